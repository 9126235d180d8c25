"""One round: sampled clients train on their ranks, the guard checks, the aggregator merges."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fcl.aggregators.base import Node, Reducer, RoundStats
from lightning_fcl.aggregators.chain import Chain
from lightning_fcl.exceptions import ClientFailedError, FCLError
from lightning_fcl.federated.comm import Ranks
from lightning_fcl.federated.context import JobInfo
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.guard import UpdateGuard, all_finite
from lightning_fcl.federated.jobs import ClientJobs, Failure, Outcome, pack_update
from lightning_fcl.federated.stacked import StackedJobs
from lightning_fcl.federated.state import RoundState
from lightning_fcl.federated.uploads import Uploads
from lightning_fcl.functional.mean import delta_dot
from lightning_fcl.serialize import dump_tree, load_bytes
from lightning_fcl.types import ClientUpdate, Metrics


class RoundRunner:
    """Trains the sampled clients and applies what they send.

    Args:
        engine: Holds the module.
        jobs: Runs client jobs on this rank.
        ranks: The ranks that share the clients.
        chain: The aggregator.
        on_event: Called with a server hook's name at the points where server callbacks listen.
    """

    def __init__(self, engine: Engine, jobs: ClientJobs, ranks: Ranks, chain: Chain, on_event: Any) -> None:
        self.engine = engine
        self.jobs = jobs
        self.ranks = ranks
        self.chain = chain
        self.on_event = on_event
        self.uploads = Uploads(jobs.callbacks, ranks, engine.fabric.device)
        chain.reducer.prepare(engine.layout.places)
        self._scratch = engine.layout.new_vector(engine.fabric.device)
        self.probe_bytes = 0
        self.stack: StackedJobs | None = None

    def init(self, state: RoundState) -> list[Any]:
        """States of the server steps before the first round."""
        return self.chain.init(state.params)

    def shown(self, state: RoundState, states: list[Any]) -> Tensor:
        """The weights to evaluate: the global ones, or what a server step puts in their place."""
        return self.chain.output(state.params, states)

    def install(self, state: RoundState) -> None:
        """Put into the module what beside the global weights is evaluated; without a router, nothing."""

    def train(self, state: RoundState, infos: list[JobInfo], states: list[Any]) -> list[Outcome]:
        """Local training of all sampled clients; this rank takes its contiguous share.

        Args:
            state: The run's state; ``sampled`` is ascending.
            infos: One per sampled client, in that order.
            states: States of the server steps, which say what clients start from.

        Returns:
            Outcomes of all clients of all ranks, ascending.
        """
        owned = self.ranks.share(len(infos))
        self.positions = {info.client: place for place, info in enumerate(infos)}
        self._start(state, owned, states)
        self.counters: dict[str, Tensor] = {}
        self.uploads.start(len(infos), owned)
        guard = UpdateGuard(
            self.engine.layout,
            state.counters,
            (infos[place].client for place in owned),
            task=state.task,
            round=state.round,
        )
        outcomes: dict[int, Outcome] = {}
        for outcome, updates in self._job_results(state, [infos[place] for place in owned]):
            outcomes[outcome.client] = outcome
            for update in updates:
                self._receive(update, guard, outcomes, outcome)
            if updates and not outcome.accepted:
                self.jobs.store.discard(outcome.client)
            self.on_event("on_client_end")
            if outcome.raised:
                break
        return self._share_outcomes([outcomes[c] for c in sorted(outcomes)])

    def _job_results(self, state: RoundState, infos: list[JobInfo]) -> Iterator[tuple[Outcome, list[ClientUpdate]]]:
        if self.stack is not None:
            yield from self.stack.run(self._download(state, -1), infos)
            return
        for info in infos:
            yield self.jobs.run(self._download(state, info.client), info, self.jobs.train)

    def measure(self, state: RoundState, infos: list[JobInfo]) -> list[Outcome]:
        """The boundary pass of all given clients."""
        outcomes = []
        owned = self.ranks.share(len(infos))
        self.uploads.start(len(infos), owned)
        with self.engine.unwrapped():
            for place in owned:
                info = infos[place]
                outcome, sent = self.jobs.run(self._download(state, info.client), info, self.jobs.measure)
                outcomes.append(outcome)
                for update in sent:
                    self.uploads.add(place, update.client, update.extra, outcome.num_examples)
                self.on_event("on_client_end")
                if outcome.raised:
                    break
        return self._share_outcomes(outcomes)

    def _receive(
        self,
        update: ClientUpdate,
        guard: UpdateGuard,
        outcomes: dict[int, Outcome],
        sender: Outcome,
    ) -> None:
        rejection = guard.check(update)
        if rejection is not None:
            sender.failures.append(Failure(sender.client, "guard", rejection.reason, rejection.detail))
            return
        owner = outcomes.setdefault(update.client, Outcome(update.client))
        owner.accepted = True
        owner.num_examples = float(update.num_examples)
        row = pack_update(update, self.engine, self._scratch)
        self._add(update.client, row, owner.num_examples)
        if self.chain.uses_square_norms:
            trained = slice(self.engine.layout.num_params)
            owner.square_norm = delta_dot(row[trained], self._start_of(update.client)[trained])
        if not self.counters:
            self.counters = {name: update.tensors[name].clone() for name in self.engine.layout.counters}
        self.uploads.add(self.positions[update.client], update.client, update.extra, owner.num_examples)

    def _start(self, state: RoundState, owned: range, states: list[Any]) -> None:
        self._sent = self.chain.broadcast(state.params, states, task=state.task)
        if self._sent is not state.params:
            self._round_slots(self._sent)
        self.chain.reducer.start(self._sent, len(self.positions), owned)

    def _start_of(self, client: int) -> Tensor:
        """The weights that ``client`` trained from."""
        return self._sent

    def _download(self, state: RoundState, client: int) -> RoundState:
        """The state with the weights that ``client`` starts from."""
        if state.phase == "boundary" or (start := self._start_of(client)) is state.params:
            return state
        return replace(state, params=start)

    def _add(self, client: int, row: Tensor, num_examples: float) -> None:
        self.chain.reducer.add(self.positions[client], row, num_examples)

    def _share_outcomes(self, outcomes: list[Outcome]) -> list[Outcome]:
        merged = outcomes
        if self.ranks.world > 1:
            gathered = self.ranks.gather_json([outcome.to_json() for outcome in outcomes])
            merged = [Outcome.from_json(data) for part in gathered for data in part]
        for outcome in merged:
            if outcome.raised:
                message = f"client {outcome.client} failed: {outcome.raised}"
                if self.jobs.error is not None:
                    raise self.jobs.error
                raise ClientFailedError(f"{message}. Use on_client_error='skip' or 'retry' to go on without it.")
        return merged

    # -- merging -----------------------------------------------------------------------------------------------------

    def aggregate(self, state: RoundState, outcomes: list[Outcome], states: list[Any], **facts: int) -> list[Any]:
        """Merge the accepted updates and write the new global weights into ``state``.

        Args:
            state: Changed in place: ``params``, ``counters``, ``metrics``.
            outcomes: Of all ranks; at least one is accepted.
            states: States of the server steps.
            facts: ``num_tasks``, ``total_clients`` and ``rounds`` (of this task).

        Returns:
            The new states of the server steps.

        Raises:
            FCLError: If the server rule itself produced a non-finite weight; ``state`` is unchanged.
        """
        accepted = [outcome for outcome in outcomes if outcome.accepted]
        stats = self._stats(state, accepted, **facts)
        states = self._merge(state, accepted, stats, states)
        state.counters = self._merge_counters(state, accepted)
        self.jobs.downloads = self.uploads.merge(self.jobs.downloads, stats)
        state.metrics.update(stats.logs)
        return states

    def _merge(self, state: RoundState, accepted: list[Outcome], stats: RoundStats, states: list[Any]) -> list[Any]:
        reducer = self.chain.reducer
        stats = self._group(stats, reducer, accepted)
        state.params, states = self._new_weights(state.params, reducer, stats, states)
        return states

    def _group(self, stats: RoundStats, reducer: Reducer, accepted: list[Outcome]) -> RoundStats:
        """The facts of the clients that are merged together."""
        num_examples = tuple(outcome.num_examples for outcome in accepted)
        return replace(
            stats,
            clients=tuple(outcome.client for outcome in accepted),
            num_examples=num_examples,
            weights=reducer.weights(num_examples),
            square_norms=tuple(o.square_norm for o in accepted) if self.chain.uses_square_norms else (),
            lone=self._lone_row(reducer, accepted),
        )

    def _new_weights(
        self, params: Tensor, reducer: Reducer, stats: RoundStats, states: list[Any]
    ) -> tuple[Tensor, list[Any]]:
        delta = reducer.merge(self._gather, stats)
        params, states = self.chain.apply(params, delta, stats, states)
        if not all_finite(params):
            raise FCLError(
                f"the aggregator made non-finite weights in task {stats.task}, round {stats.round}, although every "
                "update was finite; the model was left as it was. Lower the server's step size."
            )
        self._round_slots(params)
        return params, states

    def collect(self, state: RoundState, outcomes: list[Outcome], **facts: int) -> None:
        """Merge what the boundary pass uploaded.

        Args:
            state: Its ``metrics`` may gain numbers.
            outcomes: Of all ranks.
            facts: As for :meth:`aggregate`.
        """
        stats = self._stats(state, [outcome for outcome in outcomes if outcome.accepted], **facts)
        self.jobs.downloads = self.uploads.merge(self.jobs.downloads, stats)
        state.metrics.update(stats.logs)

    def _stats(self, state: RoundState, accepted: list[Outcome], **facts: Any) -> RoundStats:
        return RoundStats(
            task=state.task,
            round=state.round,
            num_params=self.engine.layout.num_params,
            clients=tuple(outcome.client for outcome in accepted),
            num_examples=tuple(outcome.num_examples for outcome in accepted),
            **facts,
        )

    def _gather(self, nodes: Mapping[Node, Tensor], like: Tensor | None = None) -> dict[Node, Tensor]:
        return self.ranks.gather_nodes(nodes, like=self._scratch if like is None else like)

    def _round_slots(self, params: Tensor) -> None:
        """With mixed dtypes, keep each tensor as precise as its own type: clients load and commits hold just that."""
        if not self.engine.layout.uniform:
            views = self.engine.layout.views(params)
            for slot in self.engine.layout.slots:
                views[slot.name].copy_(views[slot.name].to(slot.dtype))

    def _lone_row(self, reducer: Reducer, accepted: list[Outcome]) -> Tensor | None:
        if len(accepted) != 1:
            return None
        row = reducer.lone_row()
        can_copy = self.ranks.gather_json(row is not None)
        owner = self._owner(accepted[0].client)
        if not can_copy[owner]:
            return None
        return self.ranks.broadcast(row.clone() if row is not None else torch.empty_like(self._scratch), owner)

    def _owner(self, client: int) -> int:
        place, size, world = self.positions[client], len(self.positions), self.ranks.world
        return next(r for r in range(world) if size * r // world <= place < size * (r + 1) // world)

    def _merge_counters(self, state: RoundState, accepted: list[Outcome]) -> dict[str, Tensor]:
        """Integer buffers of the accepted client with the lowest id."""
        if not state.counters:
            return {}
        parts = self.ranks.gather_bytes(dump_tree(self.counters))
        counters: dict[str, Tensor] = load_bytes(parts[self._owner(accepted[0].client)])
        return {name: t.to(state.counters[name].device) for name, t in counters.items()}


def client_means(outcomes: list[Outcome]) -> Metrics:
    """Per-round means of what accepted clients logged, weighted by examples, as ``client/<name>``.

    Names that start with ``loss/`` keep their tag.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.accepted:
            for name, value in outcome.metrics.items():
                tag = name if name.startswith("loss/") else f"client/{name}"
                sums[tag] = sums.get(tag, 0.0) + outcome.num_examples * value
                weights[tag] = weights.get(tag, 0.0) + outcome.num_examples
    return {tag: sums[tag] / weights[tag] for tag in sums}
