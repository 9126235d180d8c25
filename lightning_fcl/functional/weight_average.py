"""Stochastic weight averaging over rounds: the running mean, and the learning rate that cycles with it."""

from torch import Tensor


def running_mean(mean: Tensor | None, value: Tensor, count: int) -> Tensor:
    r"""Mean of ``count`` values and one more.

    .. math:: \bar\theta \leftarrow \frac{n \bar\theta + \theta}{n + 1}

    Args:
        mean: Mean of the first ``count`` values, any shape, float64; ``None`` if ``count`` is 0.
        value: The next one, same shape, any float dtype.
        count: :math:`n \ge 0`.

    Returns:
        The new mean, float64; the arguments are left alone.

    Example:
        >>> import torch
        >>> running_mean(torch.tensor([1.5]), torch.tensor([3.0]), count=2)
        tensor([2.], dtype=torch.float64)

    Source: Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018, eq. 2
    (https://arxiv.org/abs/1803.05407); over rounds: Caldarola, Caputo & Ciccone, "Improving Generalization in Federated
    Learning by Seeking Flat Minima", ECCV 2022, Algorithm 1 (https://arxiv.org/abs/2203.11834).

    Deviation: written as :math:`\bar\theta + (\theta - \bar\theta) / (n + 1)`, so that equal values stay as they are.
    """
    if mean is None:
        return value.double().clone()
    return mean + (value.double() - mean) / (count + 1)


def cyclic_factor(task: int, round: int, *, start: int, every: int, low: float) -> float:
    r"""Factor of the clients' learning rate that falls from 1 to ``low`` in each cycle of the average.

    .. math:: (1 - t) + t \, \eta_2 / \eta_1, \qquad t = \frac{(r \bmod c) + 1}{c}

    Args:
        task: Ignored; so that ``functools.partial(cyclic_factor, start=15, every=5, low=0.01)`` is an ``lr_factor``.
        round: Round inside the task, from 0.
        start: First round that is averaged; before it the factor is 1.
        every: :math:`c`, rounds per cycle; the average takes the last of each. With 1 the rate is constant.
        low: :math:`\eta_2 / \eta_1` in (0, 1].

    Returns:
        The factor.

    Example:
        >>> [round(cyclic_factor(0, r, start=2, every=2, low=0.1), 2) for r in range(6)]
        [1.0, 1.0, 0.55, 0.1, 0.55, 0.1]

    Source: Caldarola, Caputo & Ciccone, ECCV 2022, Algorithm 1 (https://arxiv.org/abs/2203.11834).

    Deviation: with ``every=1`` the authors' code leaves the rate alone, so this does too. :math:`r` counts from
    ``start``, so that a cycle ends where the average takes its value.
    """
    if every == 1 or round < start:
        return 1.0
    t = ((round - start) % every + 1) / every
    return (1.0 - t) + t * low
