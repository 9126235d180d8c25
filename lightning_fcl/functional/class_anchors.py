"""Class anchors: inputs that a model makes up for each class, to stand in for examples that a client lacks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_fcl.exceptions import MisconfigurationError

Bounds = tuple[Tensor | float, Tensor | float]
"""Lowest and highest value of an input; tensors broadcast against one input."""

_ATTEMPTS = 4  # the first, and three more from fresh noise at half the step each


class AnchorSet(NamedTuple):
    """Anchors with their classes.

    Args:
        inputs: Shape ``(N, *shape)``, in the model's own input space.
        targets: Classes, int64 of shape ``(N,)``.
        confidence: Probability of each anchor's class under the model that made it, shape ``(N,)``.
        quality: Mean confidence, in ``[0, 1]``; 0 without anchors.
    """

    inputs: Tensor
    targets: Tensor
    confidence: Tensor
    quality: float


def class_anchors(
    logits_fn: Callable[[Tensor], Tensor],
    targets: Tensor,
    shape: Sequence[int],
    *,
    steps: int = 100,
    lr: float = 1.0,
    sigma: float = 1.0,
    l2: float = 1e-3,
    bounds: Bounds | None = None,
    generator: torch.Generator | None = None,
    start: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> AnchorSet:
    r"""Turn noise into confident inputs of the wanted classes by projected gradient descent.

    .. math:: x \leftarrow \Pi\Big(x - \eta \nabla_x \big(-\log \mathrm{softmax}(f(x))_c + \lambda \|x\|^2\big)\Big),
        \quad x^{(0)} = \Pi(\mathcal N(0, \sigma^2))

    The loss is summed over anchors and pixels, so one anchor does not depend on the others if ``logits_fn`` treats
    examples independently (eval mode). Weights get no gradient. An anchor that becomes non-finite starts again from
    fresh noise with half the step, three times at most, and is then left out.

    Args:
        logits_fn: Inputs ``(N, *shape)`` to logits ``(N, C)``; differentiable in its input.
        targets: Class of each anchor, int64 of shape ``(N,)``; its device is that of the anchors.
        shape: Shape of one input.
        steps: Steps :math:`I \ge 0`.
        lr: Step :math:`\eta > 0` in input units.
        sigma: Standard deviation of the noise, in input units.
        l2: :math:`\lambda \ge 0`, of the sum over an anchor's pixels.
        bounds: Box onto which every step projects; ``None`` for none.
        generator: Of the noise, on the CPU; by default torch's.
        start: Where to start in the place of noise, shape ``(N, *shape)``.
        dtype: Type of the anchors.

    Returns:
        The anchors, without graph.

    Raises:
        MisconfigurationError: If ``lr * l2 >= 1`` (the L2 term alone would diverge), or a number is out of range.

    Example:
        >>> anchors = class_anchors(lambda x: x, torch.tensor([0]), (2,), steps=2, l2=0.1, start=torch.zeros(1, 2))
        >>> anchors.inputs  # logits are the input itself
        tensor([[ 0.6689, -0.6689]])

    Source: Liu et al., "FedADB", ACM MM 2026, eq. 3 to 5.

    Deviation: the paper gives no values for the four settings; the defaults and the restarts are ours.
    """
    _check(steps, lr, sigma, l2)
    device = targets.device

    def noise(count: int) -> Tensor:
        drawn = torch.randn(count, *shape, generator=generator, dtype=torch.float32)
        return (sigma * drawn).to(device, dtype)

    inputs = noise(len(targets)) if start is None else start.detach().to(device, dtype).clone()
    open_ = torch.arange(len(targets), device=device)
    for attempt in range(_ATTEMPTS):
        inputs[open_] = _descend(logits_fn, inputs[open_], targets[open_], steps, lr, l2, bounds)
        with torch.no_grad():
            confidence = anchor_confidence(logits_fn(inputs), targets)
        finite = inputs.flatten(1).isfinite().all(dim=1) & confidence.isfinite()
        open_ = (~finite).nonzero().squeeze(1)
        if not len(open_):
            break
        if attempt < _ATTEMPTS - 1:
            inputs[open_], lr = noise(len(open_)), lr / 2
    quality = float(confidence[finite].double().mean()) if finite.any() else 0.0
    return AnchorSet(inputs[finite], targets[finite], confidence[finite], quality)


def anchor_confidence(logits: Tensor, targets: Tensor) -> Tensor:
    """Probability that the model gives to each anchor's own class.

    Args:
        logits: Shape ``(N, C)``.
        targets: Shape ``(N,)``, int64.

    Returns:
        Shape ``(N,)``; its mean is the quality of the set.

    Example:
        >>> anchor_confidence(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 0]))
        tensor([0.7870, 0.3333])

    Source: FedADB, eq. 5.

    Deviation: None.
    """
    return logits.float().softmax(dim=1).gather(1, targets.unsqueeze(1)).squeeze(1)


def input_box(mean: float | Sequence[float], std: float | Sequence[float]) -> tuple[Tensor, Tensor]:
    """Where pixels of [0, 1] lie after normalisation.

    Args:
        mean: Per channel, or one number.
        std: Per channel, or one number; positive.

    Returns:
        Lowest and highest value, float32, each of shape ``(channels, 1, 1)``, or a scalar.

    Raises:
        MisconfigurationError: If ``std`` is not positive.

    Example:
        >>> low, high = input_box(0.5, 0.25)
        >>> low.item(), high.item()
        (-2.0, 2.0)

    Source: FedADB, the valid input domain of eq. 4.

    Deviation: the paper does not name the domain; this is the pixel range.
    """
    values = (torch.as_tensor(v, dtype=torch.float32) for v in (mean, std))
    centre, spread = (v.reshape(-1, 1, 1) if v.dim() else v for v in values)
    if not (spread > 0).all():
        raise MisconfigurationError(f"`std` must be positive, got {std}. Give that of the data's normalisation.")
    return (0 - centre) / spread, (1 - centre) / spread


def _descend(
    logits_fn: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    steps: int,
    lr: float,
    l2: float,
    bounds: Bounds | None,
) -> Tensor:
    def project(x: Tensor) -> Tensor:
        return x if bounds is None else torch.minimum(torch.maximum(x, low), high)

    if bounds is not None:
        low, high = (torch.as_tensor(bound, dtype=inputs.dtype, device=inputs.device) for bound in bounds)
    inputs = project(inputs)
    for _ in range(steps):
        inputs = inputs.detach().requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(logits_fn(inputs).float(), targets, reduction="sum") + l2 * inputs.square().sum()
        (gradient,) = torch.autograd.grad(loss, inputs)  # of the inputs alone: weights keep no gradient
        inputs = project(inputs.detach() - lr * gradient)
    return inputs


def _check(steps: int, lr: float, sigma: float, l2: float) -> None:
    if steps < 0 or not 0 < lr < float("inf") or not 0 <= sigma < float("inf") or not 0 <= l2 < float("inf"):
        raise MisconfigurationError(
            f"`steps`, `sigma` and `l2` must not be negative and `lr` must be positive, got {steps}, {sigma}, {l2} and "
            f"{lr}. The defaults are 100, 1.0, 1e-3 and 1.0."
        )
    if lr * l2 >= 1:
        raise MisconfigurationError(
            f"`lr * l2` must be below 1, got {lr * l2:g}: the L2 term alone would make anchors diverge. Lower `lr`."
        )
