"""What a module and its callbacks see as ``trainer`` inside a client job."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.hooks import HookTable, overridden
from lightning_fcl.federated.metric_log import MetricLog

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """Which job this is.

    Args:
        seed: Seed of the job's random draws.
        client: Client id; ``-1`` for evaluations on the server.
        task: Task of the stream, from 0.
        round: Round inside the task, from 0.
        global_round: Commits before this round, from 0.
        phase: ``"train"``, ``"boundary"`` or ``"evaluate"``.
        rounds: Training rounds of this task.
        num_tasks: Tasks in the stream.
        num_examples: Training examples of the client in this task.
    """

    seed: int
    client: int = -1
    task: int = 0
    round: int = 0
    global_round: int = 0
    phase: str = "train"
    rounds: int = 1
    num_tasks: int = 1
    num_examples: int = 0


class _Progress:
    """The counters of a job; the context shows them read-only."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0
        self.batch = 0
        self.should_stop = False
        self.share: tuple[int, int] | None = None  # (n_local, n_global) of the batch where ranks share it


class JobStrategy:
    """The few calls of ``trainer.strategy`` that a module makes, routed to the engine."""

    def __init__(self, context: "ClientContext", engine: Engine, hooks: HookTable) -> None:
        self._context = context
        self._engine = engine
        self._hooks = hooks
        self._wrapped: list[LightningOptimizer] | None = None

    @property
    def lightning_module(self) -> L.LightningModule:
        """The user's module."""
        return self._engine.module

    @property
    def _lightning_optimizers(self) -> list[LightningOptimizer]:
        """The job's optimisers as ``self.optimizers()`` hands them out; wrapped at the first use."""
        if self._wrapped is None:
            self._wrapped = [LightningOptimizer(o) for o in self._context.optimizers]
            for wrapped in self._wrapped:
                wrapped._strategy = self  # type: ignore[assignment]
        return self._wrapped

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any) -> None:
        """Back-propagate with Lightning's hooks around it."""
        module, share = self._engine.module, self._context._progress.share
        if share is not None:
            loss = self._engine.scale_loss(loss, *share)
        self._hooks.call("on_before_backward", self._context, module, loss)
        self._engine.backward(loss, *args, **kwargs)
        self._hooks.call("on_after_backward", self._context, module)

    def optimizer_step(self, optimizer: Optimizer, closure: Any, **kwargs: Any) -> Any:
        """Step, with ``on_before_optimizer_step`` and clipping between gradient and update."""
        factor, groups = self._context.lr_factor, optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if factor != 1.0:  # only for the step itself, so that no scheduler can undo or compound it
            for group in groups:
                group["lr"] = group["lr"] * factor
        try:
            result = self._engine.optimizer_step(optimizer, closure, lambda: self.before_step(optimizer))
        finally:
            if factor != 1.0:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate
        self._context._progress.step += 1
        return result

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are whole and unscaled: let methods change them, then clip."""
        context, module = self._context, self._engine.module
        self._hooks.call("on_before_optimizer_step", context, module, optimizer)
        if not module.automatic_optimization or self._engine.clips_gradients:
            return
        if context.gradient_clip_val or overridden(module, "configure_gradient_clipping"):
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=context.gradient_clip_val,
                gradient_clip_algorithm=context.gradient_clip_algorithm,
            )

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """What ``module.clip_gradients`` reaches through ``trainer.precision_plugin``."""
        if clip_val > 0:
            self._engine.clip_gradients(
                optimizer, clip_val, getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
            )

    def convert_input(self, batch: Any) -> Any:
        """What ``trainer.precision_plugin.convert_input`` does to a batch."""
        return self._engine.convert_batch(batch)

    def forward_context(self) -> AbstractContextManager[None]:
        """What ``trainer.precision_plugin.forward_context()`` puts around a forward pass."""
        return self._engine.precision.forward_context()

    @property
    def scaler(self) -> Any:
        """What ``trainer.precision_plugin.scaler`` is: the gradient scaler, or ``None``."""
        return getattr(self._engine.precision, "scaler", None)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """A client's job does not talk to other clients: the tensor itself, unless ranks share the client."""
        if self._engine.shard[1] == 1:
            return tensor
        gathered: Tensor = self._engine.fabric.all_gather(tensor, group=group, sync_grads=sync_grads)  # type: ignore[assignment]
        return gathered

    def barrier(self, name: str | None = None) -> None:
        """Wait for the ranks that share this client."""
        if self._engine.shard[1] > 1:
            self._engine.fabric.barrier(name)


