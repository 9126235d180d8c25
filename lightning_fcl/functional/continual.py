"""Figures of a score matrix ``A``: ``A[i, j]`` is the score on task ``j`` after training task ``i``.

All take float scores in any unit (percent or fractions), rows in order of training, and return a float in that unit.
NaN marks a score that was not measured. A figure that needs such a score, or that is undefined for a single task, is
NaN: never a number made from the rest. Cut the matrix to ``A[:t, :t]`` to ask how an unfinished run stood after ``t``
tasks. Malformed matrices raise.
"""

import torch
from torch import Tensor

from lightning_fcl.functional._score_matrix import score_matrix, square


def average_accuracy(matrix: Tensor) -> float:
    r"""Mean score over all tasks at the end: :math:`\frac{1}{T} \sum_j A_{T,j}` (ACC).

    Args:
        matrix: Shape ``(T, C)``; ``C`` may differ from ``T``.

    Returns:
        The mean of the last row.

    Raises:
        ValueError: If ``matrix`` is not a float matrix.

    Example:
        >>> average_accuracy(torch.tensor([[80.0, 5.0, 2.0], [60.0, 85.0, 4.0], [50.0, 70.0, 90.0]]))
        70.0

    Source: Lopez-Paz & Ranzato, "Gradient Episodic Memory for Continual Learning", NeurIPS 2017, eq. 2
    (https://arxiv.org/abs/1706.08840).

    Deviation: None.
    """
    return score_matrix(matrix)[-1].mean().item()


def last_score(matrix: Tensor) -> float:
    r"""Mean score over all tasks after the last stage, by the name that federated instruction tuning uses (Last).

    Args:
        matrix: Shape ``(T, C)``.

    Returns:
        :func:`average_accuracy` of ``matrix``.

    Raises:
        ValueError: If ``matrix`` is not a float matrix.

    Example:
        >>> last_score(torch.tensor([[80.0, 5.0], [60.0, 85.0]]))
        72.5

    Source: FCIT benchmark, "Last".

    Deviation: None.
    """
    return average_accuracy(matrix)


def average_score(matrix: Tensor, seen: Tensor | None = None) -> float:
    r"""Mean over stages of the mean score on what had been seen by then (Avg).

    .. math:: \frac{1}{T} \sum_t \frac{1}{|S_t|} \sum_{j \in S_t} A_{t,j}

    Args:
        matrix: Shape ``(T, C)``.
        seen: Which columns had been trained on up to and including each stage, bool of shape ``(T, C)``; by default the
            lower triangle of a square matrix, :math:`S_t = \{1, \dots, t\}`.

    Returns:
        The mean; NaN if a stage has seen nothing or a score that it needs was not measured.

    Raises:
        ValueError: If ``matrix`` is not a float matrix, ``seen`` has another shape or dtype, or is left out for a
            matrix that is not square.

    Example:
        >>> average_score(torch.tensor([[80.0, 5.0], [60.0, 85.0]]))  # (80 + 72.5) / 2
        76.25

    Source: FCIT benchmark, "Avg".

    Deviation: None. (Averaging over stages within each task first gives another number.)
    """
    table = score_matrix(matrix)
    if seen is None:
        seen = torch.ones_like(square(matrix), dtype=torch.bool).tril()
    elif seen.shape != table.shape or seen.dtype != torch.bool:
        raise ValueError(f"`seen` must be bool of shape {tuple(table.shape)}, got {seen.dtype} {tuple(seen.shape)}.")
    seen = seen.to(table.device)
    return (table.masked_fill(~seen, 0.0).sum(1) / seen.sum(1)).mean().item()
