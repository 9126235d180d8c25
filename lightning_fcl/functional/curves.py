"""Figures of a curve: one test score per round.

Curves are float tensors of shape ``(R,)`` in any unit, rounds in order. NaN marks a round that was not evaluated: it
keeps its place in the count and changes nothing else. Malformed curves raise.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def ewma(curve: Tensor, smoothing: float = 0.2) -> Tensor:
    r"""Exponentially weighted moving average: :math:`s_1 = x_1, \; s_t = \alpha x_t + (1 - \alpha) s_{t-1}`.

    Args:
        curve: Shape ``(R,)``.
        smoothing: Weight :math:`\alpha` of the newest score, in ``(0, 1]``; ``1`` does not smooth.

    Returns:
        Shape ``(R,)``, float64; NaN where ``curve`` is NaN, and the average steps over such rounds.

    Raises:
        ValueError: If ``curve`` is not a float vector, or ``smoothing`` is out of range.

    Example:
        >>> ewma(torch.tensor([0.10, 0.30, 0.55]))
        tensor([0.1000, 0.1400, 0.2220], dtype=torch.float64)

    Source: FedADB, rounds-to-target.

    Deviation: starts from the first score, not from zero.
    """
    if not 0 < smoothing <= 1:
        raise ValueError(f"`smoothing` must lie in (0, 1], got {smoothing}. Use 1 for the raw curve.")
    smooth: list[float] = []
    last = math.nan
    for score in _vector(curve).tolist():
        if not math.isnan(score):
            last = score if math.isnan(last) else smoothing * score + (1 - smoothing) * last
        smooth.append(math.nan if math.isnan(score) else last)
    return torch.tensor(smooth, dtype=torch.float64)


def rounds_to_target(curve: Tensor, target: float, smoothing: float = 0.2) -> int | None:
    """First round at which the smoothed curve reaches ``target``.

    Args:
        curve: Shape ``(R,)``.
        target: Score to reach, in the curve's unit.
        smoothing: As for :func:`ewma`; ``1`` for R50 and R75, which are not smoothed.

    Returns:
        The round, counted from 1; ``None`` if the target is never reached.

    Raises:
        ValueError: If ``curve`` is not a float vector, or ``smoothing`` is out of range.

    Example:
        >>> curve = torch.tensor([20.0, 48.0, 51.0, 49.0, 76.0])
        >>> rounds_to_target(curve, 50.0, smoothing=1.0), rounds_to_target(curve, 75.0)
        (3, None)

    Source: FedADB (smoothed); FedCMM, R50 and R75 (``smoothing=1``).

    Deviation: None.
    """
    reached = (ewma(curve, smoothing) >= target).nonzero()
    return int(reached[0]) + 1 if len(reached) else None


def rounds_to_best(curves: Iterable[Tensor]) -> int | None:
    r"""Rounds until each task's own best score, added over tasks: :math:`\sum_i \arg\max_t x_{i,t}`.

    Args:
        curves: Per task, the score on that task in each of its rounds, shape ``(R_i,)``.

    Returns:
        The sum of the rounds, each counted from 1 (the first of equals); ``None`` if a task has no measured round.

    Raises:
        ValueError: If a curve is not a float vector.

    Example:
        >>> rounds_to_best([torch.tensor([0.5, 0.9, 0.9]), torch.tensor([0.7, 0.6])])  # 2 + 1
        3

    Source: SPECIAL, "rounds-to-best".

    Deviation: None.
    """
    rounds = 0
    for curve in curves:
        scores = _vector(curve)
        if scores.isnan().all():
            return None
        rounds += int(scores.nan_to_num(nan=-math.inf).argmax()) + 1  # the first of equals
    return rounds


def top_k_mean(curve: Tensor, k: int = 5) -> float:
    """Mean of the ``k`` largest scores. It selects on the test set: report the last score beside it.

    Args:
        curve: Shape ``(R,)``.
        k: How many scores, at least 1.

    Returns:
        The mean in the curve's unit; NaN if fewer than ``k`` rounds were measured.

    Raises:
        ValueError: If ``curve`` is not a float vector, or ``k < 1``.

    Example:
        >>> top_k_mean(torch.tensor([10.0, 50.0, 40.0, 30.0, 20.0, 60.0, 70.0]))
        50.0

    Source: FedADB, "top-5 round mean".

    Deviation: None.
    """
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    scores = _vector(curve)
    measured = scores[~scores.isnan()]
    return measured.topk(k).values.mean().item() if len(measured) >= k else math.nan


def _vector(curve: Tensor) -> Tensor:
    if curve.dim() != 1 or not curve.is_floating_point():
        raise ValueError(f"`curve` must be a float vector of scores, got {curve.dtype} of shape {tuple(curve.shape)}.")
    return curve.detach().double()
