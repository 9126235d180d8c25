"""O-LoRA: a task's LoRA rows stay orthogonal to those of the tasks before it."""

import torch
from torch import Tensor


def orthogonality_penalty(a: Tensor, frozen: Tensor, strength: float) -> Tensor:
    r"""Price of overlap between the subspace being trained and finished ones.

    .. math:: \lambda \sum_s \sum_{ij} | A_s A^\top |_{ij}

    Args:
        a: Down-projection being trained, shape ``[r, in]``.
        frozen: Those of finished subspaces, shape ``[S, r, in]``; ``S`` may be 0.
        strength: :math:`\lambda \ge 0`; the entries are summed, not averaged.

    Returns:
        Scalar; gradients reach ``a``.

    Example:
        >>> new = torch.tensor([[0.0, 2.0, 0.0], [0.5, 0.0, 1.0]])
        >>> orthogonality_penalty(new, torch.tensor([[[1.0, 0.0, 0.0]]]), strength=1.0)
        tensor(0.5000)

    Source: Wang et al., "Orthogonal Subspace Learning for Language Model Continual Learning", Findings of EMNLP 2023,
    eq. 8 (https://arxiv.org/abs/2310.14152).

    Deviation: the paper's equation squares the entries; its published code takes absolute values, and so does this.
    """
    return strength * (frozen.flatten(0, 1) @ a.T).abs().sum()


@torch.no_grad()
def orthogonality_penalty_grad(a: Tensor, frozen: Tensor, strength: float) -> Tensor:
    """Gradient of :func:`orthogonality_penalty` with respect to ``a``.

    Args:
        a: As there.
        frozen: As there.
        strength: As there.

    Returns:
        Shape ``[r, in]``; 0 where rows are orthogonal.

    Example:
        >>> orthogonality_penalty_grad(torch.tensor([[2.0, 1.0]]), torch.tensor([[[1.0, 0.0]]]), strength=0.5)
        tensor([[0.5000, 0.0000]])

    Source: as :func:`orthogonality_penalty`.

    Deviation: as there.
    """
    rows = frozen.flatten(0, 1)
    return strength * (rows @ a.T).sign().T @ rows
