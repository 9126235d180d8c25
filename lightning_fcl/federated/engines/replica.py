"""One plain replica per process: the payload lives in one flat, aligned buffer, and parameters are views of it."""

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.layout import named_tensors


class ReplicaEngine(Engine):
    """Each rank trains whole clients, one after another, in one persistent replica.

    When all travelling tensors share one dtype, the module's parameters and float buffers become views of a single
    vector: a download is one copy into it, an upload one copy out of it. With mixed dtypes each tensor is copied.
    """

    flat: Tensor | None = None

    @override
    def _wrap(self) -> None:
        if not self.layout.uniform:
            return
        tensors = named_tensors(self.module)
        self.flat = self.layout.new_vector(self.fabric.device)
        self.layout.pack(tensors, self.flat)
        _rehouse(self.module, self.layout.views(self.flat))

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
            return
        tensors = named_tensors(self.module)
        for name, view in self.layout.views(vector).items():
            tensors[name].copy_(view)

    @override
    @torch.no_grad()
    def read(self, out: Tensor) -> None:
        if self.flat is not None:
            out.copy_(self.flat)
        else:
            self.layout.pack(named_tensors(self.module), out)


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
