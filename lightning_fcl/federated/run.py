"""One run: tasks, rounds, boundary passes, evaluation, log rows and commits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.exceptions import EmptyRoundError, MisconfigurationError
from lightning_fcl.federated.broadcast import collect
from lightning_fcl.federated.checkpoint import CheckpointFolder
from lightning_fcl.federated.checks import quorum
from lightning_fcl.federated.client import LocalBudget
from lightning_fcl.federated.client_data import ClientData
from lightning_fcl.federated.client_store import ClientStore
from lightning_fcl.federated.comm import Ranks
from lightning_fcl.federated.context import ClientContext, JobInfo
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.evaluate import evaluate, pick_score
from lightning_fcl.federated.hooks import HookTable
from lightning_fcl.federated.jobs import ClientJobs, JobSettings, Outcome, warn_failures
from lightning_fcl.federated.persist import commit
from lightning_fcl.federated.rounds import client_means
from lightning_fcl.federated.routed import make_rounds
from lightning_fcl.federated.run_folder import RunFolder
from lightning_fcl.federated.sampling import client_seed, derive_seed, sample_clients, seed_generators
from lightning_fcl.federated.state import RoundState
from lightning_fcl.serialize import tree_bytes
from lightning_fcl.types import Metrics

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer

_MIB = 1 << 20
_WITHOUT_WEIGHTS = ("on_client_end", "on_before_aggregate")


class Run:
    """The state machine behind ``FederatedTrainer.fit``.

    A run is a row of *units*: the training rounds of each task, then its boundary pass if a callback wants one. Each
    unit ends in one log row and one commit, so a killed run goes on at the unit after the last commit.

    Args:
        trainer: The trainer with its settings.
        engine: Set up, with the user's module in it.
        stream: The task stream.
        folder: The run's tables.
        fingerprint: Description of everything that must be the same on resume.
    """

    def __init__(
        self,
        trainer: "FederatedTrainer",
        engine: Engine,
        stream: "TaskStream",
        folder: RunFolder,
        fingerprint: dict[str, Any],
    ) -> None:
        self.trainer = trainer
        self.engine = engine
        self.module: L.LightningModule = engine.module
        self.stream = stream
        self.folder = folder
        self.fingerprint = fingerprint
        self.ranks = Ranks(engine.fabric, split_clients=trainer.parallel == "clients")
        self.client_hooks = HookTable(trainer.callbacks, L.Callback, self.module)
        self.server_hooks = HookTable(trainer.server_callbacks, ServerCallback)
        self.checkpoints = CheckpointFolder(folder.path / "checkpoints", keep=trainer.keep_checkpoints)
        self.store = ClientStore(folder.path / "clients", int(trainer.client_state_mb * _MIB))
        data = ClientData(stream, int(trainer.preload_mb * _MIB), engine.shard)
        self.jobs = ClientJobs(engine, trainer.callbacks, self.client_hooks, data, self.store, self._job_settings())
        self.jobs.lr_factor = self._lr_factor
        self.rounds = make_rounds(engine, self.jobs, self.ranks, trainer.chain, self._server_event)
        self.facts = {"num_tasks": len(stream), "total_clients": stream.num_clients}
        self.loads_weights = any(c.needs_weights for c in trainer.server_callbacks)
        self.has_boundary = self.client_hooks.has("on_task_end")
        self.keeps_anchor = any(getattr(c, "uses_task_anchor", False) for c in [*trainer.callbacks, self.module])
        self.score: str | None = None
        self.matrix = torch.full((len(stream), len(stream.names)), torch.nan, dtype=torch.float64)
        self.baseline: Tensor | None = None
        self.state = RoundState(params=engine.layout.new_vector(engine.fabric.device))
        engine.read(self.state.params)
        self.state.counters = engine.get_tensors(engine.layout.counters)
        self.step_states = self.rounds.init(self.state)
        self.next = (0, 0)
        self.seconds: dict[str, float] = {}

    def _job_settings(self) -> JobSettings:
        trainer = self.trainer
        return JobSettings(
            seed=trainer.seed,
            budget=LocalBudget(
                epochs=trainer.local_epochs,
                steps=trainer.local_steps,
                limit_batches=1 if trainer.fast_dev_run else trainer.limit_train_batches,
                timeout=trainer.client_timeout,
            ),
            on_client_error=trainer.on_client_error,
            max_retries=trainer.max_retries,
            keep_optimizer_state=trainer.keep_optimizer_state,
            loggers=trainer.loggers,
            run_dir=str(self.folder.path),
        )

    # -- units -------------------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Run all units that are left."""
        trainer = self.trainer
        self._server_event("on_fit_start")
        if self.next == (0, 0) and trainer.measure_baseline and not trainer.fast_dev_run:
            self.baseline = self._scores(self._evaluate_all())
        while self.next[0] < self.num_tasks:
            self._run_unit(*self.next)
        self.load_global()
        self._server_event("on_fit_end")

    @property
    def num_tasks(self) -> int:
        """Tasks this run visits."""
        return 1 if self.trainer.fast_dev_run else len(self.stream)

    def units_of(self, task: int) -> int:
        """Units of a task: its rounds and, if wanted, the boundary pass."""
        return self.trainer.rounds_of(task) + self.has_boundary

    def _run_unit(self, task: int, unit: int) -> None:
        """One round or boundary pass with its commit; :attr:`next` is then the one after it."""
        trainer, state = self.trainer, self.state
        started = time.perf_counter()
        self.seconds = dict.fromkeys(("train", "aggregate", "evaluate", "commit", "server"), 0.0)
        self.facts["rounds"] = rounds = trainer.rounds_of(task)
        state.task, state.round = task, unit
        state.phase = "train" if unit < rounds else "boundary"
        state.metrics = {}
        if unit == 0:
            trainer.should_stop = False
            if task > 0 and self.keeps_anchor:
                state.task_anchor = state.params.clone()
            self._server_event("on_task_start")
        outcomes = self._train_round() if state.phase == "train" else self._boundary_pass()
        self._log_failures(outcomes)
        planned = unit + 1 >= self.units_of(task)
        due = trainer.eval_every is not None and state.phase == "train" and (unit + 1) % trainer.eval_every == 0
        results = self._evaluate_round(task) if planned or due else None
        self._server_event("on_round_end")
        following = rounds if trainer.should_stop and state.phase == "train" else unit + 1
        last = following >= self.units_of(task)
        if last:
            self._end_task(task, results)
        self._log_round()
        self.next = (task + 1, 0) if last else (task, following)
        with self.timed("commit"):
            commit(self, final=last and task + 1 == self.num_tasks)
        row = {"global_round": state.global_round - 1, "seconds": time.perf_counter() - started, **self.seconds}
        self.folder.append_timing(row)

    def _train_round(self) -> list[Outcome]:
        state, trainer = self.state, self.trainer
        available = self.stream.clients(state.task)
        count = min(trainer.clients_per_round, 2) if trainer.fast_dev_run else trainer.clients_per_round
        state.sampled = sample_clients(available, count, trainer.seed, state.task, state.round)
        with self.timed("server"):
            self._server_event("on_round_start")
        self.jobs.broadcast = collect(trainer.server_callbacks, trainer)
        with self.timed("train"):
            infos = [self._info(c, state.phase) for c in state.sampled]
            outcomes = self.rounds.train(state, infos, self.step_states)
        with self.timed("aggregate"):
            self._merge(outcomes)
        return outcomes

    def _merge(self, outcomes: list[Outcome]) -> None:
        state, trainer = self.state, self.trainer
        state.completed = [outcome.client for outcome in outcomes if outcome.accepted]
        payload = self.engine.layout.nbytes + tree_bytes(state.counters)
        extra_down = tree_bytes(self.jobs.downloads) + tree_bytes(self.jobs.broadcast)
        state.bytes_down += (payload + extra_down) * len(state.sampled)
        state.bytes_up += payload * len(state.completed) + self.rounds.uploads.total_bytes() + self.rounds.probe_bytes
        state.metrics["round/clients"] = float(len(state.completed))
        self._server_event("on_before_aggregate")
        if len(state.completed) < quorum(trainer.min_completed, len(state.sampled)):
            self.store.discard(*state.completed)
            state.completed, state.empty_rounds = [], state.empty_rounds + 1
            if state.empty_rounds >= trainer.max_empty_rounds:
                reasons = sorted({f.reason for outcome in outcomes for f in outcome.failures})
                self._log_failures(outcomes)
                raise EmptyRoundError(
                    f"{state.empty_rounds} rounds in a row had too few usable updates (reasons: {', '.join(reasons)}). "
                    f"See failures.csv in {str(self.folder.path)!r}; the model is as after the last good round."
                )
        else:
            state.empty_rounds = 0
            self.step_states = self.rounds.aggregate(state, outcomes, self.step_states, **self.facts)
            state.metrics.update(client_means(outcomes))
        self._server_event("on_after_aggregate")

    def _boundary_pass(self) -> list[Outcome]:
        state = self.state
        state.sampled, self.jobs.broadcast = self.stream.clients(state.task), {}
        self._server_event("on_round_start")
        with self.timed("train"):
            outcomes = self.rounds.measure(state, [self._info(c, state.phase) for c in state.sampled])
        state.completed = [outcome.client for outcome in outcomes if outcome.accepted]
        state.bytes_up += self.rounds.uploads.total_bytes()
        self.rounds.collect(state, outcomes, **self.facts)
        return outcomes

    def _evaluate_round(self, task: int) -> Tensor:
        """Scores of the global weights on every column; all that was logged goes into the round's metrics."""
        state = self.state
        with self.timed("evaluate"):
            results = self._evaluate_all()
        scores = self._scores(results)
        for name, metrics in zip(self.stream.names, results, strict=True):
            state.metrics.update({f"task/{name}/{key}": value for key, value in metrics.items()})
        state.metrics[f"round/{self.score}"] = float(scores[list(self.stream.seen(task))].mean())
        return scores

    def _end_task(self, task: int, scores: Tensor | None) -> None:
        """Fill the task's row of the score matrix."""
        self._server_event("on_task_end")
        if scores is None:  # the task ended early, in a round without evaluation
            scores = self._evaluate_round(task)
        self.matrix[task] = scores
        self.folder.write_accuracy(self.stream.names, self.matrix)

    def _log_round(self) -> None:
        state = self.state
        position: dict[str, int | str] = {
            "global_round": state.global_round,
            "task": state.task,
            "round": state.round,
            "phase": state.phase,
        }
        self.folder.append_metrics({**position, **state.metrics})
        for logger in self.trainer.loggers if self.trainer.is_global_zero else ():
            logger.log_metrics({**state.metrics, "task": state.task}, step=state.global_round)
        state.global_round += 1

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _info(self, client: int, phase: str) -> JobInfo:
        state, trainer = self.state, self.trainer
        return JobInfo(
            seed=client_seed(trainer.seed, state.task, state.round, client),
            client=client,
            task=state.task,
            round=state.round,
            global_round=state.global_round,
            phase=phase,
            rounds=trainer.rounds_of(state.task),
            num_tasks=len(self.stream),
            num_examples=self.stream.num_examples(state.task, client) if client >= 0 else 0,
        )

    def _lr_factor(self, info: JobInfo) -> float:
        return 1.0 if self.trainer.lr_factor is None else float(self.trainer.lr_factor(info.task, info.round))

    def load_global(self) -> None:
        """Put the weights to evaluate into the module, and a router's slots with them."""
        self.engine.load(self.rounds.shown(self.state, self.step_states))
        self.engine.set_tensors({**self.state.counters, **self.jobs.fresh_local})
        self.rounds.install(self.state)

    def _evaluate_all(self) -> list[Metrics]:
        """Metrics of the global weights on every column; ranks that share clients also share columns."""
        self.load_global()
        columns = range(len(self.stream.names))
        mine = {c: self._evaluate(c) for c in columns if c % self.ranks.world == self.ranks.rank}
        gathered: dict[str, Metrics] = {}
        for part in self.ranks.gather_json({str(c): m for c, m in mine.items()}):
            gathered.update(part)
        return [gathered[str(c)] for c in columns]

    def _evaluate(self, column: int) -> Metrics:
        seed_generators(derive_seed(self.trainer.seed, "evaluate", self.state.global_round, column))
        context = ClientContext(
            engine=self.engine,
            hooks=self.client_hooks,
            info=self._info(-1, "evaluate"),
            callbacks=self.trainer.callbacks,
            loggers=self.trainer.loggers,
            stream=self.stream,
            default_root_dir=str(self.folder.path),
        )
        limit = 1 if self.trainer.fast_dev_run else self.trainer.limit_eval_batches
        return evaluate(self.engine, self.client_hooks, context, self.stream.eval_loader(column), limit)

    def _scores(self, results: list[Metrics]) -> Tensor:
        self.score = self.score or pick_score(self.trainer.score, results[0])
        for name, metrics in zip(self.stream.names, results, strict=True):
            if self.score not in metrics:
                raise MisconfigurationError(
                    f"`validation_step` must log the score {self.score!r} on every evaluation set, but on {name!r} it "
                    f"logged {sorted(metrics)}."
                )
        return torch.tensor([metrics[self.score] for metrics in results], dtype=torch.float64)

    def _server_event(self, name: str) -> None:
        if not self.server_hooks.has(name):
            return
        state = self.state
        loads = self.loads_weights and name not in _WITHOUT_WEIGHTS
        with self.engine.unwrapped() if loads else nullcontext():
            if loads:
                self.load_global()
            seed_generators(derive_seed(self.trainer.seed, name, state.task, state.round))
            self.server_hooks.call(name, self.trainer, self.module)

    def _log_failures(self, outcomes: list[Outcome]) -> None:
        state = self.state
        if self.trainer.is_global_zero:
            warn_failures(outcomes, state.global_round)
        for outcome in outcomes:
            for failure in outcome.failures:
                position = {"global_round": state.global_round, "task": state.task, "round": state.round}
                self.folder.append_failure({**position, **asdict(failure)})

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to this unit's row of ``timing.csv``."""
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started
