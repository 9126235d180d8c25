"""FSDP 2: a strategy that shards over all ranks, and getting tensors in, out and the module back."""

from collections import Counter
from collections.abc import Callable, Iterator

from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override


class _FSDP2(ModelParallelStrategy):
    """All ranks in one data-parallel group; the parent would give the ranks of one machine to tensor parallelism."""

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()


def fsdp2(parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None) -> ModelParallelStrategy:
    """A Fabric strategy that shards one client's model over all ranks with FSDP 2.

    Args:
        parallelize_fn: Shards the module in place over the mesh's ``"data_parallel"`` dimension and returns it;
            :func:`shard_children` by default. :func:`shard_layers` suits models that call into the middle of a child,
            past the child's ``forward``, as LLaVA-like ones do when they write answers.

    Returns:
        A strategy for ``FederatedTrainer(parallel="model", strategy=...)`` or ``Fabric(strategy=...)``.
    """
    return _FSDP2(parallelize_fn or shard_children)


def shard_children(module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Shard each child that holds parameters of its own, then the module itself with what is left.

    Containers without ``forward`` are looked into. Children that share a parameter stay with the module, as FSDP wants
    a shared parameter in one group.

    Args:
        module: Module to shard in place.
        device_mesh: Mesh with a dimension ``"data_parallel"``.

    Returns:
        ``module``.
    """
    return _shard(module, list(_callable_children(module)), device_mesh)


def shard_layers(module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Shard each element of every ``ModuleList``, at any depth, then the module itself with all that is left.

    What is left (embeddings, norms, heads, a projector) is whole on every rank while a step of the module runs,
    whichever method of a child the step calls. Layers that share a parameter with others stay with it.

    Args:
        module: Module to shard in place.
        device_mesh: Mesh with a dimension ``"data_parallel"``.

    Returns:
        ``module``.
    """
    return _shard(module, list(_outermost_layers(module)), device_mesh)


def _shard(module: nn.Module, parts: list[nn.Module], device_mesh: DeviceMesh) -> nn.Module:
    """Shard each of ``parts`` that shares no parameter with another, then the module with what is left."""
    mesh = device_mesh["data_parallel"]
    owners = Counter(id(parameter) for part in parts for parameter in part.parameters())
    for part in parts:
        mine = [id(parameter) for parameter in part.parameters()]
        if mine and all(owners[one] == 1 for one in mine):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _outermost_layers(child)


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable_children(child)
        else:
            yield child


def whole(tensor: Tensor) -> Tensor:
    """The full value of a sharded tensor, the same on every rank; other tensors are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_out_like(tensor: Tensor, value: Tensor) -> Tensor:
    """``value``, which is whole on every rank, cut like ``tensor``; nothing is sent."""
    if not isinstance(tensor, DTensor):
        return value
    mesh = tensor.device_mesh
    whole = DTensor.from_local(value.to(tensor.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=tensor.placements)


def forget_fsdp(module: nn.Module) -> None:
    """Take FSDP's classes, hooks and registrations off, so that the module can be wrapped again."""
    from torch.distributed._composable_state import _module_state_mapping

    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.__class__ = type(child).__mro__[2]  # FSDPNet, FSDPModule, Net
            _module_state_mapping.pop(child, None)
        attributes = vars(child)
        for name in [n for n in attributes if n.startswith(("__composable_api", "_is_fsdp_", "_fsdp_"))]:
            del attributes[name]
        for hooks in [value for name, value in attributes.items() if name.endswith("_hooks")]:
            for key in [k for k, hook in hooks.items() if "torch.distributed.fsdp" in getattr(hook, "__module__", "")]:
                del hooks[key]
