"""DDP and FSDP 2: all ranks train the same client, each on its share of every batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.engines.fsdp2 import forget_fsdp, laid_out_like, whole
from lightning_fcl.federated.layout import named_tensors
from lightning_fcl.types import Metrics


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
        self.root = self._wrap_by(strategy)
        self.sharded = not isinstance(self.root, DistributedDataParallel)

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
            values = {n: whole(p).detach().clone() for n, p in self.module.named_parameters()}
            forget_fsdp(self.module)
            rebuild_parameters(self.module, values)

    @override
    @contextmanager
    def unwrapped(self) -> Iterator[None]:
        """Inside, the module is an ordinary one with whole weights on every rank, for what must look into it.

        Wrapping again costs about as much as :meth:`setup`; only DDP, which hides nothing, goes without.
        """
        if not self.sharded:
            yield
            return
        self.teardown()
        try:
            yield
        finally:
            self._wrap()

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

    @override
    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        self._reshard()
        return {n: self._gather(p).detach() for n, p in self.module.named_parameters() if p.requires_grad}

    def _gather(self, tensor: Tensor) -> Tensor:
        """The full value of a parameter or buffer, the same on every rank."""
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return whole(tensor)
        mean = self.fabric.all_reduce(tensor.double(), reduce_op="mean")  # in float64 the mean of equal values is exact
        assert isinstance(mean, Tensor)
        return mean.to(tensor.dtype)

    def _scatter(self, tensor: Tensor, value: Tensor) -> None:
        """Write a full value, which every rank holds, into a parameter or buffer."""
        tensor.copy_(laid_out_like(tensor, value))

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
            result = method(*inner)
            if (wrapper := self._manual_ddp) is not None:
                wrapper.require_backward_grad_sync = False  # it must not wait for a backward pass that has been
            return result

        attributes["forward"] = once
        try:
            return self.root(*args)
        finally:
            restore()
            if (wrapper := self._manual_ddp) is not None:
                wrapper.require_backward_grad_sync = True

    @property
    def _manual_ddp(self) -> DistributedDataParallel | None:
        """DDP around a module that runs its backward passes inside the step, where DDP does not expect them."""
        root = self.root
        return root if isinstance(root, DistributedDataParallel) and not self.module.automatic_optimization else None

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if (wrapper := self._manual_ddp) is not None:
            prepare_for_backward(wrapper, loss)
        super().backward(loss, *args, **kwargs)

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
                grad.add_(laid_out_like(grad, term))

    @override
    def mean_over_ranks(self, metrics: Metrics) -> Metrics:
        names = sorted(metrics)
        values = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=self.fabric.device)
        dist.all_reduce(values)
        return dict(zip(names, (values / self.shard[1]).tolist(), strict=True))

    @override
    def scale_loss(self, loss: Tensor, num_local: int, num_global: int) -> Tensor:
        weight = num_local * self.shard[1] / num_global
        return loss if weight == 1.0 else loss * weight

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
        self._reshard()  # optimisers are built on shards


def rebuild_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give ``module`` plain new parameters with the given values; aliases (tied weights) stay aliases."""
    fresh = {id(p): nn.Parameter(values[n], requires_grad=p.requires_grad) for n, p in module.named_parameters()}
    for child in module.modules():
        child._parameters = {n: None if p is None else fresh[id(p)] for n, p in dict.items(child._parameters)}
