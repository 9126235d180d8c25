"""Which parameters are trained, travel, stay or are frozen, in groups of names."""

import re
from collections import defaultdict
from typing import NamedTuple

from torch import Tensor, nn

from lightning_fcl.doctor.diagnosis import Diagnosis, Table
from lightning_fcl.doctor.probe import Probe
from lightning_fcl.reports.tables import data_size

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_GROUPS = 24


class _Group(NamedTuple):
    tensors: int
    elements: int
    nbytes: int


def add_parameters(found: Diagnosis, module: nn.Module, probe: Probe) -> None:
    """Add the table of parameters and their numbers.

    Args:
        found: Gains a table.
        module: Its parameters and buffers.
        probe: Knows what travels.
    """
    layout = probe.layout
    assert layout is not None
    travels = {slot.name for slot in layout.slots} | set(layout.counters)
    kinds: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in module.named_parameters():
        fate = "travels" if name in travels else "stays with the client" if parameter.requires_grad else "frozen"
        kinds[fate][name] = parameter
    for name, buffer in module.named_buffers():
        kinds["buffer, travels" if name in travels else "buffer, stays"][name] = buffer
    rows: list[tuple[str, ...]] = []
    for fate in ("travels", "stays with the client", "frozen", "buffer, travels", "buffer, stays"):
        tensors = kinds.get(fate, {})
        rows += _rows(fate, tensors, whole=fate in ("frozen", "buffer, stays"))
        found.numbers["bytes_" + fate.replace(", ", "_").replace(" ", "_")] = size_of(tensors).nbytes
    found.tables.append(Table("parameters", ("name", "tensors", "numbers", "bytes", "what becomes of them"), rows))


def _rows(fate: str, tensors: dict[str, Tensor], *, whole: bool) -> list[tuple[str, ...]]:
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        groups["all others" if whole else _NUMBER.sub("*", name)][name] = tensor
    sizes = {name: size_of(members) for name, members in groups.items()}
    if len(sizes) > _MOST_GROUPS:
        sizes = {f"all {len(sizes)} groups of names": size_of(tensors)}
    return [(name, str(s.tensors), f"{s.elements:,}", data_size(s.nbytes), fate) for name, s in sizes.items()]


def size_of(tensors: dict[str, Tensor]) -> _Group:
    """Number of tensors, of their elements and of their bytes."""
    values = list(tensors.values())
    return _Group(len(values), sum(t.numel() for t in values), sum(t.numel() * t.element_size() for t in values))
