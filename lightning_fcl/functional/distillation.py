"""Distillation: how far a student's class probabilities are from a teacher's."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float = 2.0) -> Tensor:
    r"""Divergence of the student's softened probabilities from the teacher's.

    .. math:: T^2\,\mathrm{KL}\bigl(\mathrm{softmax}(z^{teacher} / T) \,\|\, \mathrm{softmax}(z / T)\bigr)

    The factor keeps gradients comparable between temperatures. A class with the logit :math:`-\infty` takes no part;
    the divergence is infinite if only the student excludes it.

    Args:
        logits: Student's, shape ``(B, C)``; at least one of a row finite.
        teacher_logits: Teacher's, shape ``(B, C)``.
        temperature: :math:`T > 0`; above 1 small probabilities count for more.

    Returns:
        Scalar in nats, mean over the batch; gradients reach ``logits`` only.

    Raises:
        ValueError: If the shapes are not both ``(B, C)``, or ``temperature`` is not positive.

    Example:
        >>> distillation_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
        tensor(1.8485)

    Source: Hinton, Vinyals & Dean, "Distilling the Knowledge in a Neural Network", 2015, sec. 2
    (https://arxiv.org/abs/1503.02531); as a defence against forgetting: Li & Hoiem, "Learning without Forgetting",
    ECCV 2016, the knowledge distillation loss (https://arxiv.org/abs/1606.09282).

    Deviation: both papers write the cross-entropy, which is larger by the teacher's entropy: the same gradient, but not
    0 where student and teacher agree. Li & Hoiem do not have the factor.
    """
    check_logits(logits, teacher_logits, temperature)
    log_student = F.log_softmax(logits / temperature, dim=1)
    log_teacher = F.log_softmax(teacher_logits.detach() / temperature, dim=1)
    gap = torch.where(log_teacher > -math.inf, log_teacher - log_student, 0.0)
    return temperature**2 * (log_teacher.exp() * gap).sum(dim=1).mean()


def check_logits(logits: Tensor, teacher_logits: Tensor, temperature: float, min_classes: int = 1) -> None:
    """Raise ValueError unless both logits are ``(B, C)`` with enough classes and ``temperature`` is positive."""
    if logits.dim() != 2 or logits.shape != teacher_logits.shape or logits.shape[1] < min_classes:
        raise ValueError(
            f"`logits` and `teacher_logits` must be of one shape (B, C), C at least {min_classes}, got "
            f"{tuple(logits.shape)} and {tuple(teacher_logits.shape)}."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}.")
