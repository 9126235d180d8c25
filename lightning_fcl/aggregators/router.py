"""Rounds in which clients train different weights: who starts from what, and what is done with all of it."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch import Tensor

from lightning_fcl._match import NameRule
from lightning_fcl.types import Params


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a client tells about its data before it gets any weights.

    Args:
        client: Client id.
        num_examples: Its training examples.
        tensors: What :meth:`Router.probe` returned on that client.
    """

    client: int
    num_examples: float
    tensors: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """Where one client of a round goes.

    Args:
        slot: Number of the slot that it trains; ``None`` if it sits the round out.
        note: Why, for the log and ``failures.csv``; empty where there is nothing to say.
    """

    slot: int | None
    note: str = ""


class Router(ABC):
    """Keeps several sets of weights, *slots*, and turns one round into an ordinary round for each of them.

    It stands first in a :class:`~lightning_fcl.aggregators.Chain`. In each round the loop asks the sampled clients for
    a small :meth:`probe`, lets the server :meth:`route` them, sends every client its slot's weights, and runs the
    chain's reducer and server steps once per slot, over that slot's clients alone and with states of its own. After
    the merge, :meth:`update` sees who was accepted. Before anything is evaluated, :meth:`install` puts the slots into
    the module. Slots, their server steps' states and the router's state are part of each commit.

    The global weights of such a run are the template of new slots; a new slot starts as :meth:`reset` leaves the
    module that holds them. Slots appear when a client is routed to the number after the last; one whose clients all
    fail does not come to be.

    Attributes:
        shared: Names of travelling tensors that all slots have in common; they are averaged over all accepted clients,
            weighted by examples.
    """

    shared: NameRule = ()

    def setup(self, pl_module: L.LightningModule, travelling: Collection[str]) -> None:
        """Before the first round: raise MisconfigurationError if the module does not fit.

        Args:
            pl_module: The module.
            travelling: Names of the parameters and float buffers that a slot holds.
        """

    def probe(self, pl_module: L.LightningModule, batches: Iterable[Any]) -> dict[str, Tensor]:
        """On a client, in eval mode without gradients, before it gets its slot.

        It must depend on nothing but the client's data and tensors of the module that never change, since it is asked
        for once per task and client and then remembered.

        Args:
            pl_module: The module, with the template's weights.
            batches: The client's training data, on the module's device.

        Returns:
            Finite tensors by name; they count as traffic in every round.
        """
        return {}

    def init(self) -> Any:
        """The router's state before the first round: a tree of tensors and plain values."""
        return None

    @abstractmethod
    def route(self, probes: Sequence[Probe], num_slots: int, state: Any, *, task: int) -> dict[int, Route]:
        """Give each client a slot; every rank does it, and all must come to the same result.

        Args:
            probes: Of all sampled clients that could be asked, by ascending id.
            num_slots: Slots so far; the next ones are ``num_slots``, ``num_slots + 1``, ...
            state: As :meth:`init` or :meth:`update` returned it.
            task: Task, from 0.

        Returns:
            A route by client id.
        """

    def reset(self, pl_module: L.LightningModule) -> None:
        """Draw a new slot's first weights in the module; torch's generator is seeded by (seed, task, round, slot)."""

    def update(self, members: Mapping[int, Sequence[Probe]], state: Any, logs: dict[str, float], *, task: int) -> Any:
        """After the merge.

        Args:
            members: Probes of the accepted clients by slot; new slots are numbered as they were added.
            state: The router's state.
            logs: Numbers written here go into the round's log.
            task: Task, from 0.

        Returns:
            The new state.
        """
        return state

    def install(self, pl_module: L.LightningModule, slots: Sequence[Params], state: Any) -> None:
        """Put all slots into the module, for evaluation and for good.

        Args:
            pl_module: The module.
            slots: Each slot's tensors by name; views that must not be changed.
            state: The router's state.
        """
