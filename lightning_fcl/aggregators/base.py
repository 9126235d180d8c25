"""How updates merge (``Reducer``) and how the merged update is applied (``ServerStep``)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from lightning_fcl.exceptions import MisconfigurationError

Node = tuple[int, int]
"""A node of the sum's tree: ``(level, index)`` covers positions ``[index << level, (index + 1) << level)``."""

StepSize = float | str | Callable[[int], float]
"""A server step size: a number, ``"inverse_task"`` (1/i in task i, i from 1), or ``f(task) -> float``, task from 0."""


@dataclass(frozen=True, kw_only=True)
class RoundStats:
    """What a rule may know about the round that it merges.

    Args:
        task: Task, from 0.
        round: Round inside the task, from 0.
        num_tasks: Tasks in the stream.
        num_params: Elements ``[0, num_params)`` of every flat vector are parameters, the rest float buffers.
        clients: Ids of the clients whose updates were accepted, ascending.
        num_examples: Their training examples, in the same order.
        total_clients: Clients in the stream.
        rounds: Rounds that this task has.
        weights: What the reducer weighs each client by, in the same order, not normalised.
        square_norms: Squared length of each client's delta over the parameters (float buffers do not count), formed in
            float64, in the same order; empty unless a step of the chain sets ``uses_square_norms``.
        lone: The only accepted client's new weights if there is exactly one, shape ``[P]``; else ``None``.
        logs: A rule writes numbers here that belong into the round's log, e.g. ``logs["round/pull"] = 0.1``.
    """

    task: int
    round: int
    num_tasks: int
    num_params: int
    clients: tuple[int, ...]
    num_examples: tuple[float, ...]
    total_clients: int
    rounds: int = 1
    weights: tuple[float, ...] = ()
    square_norms: tuple[float, ...] = ()
    lone: Tensor | None = None
    logs: dict[str, float] = field(default_factory=dict)


class Gather(Protocol):
    """Sends this rank's nodes to all ranks; every rank must call it equally often."""

    def __call__(self, nodes: Mapping[Node, Tensor], like: Tensor | None = None) -> dict[Node, Tensor]:
        """Everybody's nodes.

        Args:
            nodes: Float tensors of this rank; each keeps its dtype.
            like: A tensor of their shape; by default that of the flat vector.
        """


class Reducer(ABC):
    """Merges a round's updates into one delta while they arrive.

    The loop calls :meth:`prepare` once a run. In each round it calls :meth:`start`, then :meth:`add` for each accepted
    update in ascending position, then :meth:`merge` on every rank. By default that exchanges the :meth:`partials` of
    all ranks once and leaves the rest to :meth:`finish`; a reducer that needs a second look overrides it. A reducer
    holds no state from one round to the next.
    """

    def prepare(self, params: Mapping[str, slice]) -> None:
        """Before the first round, for a reducer that must know which elements belong to which parameter.

        Args:
            params: Where each travelling parameter lies in the flat vector, by dotted name and in ascending order;
                what no parameter covers is a float buffer or zero padding.
        """

    @abstractmethod
    def start(self, reference: Tensor, size: int, owned: range) -> None:
        """Begin a round.

        Args:
            reference: Global weights that were sent out, shape ``[P]``.
            size: Number of sampled clients; positions are ``range(size)``.
            owned: Positions whose updates this rank will add.
        """

    @abstractmethod
    def add(self, position: int, row: Tensor, num_examples: float) -> None:
        """Take one accepted update.

        Args:
            position: Place of the client among the sampled ids in ascending order.
            row: Its new weights, shape ``[P]``; copied, since the caller reuses the memory.
            num_examples: Its training examples.
        """

    @abstractmethod
    def partials(self) -> dict[Node, Tensor]:
        """This rank's part of the result: float tensors of shape ``[P]`` by node; each keeps its dtype on the way."""

    @abstractmethod
    def finish(self, partials: Mapping[Node, Tensor], stats: RoundStats) -> Tensor:
        """Merge the parts of all ranks.

        Args:
            partials: The nodes of all ranks; may be consumed.
            stats: The round; holds at least one client.

        Returns:
            The merged delta (new - old), shape ``[P]``, float64.
        """

    def merge(self, gather: Gather, stats: RoundStats) -> Tensor:
        """Exchange what the merge needs, as often as it needs it, and merge.

        Args:
            gather: Exchanges nodes between ranks.
            stats: The round; holds at least one client.

        Returns:
            As :meth:`finish`.
        """
        return self.finish(gather(self.partials()), stats)

    def weights(self, num_examples: tuple[float, ...]) -> tuple[float, ...]:
        """What it weighs the accepted clients by, not normalised; all alike by default.

        Args:
            num_examples: Their training examples.
        """
        return (1.0,) * len(num_examples)

    def lone_row(self) -> Tensor | None:
        """The row last added on this rank, shape ``[P]``, if the delta of a single client is its own, unscaled.

        The loop then copies that client's weights instead of adding a delta to the old ones.
        """
        return None


