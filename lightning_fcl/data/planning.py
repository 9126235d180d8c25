"""The options of a stream, and how its plan is drawn from its training sets."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np

from lightning_fcl.data.labels import IntArray
from lightning_fcl.data.plan import PartitionPlan
from lightning_fcl.data.schedule import make_schedule
from lightning_fcl.data.sources import Source
from lightning_fcl.data.split import Partition, partitioner, split
from lightning_fcl.exceptions import DatasetError

Counts: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]


class LoaderOptions(TypedDict, total=False):
    """How batches are made; see :class:`~lightning_fcl.data.stream.TaskStream`."""

    batch_size: int
    eval_batch_size: int | None
    shuffle: bool
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int


class StreamOptions(LoaderOptions, total=False):
    """How training sets are shared too; see :meth:`~lightning_fcl.data.stream.TaskStream.from_datasets`."""

    clients: int | None
    partition: Partition
    seed: int
    plan: PartitionPlan | None


def draw_plan(
    sources: Sequence[Source],
    *,
    clients: int | None,
    partition: Partition = "iid",
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> PartitionPlan:
    """Share each training set among the clients; every client trains on set j in stage j.

    Args:
        sources: Training sets, one per task.
        clients: Number of clients.
        partition: Name or partitioner.
        seed: Seeds the draw; each task draws its own.
        names: Names of the tasks; by default ``"task_0"``, ``"task_1"``, ...

    Raises:
        DatasetError: If the data cannot be shared as asked.
    """
    if clients is None:
        raise DatasetError("`clients` must be given, got neither `clients` nor `plan`.")
    names = _checked_names(names, len(sources))
    examples = [source.examples(task) for task, source in enumerate(sources)]
    draw = partitioner(partition)
    parts, moved = zip(*(split(one, draw, clients, seed=seed) for one in examples), strict=True)
    classes, counts = _counts(parts, [one.known_labels for one in examples])
    return PartitionPlan(
        names=names,
        sizes=tuple(map(len, sources)),
        parts=parts,
        schedule=make_schedule("hom", len(sources), clients),
        partition=getattr(draw, "__qualname__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(draw)),
        seed=seed,
        moved=moved,
        classes=classes,
        counts=counts,
    )


def check_agrees(plan: PartitionPlan, *, clients: int | None, names: Sequence[str] | None) -> None:
    """Raise DatasetError if the plan is for other clients or tasks than the user says."""
    if clients not in (None, plan.clients):
        raise DatasetError(f"`clients` must be left out or equal the plan's {plan.clients}, got {clients}.")
    if names is not None and tuple(names) != plan.names:
        raise DatasetError(f"The names of the tasks must be the plan's, {list(plan.names)}, got {list(names)}.")


def _checked_names(names: Sequence[str] | None, tasks: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"task_{number}" for number in range(tasks))
    names = tuple(map(str, names))
    if len(names) != tasks or len(set(names)) != tasks or any(not name or "/" in name for name in names):
        raise DatasetError(
            f"`names` must hold one name per task ({tasks}), all different and without '/', got {list(names)[:3]}."
        )
    return names


def _counts(
    parts: Sequence[Sequence[IntArray]], labels: Sequence[IntArray | None]
) -> tuple[tuple[int, ...] | None, Counts | None]:
    """Classes over all tasks, and examples by task, client and class; ``None`` if some labels are not at hand."""
    known = [one for one in labels if one is not None]
    if len(known) < len(labels):
        return None, None
    classes = np.unique(np.concatenate(known))
    columns = [np.searchsorted(classes, one) for one in known]
    counts = tuple(
        tuple(tuple(np.bincount(column[part], minlength=len(classes)).tolist()) for part in task)
        for column, task in zip(columns, parts, strict=True)
    )
    return tuple(classes.tolist()), counts
