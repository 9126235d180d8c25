"""Two classifiers on one extractor: the weight of the local one, and class-balanced batches for the global one."""

import torch
from torch import Tensor

from lightning_fcl.exceptions import MisconfigurationError


def missing_rate(present: int, total: int) -> float:
    r"""Share of the classes that a client has no example of: :math:`\gamma = 1 - |C_k| / |C|`.

    Args:
        present: Classes that the client holds.
        total: Classes that there are (in a task stream: seen so far), at least 1.

    Returns:
        In ``[0, 1]``.

    Raises:
        MisconfigurationError: If there are no classes, or the client holds more than there are.

    Example:
        >>> round(missing_rate(3, 10), 3)
        0.7

    Source: Liu et al., "FedADB", ACM MM 2026, section 4.3.

    Deviation: None.
    """
    if not 0 <= present <= total or not total:
        raise MisconfigurationError(f"`present` must lie in [0, total], got {present} of {total}. Recount the classes.")
    return 1 - present / total


def local_branch_weight(progress: float, missing_rate: float, quality: float) -> float:
    r"""Weight of the local branch: :math:`\beta = r^{\gamma \tau}`.

    A client that lacks no class, or whose anchors are worthless, weighs both branches alike; one that lacks many and
    has good anchors lets the global branch lead, less so toward the end.

    Args:
        progress: :math:`r = t / T` with rounds counted from 1, in ``(0, 1]``.
        missing_rate: :math:`\gamma`, in ``[0, 1]``.
        quality: :math:`\tau` of the anchors, in ``[0, 1]``; 1 where there are none by design.

    Returns:
        In ``(0, 1]``.

    Raises:
        MisconfigurationError: If an argument is out of range; a ``progress`` of 0 would make the weight jump.

    Example:
        >>> round(local_branch_weight(0.5, 0.5, 0.9), 7), local_branch_weight(1.0, 0.7, 0.9)
        (0.7320428, 1.0)

    Source: FedADB, section 4.3.

    Deviation: None.
    """
    if not 0 < progress <= 1:
        raise MisconfigurationError(f"`progress` must lie in (0, 1], got {progress}. Count rounds from 1.")
    if not (0 <= missing_rate <= 1 and 0 <= quality <= 1):
        raise MisconfigurationError(
            f"`missing_rate` and `quality` must lie in [0, 1], got {missing_rate} and {quality}. Both are shares."
        )
    return float(progress ** (missing_rate * quality))


def class_balanced_batch(
    labels: Tensor,
    anchor_labels: Tensor,
    batch_size: int,
    num_classes: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a batch in which all classes have the same quota, from local examples and anchors.

    Every class that has an example or an anchor gets ``batch_size // C`` places, ``C`` the number of such classes; a
    random subset of classes gets one of the remaining places each. Within a class, local examples and anchors are drawn
    alike, with replacement: a class without local examples is filled by its anchors.

    Args:
        labels: Classes of the local examples, int64 of shape ``(N,)``.
        anchor_labels: Classes of the anchors, int64 of shape ``(A,)``; may be empty.
        batch_size: Places, at least 1.
        num_classes: Classes are in ``[0, num_classes)``.
        generator: By default torch's.

    Returns:
        Shape ``(batch_size,)``, int64, grouped by class: below ``N`` a local example, from ``N`` on an anchor.

    Raises:
        MisconfigurationError: If a class is out of range, or there is nothing to draw from.

    Example:
        >>> drawn = class_balanced_batch(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2]), 6, num_classes=3)
        >>> torch.cat([torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2])])[drawn].tolist()
        [0, 0, 1, 1, 2, 2]

    Source: FedADB, section 4.3.

    Deviation: the paper does not say how a batch is composed; quotas, and one pool per class, are ours.
    """
    pool = torch.cat([labels, anchor_labels])
    if batch_size < 1 or not len(pool):
        raise MisconfigurationError(
            f"`batch_size` and the number of examples must be at least 1, got {batch_size} and {len(pool)}. "
            "Leave clients without data out."
        )
    if int(pool.min()) < 0 or int(pool.max()) >= num_classes:
        raise MisconfigurationError(
            f"`labels` must lie in [0, {num_classes}), got values from {int(pool.min())} to {int(pool.max())}. Raise "
            "`num_classes`, or widen the head."
        )
    counts = pool.bincount(minlength=num_classes)
    classes = counts.nonzero().squeeze(1)
    quota, rest = divmod(batch_size, len(classes))
    quotas = torch.full_like(classes, quota)
    quotas[torch.randperm(len(classes), generator=generator)[:rest]] += 1
    chosen = classes.repeat_interleave(quotas)
    order = pool.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    within = torch.rand(batch_size, generator=generator, dtype=torch.float64) * counts[chosen]
    return order[starts[chosen] + within.long()]
