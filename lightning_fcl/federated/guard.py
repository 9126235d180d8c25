"""Nothing reaches an aggregator unchecked."""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fcl.federated.layout import Layout
from lightning_fcl.types import ClientUpdate

_FEW = 3


@dataclass(frozen=True)
class Rejection:
    """Why an update was not used.

    Args:
        reason: One word for ``failures.csv``: ``non_finite``, ``shape``, ``missing``, ``extra``, ``renamed``,
            ``dtype``, ``weight``, ``zero_examples``, ``duplicate``, ``unsampled`` or ``stale``.
        detail: What was found, with the tensor's name.
    """

    reason: str
    detail: str


class UpdateGuard:
    """Checks every update of one round against what was sent out.

    Args:
        layout: Names, shapes and dtypes that must come back.
        counters: Integer buffers that must come back.
        sampled: Clients of the round that this rank trains.
        task: Current task.
        round: Current round.
    """

    def __init__(
        self, layout: Layout, counters: dict[str, Tensor], sampled: Iterable[int], *, task: int, round: int
    ) -> None:
        self._slots = {slot.name: (slot.shape, slot.dtype) for slot in layout.slots}
        self._counters = {name: (t.shape, t.dtype) for name, t in counters.items()}
        self._sampled = frozenset(sampled)
        self._seen: set[int] = set()
        self._when = (task, round)

    def check(self, update: ClientUpdate) -> Rejection | None:
        """``None`` if the update may be used; it then counts as received."""
        rejection = self._check_origin(update) or self._check_weight(update)
        if rejection is None and update.flat is None:
            rejection = self._check_names(update) or self._check_tensors(update)
        if rejection is None:
            rejection = self._check_finite(update)
        if rejection is None:
            self._seen.add(update.client)
        return rejection

    def _check_origin(self, update: ClientUpdate) -> Rejection | None:
        if update.client not in self._sampled:
            return Rejection("unsampled", f"client {update.client} was not asked in this round")
        if update.client in self._seen:
            return Rejection("duplicate", f"client {update.client} was already received in this round")
        if (update.task, update.round) != self._when:
            task, round = self._when
            return Rejection(
                "stale", f"made for task {update.task}, round {update.round}; this is task {task}, round {round}"
            )
        return None

    @staticmethod
    def _check_weight(update: ClientUpdate) -> Rejection | None:
        count = update.num_examples
        if not math.isfinite(count) or count < 0:
            return Rejection("weight", f"num_examples is {count}")
        return Rejection("zero_examples", "num_examples is 0") if count == 0 else None

    def _check_names(self, update: ClientUpdate) -> Rejection | None:
        expected = self._slots.keys() | self._counters.keys()
        missing, extra = sorted(expected - update.tensors.keys()), sorted(update.tensors.keys() - expected)
        if missing and extra:
            pairs = [f"{m} -> {c[0]}" for m in missing[:_FEW] if (c := difflib.get_close_matches(m, extra, 1, 0))]
            return Rejection("renamed", f"{_few(missing)} missing, {_few(extra)} unknown; perhaps {', '.join(pairs)}")
        if missing:
            return Rejection("missing", _few(missing))
        return Rejection("extra", _few(extra)) if extra else None

    def _check_tensors(self, update: ClientUpdate) -> Rejection | None:
        for name, (shape, dtype) in {**self._slots, **self._counters}.items():
            tensor = update.tensors[name]
            if tensor.shape != shape:
                return Rejection("shape", f"{name} is {tuple(tensor.shape)}, expected {tuple(shape)}")
            # Another float type is cast; a float for an integer (or the reverse) is another quantity.
            if tensor.is_floating_point() != dtype.is_floating_point or tensor.is_complex():
                return Rejection("dtype", f"{name} is {tensor.dtype}, expected {dtype}")
        return None

    def _check_finite(self, update: ClientUpdate) -> Rejection | None:
        if update.flat is not None and all_finite(update.flat):
            return None
        for name in self._slots:
            bad = int((~torch.isfinite(update.tensors[name])).sum())
            if bad:
                return Rejection("non_finite", f"{name} holds {bad} NaN or infinite values")
        return None


def all_finite(tensor: Tensor) -> bool:
    """Whether every element is finite; one pass in the usual case, two if the sum itself overflows."""
    if tensor.numel() == 0 or math.isfinite(float(tensor.sum())):
        # A sum is finite only if no element is NaN or infinite: an infinity can only cancel to NaN.
        return True
    return bool(torch.isfinite(tensor).all())


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more
