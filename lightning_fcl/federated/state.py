"""Where a run stands."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fcl.types import Metrics


@dataclass
class Slots:
    """Several sets of global weights, kept by a :class:`~lightning_fcl.aggregators.Router`.

    Args:
        weights: One flat payload per slot, each of shape ``[layout.size]``; replaced, never written into.
        steps: States of the server steps, one list per slot.
        router: The router's own state.
    """

    weights: list[Tensor] = field(default_factory=list)
    steps: list[list[Any]] = field(default_factory=list)
    router: Any = None


@dataclass
class RoundState:
    """Progress and global weights of a run: what a checkpoint holds and server callbacks may read.

    Args:
        params: Global payload, flat, shape ``[layout.size]``; with a router the template of new slots.
        counters: Global integer buffers by name.
        task: Current task, from 0.
        round: Current round inside the task, from 0; the boundary pass has the index after the last round.
        global_round: Commits so far: training rounds and boundary passes of all tasks; the x-axis of all logs.
        phase: ``"train"`` or ``"boundary"``.
        sampled: Clients drawn for the current round, ascending.
        completed: Clients whose updates were accepted, ascending.
        metrics: What the current round logged so far.
        task_anchor: Global payload at the end of the previous task, kept only if a callback asks for it.
        empty_rounds: Rounds in a row without an accepted update.
        bytes_up: Bytes clients have sent so far.
        bytes_down: Bytes clients have received so far.
        slots: What a router keeps; ``None`` without one.
    """

    params: Tensor
    counters: dict[str, Tensor] = field(default_factory=dict)
    task: int = 0
    round: int = 0
    global_round: int = 0
    phase: str = "train"
    sampled: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)
    task_anchor: Tensor | None = None
    empty_rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    slots: Slots | None = None
