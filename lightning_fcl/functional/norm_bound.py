"""Bounding the length of an update."""


def bound_factor(length: float, bound: float) -> float:
    r"""What to multiply an update by so that it is at most ``bound`` long.

    .. math:: \min\left(1, \frac{M}{\|\Delta\|}\right)

    Args:
        length: :math:`\|\Delta\| \ge 0`.
        bound: :math:`M > 0`, in the same unit.

    Returns:
        A factor in (0, 1]; exactly 1 for updates within the bound.

    Example:
        >>> bound_factor(4.0, bound=1.0), bound_factor(0.0, bound=1.0)
        (0.25, 1.0)

    Source: Sun et al., "Can You Really Backdoor Federated Learning?", 2019, norm thresholding
    (https://arxiv.org/abs/1911.07963).

    Deviation: None.
    """
    return 1.0 if length <= bound else bound / length
