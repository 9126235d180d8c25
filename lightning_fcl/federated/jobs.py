"""Client jobs of one round on this rank: download, train or measure, upload; every failure has a name."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.exceptions import FCLError
from lightning_fcl.federated.broadcast import Broadcasts
from lightning_fcl.federated.client import LocalBudget, LocalTraining, ModuleFacts
from lightning_fcl.federated.client_data import ClientData
from lightning_fcl.federated.client_store import ClientStore
from lightning_fcl.federated.context import ClientContext, JobInfo
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.guard import all_finite
from lightning_fcl.federated.hooks import HookTable
from lightning_fcl.federated.sampling import seed_generators
from lightning_fcl.federated.state import RoundState
from lightning_fcl.federated.structure import Structure
from lightning_fcl.federated.uploads import check_upload
from lightning_fcl.serialize import clone_tree
from lightning_fcl.types import ClientUpdate, Metrics, Params


@dataclass
class Failure:
    """One row of ``failures.csv`` without the round's columns.

    Args:
        client: Client id.
        phase: ``"train"``, ``"boundary"`` or ``"guard"``.
        reason: One word.
        detail: First line of the error, or what the guard found.
    """

    client: int
    phase: str
    reason: str
    detail: str


@dataclass
class Outcome:
    """What became of one sampled client; plain values, so that ranks can exchange it as JSON.

    Args:
        client: Client id.
        accepted: Whether its update counts.
        num_examples: Its training examples.
        metrics: Means of what it logged.
        failures: What went wrong on the way, retries included.
        raised: The error text if the policy is to raise.
        square_norm: Squared length of its delta over the parameters, if a server step asks for it.
    """

    client: int
    accepted: bool = False
    num_examples: float = 0.0
    metrics: Metrics = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    raised: str | None = None
    square_norm: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Outcome":
        """Inverse of :meth:`to_json`."""
        return cls(**{**data, "failures": [Failure(**f) for f in data["failures"]]})


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What holds for every job of a run; the arguments of the same names of ``FederatedTrainer``."""

    seed: int
    budget: LocalBudget
    on_client_error: str
    max_retries: int
    keep_optimizer_state: bool
    loggers: list[Any]
    run_dir: str


