"""Krum: trust the update that has the closest neighbours."""

from collections.abc import Sequence

from torch import Tensor

from lightning_fcl.functional.distances import square_distances


def krum_scores(updates: Tensor | Sequence[Tensor], byzantine: int) -> Tensor:
    r"""Sum of the squared distances of each update to its ``K - f - 2`` nearest others.

    Args:
        updates: One row per client, shape ``(K, P)``, or ``K`` tensors of shape ``(P,)``; weights or deltas.
        byzantine: :math:`f \ge 0`, the number of clients that may send anything; ``K`` must be at least ``2 f + 3``.

    Returns:
        Shape ``(K,)``, float64; low is good.

    Raises:
        ValueError: If there are too few rows.

    Example:
        >>> import torch
        >>> krum_scores(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), byzantine=0)  # two nearest others each
        tensor([  5.,   2.,   5., 113.], dtype=torch.float64)

    Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017,
    sec. 4 (https://arxiv.org/abs/1703.02757).

    Deviation: None.
    """
    count = len(updates)
    if byzantine < 0 or count < 2 * byzantine + 3:
        least = 2 * byzantine + 3
        raise ValueError(f"`updates` must hold at least 2 * byzantine + 3 = {least} rows, got {count}.")
    distances = square_distances(updates)
    distances.fill_diagonal_(-1.0)  # itself comes first, and is left out
    return distances.sort(dim=1).values[:, 1 : count - byzantine - 1].sum(dim=1)


def krum_select(updates: Tensor | Sequence[Tensor], byzantine: int, keep: int | None = 1) -> Tensor:
    r"""Which updates to trust: the ``keep`` with the lowest scores.

    Args:
        updates: As in :func:`krum_scores`.
        byzantine: As in :func:`krum_scores`.
        keep: How many: 1 is Krum, more is MultiKrum (the mean of those), ``None`` is ``K - f``.

    Returns:
        Ascending positions, shape ``(keep,)``, int64, on the CPU; of equal scores the lowest positions.

    Raises:
        ValueError: If there are too few rows, or ``keep`` is not from 1 to ``K - f``.

    Example:
        >>> import torch
        >>> krum_select(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), byzantine=0, keep=3)
        tensor([0, 1, 2])

    Source: Blanchard et al., NeurIPS 2017, sec. 4 and, for MultiKrum, sec. 5.

    Deviation: None.
    """
    scores = krum_scores(updates, byzantine)
    keep = len(updates) - byzantine if keep is None else keep
    if not 1 <= keep <= len(updates) - byzantine:
        raise ValueError(f"`keep` must be from 1 to K - byzantine = {len(updates) - byzantine}, got {keep}.")
    return scores.argsort(stable=True)[:keep].sort().values
