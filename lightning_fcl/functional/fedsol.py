"""FedSOL: descend the task's loss where the weights are moved against what the global model predicts."""

import torch
from torch import Tensor

from lightning_fcl.functional.params import check_same_shapes, norm
from lightning_fcl.types import Params

_SMALL = 1e-12


def distillation_pull(logits: Tensor, teacher_logits: Tensor, temperature: float = 3.0) -> Tensor:
    r"""A scalar with the gradient of the divergence from a teacher's predictions; exactly 0 where both agree.

    .. math:: \nabla \, \mathrm{KL}\left( \sigma(z^g / \tau) \,\|\, \sigma(z / \tau) \right)

    Automatic differentiation of the divergence leaves rounding noise where the two agree, which a normalised step would
    blow up to full length. So the value is not the divergence: only its gradient is.

    Args:
        logits: Shape ``(B, C)``; gradients flow.
        teacher_logits: Shape ``(B, C)``; no gradient.
        temperature: :math:`\tau > 0`. There is no factor :math:`\tau^2`.

    Returns:
        Scalar; mean over the batch.

    Raises:
        ValueError: If the shapes differ or are not ``(B, C)``.

    Example:
        >>> z = torch.tensor([[0.0, 0.0]], requires_grad=True)
        >>> distillation_pull(z, torch.tensor([[0.0, 100.0]]), temperature=1.0).backward()
        >>> z.grad  # softmax(z) - softmax(teacher)
        tensor([[ 0.5000, -0.5000]])

    Source: Lee et al., "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning", CVPR
    2024, with the KL divergence as proximal loss (https://arxiv.org/abs/2308.12532).

    Deviation: None.
    """
    if logits.dim() != 2 or logits.shape != teacher_logits.shape:
        raise ValueError(
            f"`logits` and `teacher_logits` must have one shape (B, C), got {tuple(logits.shape)} and "
            f"{tuple(teacher_logits.shape)}."
        )
    pull = ((logits / temperature).softmax(1) - (teacher_logits / temperature).softmax(1)).detach()
    return (pull * logits).sum() / (temperature * len(logits))


def fedsol_offset(
    gradient: Params, radius: float, params: Params | None = None, anchor: Params | None = None
) -> Params:
    r"""Where to take the task's gradient: moved along the proximal loss, most where the weights have left the anchor.

    .. math:: \epsilon = \rho \, \Lambda \odot g_p / \|g_p\|

    Args:
        gradient: Gradient of the proximal loss by name.
        radius: :math:`\rho \ge 0`, in units of the weights.
        params: Weights, for the adaptive :math:`\Lambda = |\theta - \theta^t|`, scaled to norm 1 along the first
            dimension of each tensor; without them :math:`\Lambda = 1`.
        anchor: Weights that the round started from; needed with ``params``.

    Returns:
        Offsets by name, of norm at most ``radius``; zero if the gradient is (norm up to 1e-12).

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> fedsol_offset({"w": torch.tensor([3.0, 4.0])}, radius=1.0)
        {'w': tensor([0.6000, 0.8000])}
        >>> moved, start = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.zeros(2)}
        >>> fedsol_offset({"w": torch.tensor([3.0, 4.0])}, 1.0, moved, start)
        {'w': tensor([0.6000, 0.0000])}

    Source: Lee et al., CVPR 2024; scaling as in the authors' code (https://arxiv.org/abs/2308.12532).

    Deviation: None.
    """
    length = norm(gradient)
    factor = torch.where(length > _SMALL, radius / length.clamp(min=_SMALL), 0.0)
    offset = {name: value * factor.to(value.dtype) for name, value in gradient.items()}
    if params is None or anchor is None:
        return offset
    check_same_shapes(gradient=gradient, params=params, anchor=anchor)
    return {name: offset[name] * _share(params[name] - anchor[name]) for name in gradient}


def _share(distance: Tensor) -> Tensor:
    """Sizes scaled to norm 1 along the first dimension; zero where nothing moved."""
    size = distance.abs()
    return torch.nn.functional.normalize(size if size.dim() else size[None], dim=0, eps=_SMALL).view(size.shape)
