"""MoELoRA: several LoRA experts in one layer, mixed by a gate for each token."""

import torch
from torch import Tensor

from lightning_fcl.functional.subspace_lora import subspace_lora


def moe_lora(x: Tensor, a: Tensor, b: Tensor, gate: Tensor, scaling: float) -> Tensor:
    r"""What a mixture of LoRA experts adds to a layer.

    .. math:: \varsigma \sum_e \mathrm{softmax}(G x)_e \, B_e A_e x

    Args:
        x: Input of the layer, shape ``[B, ..., in]``.
        a: Down-projections, shape ``[E, r, in]``; ``E r`` is the total rank.
        b: Up-projections, shape ``[E, out, r]``.
        gate: :math:`G`, shape ``[E, in]``.
        scaling: :math:`\varsigma`, LoRA's alpha over the *total* rank.

    Returns:
        Shape ``[B, ..., out]``; gradients reach all tensors.

    Example:
        >>> a, b = torch.ones(2, 1, 2), torch.ones(2, 1, 1)  # equal experts are one LoRA, whatever the gate
        >>> moe_lora(torch.tensor([[1.0, 2.0]]), a, b, torch.tensor([[5.0, 0.0], [0.0, 1.0]]), scaling=2.0)
        tensor([[6.]])

    Source: Chen et al., "CoIN: A Benchmark of Continual Instruction Tuning for Multimodal Large Language Models",
    NeurIPS 2024 (https://arxiv.org/abs/2403.08350).

    Deviation: None; there is no load-balancing term in theirs either.
    """
    return subspace_lora(x, a, b, torch.softmax(x @ gate.T, dim=-1), scaling)
