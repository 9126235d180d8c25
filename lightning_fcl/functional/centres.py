r"""Centres of a cloud of updates, found from the distances among them: geometric median and centred clipping.

Every point on the way is a mix of the rows, :math:`z = \sum_k a_k x_k` with :math:`\sum_k a_k = 1`, and then
:math:`\|z - x_k\|^2 = \sum_j a_j D_{jk} - \tfrac12 \sum_{ij} a_i a_j D_{ij}`. So the rows are read once for their
distances :math:`D` and once for the result, however many iterations there are between.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fcl.functional.distances import mix, square_distances


def geometric_median(
    updates: Tensor | Sequence[Tensor],
    weights: Tensor | None = None,
    *,
    smoothing: float = 1e-6,
    iterations: int = 100,
) -> Tensor:
    r"""The point with the least weighted sum of distances to the updates, by smoothed Weiszfeld steps.

    .. math:: z \leftarrow \frac{\sum_k \beta_k x_k}{\sum_k \beta_k}, \qquad
              \beta_k = \frac{w_k}{\max(\nu, \|z - x_k\|)}

    Args:
        updates: One row per client, shape ``(K, P)``, or ``K`` tensors of shape ``(P,)``; weights or deltas.
        weights: :math:`w_k \ge 0`, shape ``(K,)``; by default all alike.
        smoothing: :math:`\nu > 0`, a distance.
        iterations: Steps from the weighted mean; the paper needs 3 to 5, more cost next to nothing here.

    Returns:
        Shape ``(P,)``, float64; no gradient.

    Raises:
        ValueError: If ``updates`` is no such matrix.

    Example:
        >>> geometric_median(torch.tensor([[0.0, 0.0], [0.0, 0.0], [9.0, 9.0]])).round(decimals=3)
        tensor([0., 0.], dtype=torch.float64)

    Source: Pillutla, Kakade & Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2
    (https://arxiv.org/abs/1912.13445).

    Deviation: None.
    """
    return mix(updates, median_shares(updates, weights, smoothing=smoothing, iterations=iterations))


def median_shares(
    updates: Tensor | Sequence[Tensor], weights: Tensor | None = None, *, smoothing: float, iterations: int
) -> Tensor:
    """Shares of the updates in their :func:`geometric_median`.

    Args:
        updates: As there.
        weights: As there.
        smoothing: As there.
        iterations: As there.

    Returns:
        Shape ``(K,)``, float64, on the CPU, not negative, of sum 1.

    Raises:
        ValueError: If ``updates`` is no such matrix.

    Example:
        >>> median_shares(torch.tensor([[0.0], [4.0]]), torch.tensor([1.0, 3.0]), smoothing=1e-6, iterations=0)
        tensor([0.2500, 0.7500], dtype=torch.float64)

    Source: as :func:`geometric_median`.

    Deviation: None.
    """
    distances = square_distances(updates)
    masses = torch.ones(len(distances)) if weights is None else weights.cpu()
    masses = masses.double()
    shares = masses / masses.sum()
    for _ in range(iterations):
        pulls = masses / _to_mix(distances, shares).clamp(min=smoothing)
        shares = pulls / pulls.sum()
    return shares


def centred_clipping(
    updates: Tensor | Sequence[Tensor], centre: Tensor, radius: float, *, iterations: int = 1
) -> Tensor:
    r"""Moves a centre by the mean of the updates, each cut to a distance of ``radius``.

    .. math:: v \leftarrow v + \frac{1}{K} \sum_k (x_k - v) \min\left(1, \frac{\tau}{\|x_k - v\|}\right)

    Args:
        updates: One row per client, shape ``(K, P)``, or ``K`` tensors of shape ``(P,)``; weights or deltas.
        centre: Where to start, shape ``(P,)``: the global weights, or zeros for deltas.
        radius: :math:`\tau > 0`, a distance.
        iterations: Steps; with 1 this is the mean of deltas bounded in norm.

    Returns:
        The last centre, shape ``(P,)``, float64; no gradient.

    Raises:
        ValueError: If ``updates`` is no such matrix.

    Example:
        >>> centred_clipping(torch.tensor([[1.0], [1.0], [1.0], [99.0]]), torch.zeros(1), radius=1.0)
        tensor([1.], dtype=torch.float64)

    Source: Karimireddy, He & Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021, Algorithm 2
    (https://arxiv.org/abs/2012.10333).

    Deviation: None.
    """
    points = [centre, *updates]
    return mix(points, clipping_shares(points, radius, iterations=iterations))


def clipping_shares(points: Tensor | Sequence[Tensor], radius: float, *, iterations: int) -> Tensor:
    """Shares of the centre and of the updates in the result of :func:`centred_clipping`.

    Args:
        points: The centre, then the updates: shape ``(1 + K, P)``, or so many tensors of shape ``(P,)``.
        radius: As there.
        iterations: As there.

    Returns:
        Shape ``(1 + K,)``, float64, on the CPU, of sum 1.

    Raises:
        ValueError: If ``points`` is no such matrix.

    Example:
        >>> clipping_shares(torch.tensor([[0.0], [4.0], [1.0]]), radius=2.0, iterations=1)
        tensor([0.2500, 0.2500, 0.5000], dtype=torch.float64)

    Source: as :func:`centred_clipping`.

    Deviation: None.
    """
    distances = square_distances(points)
    shares = torch.zeros(len(distances), dtype=torch.float64)
    shares[0] = 1.0
    for _ in range(iterations):
        factors = (radius / _to_mix(distances, shares)[1:].clamp(min=radius)) / (len(distances) - 1)
        shares = shares * (1.0 - factors.sum())
        shares[1:] += factors
    return shares


def _to_mix(distances: Tensor, shares: Tensor) -> Tensor:
    """Distance of each row to the mix of all."""
    reached = distances @ shares
    return (reached - 0.5 * (shares @ reached)).clamp(min=0.0).sqrt()
