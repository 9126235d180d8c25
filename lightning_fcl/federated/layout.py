"""Which tensors of a module travel, and where each one lies in the flat vector."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from lightning_fcl._match import name_matcher
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.types import Params

Payload = str | re.Pattern[str] | Sequence[str] | Callable[[str, Tensor], bool]
"""What travels: a glob, ``"re:<regex>"``, a compiled pattern, a list of them, or ``f(name, tensor) -> bool``."""

_ALIGN_BYTES = 64  # one cache line, so that no two tensors share one and vector loads never split


@dataclass(frozen=True)
class Slot:
    """One tensor of the payload: elements ``[start, stop)`` of the flat vector."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The flat vector of a module's payload: trainable parameters first, then float buffers.

    Args:
        slots: Travelling float tensors in the vector's order.
        num_params: Length of the leading part that holds parameters; the rest are buffers.
        size: Length of the vector, padding included (padding is zero).
        dtype: Type of the vector: the one type that holds every slot without loss.
        counters: Names of integer buffers that travel; they are copied, never averaged.
        local: Names of trainable parameters and buffers that stay with each client.
        transient: Names of buffers that are in no ``state_dict``; every job starts from their first values.
    """

    slots: tuple[Slot, ...]
    num_params: int
    size: int
    dtype: torch.dtype
    counters: tuple[str, ...]
    local: tuple[str, ...]
    transient: tuple[str, ...] = ()

    @property
    def uniform(self) -> bool:
        """Whether all slots have the vector's own type, so that the vector can back the module."""
        return all(slot.dtype == self.dtype for slot in self.slots)

    @property
    def places(self) -> dict[str, slice]:
        """Where each parameter lies in the vector, in its order; buffers are left out."""
        return {s.name: slice(s.start, s.stop) for s in self.slots if s.start < self.num_params}

    @property
    def nbytes(self) -> int:
        """Bytes that one transfer of the payload costs, padding not counted."""
        return sum((slot.stop - slot.start) * slot.dtype.itemsize for slot in self.slots)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector's slots as named views in their own shapes (and the vector's dtype)."""
        return {s.name: vector[s.start : s.stop].view(s.shape) for s in self.slots}

    @torch.no_grad()
    def pack(self, tensors: Params, out: Tensor) -> Tensor:
        """Copy named tensors into ``out`` (shape ``[size]``), casting to its dtype."""
        for slot in self.slots:
            out[slot.start : slot.stop].view(slot.shape).copy_(tensors[slot.name])
        return out

    def new_vector(self, device: torch.device) -> Tensor:
        """A zero vector of shape ``[size]``."""
        return torch.zeros(self.size, dtype=self.dtype, device=device)


def build_layout(module: nn.Module, payload: Payload = "*", *, share_buffers: bool = True) -> Layout:
    """Lay out the tensors of ``module`` that travel.

    Args:
        module: Module whose trainable parameters and persistent buffers are considered; frozen ones never travel. What
            its attribute ``stays_local`` matches (patterns as in ``payload``) stays with each client.
        payload: What of it travels; the rest stays with each client.
        share_buffers: Whether float and integer buffers (BatchNorm statistics) may travel.

    Returns:
        The layout.

    Raises:
        MisconfigurationError: If nothing is trainable, or ``payload`` matches nothing.
    """
    match = _matcher(payload)
    params = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not params:
        raise MisconfigurationError(
            "`module` must have at least one trainable parameter, got none. Did an earlier step freeze them all?"
        )
    buffers = list(_persistent_buffers(module))
    stays = _matcher(getattr(module, "stays_local", ()))
    travels = {n for n, t in [*params, *buffers] if match(n, t) and not stays(n, t)}
    if not share_buffers:
        travels -= {n for n, _ in buffers}
    if not travels & {n for n, _ in params}:
        names = ", ".join(n for n, _ in params[:3])
        raise MisconfigurationError(
            f"`payload` must match at least one trainable parameter, got {payload!r}. Names look like: {names}."
        )
    floats = [(n, t) for n, t in buffers if n in travels and t.is_floating_point()]
    moving = [(n, t) for n, t in params if n in travels] + floats
    dtype = reduce(torch.promote_types, [t.dtype for _, t in moving])
    slots, num_params = _place(moving, dtype, first_buffer=len(moving) - len(floats))
    return Layout(
        slots=slots,
        num_params=num_params,
        size=_aligned(slots[-1].stop, dtype),
        dtype=dtype,
        counters=tuple(n for n, t in buffers if n in travels and not t.is_floating_point()),
        local=tuple(n for n, _ in [*params, *buffers] if n not in travels),
        transient=tuple(sorted({n for n, _ in module.named_buffers()} - {n for n, _ in buffers})),
    )


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of ``module`` by dotted name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _place(moving: list[tuple[str, Tensor]], dtype: torch.dtype, first_buffer: int) -> tuple[tuple[Slot, ...], int]:
    slots: list[Slot] = []
    position = num_params = 0
    for index, (name, tensor) in enumerate(moving):
        start = _aligned(position, dtype)
        position = start + tensor.numel()
        slots.append(Slot(name, tensor.shape, tensor.dtype, start, position))
        if index < first_buffer:
            num_params = position
    # The boundary is aligned too, so that [:num_params] and [num_params:] split between two slots.
    return tuple(slots), _aligned(num_params, dtype)


def _aligned(position: int, dtype: torch.dtype) -> int:
    step = _ALIGN_BYTES // dtype.itemsize
    return -(-position // step) * step


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a ``state_dict`` would hold; caches such as rotary tables are rebuilt, not sent."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None or name in child._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield (f"{prefix}.{name}" if prefix else name), buffer


def _matcher(payload: Payload) -> Callable[[str, Tensor], bool]:
    if callable(payload):
        return payload
    match = name_matcher(payload)
    return lambda name, _: match(name)
