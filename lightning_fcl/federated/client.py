"""One client's local training: the user's ``training_step`` and hooks, in the order ``Trainer.fit`` calls them."""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _configure_schedulers_manual_opt,
    _validate_multiple_optimizers_support,
    _validate_optimizers_attached,
    _validate_scheduler_api,
)
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.exceptions import MisconfigurationError, NoTrainingError
from lightning_fcl.federated.context import ClientContext
from lightning_fcl.federated.deadline import Deadline
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.engines.light import clear_gradients
from lightning_fcl.federated.hooks import HookTable, overridden


@dataclass(frozen=True, kw_only=True)
class LocalBudget:
    """How much a client trains.

    Args:
        epochs: Passes over the client's data; ignored when ``steps`` is given.
        steps: Optimiser steps, however many passes that takes.
        limit_batches: At most so many batches per epoch; ``None`` for all.
        timeout: Seconds after which the job is given up; ``None`` for never.
    """

    epochs: int = 1
    steps: int | None = None
    limit_batches: int | None = None
    timeout: float | None = None


class ModuleFacts:
    """What the loop must know of a module's code; found once a run.

    Args:
        engine: Holds the module.
    """

    def __init__(self, engine: Engine) -> None:
        module = engine.module
        self.own_optimizer_step = overridden(module, "optimizer_step")
        self.own_zero_grad = overridden(module, "optimizer_zero_grad")
        self.training_step_takes_index = takes_index(module.training_step)
        self.transfer = BatchTransfer(engine)


class LocalTraining:
    """Runs one job in the engine's module.

    Args:
        engine: Holds the module, with the client's weights loaded.
        hooks: Callback and module hooks.
        context: The job's context.
        loader: The client's batches.
        facts: What is known of the module.
        timeout: Seconds after which :class:`TimeoutError` is raised; ``None`` for never.
    """

    def __init__(
        self,
        engine: Engine,
        hooks: HookTable,
        context: ClientContext,
        loader: Any,
        facts: ModuleFacts,
        *,
        timeout: float | None = None,
    ) -> None:
        self.engine = engine
        self.module = engine.module
        self.hooks = hooks
        self.context = context
        self.loader = loader
        self.deadline = Deadline(timeout)
        self.num_batches = context.num_training_batches
        self.facts = facts
        self._shares: deque[tuple[int, int]] | None = getattr(loader.batch_sampler, "shares", None)

    def run(self, optimizer_states: list[Any] | None = None) -> None:
        """Train as the budget in the context says.

        Args:
            optimizer_states: States to continue from, one per optimiser; fresh ones by default.

        Raises:
            NoTrainingError: If no optimiser step was taken.
            TimeoutError: If the deadline passed.
        """
        context, hooks, module = self.context, self.hooks, self.module
        with context.attached(), self.deadline, torch.enable_grad():
            hooks.call_callbacks("setup", context, module, "fit")
            self._configure_optimizers(optimizer_states)
            hooks.call("on_fit_start", context, module)
            batches = iter(self.loader)
            hooks.call("on_train_start", context, module)
            while not self._done():
                if context.current_epoch > 0:
                    batches = iter(self.loader)
                self._run_epoch(batches)
            hooks.call("on_train_end", context, module)
            hooks.call("on_fit_end", context, module)
            hooks.call_callbacks("teardown", context, module, "fit")
        if context.global_step == 0:
            raise NoTrainingError(
                f"client {context.client} took no optimiser step in task {context.task}: "
                f"{self.num_batches} batches, max_epochs={context.max_epochs}, max_steps={context.max_steps}."
            )

    def _configure_optimizers(self, states: list[Any] | None) -> None:
        context = self.context
        configured = self.module.configure_optimizers()
        if isinstance(configured, Optimizer):
            optimizers: list[Optimizer] = [configured]
            configs: list[Any] = []
        else:  # lists, dicts and schedulers in all of Lightning's forms, with its own messages
            optimizers, configs = _parse_optimizers(self.module, configured)
        context.optimizers = self.engine.attach_optimizers(optimizers)
        context.lr_scheduler_configs = configs
        for optimizer, state in zip(context.optimizers, states or [], strict=False):
            # Moments and step counts only: learning rates and schedules start anew in every job.
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state["state"]})

    def _done(self) -> bool:
        context = self.context
        if context.max_steps != -1 and context.global_step >= context.max_steps:
            return True
        if context.max_epochs != -1 and context.current_epoch >= context.max_epochs:
            return True
        return context.should_stop or self.num_batches == 0

    # -- one epoch ------------------------------------------------------------------------------------------------

    def _run_epoch(self, batches: Iterator[Any]) -> None:
        context, hooks, module = self.context, self.hooks, self.module
        hooks.call("on_train_epoch_start", context, module)
        context._log.next_epoch()
        for index in range(self.num_batches):
            self.deadline.check()
            if not self._run_batch(next(batches), index):
                break
            if context.should_stop or (context.max_steps != -1 and context.global_step >= context.max_steps):
                break
        hooks.call("on_train_epoch_end", context, module)
        self._update_schedulers("epoch", plateau=True)
        context._progress.epoch += 1

    def _run_batch(self, batch: Any, index: int) -> bool:
        """Train on one batch; ``False`` ends the epoch early, as ``on_train_batch_start`` may ask by ``-1``."""
        context, hooks, module = self.context, self.hooks, self.module
        batch = self.facts.transfer(batch)
        context._log.batch = batch
        context._progress.batch = index
        context._progress.share = self._shares.popleft() if self._shares is not None else None
        stop = hooks.call("on_train_batch_start", context, module, batch, index) == -1
        outputs: Any = None
        last = index + 1 == self.num_batches
        whole = (index + 1) % context.accumulate_grad_batches == 0 or last
        if not stop:
            if module.automatic_optimization:
                outputs = self._automatic(batch, index, whole)
            else:
                outputs = self._manual(batch, index)
        if whole:
            self._update_schedulers("step", plateau=False)
        if last:
            self._update_schedulers("epoch", plateau=False)
        if stop:
            return False
        hooks.call("on_train_batch_end", context, module, outputs, batch, index)
        if whole:
            self._update_schedulers("step", plateau=True)
        return True

    def _automatic(self, batch: Any, index: int, whole: bool) -> Any:
        context, engine = self.context, self.engine
        optimizer: Optimizer = context.optimizers[0]
        outputs: dict[str, Any] = {}
        args = (batch, index) if self.facts.training_step_takes_index else (batch,)

        def closure() -> Tensor | None:
            with torch.enable_grad():  # an optimiser may call this from inside its own no_grad
                return forward_and_backward()

        def forward_and_backward() -> Tensor | None:
            result = engine.training_step(*args)
            loss, extra = _loss_of(result, context.accumulate_grad_batches)
            if index % context.accumulate_grad_batches == 0:
                self.hooks.call("on_before_zero_grad", context, self.module, optimizer)
                if self.facts.own_zero_grad:
                    self.module.optimizer_zero_grad(context.current_epoch, index, optimizer)
                else:
                    clear_gradients(optimizer)
            if loss is not None:
                context.strategy.backward(loss, optimizer)
                outputs.update(loss=loss.detach(), **extra)
            return loss

        if not whole:
            with engine.accumulating(True):
                closure()
        elif self.facts.own_optimizer_step:
            wrapped = context.strategy._lightning_optimizers[0]
            self.module.optimizer_step(context.current_epoch, index, wrapped, closure)
        else:
            context.strategy.optimizer_step(optimizer, closure)
        return outputs or None

    def _manual(self, batch: Any, index: int) -> Any:
        result = self.engine.training_step(*((batch, index) if self.facts.training_step_takes_index else (batch,)))
        if isinstance(result, Tensor):
            return {"loss": result.detach()}
        if result is not None and not isinstance(result, Mapping):
            raise MisconfigurationException(
                "In manual optimization, `training_step` must either return a Tensor or have no return."
            )
        return result

    def _update_schedulers(self, interval: str, *, plateau: bool) -> None:
        context = self.context
        if not context.lr_scheduler_configs or not self.module.automatic_optimization:
            return
        position = (context._progress.batch if interval == "step" else context.current_epoch) + 1
        for config in context.lr_scheduler_configs:
            if config.interval != interval or config.reduce_on_plateau != plateau or position % config.frequency:
                continue
            value = None
            if config.reduce_on_plateau:
                value = context.callback_metrics.get(config.monitor)
                if value is None:
                    raise MisconfigurationException(
                        f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available. "
                        f"Available metrics are: {sorted(context.callback_metrics)}."
                    )
            self.module.lr_scheduler_step(config.scheduler, value)


