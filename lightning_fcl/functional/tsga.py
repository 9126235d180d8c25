"""Task-similarity-aware aggregation: keep the updates that agree with the round's mean direction."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fcl.functional.mean import delta_dot, tree_sum, weighted_delta_sum

_TINY = 1e-12  # an update, or a mean of unit vectors, that is shorter has no direction
_SLACK = 1e-6  # four orthogonal updates score exactly 1/2


class TSGAResult(NamedTuple):
    """What :func:`tsga` found, one entry per client."""

    delta: Tensor
    """Merged update, shape ``(P,)``."""
    scores: Tensor
    """Cosine to the mean direction, shape ``(K,)``, float64, in [-1, 1]."""
    accepted: Tensor
    """Whose update counts, shape ``(K,)``, bool; at least one."""
    weights: Tensor
    """Share in ``delta``, shape ``(K,)``, float64; 0 for refused clients, sums to 1."""


def tsga(
    updates: Tensor,
    num_examples: Tensor,
    threshold: float | Literal["auto"] = 0.5,
    weighting: Literal["samples", "uniform", "soft"] = "samples",
) -> TSGAResult:
    r"""Weighted mean of the updates that point the way most of them do.

    .. math::
        \bar g = \frac1K \sum_k \frac{\Delta_k}{\lVert\Delta_k\rVert}, \quad
        s_k = \frac{\langle \Delta_k, \bar g\rangle}{\lVert\Delta_k\rVert\,\lVert\bar g\rVert}, \quad
        S' = \{k : s_k \ge \tau\}, \quad
        \Delta = \frac{\sum_{k \in S'} n_k \Delta_k}{\sum_{k \in S'} n_k}

    If no client passes, all do. The length of an update does not matter for its score.

    Args:
        updates: One delta (new less old) per client, shape ``(K, P)``, any float dtype.
        num_examples: :math:`n_k`, shape ``(K,)``, not negative.
        threshold: :math:`\tau`; ``"auto"`` is :func:`similarity_threshold` of ``K``.
        weighting: ``"samples"`` by examples; ``"uniform"`` all accepted alike; ``"soft"`` by examples times score.

    Returns:
        The merged update in the dtype of ``updates``, formed in float64, and how it came about. No gradient.

    Raises:
        ValueError: If a shape is wrong, an update is not finite or all accepted weights are zero.

    Example:
        >>> result = tsga(torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]), torch.tensor([10, 30, 60]))
        >>> result.scores.tolist(), result.delta.tolist()  # a plain mean would give -0.2
        ([1.0, 1.0, -1.0], [1.0, 0.0])

    Source: FedCMM, "Task-similarity-aware gradient aggregation" (https://arxiv.org/abs/2607.12112).

    Deviation: an update shorter than 1e-12 has score 0, and so have all if their directions cancel; scores within 1e-6
    of the threshold pass. ``"soft"`` is what the paper's text says and its equations do not; ``"auto"`` is ours.
    """
    if updates.dim() != 2 or not len(updates) or num_examples.shape != updates.shape[:1]:
        shapes = f"{tuple(updates.shape)} and {tuple(num_examples.shape)}"
        raise ValueError(f"`updates` and `num_examples` must have shapes (K, P) and (K,) with K >= 1, got {shapes}.")
    if not torch.isfinite(updates).all():
        raise ValueError("`updates` must be finite, got NaN or infinity. Drop such clients first.")
    origin = updates.new_zeros(updates.shape[1])
    norms = [delta_dot(row) ** 0.5 for row in updates]
    units = torch.tensor([unit_weight(norm) for norm in norms], dtype=torch.float64)
    direction = weighted_delta_sum(updates, origin, units)
    length = delta_dot(direction) ** 0.5
    dots = [delta_dot(row, None, direction) for row in updates]
    scores = similarity_scores(dots, norms, length)
    accepted, _ = accept_similar(scores, resolve_threshold(threshold, len(scores)))
    weights = tsga_weights(scores, accepted, num_examples.cpu(), weighting)
    total = tree_sum(weights[:, None])
    delta = weighted_delta_sum(updates, origin, weights).div_(total.to(updates.device))
    return TSGAResult(delta.to(updates.dtype), scores, accepted, weights / total)


def unit_weight(norm: float) -> float:
    """One over the length of an update; 0 for one that is too short to have a direction.

    Example:
        >>> unit_weight(4.0), unit_weight(0.0)
        (0.25, 0.0)

    Source: as :func:`tsga`.

    Deviation: the paper does not treat updates of length 0.
    """
    return 1.0 / norm if norm >= _TINY else 0.0


def similarity_scores(dots: list[float], norms: list[float], length: float) -> Tensor:
    """Cosines of updates to the sum of their unit vectors.

    Args:
        dots: Inner product of each update with the sum.
        norms: Length of each update.
        length: Length of the sum.

    Returns:
        Shape ``(K,)``, float64, in [-1, 1]; zeros where a length is.

    Example:
        >>> similarity_scores([2.0, 0.0], norms=[1.0, 0.0], length=2.0)
        tensor([1., 0.], dtype=torch.float64)

    Source: as :func:`tsga`.

    Deviation: as :func:`tsga`.
    """
    scores = [dot * unit_weight(norm) * unit_weight(length) for dot, norm in zip(dots, norms, strict=True)]
    return torch.tensor(scores, dtype=torch.float64).clamp_(-1.0, 1.0)


def accept_similar(scores: Tensor, threshold: float) -> tuple[Tensor, bool]:
    """Who passes the threshold, everybody if nobody does; and whether that was so.

    Example:
        >>> accept_similar(torch.tensor([0.9, 0.5, 0.1]), 0.5)
        (tensor([ True,  True, False]), False)
        >>> accept_similar(torch.tensor([0.4, 0.4]), 0.5)
        (tensor([True, True]), True)

    Source: as :func:`tsga`.

    Deviation: as :func:`tsga`.
    """
    passed = scores >= threshold - _SLACK
    return (passed, False) if passed.any() else (torch.ones_like(passed), True)


def tsga_weights(scores: Tensor, accepted: Tensor, num_examples: Tensor, weighting: str = "samples") -> Tensor:
    """Weights of the accepted clients, not divided by their total.

    Args:
        scores: Shape ``(K,)``.
        accepted: Shape ``(K,)``, bool.
        num_examples: Shape ``(K,)``.
        weighting: As in :func:`tsga`; ``"soft"`` falls back to the examples if no accepted score is positive.

    Returns:
        Shape ``(K,)``, float64.

    Raises:
        ValueError: If the weights are not finite, negative, or all zero.

    Example:
        >>> tsga_weights(torch.tensor([1.0, 0.5]), torch.tensor([True, True]), torch.tensor([10, 10]), "soft")
        tensor([10.,  5.], dtype=torch.float64)

    Source: as :func:`tsga`.

    Deviation: as :func:`tsga`.
    """
    weights = accepted.double() * (1.0 if weighting == "uniform" else num_examples.double())
    if weighting == "soft" and (weights * scores > 0).any():
        weights = weights * scores.clamp(min=0.0)
    if not (torch.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
        raise ValueError(f"`num_examples` must be finite, not negative and not all zero, got {num_examples.tolist()}.")
    return weights


def similarity_threshold(num_clients: int, agreement: float = 1 / 16) -> float:
    r"""The score of clients whose updates agree pairwise by ``agreement``, for any number of them.

    .. math:: s = \sqrt{\frac{1 + (K - 1) \rho}{K}}

    An update is part of the mean that it is compared with, so even unrelated ones score :math:`1/\sqrt K`, and a fixed
    threshold asks for more, the more clients there are.

    Args:
        num_clients: :math:`K \ge 1`, updates in the round.
        agreement: :math:`\rho`, cosine between any two updates, in [0, 1]; 1/16 is what 0.5 means for five clients.

    Returns:
        The threshold, in (0, 1].

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> [round(similarity_threshold(clients), 3) for clients in (1, 3, 5, 10)]
        [1.0, 0.612, 0.5, 0.395]

    Source: geometry of :func:`tsga`'s score; the correction is ours.

    Deviation: the paper uses 0.5 throughout, with five clients a round.
    """
    if num_clients < 1 or not 0 <= agreement <= 1:
        raise ValueError(f"`num_clients` must be at least 1 and `agreement` in [0, 1], got {num_clients}, {agreement}.")
    return math.sqrt((1 + (num_clients - 1) * agreement) / num_clients)


def resolve_threshold(threshold: float | str, num_clients: int) -> float:
    """``threshold`` itself, or :func:`similarity_threshold` for ``"auto"``."""
    return similarity_threshold(num_clients) if threshold == "auto" else float(threshold)
