"""FedLMD: the teacher speaks only of classes that the client has few examples of."""

import math

import torch
from torch import Tensor

from lightning_fcl.functional.distillation import check_logits, distillation_loss
from lightning_fcl.functional.fedntd import without


def majority_classes(counts: Tensor) -> Tensor:
    """Which classes a client has more examples of than of a class on average, absent classes included.

    Args:
        counts: Examples per class, shape ``(C,)``.

    Returns:
        Shape ``(C,)``, bool; all ``False`` for a balanced client.

    Example:
        >>> majority_classes(torch.tensor([7, 2, 0]))  # the mean is 3
        tensor([ True, False, False])

    Source: Lu et al., "Federated Learning with Label-Masking Distillation", ACM MM 2023
    (https://arxiv.org/abs/2409.13136); the threshold is that of the authors' code.

    Deviation: None.
    """
    return counts > counts.double().mean()


def label_masked_distillation(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, majority: Tensor, temperature: float = 1.0
) -> Tensor:
    r"""Distillation among the classes other than the true one, with the teacher silent on the majority classes.

    .. math:: \tau^2\,\mathrm{KL}\bigl(\mathrm{softmax}(z^{g}_{\setminus y \setminus M} / \tau) \,\|\,
        \mathrm{softmax}(z_{\setminus y} / \tau)\bigr)

    The teacher gives majority classes probability 0, so its knowledge lifts the minority classes that local training
    would forget. Without majority classes it is
    :func:`~lightning_fcl.functional.not_true_distillation`.

    Args:
        logits: Student's, shape ``(B, C)``, ``C`` at least 2.
        teacher_logits: Teacher's, shape ``(B, C)``.
        targets: True classes, shape ``(B,)``, int64.
        majority: :math:`M`, shape ``(C,)``, bool; see :func:`majority_classes`.
        temperature: :math:`\tau > 0`.

    Returns:
        Scalar in nats, mean over the batch; gradients reach ``logits`` only, and never the true class's.

    Raises:
        ValueError: If shapes do not fit, there are fewer than 2 classes, or ``temperature`` is not positive.

    Example:
        >>> student, teacher = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0.0, 99.0, 2.0, 3.0]])
        >>> majority = torch.tensor([False, True, False, False])
        >>> label_masked_distillation(student, teacher, torch.tensor([0]), majority)
        tensor(1.5565)

    Source: Lu et al., "Federated Learning with Label-Masking Distillation", ACM MM 2023
    (https://arxiv.org/abs/2409.13136).

    Deviation: the authors' code subtracts 1000 from masked logits, which where nothing else is left makes the teacher
    speak of the true class (and the loss jump to 33). Here such an example counts as 0 in the mean.
    """
    check_logits(logits, teacher_logits, temperature, min_classes=2)
    if majority.shape != logits.shape[1:]:
        raise ValueError(f"`majority` must be of shape ({logits.shape[1]},), got {tuple(majority.shape)}.")
    student = without(logits, targets)
    teacher = without(teacher_logits, targets).masked_fill(majority.bool(), -math.inf)
    speaks = (teacher > -math.inf).any(dim=1, keepdim=True)
    # A student that is its own teacher has no loss and no gradient.
    return distillation_loss(student, torch.where(speaks, teacher, student.detach()), temperature)
