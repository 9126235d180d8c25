"""One plain replica per process: the payload lives in one flat, aligned buffer, and parameters are views of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.engines.light import is_plain_sgd, plain_sgd_step
from lightning_fcl.federated.layout import Slot, named_tensors


class ReplicaEngine(Engine):
    """Each rank trains whole clients, one after another, in one persistent replica.

    When all travelling tensors share one dtype, the module's parameters and float buffers become views of a single
    vector: a download is one copy into it, an upload one copy out of it. With mixed dtypes each tensor is copied, and
    so is a tensor that has left the vector because the module's code re-assigned it (``self.ema = 0.9 * self.ema``).
    """

    flat: Tensor | None = None
    _places: list[tuple[dict[str, Any], str, Slot, int]]

    @override
    def _wrap(self) -> None:
        if not self.layout.uniform:
            return
        tensors = named_tensors(self.module)
        self.flat = self.layout.new_vector(self.fabric.device)
        self.layout.pack(tensors, self.flat)
        views = self.layout.views(self.flat)
        _rehouse(self.module, views)
        owners = dict(self.module.named_modules())
        self._places = []
        for slot in self.layout.slots:
            prefix, _, name = slot.name.rpartition(".")
            owner = owners[prefix]
            table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            self._places.append((table, name, slot, views[slot.name].data_ptr()))

    def _strays(self) -> list[tuple[dict[str, Any], str, Slot]]:
        return [(table, name, slot) for table, name, slot, home in self._places if table[name].data_ptr() != home]

    @override
    def teardown(self) -> None:
        if self.flat is not None:
            tensors = named_tensors(self.module)
            _rehouse(self.module, {slot.name: tensors[slot.name].detach().clone() for slot in self.layout.slots})
            self.flat = None

    @override
    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        if self.flat is not None:
            self.flat.copy_(vector)
            for table, name, slot in self._strays():  # take them home
                view = self.flat[slot.start : slot.stop].view(slot.shape)
                if isinstance(table[name], nn.Parameter):
                    table[name].data = view
                else:
                    table[name] = view
            return
        tensors = named_tensors(self.module)
        for name, view in self.layout.views(vector).items():
            tensors[name].copy_(view)

    @override
    @torch.no_grad()
    def read(self, out: Tensor) -> None:
        if self.flat is not None:
            out.copy_(self.flat)
            for table, name, slot in self._strays():
                out[slot.start : slot.stop].view(slot.shape).copy_(table[name])
        else:
            self.layout.pack(named_tensors(self.module), out)

    # -- stacks of clients ------------------------------------------------------------------------------------------

    def own_parameters(self) -> list[Tensor]:
        """The module's travelling parameters, in the layout's order."""
        return self._own

    @contextmanager
    def borrowed(self, rows: Tensor) -> Iterator[list[Tensor]]:
        """Lend the module's places to stacked tensors; afterwards its own parameters are back.

        Args:
            rows: One client's payload per row, shape ``[K, layout.size]``.

        Yields:
            Leaf views of ``rows``, one per parameter, each of shape ``[K, *shape]``.
        """
        slots = self.layout.slots
        leaves = [rows[:, s.start : s.stop].view(len(rows), *s.shape).detach().requires_grad_() for s in slots]
        self._own = [table[name] for table, name, _, _ in self._places]
        try:
            yield leaves
        finally:
            self.install(self._own)

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Put tensors, one per slot, where the module looks for its parameters."""
        for (table, name, _, _), tensor in zip(self._places, tensors, strict=True):
            table[name] = tensor

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], after_closure: Callable[[], None]
    ) -> Any:
        if getattr(self.precision, "scaler", None) is not None or not is_plain_sgd(optimizer):
            return super().optimizer_step(optimizer, closure, after_closure)
        result = closure()
        after_closure()
        plain_sgd_step(optimizer)
        return result


def _rehouse(module: nn.Module, storage: dict[str, Tensor]) -> None:
    """Let the named parameters and buffers live in ``storage``; aliases (tied weights) follow."""
    old = named_tensors(module)
    new_of = {id(old[name]): tensor for name, tensor in storage.items()}
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and id(buffer) in new_of:
                child._buffers[name] = new_of[id(buffer)]
    for name, tensor in storage.items():
        if isinstance(old[name], nn.Parameter):
            old[name].data = tensor