class ServerStep(ABC):
    """Turns the merged delta into the one that is applied; state goes in and comes out.

    Steps of a chain run one after another: each gets the delta that the one before returned, and the last one's delta
    is added to the global weights in float64 and rounded once.

    The weights that clients start from and those that are evaluated may differ from the global weights: see
    :meth:`broadcast` and :meth:`output`.

    Attributes:
        uses_square_norms: Set to ``True`` on a subclass to find ``stats.square_norms`` filled.
        closes_chain: Set to ``True`` on a subclass that must see the delta that is applied, so that no step may follow.
    """

    uses_square_norms: ClassVar[bool] = False
    closes_chain: ClassVar[bool] = False

    def default_reducer(self) -> Reducer:
        """The reducer to use when the user names none."""
        from lightning_fcl.aggregators.fedavg import FedAvg

        return FedAvg()

    def init(self, params: Tensor) -> Any:
        """State before the first round.

        Args:
            params: Initial global weights, shape ``[P]``.

        Returns:
            A tree of tensors and plain values, or ``None``.
        """
        return None

    @abstractmethod
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        """One server step.

        Args:
            params: Global weights before the round, shape ``[P]``; not to be changed.
            delta: Merged delta (new - old), shape ``[P]``, float64; may be changed in place.
            stats: The round.
            state: What :meth:`init` or the last call returned.

        Returns:
            The delta to apply, shape ``[P]``, float64, and the new state.
        """

    def broadcast(self, params: Tensor, state: Any, *, task: int) -> Tensor:
        """The weights that the next round's clients start from; deltas are counted from there.

        Args:
            params: Global weights, or what the step before it sends; shape ``[P]``; not to be changed.
            state: What :meth:`init` or the last :meth:`apply` returned.
            task: The next round's task, from 0.

        Returns:
            Shape ``[P]``, any float dtype; ``params`` itself by default.
        """
        return params

    def output(self, params: Tensor, state: Any) -> Tensor:
        """The weights to evaluate, to show to server callbacks and to leave in the module; training does not see them.

        Args:
            params: Global weights, or what the step before it puts out; shape ``[P]``; not to be changed.
            state: What :meth:`init` or the last :meth:`apply` returned.

        Returns:
            Shape ``[P]``, any float dtype; ``params`` itself by default.
        """
        return params


def step_size(lr: StepSize, task: int) -> float:
    """Resolve a server step size for a task.

    Args:
        lr: A number, ``"inverse_task"``, or a function of the task.
        task: Task, from 0.

    Returns:
        The step size.

    Example:
        >>> [round(step_size("inverse_task", task), 3) for task in range(3)]
        [1.0, 0.5, 0.333]
    """
    if lr == "inverse_task":
        return 1.0 / (task + 1)
    return float(lr(task)) if callable(lr) else float(lr)


def check_step_size(lr: StepSize) -> None:
    """Raise unless ``lr`` is a positive number, ``"inverse_task"`` or callable."""
    if callable(lr) or lr == "inverse_task":
        return
    if isinstance(lr, str) or not 0 < float(lr) < float("inf"):
        raise MisconfigurationError(
            f'`lr` must be a positive number, "inverse_task" or a function of the task, got {lr!r}.'
        )
