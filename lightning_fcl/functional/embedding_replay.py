"""Rehearsal of earlier tasks by generated embeddings: soft labels, their loss, and an even share of a budget."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Rehearsal(NamedTuple):
    """Embeddings to rehearse beside one batch.

    Args:
        embeddings: One tensor per modality, shapes ``(B, *positions, d)``.
        targets: Soft labels, shape ``(B, C)``.
        strength: Weight of the loss term.
    """

    embeddings: tuple[Tensor, ...]
    targets: Tensor
    strength: float


def soft_labels(labels: Tensor, teacher: Tensor, smoothing: float = 0.1) -> Tensor:
    r"""Labels smoothed by what a frozen teacher believes.

    .. math:: \hat y = (1 - \varepsilon) \, \mathrm{onehot}(c) + \varepsilon \, p_{teacher}

    Args:
        labels: Class numbers, shape ``(B,)``, int64.
        teacher: Probabilities, shape ``(B, C)``, rows of sum 1.
        smoothing: :math:`\varepsilon` in [0, 1], unitless.

    Returns:
        Shape ``(B, C)``, rows of sum 1, dtype of ``teacher``.

    Raises:
        ValueError: If ``smoothing`` is out of range or a label is no column of ``teacher``.

    Example:
        >>> soft_labels(torch.tensor([0]), torch.tensor([[0.7, 0.2, 0.1]]))
        tensor([[0.9700, 0.0200, 0.0100]])

    Source: FedCMM (arXiv 2607.12112), sec. IV-C, "teacher-smoothed soft target".

    Deviation: the paper does not give :math:`\varepsilon`.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"`smoothing` must lie in [0, 1], got {smoothing}.")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < teacher.shape[1]:
        raise ValueError(f"`labels` must be from 0 to {teacher.shape[1] - 1}, got up to {int(labels.max())}.")
    return torch.lerp(F.one_hot(labels, teacher.shape[1]).to(teacher.dtype), teacher, smoothing)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Cross-entropy with soft labels, :math:`-\tfrac1B \sum_n \sum_c \hat y_{nc} \log p_{nc}`.

    Args:
        logits: Shape ``(B, C)``.
        targets: Probabilities, shape ``(B, C')`` with ``C' <= C``: classes that the head has gained since have none.

    Returns:
        Scalar, mean over the batch, in nats; gradients reach ``logits``.

    Raises:
        ValueError: If ``targets`` has more columns than ``logits``, or another number of rows.

    Example:
        >>> q, soft = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.97, 0.02, 0.01]])
        >>> round(soft_cross_entropy(q.log(), soft).item(), 6)
        0.712527

    Source: FedCMM (arXiv 2607.12112), eq. 6.

    Deviation: None.
    """
    rows, classes = logits.shape
    if targets.shape[0] != rows or targets.shape[1] > classes:
        raise ValueError(
            f"`targets` must have {rows} rows and at most {classes} columns, got {tuple(targets.shape)}. Did the head "
            "lose classes?"
        )
    log_probs = F.log_softmax(logits, dim=1)[:, : targets.shape[1]]
    return -(targets.to(log_probs.dtype) * log_probs).sum(1).mean()


def balanced_counts(parts: int, total: int) -> list[int]:
    """``total`` shared as evenly as it goes; the first parts get the rest.

    Args:
        parts: How many parts, at least 1.
        total: What to share, not negative.

    Returns:
        One count per part.

    Raises:
        ValueError: If ``parts`` is below 1 or ``total`` negative.

    Example:
        >>> balanced_counts(3, 100)
        [34, 33, 33]

    Source: FedCMM (arXiv 2607.12112), sec. IV-C: a budget of 100 over a client's events.

    Deviation: None.
    """
    if parts < 1 or total < 0:
        raise ValueError(f"`parts` must be at least 1 and `total` not negative, got {parts} and {total}.")
    return [total // parts + (part < total % parts) for part in range(parts)]
