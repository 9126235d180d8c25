"""A client's batches: a plain DataLoader, over preloaded tensors where that changes nothing."""

import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_fcl.data.stream import TaskStream
from lightning_fcl.serialize import tree_bytes

_LOOKS = 3  # examples fetched twice to see whether they stay the same


class Preloaded(Dataset[Any]):
    """A client's examples as one tensor per field; a batch is one indexing call.

    Args:
        columns: One tensor per field of an example, each of length ``N``.
    """

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self.columns = list(columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def targets(self) -> Tensor:
        """The last field, where the label stands if there is one."""
        return self.columns[-1]

    def __getitem__(self, index: int) -> Any:
        return [column[index] for column in self.columns]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """A collated batch, as ``default_collate`` would stack it."""
        return self.take(torch.tensor(indices))

    def take(self, indices: Tensor) -> list[Tensor]:
        """The batch of the given examples."""
        return [column.index_select(0, indices) for column in self.columns]


class PreloadedLoader:
    """Yields what ``DataLoader`` would over preloaded examples, from the same draws of torch's global generator.

    A ``DataLoader`` turns a permutation into Python integers, groups them, and opens a profiler range per batch; for a
    client of two batches that costs as much as a tenth of its training.

    Args:
        plain: The loader that it stands for; other attributes are looked up there.
        dataset: Its examples.
    """

    def __init__(self, plain: DataLoader[Any], dataset: Preloaded) -> None:
        self.plain = plain
        self.dataset = dataset
        self.batch_sampler = None
        self._shuffles = isinstance(plain.sampler, RandomSampler)
        self._length = len(plain)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # while being copied
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __len__(self) -> int:
        return self._length

    def draw_order(self) -> Tensor | None:
        """The next epoch's order, from the draws that an epoch makes; ``None``: as the examples lie."""
        torch.empty((), dtype=torch.int64).random_()
        return self._permutation() if self._shuffles else None

    def _permutation(self) -> Tensor:
        generator = torch.Generator()  # RandomSampler seeds one of its own when the first batch is asked for
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return torch.randperm(len(self.dataset), generator=generator)

    def __iter__(self) -> Iterator[list[Tensor]]:
        torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws its workers' base seed when it is opened
        return self._batches()

    def _batches(self) -> Iterator[list[Tensor]]:
        batch_size, batches = self.plain.batch_size, self._length
        assert batch_size is not None
        if not self._shuffles:
            for start in range(0, batches * batch_size, batch_size):
                # Copies: a step may change its batch in place.
                yield [column[start : start + batch_size].clone() for column in self.dataset.columns]
            return
        for indices in torch.split(self._permutation(), batch_size)[:batches]:  # drop_last leaves one fewer
            yield self.dataset.take(indices)


class ShardedBatches(BatchSampler):
    """This rank's contiguous share of every batch of indices.

    Args:
        batches: The global batches; every rank draws the same ones.
        rank: This rank.
        world: Ranks that share a batch.

    Attributes:
        shares: ``(n_local, n_global)`` of the batches handed out and not trained on yet, oldest first; an empty share
            borrows one example with weight 0.
    """

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches = batches
        self.rank = rank
        self.world = world
        self.shares: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.shares.clear()
        for batch in self.batches:
            count = len(batch)
            part = batch[count * self.rank // self.world : count * (self.rank + 1) // self.world]
            self.shares.append((len(part), count))
            yield part or batch[:1]

    def __len__(self) -> int:
        return len(self.batches)


class ClientData:
    """Hands out training loaders and keeps recently used clients' examples as tensors.

    Preloading replaces the dataset only; sampler, batch size and every random draw stay. It happens by a fixed rule:
    the loader uses no worker processes and the default collate function, examples are tuples of tensors or numbers of
    equal shape, fetching them draws nothing from Python's, NumPy's or torch's global generators, and the first ones are
    the same when fetched again (a random augmentation must stay random). Examples that change with something else, such
    as an epoch counter in the dataset, need ``preload_mb=0``.

    Args:
        stream: The task stream.
        budget_bytes: Memory for preloaded examples; the least recently used client goes first. 0 turns it off.
        shard: ``(rank, world)``: which part of every batch to give.
    """

    def __init__(self, stream: TaskStream, budget_bytes: int, shard: tuple[int, int] = (0, 1)) -> None:
        self.stream = stream
        self.budget_bytes = budget_bytes
        self.shard = shard
        self._loaders: OrderedDict[tuple[int, int, bool], tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def loader(self, task: int, client: int, *, whole: bool = False) -> Any:
        """The client's training batches in ``task``; ``whole`` gives every rank all of every batch."""
        key = (task, client, whole)
        if key in self._loaders:
            self._loaders.move_to_end(key)
            return self._loaders[key][0]
        plain = self.stream.train_loader(task, client)
        usable = self.budget_bytes > 0 and _is_plain_loader(plain)
        dataset = preload(plain.dataset, self.budget_bytes) if usable else None
        loader = self._make(plain, dataset, *((0, 1) if whole else self.shard))
        if dataset is not None:
            self._keep(key, loader, tree_bytes(dataset.columns))
        return loader

    def _make(self, plain: DataLoader[Any], dataset: Preloaded | None, rank: int, world: int) -> Any:
        if world == 1:
            return plain if dataset is None else PreloadedLoader(plain, dataset)
        return DataLoader(
            plain.dataset if dataset is None else dataset,
            batch_sampler=ShardedBatches(plain.batch_sampler, rank, world),
            collate_fn=plain.collate_fn if dataset is None else _identity,
            num_workers=plain.num_workers,
        )

    def _keep(self, key: tuple[int, int, bool], loader: Any, size: int) -> None:
        self._loaders[key] = loader, size
        self._bytes += size
        while self._bytes > self.budget_bytes:
            _, (_, old) = self._loaders.popitem(last=False)
            self._bytes -= old


def _is_plain_loader(loader: DataLoader[Any]) -> bool:
    """Whether the loader is what ``TaskStream`` makes without worker processes or a collate function of one's own."""
    return (
        loader.num_workers == 0
        and loader.collate_fn is default_collate
        and loader.batch_size is not None
        and type(loader.sampler) in (RandomSampler, SequentialSampler)
        and loader.generator is None
    )


def preload(dataset: Dataset[Any], budget_bytes: int) -> Preloaded | None:
    """All examples of ``dataset`` as tensors, or ``None`` if that could change what training sees.

    Args:
        dataset: Map-style dataset.
        budget_bytes: Give up if the examples need more than this.

    Returns:
        The examples, or ``None``.
    """
    columns = _tensor_columns(dataset)
    if columns is not None:
        return Preloaded(columns) if tree_bytes(columns) <= budget_bytes else None
    size = len(dataset)  # type: ignore[arg-type]
    before = _generator_states()
    examples = []
    try:
        for index in range(size):
            example = dataset[index]
            if type(example) not in (tuple, list) or not all(_is_plain(f) for f in example):
                return None
            if index == 0 and size * sum(_field_bytes(f) for f in example) > budget_bytes:
                return None
            examples.append(tuple(example))
        again = [dataset[index] for index in range(min(size, _LOOKS))]  # generators of the dataset's own
        if not _same_states(before, _generator_states()) or not _same_examples(examples, again):
            return None
        columns = default_collate(examples)
    except RuntimeError:  # examples of different shapes do not stack
        return None
    finally:
        _restore_states(before)
    return Preloaded(columns)


def _tensor_columns(dataset: Dataset[Any]) -> list[Tensor] | None:
    """Columns of a ``TensorDataset`` seen through any number of ``Subset``s."""
    indices: Tensor | None = None
    while type(dataset) is Subset:  # a subclass may transform what it hands out
        outer = torch.as_tensor(
            list(dataset.indices) if not isinstance(dataset.indices, np.ndarray) else dataset.indices
        )
        indices = outer if indices is None else outer[indices]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    return [t if indices is None else t[indices] for t in dataset.tensors]


def _same_examples(first: Sequence[Any], again: Sequence[Any]) -> bool:
    pairs = [pair for a, b in zip(first, again, strict=False) for pair in zip(a, b, strict=True)]
    return all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs)


def _is_plain(field: Any) -> bool:
    return isinstance(field, Tensor | int | float | np.ndarray | np.generic)


def _field_bytes(field: Any) -> int:
    return field.numel() * field.element_size() if isinstance(field, Tensor) else int(getattr(field, "nbytes", 8))


def _generator_states() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _same_states(a: tuple[Any, Any, Tensor], b: tuple[Any, Any, Tensor]) -> bool:
    numpy_same = all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
    return a[0] == b[0] and numpy_same and torch.equal(a[2], b[2])


def _restore_states(states: tuple[Any, Any, Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _identity(batch: Any) -> Any:
    return batch