class BatchTransfer:
    """Casting and moving a batch, with the module's own transfer hooks where it has any."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        self.own = any(overridden(engine.module, name) for name in names)
        self.idle = not self.own and engine.fabric.device.type == "cpu"

    def __call__(self, batch: Any) -> Any:
        """The batch as the step wants it."""
        batch = self.engine.convert_batch(batch)
        if self.idle:
            return batch
        module = self.engine.module
        batch = module.on_before_batch_transfer(batch, 0)
        batch = module.transfer_batch_to_device(batch, self.engine.fabric.device, 0)
        return module.on_after_batch_transfer(batch, 0)


def _parse_optimizers(module: L.LightningModule, configured: Any) -> tuple[list[Optimizer], list[Any]]:
    if configured is None:
        raise MisconfigurationError("`configure_optimizers` must return an optimizer to train with, got None.")
    optimizers, schedulers, monitor = _configure_optimizers(configured)
    automatic = module.automatic_optimization
    configs = (
        _configure_schedulers_automatic_opt(schedulers, monitor)
        if automatic
        else _configure_schedulers_manual_opt(schedulers)
    )
    _validate_multiple_optimizers_support(optimizers, module)
    _validate_optimizers_attached(optimizers, configs)
    _validate_scheduler_api(configs, module)
    return optimizers, configs


def _loss_of(result: Any, accumulate: int) -> tuple[Tensor | None, dict[str, Any]]:
    extra: dict[str, Any] = {}
    if isinstance(result, Mapping):
        if result.get("loss") is None:
            raise MisconfigurationException(
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
            )
        extra = {k: v for k, v in result.items() if k != "loss"}
        result = result["loss"]
    elif result is not None and not isinstance(result, Tensor):
        raise MisconfigurationException(
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the step will "
            "be skipped)."
        )
    # Dividing by 1 changes no bit, but costs a node of the graph.
    return (result if result is None or accumulate == 1 else result / accumulate), extra


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step wants the batch's index beside the batch."""
    parameters = inspect.signature(step).parameters
    return len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
