"""Linear layers with one LoRA subspace to train and a bank of finished ones to evaluate with."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_fcl._match import NameRule, name_matcher
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.subspace_lora import scaled_lora


class SubspaceLinear(nn.Module):
    r"""A frozen linear layer, one trainable LoRA pair, and a bank of pairs that others trained.

    .. math:: y = W x + \varsigma B A \, \mathrm{dropout}(x)
        \quad\text{or, with the bank,}\quad y = W x + \varsigma \sum_i \alpha_i B_i A_i x

    Clients train and send the pair alone. The bank is no parameter and no buffer: it neither travels nor is saved with
    the module; a router installs it. The second form runs as two matrix products for the whole bank.

    Args:
        base: The layer; frozen here.
        rank: Rank of one subspace.
        scaling: :math:`\varsigma`, LoRA's alpha over the *total* rank; 2 in the paper, whatever the number of slots.
        dropout: In front of the trained pair.

    Attributes:
        bank: ``A`` of shape ``[T, rank, in]`` and ``B`` of shape ``[T, out, rank]``, or ``None``.
        active: Whether the trained pair takes part in the forward pass.

    Raises:
        MisconfigurationError: If ``rank``, ``scaling`` or ``dropout`` is out of range.
    """

    def __init__(self, base: nn.Linear, rank: int = 8, scaling: float = 2.0, dropout: float = 0.0) -> None:
        super().__init__()
        if rank < 1 or not math.isfinite(scaling) or not 0 <= dropout < 1:
            raise MisconfigurationError(
                f"`rank` must be at least 1, `scaling` finite, `dropout` in [0, 1), got {rank}, {scaling}, {dropout}."
            )
        self.base = base.requires_grad_(False)
        self.rank = rank
        self.scaling = scaling
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        weight = base.weight
        dtype = weight.dtype if weight.is_floating_point() else torch.float32  # quantised weights are integers
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=dtype, device=weight.device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank, dtype=dtype, device=weight.device))
        self.reset_parameters()
        self.bank: tuple[Tensor, Tensor] | None = None
        self.active = True
        self._scales: Tensor | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The first weights of a subspace: A normal with deviation .01, as the published code has it, and B zero."""
        self.lora_A.normal_(std=0.01)
        self.lora_B.zero_()

    def set_bank(self, a: list[Tensor], b: list[Tensor]) -> None:
        """Replace the bank.

        Args:
            a: Down-projections, each ``[rank, in]``; copied.
            b: Up-projections, each ``[out, rank]``; copied. Empty lists empty the bank.

        Raises:
            ValueError: If a shape does not fit this layer.
        """
        shapes = (self.rank, self.base.in_features), (self.base.out_features, self.rank)  # ZeRO-3 cuts the parameters
        for found, shape in zip((a, b), shapes, strict=True):
            if wrong := [tuple(t.shape) for t in found if t.shape != shape]:
                raise ValueError(f"a subspace's tensor must have shape {shape}, got {wrong[0]}.")
        self._scales = None
        self.active = True
        if not a:
            self.bank = None
            return
        down, up = torch.stack(a).to(self.lora_A), torch.stack(b, dim=1).to(self.lora_B)
        self.bank = (down.detach(), up.detach().transpose(0, 1))

    def activate(self, factors: Tensor | None, *, active: bool = False) -> None:
        """Say who speaks in the next forward passes.

        Args:
            factors: Factor of each of the bank's subspaces per sample, shape ``[B, T]`` (or ``[1, T]`` for all alike);
                ``None`` switches the bank off.
            active: Whether the trained pair speaks too.
        """
        self.active = active
        if factors is None or self.bank is None:
            self._scales = None
            return
        if factors.dim() != 2 or factors.shape[1] != len(self.bank[0]):
            raise ValueError(f"`factors` must have shape [B, {len(self.bank[0])}], got {tuple(factors.shape)}.")
        self._scales = (factors * self.scaling).repeat_interleave(self.rank, dim=1).to(self.lora_A)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        inner = x.to(self.lora_A.dtype)
        if self._scales is not None and self.bank is not None:
            y = y + scaled_lora(inner, *self.bank, self._spread(inner)).to(y.dtype)
        if self.active:
            low = F.linear(self.dropout(inner), self.lora_A) * self.scaling
            y = y + F.linear(low, self.lora_B).to(y.dtype)
        return y

    def _spread(self, x: Tensor) -> Tensor:
        """The scales, one row per row of ``x``: beams and flattened positions of a sample follow each other."""
        scales = self._scales
        assert scales is not None
        if len(scales) not in (1, len(x)):
            if len(x) % len(scales):
                raise ValueError(f"{len(scales)} samples were routed, but the layer got {len(x)} rows.")
            scales = scales.repeat_interleave(len(x) // len(scales), dim=0)
        return scales.view(len(scales), *(1 for _ in x.shape[1:-1]), -1)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SubspaceLinear":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bank is not None:
            down, up = self.bank
            self.bank = (fn(down), fn(up.transpose(0, 1)).transpose(0, 1))
        return self

    @property
    def weight(self) -> Tensor:
        """The frozen weight; model code may look at its type or device."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen bias."""
        return self.base.bias

    @override
    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling}, subspaces={0 if self.bank is None else len(self.bank[0])}"


def add_subspaces(
    model: nn.Module, targets: NameRule, *, trainable: NameRule = (), **options: Any
) -> dict[str, SubspaceLinear]:
    """Put a :class:`SubspaceLinear` in the place of chosen linear layers, and freeze everything else.

    Args:
        model: Changed in place.
        targets: Names of linear layers: a glob, ``"re:<regex>"``, or a list of them, e.g.
            ``r"re:language_model.*(gate|up|down)_proj$"``.
        trainable: Names of parameters that stay trainable beside the subspaces (a projector, a head).
        **options: ``rank``, ``scaling`` and ``dropout`` of :class:`SubspaceLinear`.

    Returns:
        The new layers by name.

    Raises:
        MisconfigurationError: If ``targets`` matches no linear layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> sorted(add_subspaces(net, "0", rank=2))
        ['0']
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['0.lora_A', '0.lora_B']
    """
    replace_linears(model, targets, lambda layer: SubspaceLinear(layer, **options), trainable=trainable)
    return subspace_layers(model)


def replace_linears(
    model: nn.Module, targets: NameRule, make: Callable[[nn.Linear], nn.Module], *, trainable: NameRule = ()
) -> list[str]:
    """Put ``make(layer)`` in the place of chosen linear layers, and freeze everything else.

    Args:
        model: Changed in place.
        targets: As for :func:`add_subspaces`, like the rest.
        make: Makes the new layer around the old one.
        trainable: Names of parameters that stay trainable.

    Returns:
        The names of the new layers.

    Raises:
        MisconfigurationError: If ``targets`` matches no linear layer.
    """
    match, keep = name_matcher(targets), name_matcher(trainable)
    chosen = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and match(name)}
    if not chosen:
        linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        raise MisconfigurationError(f"`targets` must match a linear layer, got {targets!r}. Their names: {linear[:5]}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(keep(name))
    for name, layer in chosen.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, make(layer))
    return list(chosen)


def subspace_layers(model: nn.Module) -> dict[str, SubspaceLinear]:
    """The model's subspace layers by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, SubspaceLinear)}
