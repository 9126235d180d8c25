"""FedNTD: distil what the teacher says of the classes that an example does not belong to."""

import math

from torch import Tensor

from lightning_fcl.functional.distillation import check_logits, distillation_loss


def not_true_distillation(logits: Tensor, teacher_logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Distillation among the classes other than the true one, in proportion to each other.

    .. math:: \tau^2\,\mathrm{KL}\bigl(\mathrm{softmax}(z^{g}_{\setminus y} / \tau) \,\|\,
        \mathrm{softmax}(z_{\setminus y} / \tau)\bigr)

    The true class stays out of both softmaxes, so the local labels keep full say on it. With two classes it is 0. A
    class with the logit :math:`-\infty` takes no part.

    Args:
        logits: Student's, shape ``(B, C)``, ``C`` at least 2; beside the true class at least one of a row finite.
        teacher_logits: Teacher's, shape ``(B, C)``.
        targets: True classes, shape ``(B,)``, int64.
        temperature: :math:`\tau > 0`.

    Returns:
        Scalar in nats, mean over the batch; gradients reach ``logits`` only, and never the true class's.

    Raises:
        ValueError: If shapes do not fit, there are fewer than 2 classes, or ``temperature`` is not positive.

    Example:
        >>> import torch
        >>> not_true_distillation(torch.tensor([[50.0, 1.0, 0.0]]), torch.zeros(1, 3), torch.tensor([0]))
        tensor(0.1201)

    Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
    NeurIPS 2022, the not-true distillation loss (https://arxiv.org/abs/2106.03097).

    Deviation: with the factor :math:`\tau^2`, as in the authors' code; at the paper's :math:`\tau = 1` it is 1.
    """
    check_logits(logits, teacher_logits, temperature, min_classes=2)
    return distillation_loss(without(logits, targets), without(teacher_logits, targets), temperature)


def without(logits: Tensor, targets: Tensor) -> Tensor:
    """``logits`` of shape ``(B, C)`` with the class ``targets`` of each row, shape ``(B,)``, out of the softmax."""
    return logits.scatter(1, targets.unsqueeze(1), -math.inf)
