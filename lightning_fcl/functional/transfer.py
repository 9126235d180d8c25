"""What training one task did to the others: transfer and forgetting, read off a score matrix.

Matrices, units and NaN are as in :mod:`lightning_fcl.functional.continual`.
"""

import math

import torch
from torch import Tensor

from lightning_fcl.functional._score_matrix import square


def backward_transfer(matrix: Tensor) -> float:
    r"""What later training did to earlier tasks: :math:`\frac{1}{T-1} \sum_{j<T} (A_{T,j} - A_{j,j})` (BWT).

    Print it beside :func:`average_accuracy`: a method that never learns has nothing to forget.

    Args:
        matrix: Shape ``(T, T)``.

    Returns:
        The mean change, negative for forgetting; NaN for ``T = 1``.

    Raises:
        ValueError: If ``matrix`` is not a square float matrix.

    Example:
        >>> backward_transfer(torch.tensor([[80.0, 5.0, 2.0], [60.0, 85.0, 4.0], [50.0, 70.0, 90.0]]))  # -30, -15
        -22.5

    Source: Lopez-Paz & Ranzato, NeurIPS 2017, eq. 3 (https://arxiv.org/abs/1706.08840).

    Deviation: None.
    """
    return _changes(matrix).mean().item()


def worst_drop(matrix: Tensor) -> float:
    r"""The largest loss on one earlier task: :math:`\min_{j<T} (A_{T,j} - A_{j,j})`.

    Args:
        matrix: Shape ``(T, T)``.

    Returns:
        The smallest change, negative for a loss; NaN for ``T = 1``.

    Raises:
        ValueError: If ``matrix`` is not a square float matrix.

    Example:
        >>> worst_drop(torch.tensor([[80.0, 5.0, 2.0], [60.0, 85.0, 4.0], [50.0, 70.0, 90.0]]))
        -30.0

    Source: SPECIAL, "worst earlier-task drop".

    Deviation: None.
    """
    changes = _changes(matrix)
    return changes.min().item() if len(changes) else math.nan


def forward_transfer(matrix: Tensor, baseline: Tensor | None = None) -> float:
    r"""How well tasks went before they were trained: :math:`\frac{1}{T-1} \sum_{j>1} (A_{j-1,j} - b_j)` (FWT).

    Args:
        matrix: Shape ``(T, T)``.
        baseline: Scores :math:`b` of the untrained model, shape ``(T,)``; zero if left out. Figures with and without a
            baseline cannot be compared.

    Returns:
        The mean; NaN for ``T = 1``.

    Raises:
        ValueError: If ``matrix`` is not a square float matrix, or ``baseline`` has another length.

    Example:
        >>> scores = torch.tensor([[80.0, 5.0, 2.0], [60.0, 85.0, 4.0], [50.0, 70.0, 90.0]])
        >>> forward_transfer(scores), forward_transfer(scores, baseline=torch.tensor([10.0, 8.0, 6.0]))
        (4.5, -2.5)

    Source: Lopez-Paz & Ranzato, NeurIPS 2017, eq. 4 (https://arxiv.org/abs/1706.08840).

    Deviation: without ``baseline`` nothing is subtracted, as FedCMM does.
    """
    ahead = square(matrix).diagonal(1)
    if baseline is not None:
        if baseline.shape != matrix.shape[:1]:
            raise ValueError(f"`baseline` must have shape ({len(matrix)},), got {tuple(baseline.shape)}.")
        ahead = ahead - baseline[1:].to(ahead)
    return ahead.mean().item()


def forgetting(matrix: Tensor) -> float:
    r"""How far earlier tasks ended below their best: :math:`\frac{1}{T-1} \sum_{j<T} (\max_{l<T} A_{l,j} - A_{T,j})`.

    Args:
        matrix: Shape ``(T, T)``.

    Returns:
        The mean loss, positive for forgetting; NaN for ``T = 1``. Scores from before a task was trained count where
        they were measured, and may be missing.

    Raises:
        ValueError: If ``matrix`` is not a square float matrix.

    Example:
        >>> forgetting(torch.tensor([[80.0, 5.0, 2.0], [60.0, 85.0, 4.0], [50.0, 70.0, 90.0]]))  # 30, 15
        22.5

    Source: Chaudhry et al., "Riemannian Walk for Incremental Learning", ECCV 2018, eq. 3
    (https://arxiv.org/abs/1801.10112).

    Deviation: None.
    """
    table = square(matrix)
    if len(table) == 1:
        return math.nan
    before = table[:-1, :-1]
    untrained = torch.ones_like(before, dtype=torch.bool).triu(1)
    best = before.masked_fill(untrained & before.isnan(), -torch.inf).amax(0)
    return (best - table[-1, :-1]).mean().item()


def _changes(matrix: Tensor) -> Tensor:
    """Last score minus the score right after training, for every task but the last."""
    table = square(matrix)
    return table[-1, :-1] - table.diagonal()[:-1]
