"""Rounds behind a router: probe, route, train in slots, and an ordinary merge for each slot."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_fcl._match import name_matcher
from lightning_fcl.aggregators.base import Reducer, RoundStats
from lightning_fcl.aggregators.chain import Chain
from lightning_fcl.aggregators.router import Probe, Router
from lightning_fcl.aggregators.tree import TreeSum, merge_nodes
from lightning_fcl.federated.client import BatchTransfer
from lightning_fcl.federated.comm import Ranks
from lightning_fcl.federated.context import JobInfo
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.jobs import ClientJobs, Failure, Outcome
from lightning_fcl.federated.layout import named_tensors
from lightning_fcl.federated.rounds import RoundRunner
from lightning_fcl.federated.sampling import derive_seed, seed_generators
from lightning_fcl.federated.state import RoundState, Slots
from lightning_fcl.serialize import clone_tree, dump_tree, load_bytes, tree_bytes
from lightning_fcl.types import ClientUpdate

COUNT_BYTES = 8  # the number of examples, sent with a probe


def make_rounds(engine: Engine, jobs: ClientJobs, ranks: Ranks, chain: Chain, on_event: Any) -> RoundRunner:
    """What runs the rounds of a chain, with or without a router."""
    kind = RoundRunner if chain.router is None else RoutedRounds
    return kind(engine, jobs, ranks, chain, on_event)


class RoutedRounds(RoundRunner):
    """Rounds in which every client starts from the weights of its own slot.

    Args:
        engine: As in :class:`RoundRunner`, like the rest.
        jobs: Runs client jobs on this rank.
        ranks: The ranks that share the clients.
        chain: The aggregator, with its router.
        on_event: Called with a server hook's name.
    """

    def __init__(self, engine: Engine, jobs: ClientJobs, ranks: Ranks, chain: Chain, on_event: Any) -> None:
        super().__init__(engine, jobs, ranks, chain, on_event)
        assert chain.router is not None
        self.router: Router = chain.router
        self.router.setup(engine.module, [slot.name for slot in engine.layout.slots])
        shared = name_matcher(self.router.shared)
        self._shared = [slice(s.start, s.stop) for s in engine.layout.slots if shared(s.name)]
        self._probes: dict[int, Probe] = {}
        self._answers: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._routes: dict[int, int] = {}
        self._weights: list[Tensor] = []
        self._reducers: list[Reducer] = []
        self._members: dict[int, list[int]] = {}
        self._common: TreeSum | None = None
        self._installed: list[Tensor] | None = None

    @override
    def init(self, state: RoundState) -> list[Any]:
        state.slots = Slots(router=self.router.init())
        return []

    @override
    def shown(self, state: RoundState, states: list[Any]) -> Tensor:
        return state.params

    @override
    def install(self, state: RoundState) -> None:
        assert state.slots is not None
        weights, known = state.slots.weights, self._installed
        if (
            known is not None
            and len(known) == len(weights)
            and all(a is b for a, b in zip(known, weights, strict=True))
        ):
            return
        views = [self.engine.layout.views(vector) for vector in weights]
        self.router.install(self.engine.module, views, state.slots.router)
        self._installed = list(weights)

    # -- before training ---------------------------------------------------------------------------------------------

    @override
    def train(self, state: RoundState, infos: list[JobInfo], states: list[Any]) -> list[Outcome]:
        self.install(state)
        lost = self._route(state, infos)
        outcomes = super().train(state, [info for info in infos if info.client in self._routes], states)
        return sorted([*outcomes, *lost], key=lambda outcome: outcome.client)

    @override
    def measure(self, state: RoundState, infos: list[JobInfo]) -> list[Outcome]:
        lost = self._route(state, infos)
        outcomes = super().measure(state, [info for info in infos if info.client in self._routes])
        return sorted([*outcomes, *lost], key=lambda outcome: outcome.client)

    def _route(self, state: RoundState, infos: list[JobInfo]) -> list[Outcome]:
        """Ask all clients and give each a slot; returns what became of those that get none."""
        assert state.slots is not None
        lost = self._ask(state, infos)
        probes = [
            Probe(client=info.client, num_examples=float(info.num_examples), tensors=answer)
            for info in infos
            if (answer := self._answers.get((info.task, info.client))) is not None
        ]
        self._probes = {probe.client: probe for probe in probes}
        self.probe_bytes = sum(tree_bytes(p.tensors) + COUNT_BYTES for p in probes if p.tensors)
        routes = self.router.route(probes, len(state.slots.weights), state.slots.router, task=state.task)
        noted: dict[str, list[str]] = {}
        for client, route in routes.items():
            if route.slot is None:
                lost.append(Outcome(client, failures=[Failure(client, "route", "refused", route.note)]))
            elif route.note:
                noted.setdefault(route.note, []).append(str(client))
        for note, clients in noted.items():
            rank_zero_info(f"round {state.global_round}: clients {', '.join(clients)}: {note}")
        self._routes = {client: route.slot for client, route in routes.items() if route.slot is not None}
        opened = max([len(state.slots.weights), *(slot + 1 for slot in self._routes.values())])
        self._weights = [*state.slots.weights]
        for slot in range(len(state.slots.weights), opened):
            self._weights.append(self._fresh_slot(state, slot))
        return lost

    def _ask(self, state: RoundState, infos: list[JobInfo]) -> list[Outcome]:
        """Probe the clients that were never asked in this task; all ranks learn all answers."""
        if type(self.router).probe is Router.probe:
            self._answers.update({(info.task, info.client): {} for info in infos})
            return []
        found: dict[int, dict[str, Tensor]] = {}
        outcomes = []

        def probe(state: RoundState, info: JobInfo) -> list[ClientUpdate]:
            found[info.client] = self._probe(state, info)
            return []

        for info in (infos[place] for place in self.ranks.share(len(infos))):
            if (info.task, info.client) in self._answers:
                continue
            outcome, _ = self.jobs.run(state, replace(info, phase="probe"), probe)
            if outcome.failures:
                outcomes.append(outcome)
            if outcome.raised:
                break
        lost = self._share_outcomes(outcomes)
        for part in self.ranks.gather_bytes(dump_tree(found)):
            for client, tensors in load_bytes(part).items():
                device = self.engine.fabric.device
                self._answers[state.task, client] = {name: t.to(device) for name, t in tensors.items()}
        return lost

    def _probe(self, state: RoundState, info: JobInfo) -> dict[str, Tensor]:
        jobs, engine = self.jobs, self.engine
        jobs._switch_to(state, info.client)
        loader = jobs.data.loader(info.task, info.client, whole=True)
        context = jobs._context(state, info, train_dataloader=loader, num_training_batches=len(loader))
        seed_generators(derive_seed(jobs.settings.seed, "probe", info.task, info.client))  # the same in every round
        with context.attached(), engine.evaluating():
            tensors = self.router.probe(engine.module, map(BatchTransfer(engine), loader))
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise FloatingPointError(f"the client's {name} holds NaN or infinite values")
        found: dict[str, Tensor] = clone_tree(tensors)
        return found

    def _fresh_slot(self, state: RoundState, slot: int) -> Tensor:
        engine, vector = self.engine, torch.empty_like(state.params)
        seed_generators(derive_seed(self.jobs.settings.seed, "slot", state.task, state.round, slot))
        with engine.unwrapped(), torch.no_grad():
            engine.load(state.params)
            self.router.reset(engine.module)
            vector.copy_(state.params)  # padding
            return engine.layout.pack(named_tensors(engine.module), vector)

    # -- one round per slot ------------------------------------------------------------------------------------------

    @override
    def _start(self, state: RoundState, owned: range, states: list[Any]) -> None:
        clients = list(self.positions)
        self._members = {}
        for client in clients:
            self._members.setdefault(self._routes[client], []).append(client)
        while len(self._reducers) < len(self._members):
            self._reducers.append(deepcopy(self.chain.reducer))
        for reducer, (slot, members) in zip(self._reducers, sorted(self._members.items()), strict=False):
            mine = [place for place, client in enumerate(members) if self.positions[client] in owned]
            before = sum(self.positions[client] < owned.start for client in members)
            reducer.start(self._weights[slot], len(members), range(before, before + len(mine)))
        self._common = TreeSum(self._pick(state.params), len(clients), owned) if self._shared else None

    @override
    def _start_of(self, client: int) -> Tensor:
        return self._weights[self._routes[client]]

    @override
    def _download(self, state: RoundState, client: int) -> RoundState:
        return replace(state, params=self._start_of(client))

    @override
    def _add(self, client: int, row: Tensor, num_examples: float) -> None:
        slot = self._routes[client]
        self._reducer(slot).add(self._members[slot].index(client), row, num_examples)
        if self._common is not None:
            self._common.add(self.positions[client], self._pick(row), num_examples)

    def _reducer(self, slot: int) -> Reducer:
        return self._reducers[sorted(self._members).index(slot)]

    def _pick(self, vector: Tensor) -> Tensor:
        return torch.cat([vector[place] for place in self._shared])

    @override
    def _merge(self, state: RoundState, accepted: list[Outcome], stats: RoundStats, states: list[Any]) -> list[Any]:
        assert state.slots is not None
        old = state.slots
        weights, steps, members = [*old.weights], [*old.steps], {}
        for slot in sorted({self._routes[outcome.client] for outcome in accepted}):
            group = [outcome for outcome in accepted if self._routes[outcome.client] == slot]
            reducer, start = self._reducer(slot), self._weights[slot]
            own = replace(self._group(stats, reducer, group), logs={})
            before = old.steps[slot] if slot < len(old.steps) else self.chain.init(start)
            vector, after = self._new_weights(start, reducer, own, before)
            if slot < len(old.weights):
                weights[slot], steps[slot], place = vector, after, slot
            else:
                weights, steps, place = [*weights, vector], [*steps, after], len(weights)
            members[place] = [self._probes[outcome.client] for outcome in group]
            state.metrics.update({f"slot/{place}/{tag.removeprefix('round/')}": x for tag, x in own.logs.items()})
        params = self._merge_shared(state, accepted, weights)
        router = self.router.update(members, old.router, state.metrics, task=state.task)
        state.params, state.slots = params, Slots(weights, steps, router)
        state.metrics["round/slots"] = float(len(weights))
        return states

    def _merge_shared(self, state: RoundState, accepted: list[Outcome], weights: list[Tensor]) -> Tensor:
        """Average what all slots have in common, and put it into each of them; returns the new template."""
        if self._common is None:
            return state.params
        before = self._pick(state.params)
        total = sum(outcome.num_examples for outcome in accepted)
        delta = merge_nodes(self.ranks.gather_nodes(self._common.partials(), like=before)).div_(total)
        common = (before.double() + delta).to(before.dtype)
        vectors = [vector.clone() for vector in (state.params, *weights)]  # the old ones are still in use
        for vector in vectors:
            parts = torch.split(common, [place.stop - place.start for place in self._shared])
            for place, part in zip(self._shared, parts, strict=True):
                vector[place] = part
        weights[:] = vectors[1:]
        return vectors[0]
