"""The plan of a stream: who owns which examples and when they train on them, as readable, hashed JSON."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fcl.data.labels import IntArray
from lightning_fcl.data.schedule import Schedule, ScheduleLike, as_rows, check_schedule, make_schedule
from lightning_fcl.exceptions import DatasetError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "lightning_fcl.partition_plan"
VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionPlan:
    """Who owns which examples of which training set, and who trains on which set in which stage.

    Two plans with the same ``hash`` split the same data in the same way. Plans do not hold data.

    Args:
        names: Name of each training set.
        sizes: Examples of each training set.
        parts: ``parts[task][client]``: the client's sorted indices into the training set, int64. The parts of a set
            are disjoint and cover it.
        schedule: ``schedule[stage][client]``: numbers of the training sets.
        partition: The partitioner in words.
        seed: The seed it was drawn with.
        moved: Examples per training set that the repair moved to give each client enough.
        classes: The class numbers behind the columns of ``counts``, if known.
        counts: ``counts[task][client][column]``: examples of each class, if the labels are known without a pass over
            the data.

    Raises:
        DatasetError: If the parts are no partition or the schedule names unknown sets.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    parts: tuple[tuple[IntArray, ...], ...]
    schedule: Schedule
    partition: str = "given"
    seed: int = 0
    moved: tuple[int, ...] = ()
    classes: tuple[int, ...] | None = None
    counts: tuple[tuple[tuple[int, ...], ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.names or not len(self.names) == len(self.sizes) == len(self.parts):
            raise DatasetError(
                f"`names`, `sizes` and `parts` must have one entry per training set, got {len(self.names)}, "
                f"{len(self.sizes)} and {len(self.parts)}."
            )
        for name, size, parts in zip(self.names, self.sizes, self.parts, strict=True):
            together = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
            if len(parts) != self.clients or not np.array_equal(np.sort(together), np.arange(size)):
                raise DatasetError(
                    f"`parts` of {name!r} must give each of its {size} examples to exactly one of {self.clients} "
                    f"clients, got {len(together)} entries in {len(parts)} parts."
                )
        try:
            check_schedule(self.schedule, len(self.names), self.clients)
        except ValueError as error:
            raise DatasetError(str(error)) from error

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.parts[0])

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Clients with data in each stage, ascending; found once, since there may be a million of them."""
        sizes = [[len(part) for part in parts] for parts in self.parts]
        return tuple(
            tuple(client for client, entry in enumerate(row) if any(sizes[task][client] for task in entry))
            for row in self.schedule
        )

    @property
    def deviation(self) -> float:
        """Distance of the split from its draw: the share of all examples, in [0, 1], that the repair moved."""
        return sum(self.moved) / sum(self.sizes)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the plan's content, as ``"sha256:<64 hex digits>"``."""
        canonical = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"

    def with_schedule(self, schedule: ScheduleLike, *, lag: float = 0.0) -> "PartitionPlan":
        """The same parts in another order; see :func:`~lightning_fcl.data.schedule.make_schedule`."""
        rows = make_schedule(schedule, len(self.names), self.clients, lag=lag, seed=self.seed)
        return replace(self, schedule=rows)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain types. Indices are runs in words: ``"0-3 7"`` is 0, 1, 2, 3, 7."""
        return {"format": FORMAT, "version": VERSION, "hash": self.hash, **self._content()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PartitionPlan":
        """The plan that :meth:`to_dict` described.

        Raises:
            DatasetError: If it is no plan, of another version, damaged, or does not match its hash.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise DatasetError(f"The plan must have the format {FORMAT!r}. Was the file written by `plan.save`?")
        if data.get("version") != VERSION:
            raise DatasetError(f"The plan must be of version {VERSION}, got {data.get('version')!r}.")
        try:
            plan = cls._from_content(data)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise DatasetError(f"The plan is damaged ({type(error).__name__}: {error}). Draw it again.") from error
        if plan.hash != data.get("hash"):
            raise DatasetError(
                f"The plan must match its hash {data.get('hash')!r}, got {plan.hash!r}. It was edited or damaged; draw "
                "it again, or build a `PartitionPlan` of your own."
            )
        return plan

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, one client per line, replacing the file in one step; returns the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(_readable(self.to_dict()) + "\n", encoding="utf-8")
        partial.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "PartitionPlan":
        """Read a plan that :meth:`save` wrote and check its hash.

        Raises:
            DatasetError: If the file is missing, no JSON, or no undamaged plan of this version.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise DatasetError(f"`path` must be a plan that `plan.save` wrote, got no file {str(path)!r}.") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DatasetError(f"`path` must hold JSON, got {str(path)!r} ({error}).") from error
        except DatasetError as error:
            raise DatasetError(f"{path}: {error}") from error

    def plot(self) -> "Figure":
        """Heat map of the examples by client and class, one panel per training set (extra ``plot``).

        Where the labels are not known, each panel has one column: the client's number of examples.

        Returns:
            A matplotlib ``Figure`` of its own, not known to pyplot; ``.savefig(path)`` writes it.
        """
        from lightning_fcl.data.plan_figure import plan_figure

        return plan_figure(self)

    def _content(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "seed": self.seed,
            "names": list(self.names),
            "sizes": list(self.sizes),
            "moved": list(self.moved),
            "schedule": [[entry[0] if len(entry) == 1 else list(entry) for entry in row] for row in self.schedule],
            "classes": None if self.classes is None else list(self.classes),
            "counts": None if self.counts is None else [[list(row) for row in task] for task in self.counts],
            "parts": [[_to_runs(part) for part in task] for task in self.parts],
        }

    @classmethod
    def _from_content(cls, data: Mapping[str, Any]) -> "PartitionPlan":
        counts, classes, sizes = data["counts"], data["classes"], tuple(map(int, data["sizes"]))
        return cls(
            partition=str(data["partition"]),
            seed=int(data["seed"]),
            names=tuple(map(str, data["names"])),
            sizes=sizes,
            moved=tuple(map(int, data["moved"])),
            schedule=as_rows(data["schedule"]),
            classes=None if classes is None else tuple(map(int, classes)),
            counts=None if counts is None else tuple(tuple(tuple(map(int, row)) for row in task) for task in counts),
            parts=tuple(
                tuple(_from_runs(part, size) for part in task) for task, size in zip(data["parts"], sizes, strict=True)
            ),
        )


def _to_runs(indices: IntArray) -> str:
    """Sorted indices as runs: [0, 1, 2, 5] -> ``"0-2 5"``."""
    runs: list[list[int]] = []
    for index in indices.tolist():  # most clients have few: NumPy would cost more than it saves
        if runs and index == runs[-1][-1] + 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    return " ".join("-".join(map(str, run)) for run in runs)


def _from_runs(text: str, size: int) -> IntArray:
    """The indices behind :func:`_to_runs`, below ``size``."""
    runs = [(int(low), int(high or low)) for low, _, high in (run.partition("-") for run in text.split())]
    if any(not 0 <= low <= high < size for low, high in runs):
        raise ValueError(f"indices must lie between 0 and {size - 1}")
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(low, high + 1) for low, high in runs)])


def _readable(value: Any, indent: str = "") -> str:
    """JSON with lists of integers on one line and all else one entry per line."""
    inner = indent + " "
    if isinstance(value, dict):
        entries = [f"{inner}{json.dumps(key)}: {_readable(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and not all(isinstance(entry, int) for entry in value):
        return "[\n" + ",\n".join(inner + _readable(entry, inner) for entry in value) + f"\n{indent}]"
    return json.dumps(value)
