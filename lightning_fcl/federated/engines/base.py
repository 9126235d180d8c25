"""What the client loop asks of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.amp import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fcl._heads import modes_kept
from lightning_fcl.federated.engines.memory_format import channels_last, wide_convolutions
from lightning_fcl.federated.layout import Layout, Payload, build_layout, named_tensors
from lightning_fcl.federated.metric_log import never_distributed
from lightning_fcl.types import Metrics


class Engine(ABC):
    """Holds the one module of a run; clients are switched by loading their weights into it.

    The loop calls, in this order: :meth:`setup` once; then for each client job :meth:`load`,
    :meth:`attach_optimizers` (with what the user's ``configure_optimizers`` gave), any number of
    :meth:`training_step` / :meth:`backward` / :meth:`optimizer_step`, :meth:`read`; and :meth:`teardown` once.
    All ranks of a ``parallel="model"`` run make the same calls in the same order.

    Args:
        fabric: A launched Fabric; its precision plugin decides contexts and casts.
        gradient_clip_val: Clipping limit (``None`` for none); only an engine whose backend clips by itself needs it.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        accumulate_grad_batches: Micro-batches per optimiser step.
        channels_last: Whether images are stored channels last; ``"auto"`` goes by the module's layers.
    """

    module: L.LightningModule
    layout: Layout
    clips_gradients: bool = False
    """Whether the backend clips by itself, so that the loop must not."""
    sharded: bool = False
    """Whether weights or optimiser states are spread over ranks."""
    stacked: bool = False
    """Whether clients are trained in stacks."""

    def __init__(
        self,
        fabric: Fabric,
        *,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        accumulate_grad_batches: int = 1,
        channels_last: bool | str = False,
    ) -> None:
        self.fabric = fabric
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.accumulate_grad_batches = accumulate_grad_batches
        self.channels_last = channels_last
        self.precision = fabric.strategy.precision

    # -- once a run -----------------------------------------------------------------------------------------------

    def setup(self, module: L.LightningModule, payload: Payload = "*", *, share_buffers: bool = True) -> None:
        """Cast and move ``module`` as the precision and device ask, lay out its payload, wrap it if need be."""
        self.module = module
        self.channels_last = wide_convolutions(module) if self.channels_last == "auto" else self.channels_last
        self.precision.convert_module(module)  # in place
        module.to(self.fabric.device)
        if self.fabric.world_size > 1:  # ranks must agree from the start, whatever each drew for its own module
            for tensor in named_tensors(module).values():
                torch.distributed.broadcast(tensor.data, 0)
        for metric in self._metrics():  # a client's figures are its own, and every evaluation is whole
            metric.distributed_available_fn = never_distributed
        self.layout = build_layout(self.module, payload, share_buffers=share_buffers)
        self._wrap()

    def _metrics(self) -> list[Metric]:
        return [child for child in self.module.modules() if isinstance(child, Metric)]

    def reset_metrics(self) -> None:
        """Forget what a failed job counted in the module's Metric objects."""
        for metric in self._metrics():
            metric.reset()

    def _wrap(self) -> None:
        """Wrap or re-house the module after the layout is known."""

    def teardown(self) -> None:
        """Undo :meth:`_wrap`: the user gets back an ordinary module that holds the last loaded weights."""

    # -- once a job -----------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, vector: Tensor) -> None:
        """Write the flat payload ``vector`` (shape ``[layout.size]``) into the module."""

    @abstractmethod
    def read(self, out: Tensor) -> None:
        """Write the module's payload into ``out`` (shape ``[layout.size]``), whole on every rank."""

    def get_tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Full copies of parameters or buffers by name (local tensors, counters)."""
        if not names:
            return {}
        lookup = named_tensors(self.module)
        return {name: lookup[name].detach().clone() for name in names}

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Write full values into parameters or buffers by name."""
        if tensors:
            lookup = named_tensors(self.module)
            with torch.no_grad():
                for name, value in tensors.items():
                    lookup[name].copy_(value)

    def attach_optimizers(self, optimizers: list[Optimizer]) -> list[Optimizer]:
        """Take the fresh optimisers of a job; returns the ones to step (an engine may substitute its own)."""
        return optimizers

    # -- once a step ----------------------------------------------------------------------------------------------

    def convert_batch(self, batch: Any) -> Any:
        """Cast a batch as ``Trainer`` would: "true" precisions cast inputs, mixed ones leave that to autocast."""
        batch = channels_last(batch) if self.channels_last else batch
        return batch if isinstance(self.precision, MixedPrecision) else self.precision.convert_input(batch)

    def training_step(self, *args: Any) -> Any:
        """Run the user's ``training_step`` under the run's precision."""
        with self.precision.forward_context():
            return self.module.training_step(*args)

    def validation_step(self, *args: Any) -> Any:
        """Run the user's ``validation_step`` under the run's precision."""
        with self.precision.forward_context():
            return self.module.validation_step(*args)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Scale if the precision asks for it, then let the module back-propagate (``module.backward``)."""
        scaler = getattr(self.precision, "scaler", None)
        loss = loss if scaler is None else scaler.scale(loss)
        self.module.backward(loss, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], after_closure: Callable[[], None]
    ) -> Any:
        """Step ``optimizer``; ``closure`` runs forward and backward, ``after_closure`` hooks and clipping."""
        if getattr(self.precision, "scaler", None) is None:

            def whole() -> Any:
                result = closure()
                after_closure()
                return result

            return optimizer.step(whole)
        result = closure()
        self.precision.unscale_gradients(optimizer)
        after_closure()
        if result is not None:
            self.precision.optimizer_step(optimizer)
        return result

    def accumulating(self, active: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch whose gradients need not be synchronised yet."""
        return nullcontext()

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip the gradients of the optimiser's parameters by total norm or by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_value=value)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, value)

    def weights(self) -> dict[str, Tensor]:
        """Whole values of the trainable parameters by name; views where they live whole on this device."""
        return {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}

    def add_to_gradients(self, terms: Mapping[str, Tensor]) -> None:
        """Add full-size ``terms`` (by parameter name) to the gradients, between backward and step."""
        lookup = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, term in terms.items():
                grad = lookup[name].grad
                if grad is not None:
                    grad.add_(term)

    def scale_loss(self, loss: Tensor, num_local: int, num_global: int) -> Tensor:
        """Weight a rank's mean loss so that the mean over ranks is the mean over the whole batch."""
        return loss

    def mean_over_ranks(self, metrics: Metrics) -> Metrics:
        """Mean of each number over the ranks that share a client, so that all of them decide alike."""
        return metrics

    def unwrapped(self) -> AbstractContextManager[Any]:
        """Inside, the module is an ordinary one with whole weights, on every rank."""
        return nullcontext()

    @property
    def shard(self) -> tuple[int, int]:
        """``(rank, world)`` of the split of every batch; ``(0, 1)`` when each rank trains whole clients."""
        return 0, 1

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode without gradients; the mode of every submodule is restored."""
        with modes_kept(self.module, training=False), torch.inference_mode():
            yield
