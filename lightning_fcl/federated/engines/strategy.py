"""DDP and FSDP 2: all ranks train the same client, each on its share of every batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.layout import named_tensors


class StrategyEngine(Engine):
    """All ranks train one client at a time, wrapped once a run by Fabric's DDP or ``ModelParallelStrategy`` (FSDP 2).

    Steps run behind the wrapper's ``__call__``, so the user's module is not edited. Float buffers, such as BatchNorm
    statistics, see a rank's share of the batch only; they leave as the mean over ranks.

    Raises:
        MisconfigurationError: At :meth:`setup`, if the strategy is another one, or leaves trainable parameters outside
            its sharding, whose gradients would not be averaged.
    """

    root: nn.Module
    """What is called: the wrapper, or the module itself where the strategy works in place."""
    _inside_step = False

    @staticmethod
    def accepts(strategy: object) -> bool:
        """Whether this engine drives ``strategy``."""
        return isinstance(strategy, DDPStrategy | ModelParallelStrategy) and not isinstance(strategy, DeepSpeedStrategy)

    @override
    def _wrap(self) -> None:
        strategy = self.fabric.strategy
        if not self.accepts(strategy):
            raise MisconfigurationError(
                f"`strategy` must suit {type(self).__name__}, got {type(strategy).__name__}. parallel='model' knows "
                "DDP, FSDP 2 (`strategy=fsdp2()`, not FSDP 1) and DeepSpeed."
            )
        for tensor in named_tensors(self.module).values():
            dist.broadcast(tensor.data, 0)  # frozen weights are never loaded, so they must agree from the start
        self.root = self._wrap_by(strategy)

    def _wrap_by(self, strategy: Any) -> nn.Module:
        root: nn.Module = strategy.setup_module(self.module)
        if isinstance(root, DistributedDataParallel):
            return root
        loose = [n for n, p in self.module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
        if root is not self.module or loose:
            raise MisconfigurationError(
                "`parallelize_fn` must shard every trainable parameter of the module it gets, in place, but it leaves "
                f"out {', '.join(loose[:3]) or 'the module itself'}. `fsdp2()` shards everything."
            )
        return root

    @override
    def teardown(self) -> None:
        self.root = self.module
        if any(isinstance(child, FSDPModule) for child in self.module.modules()):
            self._reshard()
            whole = {n: _whole(p).detach().clone() for n, p in self.module.named_parameters()}
            _forget_fsdp(self.module)
            rebuild_parameters(self.module, whole)

    # -- weights --------------------------------------------------------------------------------------------------

    @override
    def load(self, vector: Tensor) -> None:
        if self._inside_step:
            self._abandon_step()
            self._inside_step = False
        self.set_tensors(self.layout.views(vector))

    def _abandon_step(self) -> None:
        """Drop what a failed job left behind; FSDP keeps unsynchronised gradients where `zero_grad` does not reach."""
        if isinstance(self.root, FSDPModule) and hasattr(self.root, "reset_iter_state"):
            self.root.reset_iter_state()
        for child in self.module.modules():
            if isinstance(child, FSDPModule):
                child.unshard()
                child.zero_grad(set_to_none=True)
                child.reshard()

    @override
    @torch.no_grad()
    def read(self, out: Tensor) -> None:
        self._reshard()
        tensors = named_tensors(self.module)
        for name, view in self.layout.views(out).items():
            view.copy_(self._gather(tensors[name]))

    @override
    @torch.no_grad()
    def get_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        self._reshard()
        tensors = named_tensors(self.module)
        return {name: self._gather(tensors[name]).detach().clone() for name in names}

    @override
    @torch.no_grad()
    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._reshard()
        own = named_tensors(self.module)
        for name, value in tensors.items():
            self._scatter(own[name], value)

    def _gather(self, tensor: Tensor) -> Tensor:
        """The full value of a parameter or buffer, the same on every rank."""
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return _whole(tensor)
        mean = self.fabric.all_reduce(tensor.double(), reduce_op="mean")  # in float64 the mean of equal values is exact
        assert isinstance(mean, Tensor)
        return mean.to(tensor.dtype)

    def _scatter(self, tensor: Tensor, value: Tensor) -> None:
        """Write a full value, which every rank holds, into a parameter or buffer."""
        tensor.copy_(_laid_out_like(tensor, value))

    def _reshard(self) -> None:
        """Let the module hold its shards: after a forward without backward, FSDP leaves gathered copies in place."""
        for child in self.module.modules():
            if isinstance(child, FSDPModule):
                child.reshard()

    # -- steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any) -> Any:
        self._inside_step = True
        with self.precision.forward_context():
            return self._call(self.module.training_step, *args)

    @override
    def validation_step(self, *args: Any) -> Any:
        if isinstance(self.root, DistributedDataParallel):
            return super().validation_step(*args)  # every rank holds all weights; ranks need not keep step
        with self.precision.forward_context():
            return self._call(self.module.validation_step, *args)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Run a method of the module behind ``root.__call__``, where the wrapper hooks in its work."""
        attributes = vars(self.module)
        saved = attributes.get("forward")

        def restore() -> None:
            if saved is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = saved

        def once(*inner: Any) -> Any:
            restore()  # the method may call the real forward
            return method(*inner)

        attributes["forward"] = once
        try:
            return self.root(*args)
        finally:
            restore()

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], after_closure: Callable[[], None]
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, after_closure)
        self._inside_step = False
        return result

    @override
    def accumulating(self, active: bool) -> AbstractContextManager[Any]:
        if not active:
            return nullcontext()
        if isinstance(self.root, DistributedDataParallel):
            return self.root.no_sync()
        return self._unsynchronised()

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        sharded = [child for child in self.module.modules() if isinstance(child, FSDPModule)]
        for child in sharded:
            child.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for child in sharded:
                child.set_requires_gradient_sync(True, recurse=False)

    @override
    @torch.no_grad()
    def add_to_gradients(self, terms: Mapping[str, Tensor]) -> None:
        own = dict(self.module.named_parameters())
        for name, term in terms.items():
            if (grad := own[name].grad) is not None:
                grad.add_(_laid_out_like(grad, term))

    @override
    def scale_loss(self, loss: Tensor, num_local: int, num_global: int) -> Tensor:
        weighted, world = num_local * self.shard[1], num_global
        return loss if weighted == world else loss * (weighted / world)

    @property
    @override
    def shard(self) -> tuple[int, int]:
        split = self.fabric.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        return split["rank"], split["num_replicas"]

    @override
    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # Weights gathered in inference mode could not be trained on afterwards.
        with super().evaluating(), torch.inference_mode(False), torch.no_grad():
            yield
        self._reshard()


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
            :func:`shard_children` by default. Write your own if the model calls into the middle of a child, past the
            child's ``forward``.

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
    mesh = device_mesh["data_parallel"]
    children = list(_callable_children(module))
    for child in children:
        others = {id(p) for other in children if other is not child for p in other.parameters()}
        mine = [id(p) for p in child.parameters()]
        if mine and others.isdisjoint(mine):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable_children(child)
        else:
            yield child


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _laid_out_like(tensor: Tensor, value: Tensor) -> Tensor:
    """``value``, which is whole on every rank, cut like ``tensor``; nothing is sent."""
    if not isinstance(tensor, DTensor):
        return value
    mesh = tensor.device_mesh
    whole = DTensor.from_local(value.to(tensor.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=tensor.placements)


def rebuild_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give ``module`` plain new parameters with the given values; aliases (tied weights) stay aliases."""
    fresh = {id(p): nn.Parameter(values[n], requires_grad=p.requires_grad) for n, p in module.named_parameters()}
    for child in module.modules():
        child._parameters = {n: None if p is None else fresh[id(p)] for n, p in dict.items(child._parameters)}


def _forget_fsdp(module: nn.Module) -> None:
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
