"""Squared distances between flat updates, in float64 and tile by tile, whatever the number of threads."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

TILE = 16_384  # elements: below the size at which torch splits a sum over threads


def tiles(rows: Tensor | Sequence[Tensor], size: int = TILE) -> Iterator[tuple[slice, Tensor]]:
    """Columns of ``rows``, tile by tile, in float64.

    Args:
        rows: Shape ``(K, P)``, or ``K`` tensors of shape ``(P,)``; any float dtype, ``K >= 1``.
        size: Columns per tile.

    Yields:
        Where the tile lies, and its copy, shape ``(K, n)``, float64, without gradient.

    Raises:
        ValueError: If ``rows`` is no such matrix.

    Example:
        >>> [(place.start, tile.tolist()) for place, tile in tiles(torch.tensor([[1.0, 2.0, 3.0]]), size=2)]
        [(0, [[1.0, 2.0]]), (2, [[3.0]])]
    """
    if not len(rows) or any(row.dim() != 1 or row.shape != rows[0].shape for row in rows):
        shapes = [tuple(row.shape) for row in rows[:3]]
        raise ValueError(f"`rows` must have shape (K, P) with K >= 1, got rows of {shapes}. Stack flat updates.")
    for start in range(0, len(rows[0]), size):
        place = slice(start, start + size)
        yield place, torch.stack([row[place].detach() for row in rows]).double()


def mix(rows: Tensor | Sequence[Tensor], shares: Tensor) -> Tensor:
    """Sum of the rows, each times its share; the same bits for every number of threads.

    Args:
        rows: Shape ``(K, P)``, or ``K`` tensors of shape ``(P,)``.
        shares: Shape ``(K,)``, any float dtype.

    Returns:
        Shape ``(P,)``, float64.

    Raises:
        ValueError: If ``rows`` is no such matrix.

    Example:
        >>> mix(torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5]))
        tensor([2.], dtype=torch.float64)
    """
    column = shares.to(rows[0].device, torch.float64)[:, None]
    return torch.cat([(tile * column).sum(dim=0) for _, tile in tiles(rows)])


def square_distances(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """Squared Euclidean distances between all rows.

    Args:
        rows: Shape ``(K, P)``, or ``K`` tensors of shape ``(P,)``.

    Returns:
        Shape ``(K, K)``, float64, symmetric, zero on the diagonal. Differences are formed before they are squared, so
        that close rows far from the origin keep their distance. Memory beyond the rows is one tile.

    Raises:
        ValueError: If ``rows`` is no such matrix.

    Example:
        >>> square_distances(torch.tensor([[0.0, 0.0], [3.0, 4.0]]))
        tensor([[ 0., 25.],
                [25.,  0.]], dtype=torch.float64)
    """
    count = len(rows)
    found = [torch.zeros(count, dtype=torch.float64) for _ in range(count)]
    for _, tile in tiles(rows):
        for place in range(count - 1):
            found[place][place + 1 :] += (tile[place + 1 :] - tile[place]).square_().sum(dim=1).cpu()
    upper = torch.stack(found) if found else torch.zeros(0, 0)
    return upper + upper.T
