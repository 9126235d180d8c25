"""Callbacks that look on in the dry run: gradients, bytes, memory, seconds, and what was going on when it failed."""

import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.federated.engines.fsdp2 import whole
from lightning_fcl.federated.layout import Layout
from lightning_fcl.serialize import tree_bytes

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer


class Probe(L.Callback):
    """Looks on in client jobs.

    Attributes:
        phase: What the run is doing, for the message if it fails.
        arrived: Names of trained parameters that some step gave a gradient.
        moved: Those of them that were not all zero in some step.
        broken: Those with NaN or infinite entries in the first step that had any: after it, all have.
        gradient_bytes: Most bytes of gradients that were there before a step.
        optimizer_bytes: Bytes of all optimisers' states at a job's end.
        job_seconds: Wall seconds of each job.
        batch_seconds: Wall seconds of each training batch.
        eval_seconds: Wall seconds of each evaluation batch.
        layout: What travels, once a job has started.
        scales_loss: Whether the precision scales the loss, so that early gradients may be infinite.
        sharded: Whether ranks hold parts of weights or optimiser states.
    """

    affects_results = False

    def __init__(self) -> None:
        self.phase = "setting up the module"
        self.trained: list[str] = []
        self.arrived: set[str] = set()
        self.moved: set[str] = set()
        self.broken: set[str] = set()
        self.gradient_bytes = self.optimizer_bytes = 0
        self.job_seconds: list[float] = []
        self.batch_seconds: list[float] = []
        self.eval_seconds: list[float] = []
        self.layout: Layout | None = None
        self.scales_loss = self.sharded = False
        self._handles: list[Any] = []
        self._now: set[str] = set()
        self._spoilt = False
        self._job_started = self._started = 0.0

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        self.phase = f"configure_optimizers, client {trainer.client}"
        self._job_started = time.perf_counter()

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.phase = f"preparing the training of client {trainer.client}"
        self.layout = trainer._engine.layout
        self.scales_loss = trainer.precision_plugin.scaler is not None
        self.sharded = trainer._engine.sharded

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        named = [(name, p) for name, p in pl_module.named_parameters() if p.requires_grad]
        self.trained = [name for name, _ in named]
        # A hook sees gradients that ZeRO takes away at once; FSDP 2 calls none, but leaves `grad` in place.
        self._handles = [p.register_hook(partial(self._arrives, name)) for name, p in named]  # type: ignore[no-untyped-call]
        self.phase = f"loading the first batch of client {trainer.client}"

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.phase = f"training_step, client {trainer.client}"
        self._now.clear()
        self._started = time.perf_counter()

    @override
    def on_before_backward(self, trainer: Any, pl_module: L.LightningModule, loss: Tensor) -> None:
        self.phase = f"backward, client {trainer.client}"

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.phase = f"optimizer step, client {trainer.client}"
        grads = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self.gradient_bytes = max(self.gradient_bytes, tree_bytes(grads))
        for name, grad in grads.items():
            if name in self.trained and name not in self._now:
                self._arrives(name, whole(grad))

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, *args: Any) -> None:
        self.phase = f"after the training step of client {trainer.client}"
        self._spoilt = bool(self.broken)
        self.batch_seconds.append(time.perf_counter() - self._started)

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        for handle in self._handles:
            handle.remove()
        self.optimizer_bytes = sum(tree_bytes(list(one.state.values())) for one in trainer.optimizers)
        self.job_seconds.append(time.perf_counter() - self._job_started)
        self.phase = f"taking the update of client {trainer.client}"

    @override
    def on_validation_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.phase = "loading the first evaluation batch"

    @override
    def on_validation_batch_start(
        self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.phase = "validation_step"
        self._started = time.perf_counter()

    @override
    def on_validation_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self.eval_seconds.append(time.perf_counter() - self._started)
        self.phase = "end of the evaluation"

    def _arrives(self, name: str, gradient: Tensor) -> None:
        self._now.add(name)
        self.arrived.add(name)
        if not self._spoilt and not bool(torch.isfinite(gradient).all()):
            self.broken.add(name)
        if name not in self.moved and bool(gradient.any()):
            self.moved.add(name)


class ServerProbe(ServerCallback):
    """Looks on between rounds.

    Args:
        probe: Is told the phase.

    Attributes:
        traffic: ``(down, up, clients)`` of each unit, bytes of all its clients: two rounds, and the boundary pass.
        state_bytes: Of server steps, of what methods send down, of a router's slots and of the task's anchor.
    """

    needs_weights = False

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.traffic: list[tuple[int, int, int]] = []
        self.state_bytes = 0

    @override
    def on_fit_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        self.probe.phase = "starting the run"

    @override
    def on_round_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        boundary = trainer.state.phase == "boundary"
        self.probe.phase = "the boundary pass (on_task_end)" if boundary else "starting a round"

    @override
    def on_before_aggregate(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        self.probe.phase = "aggregation"

    @override
    def on_after_aggregate(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        self.probe.phase = "after the aggregation"

    @override
    def on_round_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        state = trainer.state
        before = [sum(column) for column in zip(*self.traffic, strict=True)] or [0, 0]
        self.traffic.append((state.bytes_down - before[0], state.bytes_up - before[1], len(state.sampled)))
        self.state_bytes = self._state_bytes(trainer)
        self.probe.phase = "the end of a round"

    def _state_bytes(self, trainer: "FederatedTrainer") -> int:
        run = trainer._run
        assert run is not None
        slots = None if run.state.slots is None else vars(run.state.slots)
        anchor = tree_bytes(run.state.params) if run.keeps_anchor else 0
        return tree_bytes([run.step_states, run.jobs.downloads, slots]) + anchor


def few(names: Iterable[str], most: int = 5) -> str:
    """Some names, and how many more there are.

    Example:
        >>> few(["b", "a", "c"], most=2)
        'a, b and 1 more'
    """
    ordered = sorted(names)
    rest = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + rest
