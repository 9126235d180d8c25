"""All sampled clients of a rank in one vectorised step: ``engine="stacked"``."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_fcl.federated.client_data import PreloadedLoader
from lightning_fcl.federated.context import ClientContext, JobInfo
from lightning_fcl.federated.engines.light import has_step_hooks, is_plain_sgd, plain_sgd_step
from lightning_fcl.federated.guard import all_finite
from lightning_fcl.federated.jobs import ClientJobs, Outcome, update_of
from lightning_fcl.federated.lanes import LaneMode, NotStackable
from lightning_fcl.federated.metric_log import MetricLog
from lightning_fcl.federated.sampling import seed_generators
from lightning_fcl.federated.stacked_data import LaneData
from lightning_fcl.federated.state import RoundState
from lightning_fcl.federated.step_state import StepState
from lightning_fcl.types import ClientUpdate

_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adamax)
_WINDOW = 4  # chunks whose results may wait, so that clients of like size can be trained together


_Result = tuple[Tensor, list[tuple[str, dict[str, Any]]], list[Any]]
"""Losses ``[K]``, names and options of what was logged, and its values."""


class _Lane:
    """One client's result: its row of the stack and what it logged."""

    def __init__(self, row: Tensor) -> None:
        self.row = row
        self.log = MetricLog(on_epoch=False)


class StackContext(ClientContext):
    """The ``trainer`` of a step that belongs to several clients."""

    _hidden = frozenset({"client", "seed", "num_examples"})

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise NotStackable(f"the step reads `trainer.{name}`, which differs from client to client")
        return super().__getattr__(name)


class _StepLog:
    """``self.log`` of a stacked step: values are collected by lane and reach each client's own log afterwards."""

    def __init__(self) -> None:
        self.names: list[tuple[str, dict[str, Any]]] = []
        self.values: list[Any] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """As ``LightningModule.log``."""
        if args or not isinstance(value, Tensor | int | float):
            raise NotStackable(f"`self.log({name!r})` logs something else than a number, or by position")
        self.names.append((name, options))
        self.values.append(value.detach() if isinstance(value, Tensor) else value)


