"""Which client trains on which training set in which stage."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Schedule: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""Training sets by stage and client: ``schedule[stage][client]`` is a tuple of set numbers, empty if it sits out."""

ScheduleLike: TypeAlias = str | Sequence[Sequence[int | Sequence[int]]]


def make_schedule(schedule: ScheduleLike, tasks: int, clients: int, *, lag: float = 0.0, seed: int = 0) -> Schedule:
    """Turn a name or a table into a schedule.

    Args:
        schedule: ``"hom"``: every client trains on set j in stage j. ``"het"``: different clients train on different
            sets in the same stage; client c starts with set ``r[c] % tasks`` (r: a random order of the clients) and
            goes round, so that each client sees each set once and each stage holds all sets if there are as many
            clients. Or a table by stage and client of set numbers (several in a tuple, ``()`` to sit out).
        tasks: Number of training sets.
        clients: Number of clients.
        lag: Share of the clients, in [0, 1), that are one stage behind: in stage t they train on what the schedule
            names for stage t - 1. The same clients lag all along, chosen at random, ``round(lag * clients)`` of
            them and never all. In stage 0 there is nothing to be behind with, so they train on stage 0, and on it
            again in stage 1.
        seed: Seeds the random orders.

    Returns:
        The schedule.

    Raises:
        ValueError: If the name is unknown, the table has the wrong shape, or ``lag`` is out of range.

    Example:
        >>> make_schedule("hom", tasks=2, clients=3)
        (((0,), (0,), (0,)), ((1,), (1,), (1,)))
    """
    rng = np.random.default_rng([seed, tasks, clients])
    order = rng.permutation(clients)
    if not isinstance(schedule, str):
        rows = as_rows(schedule)
    elif schedule == "hom":
        rows = tuple(((task,),) * clients for task in range(tasks))
    elif schedule == "het":
        rows = tuple(tuple((int(order[c] + stage) % tasks,) for c in range(clients)) for stage in range(tasks))
    else:
        raise ValueError(f"`schedule` must be 'hom', 'het' or a table by stage and client, got {schedule!r}.")
    check_schedule(rows, tasks, clients)
    return _lagging(rows, lag, rng)


def as_rows(table: Sequence[Sequence[int | Sequence[int]]]) -> Schedule:
    """A table by stage and client, with single numbers made into tuples."""
    return tuple(tuple(tuple(int(task) for task in np.atleast_1d(e)) for e in row) for row in table)


def check_schedule(schedule: Schedule, tasks: int, clients: int) -> None:
    """Raise ValueError unless each stage names known training sets for each client."""
    if not schedule:
        raise ValueError("`schedule` must hold at least one stage, got none.")
    for stage, row in enumerate(schedule):
        if len(row) != clients:
            raise ValueError(f"`schedule[{stage}]` must hold an entry for each of {clients} clients, got {len(row)}.")
        bad = sorted({task for entry in row for task in entry if not 0 <= task < tasks})
        if bad:
            raise ValueError(f"`schedule[{stage}]` must name training sets from 0 to {tasks - 1}, got {bad[:3]}.")
        if any(len(set(entry)) != len(entry) for entry in row):
            raise ValueError(f"`schedule[{stage}]` must name a training set once per client, got one twice.")


def _lagging(schedule: Schedule, lag: float, rng: np.random.Generator) -> Schedule:
    if not 0 <= lag < 1:
        raise ValueError(f"`lag` must be a share of the clients in [0, 1), got {lag}.")
    clients = len(schedule[0])
    behind = set(rng.permutation(clients)[: min(round(lag * clients), clients - 1)].tolist())
    return tuple(
        tuple(schedule[max(stage - (client in behind), 0)][client] for client in range(clients))
        for stage in range(len(schedule))
    )
