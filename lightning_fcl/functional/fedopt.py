"""Server optimisers: the mean update of a round taken as a gradient that already points downhill."""

from typing import Literal

import torch
from torch import Tensor


def server_momentum(momentum: Tensor | None, delta: Tensor, beta: float, *, ema: bool = False) -> Tensor:
    r"""Momentum of the server after one more round.

    .. math:: m \leftarrow \beta m + \bar\Delta \qquad\text{or, as an average,}\qquad
              m \leftarrow \beta m + (1 - \beta) \bar\Delta

    Args:
        momentum: :math:`m`, shape ``(P,)``, float64; ``None`` before the first round, whose momentum is ``delta``.
        delta: Mean delta (new - old) of the round, shape ``(P,)``, float64.
        beta: :math:`\beta` in [0, 1); 0 keeps ``delta``.
        ema: Whether to take the average.

    Returns:
        The new momentum, shape ``(P,)``; the arguments are left alone.

    Example:
        >>> server_momentum(torch.tensor([2.0]), torch.tensor([1.0]), 0.5)
        tensor([2.])
        >>> server_momentum(torch.tensor([2.0]), torch.tensor([1.0]), 0.5, ema=True)
        tensor([1.5000])

    Source: Hsu, Qi & Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, sec. 4.3 (https://arxiv.org/abs/1909.06335). The average: Ye et al., "OpenFedLLM", KDD 2024
    (https://arxiv.org/abs/2402.06954), whose first round takes the whole delta, too.

    Deviation: None.
    """
    if momentum is None:
        return delta.clone()
    return momentum * beta + (delta * (1.0 - beta) if ema else delta)


def second_moment(second: Tensor, delta: Tensor, beta: float, rule: Literal["adam", "yogi", "adagrad"]) -> Tensor:
    r"""Running squares of the server's deltas after one more round.

    .. math::
        \text{adam: } v \leftarrow \beta_2 v + (1 - \beta_2) \bar\Delta^2, \quad
        \text{yogi: } v \leftarrow v - (1 - \beta_2) \bar\Delta^2 \operatorname{sign}(v - \bar\Delta^2), \quad
        \text{adagrad: } v \leftarrow v + \bar\Delta^2

    Args:
        second: :math:`v`, shape ``(P,)``, float64, not negative; before the first round :math:`\tau^2`.
        delta: Mean delta (new - old) of the round, shape ``(P,)``, float64.
        beta: :math:`\beta_2` in [0, 1]; Adagrad has none and ignores it.
        rule: Which of the three.

    Returns:
        The new squares, shape ``(P,)``, not negative; the arguments are left alone.

    Raises:
        ValueError: If ``rule`` is another.

    Example:
        >>> v, half = torch.ones(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
        >>> [round(second_moment(v, half, 0.99, rule).item(), 4) for rule in ("adam", "yogi", "adagrad")]
        [0.9925, 0.9975, 1.25]

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295).

    Deviation: None.
    """
    square = delta.square()
    if rule == "adam":
        return second * beta + square * (1.0 - beta)
    if rule == "yogi":
        return second - (1.0 - beta) * square * (second - square).sign()
    if rule == "adagrad":
        return second + square
    raise ValueError(f'`rule` must be "adam", "yogi" or "adagrad", got {rule!r}.')


def adaptive_step(momentum: Tensor, second: Tensor, lr: float, tau: float) -> Tensor:
    r"""The delta that an adaptive server applies.

    .. math:: \eta_g \frac{m}{\sqrt{v} + \tau}

    Args:
        momentum: :math:`m`, shape ``(P,)``, float64.
        second: :math:`v`, shape ``(P,)``, float64, not negative.
        lr: :math:`\eta_g`, in units of the weights: an element moves by about as much at most.
        tau: :math:`\tau > 0`, in units of a delta; outside of the root.

    Returns:
        Shape ``(P,)``. There is no bias correction.

    Example:
        >>> adaptive_step(torch.tensor([1.0]), torch.tensor([4.0]), lr=0.3, tau=1.0)  # .3 * 1 / (2 + 1)
        tensor([0.1000])

    Source: Reddi et al., ICLR 2021, Algorithm 2.

    Deviation: None.
    """
    return momentum / (second.sqrt() + tau) * lr


def look_ahead(params: Tensor, momentum: Tensor | None, strength: float) -> Tensor:
    r"""Where the server's momentum is about to carry the weights.

    .. math:: \hat\theta = \theta + \lambda m

    Args:
        params: Global weights, shape ``(P,)``, any float dtype.
        momentum: :math:`m`, shape ``(n,)`` with ``n <= P``, float64: the rest stays; ``None`` before the first round.
        strength: :math:`\lambda` in [0, 1).

    Returns:
        Shape ``(P,)``, float64.

    Example:
        >>> look_ahead(torch.tensor([1.0, 5.0]), torch.tensor([2.0], dtype=torch.float64), 0.5)
        tensor([2., 5.], dtype=torch.float64)

    Source: Kim, Kim & Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024,
    Algorithm 1 (https://arxiv.org/abs/2201.03172).

    Deviation: None.
    """
    ahead = params.to(torch.float64, copy=True)
    if momentum is not None:
        ahead[: len(momentum)].add_(momentum, alpha=strength)
    return ahead