class StackedJobs:
    """Trains clients in stacks: lane ``k`` of every tensor is client ``k`` of the stack.

    The weights of a stack are the rows of one matrix, of which each parameter is a view ``[K, ...]``. The user's
    ``training_step`` runs once for all lanes, and the user's optimiser steps them at once, since its rule acts element
    by element. Only clients with equally many batches share a stack; where their last batches differ in size, these are
    computed apart. What cannot be stacked is trained one after another, and the reason is told once.

    Args:
        jobs: Runs what is left to do for one client.
        lanes: Clients in a stack.
    """

    def __init__(self, jobs: ClientJobs, lanes: int) -> None:
        self.jobs = jobs
        self.engine: Any = jobs.engine  # a replica, whose places are known
        self.module = jobs.engine.module
        self.lanes = lanes
        self.reason: str | None = None
        self.by_rules = True
        self._checked = False
        self._kept: StepState | None = None

    def run(self, state: RoundState, infos: Sequence[JobInfo]) -> Iterator[tuple[Outcome, list[ClientUpdate]]]:
        """Train clients; results come in their order.

        Args:
            state: Its weights are the download.
            infos: One per client.

        Yields:
            What ``ClientJobs.run`` returns for each.
        """
        window = _WINDOW * self.lanes
        for start in range(0, len(infos), window):
            part = infos[start : start + window]
            trained = self._try(state, part) if self.reason is None else {}
            for info in part:
                lane = trained.get(info.client)
                yield self.jobs.run(state, info, self.jobs.train if lane is None else partial(self._hand_over, lane))

    def _try(self, state: RoundState, infos: Sequence[JobInfo]) -> dict[int, _Lane]:
        """Lanes by client; none if something does not stack, so that it shows again, if it does, in its own job."""
        lanes: dict[int, _Lane] = {}
        try:
            for chunk in self._chunks(infos):
                lanes |= self._train(state, chunk)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.reason = lines[0] if isinstance(error, NotStackable) else f"{type(error).__name__}: {lines[0]}"
            warn_sequential(self.reason)
            if self._kept is not None:
                self._kept.restore()
            return {}
        return lanes

    def _hand_over(self, lane: _Lane, state: RoundState, info: JobInfo) -> list[ClientUpdate]:
        if not all_finite(lane.row):
            raise FloatingPointError("the weights after local training hold NaN or infinite values")
        views = self.engine.layout.views(lane.row)
        return [update_of(info, views, metrics=lane.log.reduced(), flat=lane.row)]

    def _chunks(self, infos: Sequence[JobInfo]) -> Iterator[list[tuple[JobInfo, PreloadedLoader]]]:
        buckets: dict[int, list[tuple[JobInfo, PreloadedLoader]]] = defaultdict(list)
        for info in infos:
            loader = self.jobs.data.loader(info.task, info.client)
            if not isinstance(loader, PreloadedLoader):
                raise NotStackable("the clients' examples cannot be preloaded as tensors")
            buckets[len(loader)].append((info, loader))
        for bucket in buckets.values():
            for start in range(0, len(bucket), self.lanes):
                yield bucket[start : start + self.lanes]

    # -- one stack ------------------------------------------------------------------------------------------------

    def _train(self, state: RoundState, chunk: list[tuple[JobInfo, PreloadedLoader]]) -> dict[int, _Lane]:
        engine, budget = self.engine, self.jobs.settings.budget
        data = LaneData([loader for _, loader in chunk], [info.seed for info, _ in chunk], budget)
        engine.load(state.params)
        rows = state.params.repeat(len(chunk), 1)
        lanes = [_Lane(row) for row in rows]
        context = self._context(state, chunk[0][0], data)
        seed_generators(chunk[0][0].seed)
        self._kept = StepState(self.module)
        with context.attached(), torch.enable_grad(), engine.borrowed(rows) as leaves:
            optimizer = self._optimizer(context, leaves)
            for epoch, index, groups in data.steps(engine.convert_batch):
                context._progress.epoch, context._progress.batch = epoch, index
                total: Any = 0.0
                for members, batch in groups:
                    total = total + self._losses(members, batch, index, leaves, lanes, context).sum()
                gradients = torch.autograd.grad(total, leaves, allow_unused=True)
                if any(gradient is None for gradient in gradients):
                    raise NotStackable("the step does not use all trainable parameters")
                if not self._checked:
                    self._check_unchanged()
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    leaf.grad = gradient
                plain_sgd_step(optimizer) if is_plain_sgd(optimizer) else optimizer.step()
                context._progress.step += 1
                if context.should_stop:
                    raise NotStackable("the step stops the training")
            self._check_unchanged()  # once more, since a step may do other things in another epoch, round or task
        self._checked = self._checked or len(chunk) > 1  # a lone lane cannot show that lanes do not mix
        return {info.client: lane for (info, _), lane in zip(chunk, lanes, strict=True)}

    def _check_unchanged(self) -> None:
        if self._kept is not None and (change := self._kept.change()):
            raise NotStackable(change)

    def _context(self, state: RoundState, info: JobInfo, data: LaneData) -> StackContext:
        jobs = self.jobs
        return StackContext(
            engine=self.engine,
            hooks=jobs.hooks,
            info=replace(info, client=-1, seed=-1, num_examples=-1),
            max_epochs=data.epochs if jobs.settings.budget.steps is None else -1,
            max_steps=-1 if jobs.settings.budget.steps is None else jobs.settings.budget.steps,
            num_training_batches=data.batches,
            callbacks=jobs.callbacks,
            loggers=jobs.settings.loggers,
            stream=jobs.data.stream,
            task_anchor=None if state.task_anchor is None else self.engine.layout.views(state.task_anchor),
            broadcast=jobs.broadcast,
            lr_factor=jobs.lr_factor(info),
            default_root_dir=jobs.settings.run_dir,
        )

    def _optimizer(self, context: ClientContext, leaves: list[Tensor]) -> Optimizer:
        """The user's optimiser, made to hold the stacked parameters in the place of the module's."""
        optimizer: Any = self.module.configure_optimizers()
        if type(optimizer) not in _ELEMENTWISE or optimizer.state or "step" in vars(optimizer):
            raise NotStackable(
                "`configure_optimizers` returns something else than one optimizer of "
                f"{', '.join(kind.__name__ for kind in _ELEMENTWISE)} without a scheduler"
            )
        if has_step_hooks(optimizer):
            raise NotStackable("a hook of the optimizer would see all clients at once")
        stacked = dict(zip(map(id, self.engine.own_parameters()), leaves, strict=True))
        for group in optimizer.param_groups:
            group["params"] = [stacked[id(parameter)] for parameter in group["params"] if id(parameter) in stacked]
            group["lr"] = group["lr"] if context.lr_factor == 1.0 else group["lr"] * context.lr_factor
        context.optimizers = [optimizer]
        return cast(Optimizer, optimizer)

    def _losses(
        self,
        members: Tensor | None,
        batch: list[Tensor],
        index: int,
        leaves: list[Tensor],
        lanes: list[_Lane],
        context: ClientContext,
    ) -> Tensor:
        """The losses of the given lanes (``None``: all), shape ``[K]``; what the step logs reaches their logs."""
        parameters = leaves if members is None else [leaf.index_select(0, members) for leaf in leaves]
        losses, names, values = self._step(parameters, batch, index, context)
        chosen = lanes if members is None else [lanes[place] for place in members.tolist()]
        if any(isinstance(one, Tensor) and one.numel() != len(chosen) for one in (losses, *values)):
            raise NotStackable("the loss, or something that is logged, is not one number for each client")
        for (name, options), value in zip(names, values, strict=True):
            column = value.flatten().tolist() if isinstance(value, Tensor) else [value] * len(chosen)
            for lane, number in zip(chosen, column, strict=True):
                lane.log.batch = batch[0].shape[1]
                lane.log.log(name, number, **options)
        return losses

    def _step(self, parameters: list[Tensor], batch: list[Tensor], index: int, context: ClientContext) -> _Result:
        if not self.by_rules:
            return self._by_vmap(parameters, batch, index, context)
        try:
            result = self._by_rules(parameters, batch, index, context)
        except NotStackable:
            self.by_rules = False
            return self._by_vmap(parameters, batch, index, context)
        if not self._checked:  # rules are trusted once they have shown to give what vmap gives
            proven = self._by_vmap(parameters, batch, index, context)
            if not all(map(_agree, (result[0], *result[2]), (proven[0], *proven[2]))):
                self.by_rules = False
                return proven
        return result

    def _by_rules(self, parameters: list[Tensor], batch: list[Tensor], index: int, context: Any) -> _Result:
        log = context._log = _StepLog()
        self.engine.install(parameters)
        self.module.log = log.log  # type: ignore[method-assign]
        mode = LaneMode([*parameters, *batch])
        with mode:
            loss = self._call(list(batch), index)
        if not mode.has_lanes(loss) or loss.dim() != 1:
            raise NotStackable("the loss is not one number for each client")
        return loss, log.names, [v.item() if isinstance(v, Tensor) and not mode.has_lanes(v) else v for v in log.values]

    def _by_vmap(self, parameters: list[Tensor], batch: list[Tensor], index: int, context: Any) -> _Result:
        log = context._log = _StepLog()
        self.module.log = log.log  # type: ignore[method-assign]

        def one(parameters: list[Tensor], batch: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            self.engine.install(parameters)
            loss = self._call(batch, index)
            return loss, [torch.as_tensor(value) for value in log.values]

        loss, values = torch.func.vmap(one)(parameters, list(batch))
        return loss, log.names, values

    def _call(self, batch: list[Tensor], index: int) -> Tensor:
        result = self.module.training_step(*((batch, index) if self.jobs.facts.training_step_takes_index else (batch,)))
        result = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(result, Tensor):
            raise NotStackable("`training_step` returns no loss")
        return result


def warn_sequential(reason: str) -> None:
    """Say once that clients are trained one after another."""
    rank_zero_warn(
        f"`engine='stacked'` trains clients one after another here, since {reason}.", category=UserWarning, stacklevel=2
    )


def _agree(by_rules: Any, by_vmap: Tensor) -> bool:
    """Whether two ways gave the same; ``by_vmap`` has a number for each lane."""
    found = torch.as_tensor(by_rules, dtype=torch.float64, device=by_vmap.device)
    same_shape = not found.dim() or found.shape == by_vmap.shape
    return same_shape and torch.allclose(found.expand_as(by_vmap), by_vmap.double(), 1e-4, 1e-6, equal_nan=True)