class ClientContext:
    """The ``trainer`` of a client job: the attributes of ``lightning.Trainer`` that modules and callbacks use.

    All is read-only but ``should_stop``. It tells ``client``, ``task`` and ``round``, too. Counters start at 0.
    """

    sanity_checking = False
    testing = False
    predicting = False
    fast_dev_run = False
    interrupted = False
    barebones = False
    datamodule = None
    progress_bar_callback = None
    profiler = PassThroughProfiler()
    log_every_n_steps = 1

    def __init__(
        self,
        *,
        engine: Engine,
        hooks: HookTable,
        info: JobInfo,
        max_epochs: int = 1,
        max_steps: int = -1,
        num_training_batches: int = 0,
        train_dataloader: Any = None,
        callbacks: list[Any] | None = None,
        loggers: list[Any] | None = None,
        stream: "TaskStream | None" = None,
        task_anchor: dict[str, Tensor] | None = None,
        broadcast: Mapping[str, Mapping[str, Tensor]] | None = None,
        lr_factor: float = 1.0,
        default_root_dir: str = ".",
    ) -> None:
        self._engine = engine
        self._progress = _Progress()
        self._log = MetricLog(on_epoch=info.phase == "evaluate")
        self._info = info
        self.max_epochs = max_epochs
        self.max_steps = max_steps
        self.num_training_batches = num_training_batches
        self.train_dataloader = train_dataloader
        self.callbacks = callbacks or []
        self.loggers = loggers or []
        self.stream = stream
        self.task_anchor = task_anchor
        self.broadcast = broadcast or {}
        self.lr_factor = lr_factor
        self.default_root_dir = default_root_dir
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.strategy = JobStrategy(self, engine, hooks)
        self.precision_plugin = self.strategy

    # -- which job --------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            info, fields = self.__dict__.get("_info"), JobInfo.__dataclass_fields__
            if info is not None and name in fields:
                return getattr(info, name)
            raise AttributeError(
                f"`trainer.{name}` is not available inside a client job of FederatedTrainer. It has: "
                f"{', '.join(sorted(n for n in [*dir(type(self)), *vars(self), *fields] if not n.startswith('_')))}."
            )
        raise AttributeError(name)

    # -- Trainer's names --------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Local epoch, from 0 in every job."""
        return self._progress.epoch

    @property
    def global_step(self) -> int:
        """Optimiser steps taken in this job."""
        return self._progress.step

    @property
    def should_stop(self) -> bool:
        """Set to ``True`` to end the job after the current batch."""
        return self._progress.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._progress.should_stop = value

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimiser steps this job will take, for schedulers that need the total."""
        if self.max_epochs == -1:
            return self.max_steps
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * self.max_epochs
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches per optimiser step."""
        return self._engine.accumulate_grad_batches

    @property
    def gradient_clip_val(self) -> float | None:
        """Clipping limit, or ``None``."""
        return self._engine.gradient_clip_val

    @property
    def gradient_clip_algorithm(self) -> Any:
        """Lightning's enum, ``"norm"`` or ``"value"``."""
        from lightning.pytorch.utilities.enums import GradClipAlgorithmType

        return GradClipAlgorithmType(self._engine.gradient_clip_algorithm)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """What was logged so far, by name."""
        return self._log.latest()

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def training(self) -> bool:
        """Whether this is a training job."""
        return self._info.phase == "train"

    @property
    def validating(self) -> bool:
        """Whether this is an evaluation."""
        return self._info.phase == "evaluate"

    @property
    def lightning_module(self) -> L.LightningModule:
        """The user's module."""
        return self._engine.module

    @property
    def model(self) -> L.LightningModule:
        """The user's module."""
        return self._engine.module

    @property
    def logger(self) -> Any:
        """The first logger passed to the trainer, or ``None``."""
        return self.loggers[0] if self.loggers else None

    @property
    def precision(self) -> str:
        """The run's precision, e.g. ``"32-true"``."""
        return str(self._engine.precision.precision)

    @property
    def world_size(self) -> int:
        """Ranks that train this client together (1 with ``parallel="clients"``)."""
        return self._engine.shard[1]

    @property
    def global_rank(self) -> int:
        """This rank among those that train this client."""
        return self._engine.shard[0]

    local_rank = node_rank = global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of the ranks that train this client."""
        return self.global_rank == 0

    @property
    def batch_share(self) -> tuple[int, slice] | None:
        """Where ranks share this client: size of the whole batch, and which of it is this rank's; else ``None``."""
        share, (rank, world) = self._progress.share, self._engine.shard
        return share and (share[1], slice(share[1] * rank // world, share[1] * (rank + 1) // world))

    @property
    def sharded(self) -> bool:
        """Whether weights or optimiser states are spread over ranks, so that no rank can change weights alone."""
        return self._engine.sharded

    def weights(self) -> dict[str, Tensor]:
        """Whole values of the trainable parameters, by name; views of the module's own where they live whole."""
        return self._engine.weights()

    @property
    def travelling(self) -> frozenset[str]:
        """Names of the parameters and float buffers that are sent; the others stay with the client."""
        return frozenset(slot.name for slot in self._engine.layout.slots)

    def add_to_gradients(self, terms: Mapping[str, Tensor]) -> None:
        """Add whole terms, by parameter name, to the gradients; call it in ``on_before_optimizer_step``."""
        self._engine.add_to_gradients(terms)

    @contextmanager
    def attached(self) -> Iterator["ClientContext"]:
        """Make this the ``trainer`` of the module, and send ``self.log`` here."""
        module = self._engine.module
        previous = module._trainer
        object.__setattr__(module, "_trainer", self)
        object.__setattr__(module, "log", self._log.log)
        try:
            yield self
        finally:
            object.__setattr__(module, "_trainer", previous)
            object.__delattr__(module, "log")
