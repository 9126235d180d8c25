"""One training or evaluation set and how its batches are made, from a Dataset or a DataLoader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset

from lightning_fcl.data.labels import IntArray, as_labels, find_domains, find_labels, stored_labels
from lightning_fcl.data.partition import Examples
from lightning_fcl.exceptions import DatasetError


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How a dataset's examples become batches; the words are those of ``DataLoader``."""

    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    drop_last: bool

    def loader(self, dataset: Dataset[Any], *, shuffle: bool) -> DataLoader[Any]:
        """A plain DataLoader; it drops an incomplete batch only if there is another one."""
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            drop_last=self.drop_last and len(dataset) > self.batch_size,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A map-style dataset, with the DataLoader that lent it and the labels that were given for it, if any.

    ``positions`` are the places of its examples in the dataset that the user gave; by default 0, 1, 2, ...
    """

    dataset: Dataset[Any]
    lender: DataLoader[Any] | None = None
    labels: IntArray | None = None
    positions: IntArray | None = None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def take(self, indices: IntArray) -> "Source":
        """The same source with some of its examples; a Subset of a Subset becomes one Subset."""
        dataset, inner = self.dataset, indices
        if type(dataset) is Subset:  # not a subclass: it may change what it returns
            inner = np.asarray(dataset.indices, dtype=np.int64)[indices]
            dataset = dataset.dataset
        return replace(
            self,
            dataset=Subset(dataset, inner.tolist()),
            labels=None if self.labels is None else self.labels[indices],
            positions=indices if self.positions is None else self.positions[indices],
        )

    def with_labels(self, labels: Any, name: str) -> "Source":
        """The same source with labels that the user gave; ``None`` gives none."""
        if labels is None:
            return self
        array = as_labels(labels, len(self))
        if array is None:
            raise DatasetError(
                f"`{name}` must hold one integer for each of {len(self)} examples, got a {type(labels).__name__} that "
                "does not."
            )
        return replace(self, labels=array)

    def examples(self, task: int = 0) -> Examples:
        """What a partitioner may ask about this set; the data is read only if the labels are stored nowhere."""
        labels = self.labels if self.labels is not None else stored_labels(self.dataset)
        return Examples(
            len(self),
            labels=(lambda: find_labels(self.dataset)) if labels is None else labels,
            domains=lambda: find_domains(self.dataset),
            positions=self.positions,
            task=task,
        )

    def batching(self, default: Batching) -> Batching:
        """What the lender says, else ``default``."""
        lender = self.lender
        if lender is None:
            return default
        assert lender.batch_size is not None  # `as_source` refuses such a lender
        return Batching(
            batch_size=lender.batch_size,
            collate_fn=lender.collate_fn,
            num_workers=lender.num_workers,
            drop_last=lender.drop_last,
        )


def as_sources(items: Sequence[Any], name: str) -> tuple[Source, ...]:
    """Make sources of what the user gave.

    Args:
        items: Map-style datasets, or DataLoaders, which lend dataset and batching.
        name: How error messages call the list.

    Raises:
        DatasetError: If there is none, or one cannot be shared among clients; see :func:`as_source`.
    """
    if not isinstance(items, list | tuple) or not items:
        raise DatasetError(f"`{name}` must be a list with one dataset per task, got {type(items).__name__}.")
    return tuple(as_source(item, f"{name}[{number}]") for number, item in enumerate(items))


def as_source(item: Any, name: str) -> Source:
    """Make a source of one dataset or DataLoader.

    Raises:
        DatasetError: If the dataset is iterable-style or empty, or a DataLoader draws its batches by a sampler of its
            own.
    """
    if isinstance(item, Source):
        return item
    lender = item if isinstance(item, DataLoader) else None
    dataset = item if lender is None else lender.dataset
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DatasetError(
            f"`{name}` must be a map-style dataset (`__len__` and `__getitem__`), got {type(dataset).__name__}. "
            "Examples need numbers to be shared among clients: read an iterable into a list first."
        )
    if len(dataset) == 0:
        raise DatasetError(f"`{name}` must hold at least one example, got an empty {type(dataset).__name__}.")
    if lender is not None and (
        lender.batch_size is None or type(lender.sampler) not in (RandomSampler, SequentialSampler)
    ):
        raise DatasetError(
            f"`{name}` must be a DataLoader with a batch size and no sampler of its own, got "
            f"batch_size={lender.batch_size} and {type(lender.sampler).__name__}. Each client draws from its own part, "
            "so give the dataset instead."
        )
    return Source(dataset=dataset, lender=lender)
