"""Cut the classes of one dataset into tasks."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from lightning_fcl.data.labels import IntArray
from lightning_fcl.data.sources import Source
from lightning_fcl.exceptions import DatasetError

ClassOrder: TypeAlias = Sequence[int] | Literal["sorted", "random"]


def class_groups(
    labels: IntArray, tasks: int | Sequence[int], *, order: ClassOrder = "sorted", seed: int = 0
) -> list[IntArray]:
    """The classes of each task.

    Args:
        labels: Labels of the training set, shape ``(N,)``.
        tasks: Number of tasks, which get equally many classes (the first ones one more if they do not divide), or the
            number of classes of each task.
        order: ``"sorted"``, ``"random"`` by ``seed``, or all classes in the order wanted.
        seed: Seeds the random order.

    Returns:
        One array of class numbers per task.

    Raises:
        DatasetError: If the classes cannot be cut so.

    Example:
        >>> class_groups(np.array([3, 1, 0, 2, 4]), tasks=2)
        [array([0, 1, 2]), array([3, 4])]
    """
    classes = np.unique(labels)
    if isinstance(order, str):
        if order not in ("sorted", "random"):
            raise ValueError(f"`class_order` must be 'sorted', 'random' or a list of classes, got {order!r}.")
        ordered = np.random.default_rng(seed).permutation(classes) if order == "random" else classes
    else:
        ordered = np.asarray(order, dtype=np.int64)
        if not np.array_equal(np.sort(ordered), classes):
            raise DatasetError(
                f"`class_order` must name each of the {len(classes)} classes once, got {ordered[:10].tolist()}."
            )
    if isinstance(tasks, int):
        if not 1 <= tasks <= len(classes):
            raise DatasetError(f"`tasks` must be from 1 to the number of classes ({len(classes)}), got {tasks}.")
        return np.array_split(ordered, tasks)
    if not tasks or min(tasks) < 1 or sum(tasks) != len(classes):
        raise DatasetError(
            f"`tasks` must hold the number of classes of each task, {len(classes)} in all, got {list(tasks)}."
        )
    return np.split(ordered, np.cumsum(tasks)[:-1])


def split_source(source: Source, groups: Sequence[IntArray], name: str) -> list[Source]:
    """One source per group of classes; labels keep their numbers.

    Raises:
        DatasetError: If a group has no example, or an example belongs to no group.
    """
    labels = source.examples().labels
    stray = np.setdiff1d(labels, np.concatenate(groups))
    empty = [task for task, group in enumerate(groups) if not np.isin(group, labels).any()]
    if len(stray) or empty:
        raise DatasetError(
            f"`{name}` must hold examples of each task's classes and of no others, got "
            + (f"none for task {empty[0]} (classes {groups[empty[0]].tolist()})." if empty else f"class {stray[0]}.")
        )
    labelled = source.with_labels(labels, name)
    return [labelled.take(np.flatnonzero(np.isin(labels, group))) for group in groups]
