"""The public face of the loop."""

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
from lightning.fabric import Fabric

from lightning_fcl.aggregators.chain import Chain, Rule, chain_of
from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.federated.checks import as_list, check_arguments, check_engine, check_module, method_name
from lightning_fcl.federated.context import ClientContext, JobInfo
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.evaluate import evaluate, predict
from lightning_fcl.federated.hooks import HookTable, check_callbacks
from lightning_fcl.federated.layout import Payload
from lightning_fcl.federated.run import Run
from lightning_fcl.federated.session import finalize, launch, report_of, start_run, working_on
from lightning_fcl.federated.state import RoundState
from lightning_fcl.reports.run_report import RunReport
from lightning_fcl.types import Metrics

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream


class FederatedTrainer:
    """Federated continual training of an unmodified ``LightningModule`` over a :class:`~lightning_fcl.TaskStream`.

    For each task of the stream, for each round: sample clients, let each train locally with the module's own
    ``training_step`` and ``configure_optimizers``, check and merge their updates, evaluate, log, commit.

    Args:
        rounds: Rounds per task: one number for all tasks, or one per task.
        clients_per_round: Clients sampled per round; all of a task's clients if there are fewer.
        local_epochs: Passes over its data that a client makes per round.
        local_steps: Optimiser steps that a client makes per round, in the place of ``local_epochs``.
        aggregator: A router, a reducer, a server step, a :class:`~lightning_fcl.aggregators.Chain` or list of rules.
        callbacks: Lightning callbacks that act inside client jobs; each has one state per client. What the module's
            own ``configure_callbacks`` returns joins them, and replaces those of its type, as in ``Trainer``.
        server_callbacks: :class:`~lightning_fcl.callbacks.ServerCallback` objects that act between rounds.
        accelerator: As in ``lightning.Fabric``.
        devices: As in ``lightning.Fabric``.
        num_nodes: As in ``lightning.Fabric``; start the script by ``torchrun`` on every machine.
        strategy: As in ``lightning.Fabric``; with ``parallel="clients"`` it only decides how processes start.
        precision: As in ``lightning.Fabric``.
        parallel: ``"clients"``: each process trains other clients. ``"model"``: all processes train the same client by
            DDP, FSDP 2 or DeepSpeed; the batch size of the stream is then the whole batch, shared among them.
        engine: ``"sequential"``: one client after another, bit for bit as ``Trainer.fit``. ``"stacked"``: the clients
            of a process in one vectorised step, equal to about 1e-5; what cannot be stacked is trained in sequence,
            with a warning. ``"auto"`` stacks where a fixed rule on layers and shapes says that it is faster.
        channels_last: Store images channels last, which is faster for wide convolutions on CPU; ``"auto"`` does so if
            all ``Conv2d`` layers give 32 channels or more. Results then equal ``Trainer.fit`` to 1e-6, not to the bit.
        loggers: Lightning loggers, beside the run folder's CSV files.
        seed: Every random stream of the run derives from it. The module's own initialisation is yours.
        run_dir: Where everything is written; by default ``runs/<date-time>``.
        accumulate_grad_batches: Batches per optimiser step.
        gradient_clip_val: Clipping limit, or ``None``.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        eval_every: Evaluate every so many rounds, beside the end of each task; ``None`` for the ends only.
        checkpoint_every: Commit every so many rounds and at the end; 0 for never.
        keep_checkpoints: How many commits to keep.
        min_completed: Quorum of a round: clients (int) or share of the sampled ones (float). Below it the round changes
            nothing.
        max_empty_rounds: So many rounds in a row below the quorum end the run.
        on_client_error: What an exception or time-out in a client's job does: ``"raise"``, ``"skip"`` or ``"retry"``.
        max_retries: Further attempts with ``on_client_error="retry"``.
        client_timeout: Seconds that a client's job may take; ``None`` for no limit.
        payload: Which trainable parameters and buffers travel: a glob, ``"re:<regex>"``, a list of them, or a function
            ``(name, tensor) -> bool``. The others stay with each client.
        share_buffers: Whether buffers (BatchNorm statistics) travel and average with the weights.
        score: Key logged by ``validation_step`` that fills the score matrix; by default the one that looks like an
            accuracy.
        measure_baseline: Evaluate the untrained module first, for the forward transfer.
        lr_factor: ``f(task, round)`` that multiplies a job's learning rates.
        keep_optimizer_state: Keep optimisers per client from round to round.
        limit_train_batches: At most so many batches per local epoch.
        limit_eval_batches: At most so many batches per evaluation.
        preload_mb: Memory for clients' examples, MiB; 0 turns preloading off.
        client_state_mb: Memory for clients' states before they are read from disk, MiB.
        enable_progress_bar: Show progress: a bar on a terminal, lines elsewhere.
        fast_dev_run: One task, one round, two clients, one batch; nothing is kept but the run folder.
        method: Name of the method in reports; by default found from the rules, callbacks and mixins.

    Raises:
        MisconfigurationError: If arguments are out of range or cannot work together.
    """

    def __init__(
        self,
        *,
        rounds: int | Sequence[int],
        clients_per_round: int,
        local_epochs: int = 1,
        local_steps: int | None = None,
        aggregator: Rule | Chain | list[Rule] | None = None,
        callbacks: L.Callback | list[L.Callback] | None = None,
        server_callbacks: ServerCallback | list[ServerCallback] | None = None,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        strategy: Any = "auto",
        precision: Any = "32-true",
        parallel: Literal["clients", "model"] = "clients",
        engine: Literal["auto", "sequential", "stacked"] = "sequential",
        channels_last: bool | Literal["auto"] = False,
        loggers: Any = None,
        seed: int = 0,
        run_dir: str | PathLike[str] | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        eval_every: int | None = None,
        checkpoint_every: int = 1,
        keep_checkpoints: int = 2,
        min_completed: int | float = 1,
        max_empty_rounds: int = 3,
        on_client_error: Literal["raise", "skip", "retry"] = "raise",
        max_retries: int = 1,
        client_timeout: float | None = None,
        payload: Payload = "*",
        share_buffers: bool = True,
        score: str | None = None,
        measure_baseline: bool = True,
        lr_factor: Callable[[int, int], float] | None = None,
        keep_optimizer_state: bool = False,
        limit_train_batches: int | None = None,
        limit_eval_batches: int | None = None,
        preload_mb: float = 256,
        client_state_mb: float = 256,
        enable_progress_bar: bool = True,
        fast_dev_run: bool = False,
        method: str | None = None,
    ) -> None:
        self.rounds = rounds
        self.clients_per_round = clients_per_round
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.callbacks = as_list(callbacks)
        self.server_callbacks = as_list(server_callbacks)
        check_callbacks(self.callbacks, self.server_callbacks)
        self.chain = chain_of(aggregator, self.callbacks)
        self.accelerator = accelerator
        self.devices = devices
        self.num_nodes = num_nodes
        self.strategy = strategy
        self.precision = precision
        self.parallel = parallel
        self.engine = engine
        self.channels_last = channels_last
        self.loggers = as_list(loggers)
        self.seed = seed
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.eval_every = eval_every
        self.checkpoint_every = checkpoint_every
        self.keep_checkpoints = keep_checkpoints
        self.min_completed = min_completed
        self.max_empty_rounds = max_empty_rounds
        self.on_client_error = on_client_error
        self.max_retries = max_retries
        self.client_timeout = client_timeout
        self.payload = payload
        self.share_buffers = share_buffers
        self.score = score
        self.measure_baseline = measure_baseline
        self.lr_factor = lr_factor
        self.keep_optimizer_state = keep_optimizer_state
        self.limit_train_batches = limit_train_batches
        self.limit_eval_batches = limit_eval_batches
        self.preload_mb = preload_mb
        self.client_state_mb = client_state_mb
        self.enable_progress_bar = enable_progress_bar
        self.fast_dev_run = fast_dev_run
        self.run_dir = Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f") if run_dir is None else Path(run_dir)
        check_arguments(self)
        self.method = method or method_name(self)
        self._named = method is not None
        self.should_stop = False
        self.stream: TaskStream | None = None
        self._fabric: Fabric | None = None
        self._run: Run | None = None

    # -- what server callbacks may ask --------------------------------------------------------------------------------

    @property
    def state(self) -> RoundState:
        """Where the current run stands.

        Raises:
            RuntimeError: Outside of :meth:`fit`.
        """
        if self._run is None:
            raise RuntimeError("`trainer.state` exists only while `fit` runs. Read the returned RunReport instead.")
        return self._run.state

    @property
    def fabric(self) -> Fabric:
        """The one Fabric of this trainer, launched at the first use."""
        if self._fabric is None:
            self._fabric = launch(self)
        return self._fabric

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files."""
        return self.fabric.is_global_zero

    def rounds_of(self, task: int) -> int:
        """Training rounds of a task."""
        if self.fast_dev_run:
            return 1
        return self.rounds if isinstance(self.rounds, int) else self.rounds[task]

    @property
    def total_rounds(self) -> int:
        """Training rounds of all tasks of the stream being fitted."""
        tasks = 0 if self.stream is None else 1 if self.fast_dev_run else len(self.stream)
        return sum(self.rounds_of(task) for task in range(tasks))

    # -- entry points ------------------------------------------------------------------------------------------------

    def fit(
        self,
        module: L.LightningModule,
        stream: "TaskStream",
        ckpt_path: str | PathLike[str] | None = None,
        *,
        strict_resume: bool = True,
    ) -> RunReport:
        """Train ``module`` over ``stream``; afterwards it holds the final global weights.

        Args:
            module: Any LightningModule with ``training_step``, ``validation_step`` and ``configure_optimizers``.
            stream: Tasks and clients.
            ckpt_path: ``None`` starts anew; ``"last"`` resumes ``run_dir`` at its newest valid commit; ``"auto"`` does
                so if there is one, else starts anew; or the path of a committed round of this run.
            strict_resume: Whether resuming with other settings is an error (else a warning).

        Returns:
            The report, saved into ``run_dir``.

        If an error ends the run, the module holds the global weights of the last good round.

        Raises:
            MisconfigurationError: If module, stream and settings cannot work together.
            CheckpointError: If there is nothing valid to resume, or ``run_dir`` holds another run.
            ResumeMismatchError: If the run was started with other settings.
            ClientFailedError: If a client on another process failed and the policy is to raise.
            EmptyRoundError: If too many rounds in a row had no usable update.
        """
        check_module(self, module, stream)
        started = time.perf_counter()
        with working_on(self, module, "fit") as engine:
            check_engine(self, engine)
            self._run, self.stream = start_run(self, engine, stream, ckpt_path, strict=strict_resume), stream
            try:
                self._run.execute()
                report = report_of(self, self._run, time.perf_counter() - started)
                report.save()
                finalize(self.loggers, "success")
            except BaseException as error:
                if not engine.sharded:  # else the ranks may no longer be in step, and loading needs all of them
                    self._run.load_global()
                self._run.server_hooks.call("on_exception", self, module, error)
                finalize(self.loggers, "failed")
                raise
            finally:
                self._run.jobs.reset_callbacks()
                self._run = None
            self.fabric.barrier()
        return report

    def validate(self, module: L.LightningModule, stream: "TaskStream") -> list[Metrics]:
        """Run ``validation_step`` of ``module`` on every evaluation set.

        Args:
            module: The module, with the weights to evaluate.
            stream: Its evaluation sets are used.

        Returns:
            What the module logged, one dict per evaluation set.
        """
        with working_on(self, module, "validate") as engine:
            return [
                evaluate(engine, *self._evaluation(engine, self.callbacks), stream.eval_loader(column))
                for column in range(len(stream.names))
            ]

    def predict(self, module: L.LightningModule, dataloader: Any) -> list[Any]:
        """Run ``predict_step`` of ``module`` on every batch.

        Args:
            module: The module.
            dataloader: Batches.

        Returns:
            The outputs, one per batch.
        """
        with working_on(self, module, "predict") as engine:
            hooks, context = self._evaluation(engine, [])
            with engine.unwrapped():
                return predict(engine, hooks, context, dataloader)

    # -- pieces ------------------------------------------------------------------------------------------------------

    def _evaluation(self, engine: Engine, callbacks: list[L.Callback]) -> tuple[HookTable, ClientContext]:
        hooks = HookTable(callbacks, L.Callback, engine.module)
        info = JobInfo(seed=self.seed, phase="evaluate")
        return hooks, ClientContext(engine=engine, hooks=hooks, info=info, callbacks=callbacks, loggers=self.loggers)
