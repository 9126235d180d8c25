"""MoELoRA: linear layers with several LoRA experts and a gate."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_fcl._match import NameRule
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.moe_lora import moe_lora
from lightning_fcl.models.subspace_lora import replace_linears
from lightning_fcl.types import MethodCard


class MoELoRALinear(nn.Module):
    r"""A frozen linear layer with LoRA experts that a gate mixes for each token.

    .. math:: y = W x + \varsigma \sum_e \mathrm{softmax}(G x)_e \, B_e A_e \, \mathrm{dropout}(x)

    All experts and the gate travel and are averaged.

    Args:
        base: The layer; frozen here.
        rank: Total rank, shared evenly among the experts.
        experts: Their number; divides ``rank``.
        scaling: :math:`\varsigma`, LoRA's alpha over the total rank.
        dropout: In front of experts and gate.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Chen et al., "CoIN: A Benchmark of Continual Instruction Tuning for Multimodal Large Language Models",
    NeurIPS 2024 (https://arxiv.org/abs/2403.08350).

    Deviation: A starts normal with deviation .01, as DISCO's published code has it for its own slots, so that the
    baseline and the method start alike.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="MoELoRA",
        acts_on="structure",
        paper="Chen et al., CoIN, NeurIPS 2024",
        url="https://arxiv.org/abs/2403.08350",
        functions=("moe_lora",),
    )

    def __init__(
        self, base: nn.Linear, rank: int = 64, experts: int = 8, scaling: float = 2.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if experts < 1 or rank < experts or rank % experts:
            raise MisconfigurationError(f"`rank` must be a multiple of `experts`, got {rank} and {experts}.")
        if not math.isfinite(scaling) or not 0 <= dropout < 1:
            raise MisconfigurationError(f"`scaling` must be finite, `dropout` in [0, 1), got {scaling}, {dropout}.")
        self.base = base.requires_grad_(False)
        self.scaling = scaling
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        share, width, out, like = rank // experts, base.in_features, base.out_features, base.weight
        dtype = like.dtype if like.is_floating_point() else torch.float32
        self.lora_A = nn.Parameter(
            torch.empty(experts, share, width, dtype=dtype, device=like.device).normal_(std=0.01)
        )
        self.lora_B = nn.Parameter(torch.zeros(experts, out, share, dtype=dtype, device=like.device))
        self.gate = nn.Parameter(torch.empty(experts, width, dtype=dtype, device=like.device))
        nn.init.kaiming_uniform_(self.gate, a=math.sqrt(5))  # as nn.Linear starts

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        inner = x.to(self.lora_A.dtype)
        mixed = moe_lora(self.dropout(inner), self.lora_A, self.lora_B, self.gate, self.scaling)
        return y + mixed.to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """The frozen weight; model code may look at its type or device."""
        return self.base.weight


def add_experts(model: nn.Module, targets: NameRule, *, trainable: NameRule = (), **options: Any) -> list[str]:
    """Put a :class:`MoELoRALinear` in the place of chosen linear layers, and freeze everything else.

    Args:
        model: Changed in place.
        targets: As for :func:`~lightning_fcl.models.add_subspaces`.
        trainable: Names of parameters that stay trainable beside the experts.
        **options: ``rank``, ``experts``, ``scaling`` and ``dropout`` of :class:`MoELoRALinear`.

    Returns:
        Names of the new layers.

    Raises:
        MisconfigurationError: If ``targets`` matches no linear layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> add_experts(net, "2", rank=4, experts=2)
        ['2']
    """
    return replace_linears(model, targets, lambda layer: MoELoRALinear(layer, **options), trainable=trainable)