class ClientJobs:
    """Runs client jobs through the engine, one after another.

    Args:
        engine: Holds the module.
        callbacks: Client callbacks.
        hooks: Their hooks and the module's.
        data: Training loaders.
        store: What clients keep between rounds.
        settings: The run's settings.
    """

    def __init__(
        self,
        engine: Engine,
        callbacks: list[L.Callback],
        hooks: HookTable,
        data: ClientData,
        store: ClientStore,
        settings: JobSettings,
    ) -> None:
        self.engine = engine
        self.callbacks = callbacks
        self.hooks = hooks
        self.data = data
        self.store = store
        self.settings = settings
        self.downloads: dict[str, dict[str, Any]] = {}
        self.broadcast: Broadcasts = {}
        self.error: Exception | None = None
        self.facts = ModuleFacts(engine)
        self._structure = Structure(engine.module)
        self._row = engine.layout.new_vector(engine.fabric.device)
        self._row_views = engine.layout.views(self._row)
        self._fresh = {c.state_key: clone_tree(c.state_dict()) for c in callbacks}
        # What does not travel starts from here for a new client: personal tensors and non-persistent buffers.
        self.fresh_local = engine.get_tensors([*engine.layout.local, *engine.layout.transient])
        self._uploads = [c for c in callbacks if isinstance(c, ContinualCallback)]

    def run(
        self, state: RoundState, info: JobInfo, job: Callable[[RoundState, JobInfo], list[ClientUpdate]]
    ) -> tuple[Outcome, list[ClientUpdate]]:
        """Run one client's job under the error policy.

        Args:
            state: The run's state; its weights are the download.
            info: Which job.
            job: :meth:`train` or :meth:`measure`.

        Returns:
            The outcome (of a training job not accepted yet: the guard decides), and the updates to check.
        """
        outcome = Outcome(info.client, num_examples=float(info.num_examples))
        attempts = 1 + (self.settings.max_retries if self.settings.on_client_error == "retry" else 0)
        for _ in range(attempts):
            try:
                updates = job(state, info)
            except Exception as error:
                self.store.discard(info.client)
                self.engine.reset_metrics()
                self.engine.module.zero_grad(set_to_none=True)
                outcome.failures.append(_failure(info, error))
                if self.settings.on_client_error == "raise":
                    self.error = error
                    outcome.raised = f"{type(error).__name__}: {error}"
                    return outcome, []
            else:
                outcome.metrics = updates[0].metrics if updates else {}
                outcome.accepted = info.phase == "boundary"  # nothing is sent that a guard could check
                return outcome, updates
        return outcome, []

    def train(self, state: RoundState, info: JobInfo) -> list[ClientUpdate]:
        """Train one client from the global weights.

        Args:
            state: Its ``params`` and ``counters`` are the download.
            info: Which job.

        Returns:
            What the client sends: normally one update.
        """
        engine, budget = self.engine, self.settings.budget
        own = self._switch_to(state, info.client)
        loader = self.data.loader(info.task, info.client)
        batches = len(loader) if budget.limit_batches is None else min(len(loader), budget.limit_batches)
        context = self._context(
            state,
            info,
            train_dataloader=loader,
            num_training_batches=batches,
            lr_factor=self.lr_factor(info),
            max_epochs=budget.epochs if budget.steps is None else -1,
            max_steps=-1 if budget.steps is None else budget.steps,
        )
        self._structure = self._structure if self._structure.holds() else Structure(engine.module)
        seed_generators(info.seed)
        training = LocalTraining(engine, self.hooks, context, loader, self.facts, timeout=budget.timeout)
        training.run(own.get("optimizers"))
        self._check_trainable()
        engine.read(self._row)
        if not all_finite(self._row):
            raise FloatingPointError("the weights after local training hold NaN or infinite values")
        update = update_of(
            info,
            {**self._row_views, **engine.get_tensors(engine.layout.counters)},
            metrics=engine.mean_over_ranks(context._log.reduced()),
            flat=self._row,
        )
        updates = self._upload(context, update)
        self._keep(info.client, context)
        return updates

    def measure(self, state: RoundState, info: JobInfo) -> list[ClientUpdate]:
        """Run the boundary pass of one client: ``on_task_end`` with the final global weights.

        Args:
            state: Its weights are loaded.
            info: Which job.

        Returns:
            What the callbacks upload from here, without weights.
        """
        self._switch_to(state, info.client)
        loader = self.data.loader(info.task, info.client, whole=True)  # so that ranks that share it agree
        limit = self.settings.budget.limit_batches
        batches = len(loader) if limit is None else min(len(loader), limit)
        context = self._context(state, info, train_dataloader=loader, num_training_batches=batches)
        seed_generators(info.seed)
        with context.attached():
            self.hooks.call("on_task_end", context, self.engine.module)
            extra = self._extra(context)
        self._keep(info.client, context)
        return [update_of(info, {}, extra=extra)] if extra else []

    lr_factor: Callable[[JobInfo], float] = staticmethod(lambda info: 1.0)

    def _check_trainable(self) -> None:
        """A layer that was unfrozen or replaced in a job would neither be sent nor reset."""
        if self._structure.holds():
            return
        now = {id(p): n for n, p in self.engine.module.named_parameters() if p.requires_grad}
        if now.keys() != self._structure.trainable:
            strange = ", ".join(n for i, n in now.items() if i not in self._structure.trainable) or "fewer than before"
            raise FCLError(
                f"the trainable parameters changed during a client's job ({strange}). What is trained must stay the "
                "same for the whole run: freeze, unfreeze and replace layers before `fit`."
            )

    def reset_callbacks(self) -> None:
        """Give the callbacks back as they came: no client's state stays in them for the next run."""
        for callback in self.callbacks:
            callback.load_state_dict(clone_tree(self._fresh[callback.state_key]))

    def _context(self, state: RoundState, info: JobInfo, **options: Any) -> ClientContext:
        anchor = None if state.task_anchor is None else self.engine.layout.views(state.task_anchor)
        return ClientContext(
            engine=self.engine,
            hooks=self.hooks,
            info=info,
            callbacks=self.callbacks,
            loggers=self.settings.loggers,
            stream=self.data.stream,
            task_anchor=anchor,
            broadcast=self.broadcast,
            default_root_dir=self.settings.run_dir,
            **options,
        )

    def _switch_to(self, state: RoundState, client: int) -> dict[str, Any]:
        """Load global weights and what the client kept; returns the latter."""
        own: dict[str, Any] = self.store.get(client) or {}
        self.engine.load(state.params)
        self.engine.set_tensors(state.counters)
        self.engine.set_tensors({**self.fresh_local, **own.get("local", {})})
        states = own.get("callbacks", {})
        for callback in self.callbacks:
            key = callback.state_key
            # A new client starts from the callback's first state, not from what the client before it left behind.
            callback.load_state_dict(states[key] if key in states else clone_tree(self._fresh[key]))
            if isinstance(callback, ContinualCallback) and key in self.downloads:
                callback.download(self.downloads[key])
        return own

    def _keep(self, client: int, context: ClientContext) -> None:
        states = {c.state_key: s for c in self.callbacks if (s := c.state_dict())}
        own: dict[str, Any] = {}
        if states:
            own["callbacks"] = states
        if self.engine.layout.local:
            own["local"] = self.engine.get_tensors(self.engine.layout.local)
        if self.settings.keep_optimizer_state and context.optimizers:
            own["optimizers"] = [clone_tree(o.state_dict()) for o in context.optimizers]
        if own:
            self.store.put(client, own)

    def _upload(self, context: ClientContext, update: ClientUpdate) -> list[ClientUpdate]:
        updates = [update]
        update.extra.update(self._extra(context))
        for callback in self._uploads:
            sent: list[ClientUpdate] = []
            for one in updates:
                result = callback.on_upload(context, self.engine.module, one)
                sent += [] if result is None else result if isinstance(result, list) else [result]
            updates = sent
        # A copy with other tensors must not travel as the vector it was made from.
        return [one if one.tensors is update.tensors else replace(one, flat=None) for one in updates]

    def _extra(self, context: ClientContext) -> dict[str, dict[str, Tensor]]:
        """What the callbacks send beside the weights; copied, since the next client may write into the same tensors."""
        extra: dict[str, dict[str, Tensor]] = {}
        for callback in self._uploads:
            if callback.upload_phase == context.phase and (sent := callback.upload(context)):
                check_upload(callback, sent)
                extra[callback.state_key] = clone_tree(sent)
        return extra


def pack_update(update: ClientUpdate, engine: Engine, row: Tensor) -> Tensor:
    """The update as one flat row, shape ``[layout.size]``."""
    return update.flat if update.flat is not None else engine.layout.pack(update.tensors, row)


def warn_failures(outcomes: Iterable[Outcome], global_round: int) -> None:
    """One warning line per failed client, on rank 0."""
    for outcome in outcomes:
        for failure in outcome.failures:
            rank_zero_warn(
                f"round {global_round}: client {failure.client} dropped ({failure.reason}): {failure.detail}",
                category=UserWarning,
            )


def update_of(info: JobInfo, tensors: Params, **options: Any) -> ClientUpdate:
    """What a job sends."""
    origin: dict[str, Any] = {"client": info.client, "task": info.task, "round": info.round}
    return ClientUpdate(**origin, num_examples=float(info.num_examples), tensors=tensors, **options)


def _failure(info: JobInfo, error: Exception) -> Failure:
    named = {TimeoutError: "timeout", FloatingPointError: "diverged"}
    reason = next((word for kind, word in named.items() if isinstance(error, kind)), type(error).__name__)
    text = str(error).strip().splitlines()
    return Failure(info.client, info.phase, reason, text[0] if text else reason)
