"""What a stream knows of its columns and labels: those of a client, and those seen so far."""

import numpy as np

from lightning_fcl.data.labels import IntArray
from lightning_fcl.data.plan import PartitionPlan
from lightning_fcl.data.sources import Source


class StreamLabels:
    """The part of :class:`~lightning_fcl.TaskStream` that tells what has been seen, and looks labels up once.

    Labels that were given to the stream come first, then those that a dataset stores; only if there are none, its
    examples are read.
    """

    plan: PartitionPlan
    _train: tuple[Source, ...]
    _labels: dict[int, IntArray]

    def seen(self, task: int) -> tuple[int, ...]:
        """Sorted columns that some client has trained on in the stages up to and including ``task``."""
        rows = self.plan.schedule[: checked_index("task", task, len(self.plan.schedule)) + 1]
        return tuple(
            sorted({s for row in rows for c, entry in enumerate(row) for s in entry if len(self.plan.parts[s][c])})
        )

    def train_labels(self, task: int, client: int) -> IntArray:
        """Labels of the training examples of ``client`` in stage ``task``.

        Args:
            task: Stage, counted from 0.
            client: Client id.

        Returns:
            Shape ``(num_examples,)``, int64, in the order of the client's dataset.

        Raises:
            DatasetError: If an example holds no single integer label.
        """
        parts = [self._labels_of(s)[self.plan.parts[s][client]] for s in self._sources_of(task, client)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def classes(self, task: int) -> tuple[int, ...]:
        """Sorted labels of the training sets that some client has trained on up to and including ``task``.

        Raises:
            DatasetError: If an example holds no single integer label.
        """
        return tuple(sorted({int(label) for s in self.seen(task) for label in np.unique(self._labels_of(s))}))

    def _labels_of(self, source: int) -> IntArray:
        if source not in self._labels:
            self._labels[source] = self._train[source].examples().labels
        return self._labels[source]

    def _sources_of(self, task: int, client: int) -> tuple[int, ...]:
        row = self.plan.schedule[checked_index("task", task, len(self.plan.schedule))]
        return row[checked_index("client", client, self.plan.clients)]


def checked_index(name: str, value: int, size: int) -> int:
    """``value``, or IndexError if it is not from 0 to ``size - 1``."""
    if not 0 <= value < size:
        raise IndexError(f"`{name}` must be from 0 to {size - 1}, got {value}.")
    return value
