"""Means of each coordinate that a few wild clients cannot move far: the median and the trimmed mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fcl.functional.distances import tiles


def coordinate_median(updates: Tensor | Sequence[Tensor]) -> Tensor:
    r"""Median of each coordinate; of an even number, the mean of the two in the middle.

    Args:
        updates: One row per client, shape ``(K, P)``, or ``K`` tensors of shape ``(P,)``; weights or deltas, any float
            dtype.

    Returns:
        Shape ``(P,)``, float64; no gradient. Memory beyond the rows is one tile and the result.

    Raises:
        ValueError: If ``updates`` is no such matrix.

    Example:
        >>> coordinate_median(torch.tensor([[1.0, 0.0], [2.0, 0.0], [99.0, 1.0]]))
        tensor([2., 0.], dtype=torch.float64)

    Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
    definition 1 (https://arxiv.org/abs/1803.01498).

    Deviation: None.
    """
    return trimmed_mean(updates, max(len(updates) - 1, 0) // 2)


def trimmed_mean(updates: Tensor | Sequence[Tensor], trim: int) -> Tensor:
    r"""Mean of each coordinate without its ``trim`` smallest and ``trim`` largest values.

    Args:
        updates: As in :func:`coordinate_median`.
        trim: How many values to drop at either end; ``2 * trim < K``. 0 is the plain mean.

    Returns:
        Shape ``(P,)``, float64; no gradient.

    Raises:
        ValueError: If ``updates`` is no such matrix, or nothing would be left.

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), trim=1)
        tensor([3.], dtype=torch.float64)

    Source: Yin et al., ICML 2018, definition 2.

    Deviation: the paper trims a share :math:`\beta` of the clients, here a number.
    """
    count = len(updates)
    if not (trim >= 0 and 2 * trim < max(count, 1)):
        raise ValueError(f"`updates` must hold more than 2 * trim = {2 * trim} rows, got {count}. Lower `trim`.")
    return torch.cat([tile.sort(dim=0).values[trim : count - trim].mean(dim=0) for _, tile in tiles(updates)])
