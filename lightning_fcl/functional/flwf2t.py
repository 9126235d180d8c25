"""FLwF-2T: distil from two teachers, the model of the past and that of the server."""

from torch import Tensor

from lightning_fcl.functional.distillation import distillation_loss


def two_teacher_distillation(
    logits: Tensor,
    old_logits: Tensor,
    server_logits: Tensor,
    *,
    old_weight: float = 0.25,
    server_weight: float = 0.25,
    temperature: float = 2.0,
) -> Tensor:
    r"""Weighted sum of two distillations: from the model at the end of the last task, and from the server's.

    .. math:: \beta\,D_T(z^{old}, z) + (1 - \alpha - \beta)\,D_T(z^{g}, z)

    with :math:`D_T` as in :func:`~lightning_fcl.functional.distillation_loss`. The loss on the labels has the weight
    :math:`\alpha`, and the three weights add up to 1.

    Args:
        logits: Student's, shape ``(B, C)``.
        old_logits: Those of the old teacher, shape ``(B, C_old)``; classes that it does not know yet, the last
            ``C - C_old``, take no part.
        server_logits: Those of the server's model, shape ``(B, C)``.
        old_weight: :math:`\beta`.
        server_weight: :math:`1 - \alpha - \beta`.
        temperature: :math:`T > 0`.

    Returns:
        Scalar in nats, mean over the batch; gradients reach ``logits`` only.

    Raises:
        ValueError: If shapes do not fit, or ``temperature`` is not positive.

    Example:
        >>> import torch
        >>> student, old = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])
        >>> two_teacher_distillation(student, old, student)  # 1.8485 / 4
        tensor(0.4621)

    Source: Usmanova et al., "A distillation-based approach integrating continual learning and federated learning for
    pervasive services", 2021 (https://arxiv.org/abs/2109.04197).

    Deviation: the divergence and its factor :math:`T^2` are those of ``distillation_loss``.
    """
    old = distillation_loss(logits[:, : old_logits.shape[1]], old_logits, temperature)
    return old_weight * old + server_weight * distillation_loss(logits, server_logits, temperature)
