"""FedExP: how far the server may go along the mean update, told by how much the updates disagree."""

from collections.abc import Sequence
from math import fsum


def extrapolation(
    square_norms: Sequence[float], weights: Sequence[float], mean_square_norm: float, epsilon: float
) -> float:
    r"""Step size of the server for one round.

    .. math:: \eta_g = \max\left\{1, \frac{\sum_k p_k \|\Delta_k\|^2}{2 (\|\bar\Delta\|^2 + \epsilon)}\right\}

    Args:
        square_norms: :math:`\|\Delta_k\|^2`, the squared length of each client's delta over the trained tensors.
        weights: Weights of the mean, not normalised: :math:`p_k` is the share of each.
        mean_square_norm: :math:`\|\bar\Delta\|^2`, of the mean delta with the same weights.
        epsilon: :math:`\epsilon \ge 0`, in units of a squared delta.

    Returns:
        The step size, at least 1; for nearly cancelling updates it is huge although the step is small.

    Raises:
        ValueError: If there is no client, or the lengths differ.

    Example:
        >>> extrapolation([1.0] * 4, [1.0] * 4, mean_square_norm=0.25, epsilon=0.0)  # four orthogonal unit updates
        2.0
        >>> extrapolation([1.0] * 4, [1.0] * 4, mean_square_norm=1.0, epsilon=0.0)  # four equal ones: 1/2, raised to 1
        1.0

    Source: Jhunjhunwala, Wang & Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023, eq. 10
    and Algorithm 1 (https://arxiv.org/abs/2301.09604).

    Deviation: the paper's mean is the plain one, the authors' code weighs by examples; :math:`p_k` is either here.
    (Their code adds :math:`\epsilon` once per client.)
    """
    if not square_norms or len(square_norms) != len(weights):
        raise ValueError(
            f"`square_norms` and `weights` must have one entry per client, got {len(square_norms)} and {len(weights)}."
        )
    mean = fsum(w * s for w, s in zip(weights, square_norms, strict=True)) / fsum(weights)
    price = 2.0 * (mean_square_norm + epsilon)
    return max(1.0, mean / price) if price > 0 else 1.0
