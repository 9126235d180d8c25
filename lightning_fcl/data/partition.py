"""What a partitioner is, and the partitioners that draw no shares: even, by shards, by domain, by natural ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_fcl.data.labels import IntArray
from lightning_fcl.exceptions import DatasetError


class Examples:
    """What a partitioner may ask about one training set.

    Labels and domains are looked up when first asked for, so that a partition that needs none works on any data.

    Args:
        size: Number of examples N.
        labels: Class numbers, shape ``(N,)``, or a function that finds them.
        domains: Domain numbers, shape ``(N,)``, or a function that finds them.
        positions: Position of each example in the dataset that the user gave, shape ``(N,)``; by default 0 to N - 1.
        task: Number of the training set, counted from 0.
    """

    def __init__(
        self,
        size: int,
        *,
        labels: IntArray | Callable[[], IntArray] | None = None,
        domains: IntArray | Callable[[], IntArray] | None = None,
        positions: IntArray | None = None,
        task: int = 0,
    ) -> None:
        self.size = size
        self.task = task
        self.positions = np.arange(size) if positions is None else positions
        self._labels = labels
        self._domains = domains

    def __len__(self) -> int:
        return self.size

    @property
    def labels(self) -> IntArray:
        """Class numbers, shape ``(N,)``, int64."""
        self._labels = _look_up(self._labels, "labels")
        return self._labels

    @property
    def domains(self) -> IntArray:
        """Domain numbers, shape ``(N,)``, int64."""
        self._domains = _look_up(self._domains, "domains")
        return self._domains

    @property
    def known_labels(self) -> IntArray | None:
        """The labels if they are at hand: given, or looked up before."""
        return None if callable(self._labels) else self._labels

    def take(self, indices: IntArray) -> "Examples":
        """The same questions about some of the examples only."""
        return Examples(
            len(indices),
            labels=lambda: self.labels[indices],
            domains=lambda: self.domains[indices],
            positions=self.positions[indices],
            task=self.task,
        )


class Partitioner(ABC):
    """Says which client owns which example.

    A partition is one owner per example, so it is disjoint and covers all by construction. Subclass this for the
    command line's ``class_path``; any function of the same signature works as well.
    """

    min_examples: int = 1

    @abstractmethod
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        """Draw the owners.

        Args:
            examples: The training set.
            clients: Number of clients K.
            rng: The only source of randomness.

        Returns:
            Client of each example, shape ``(N,)``, int64, from 0 to K - 1.
        """


@dataclass(frozen=True)
class IID(Partitioner):
    """Equal shares at random; sizes differ by at most one.

    Args:
        min_examples: Fewest examples per client.
    """

    _: KW_ONLY
    min_examples: int = 1

    @override
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        return rng.permutation(np.arange(len(examples)) % clients)


@dataclass(frozen=True)
class Shards(Partitioner):
    """Sort by label, cut into equal shards, deal the same number of shards to each client.

    Args:
        shards_per_client: Shards that each client gets; with one, most clients see one class.
        min_examples: Fewest examples per client.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    sec. 3 (https://arxiv.org/abs/1602.05629).

    Deviation: None. (Examples of one class are shuffled before they are cut.)
    """

    shards_per_client: int = 2
    _: KW_ONLY
    min_examples: int = 1

    def __post_init__(self) -> None:
        check_at_least("shards_per_client", self.shards_per_client, 1)

    @override
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        shuffled = rng.permutation(len(examples))
        by_label = shuffled[np.argsort(examples.labels[shuffled], kind="stable")]
        shards = clients * self.shards_per_client
        shard_owner = rng.permutation(np.arange(shards) % clients)
        owner = np.empty(len(examples), dtype=np.int64)
        owner[by_label] = shard_owner[np.arange(len(examples)) * shards // len(examples)]
        return owner


@dataclass(frozen=True)
class ByDomain(Partitioner):
    """Each client holds one domain; with fewer clients than domains, each domain goes to one client.

    Client c holds domain ``c % D``, and the clients of a domain share it by ``within``.

    Args:
        domain_of: Domain number of each example of the only task, or one such list per task; by default the
            dataset's ``.domains``, or the members of a ``ConcatDataset``.
        within: How the clients of one domain share it; by default equal shares at random.
        min_examples: Fewest examples per client.
    """

    domain_of: Sequence[Any] | None = field(default=None, repr=False)
    _: KW_ONLY
    within: Partitioner | None = None
    min_examples: int = 1

    @override
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        domains = examples.domains if self.domain_of is None else ids_of("domain_of", self.domain_of, examples)
        found = np.unique(domains)
        owner = np.empty(len(examples), dtype=np.int64)
        for number, domain in enumerate(found):
            holders = np.arange(number, clients, len(found)) if number < clients else np.array([number % clients])
            members = np.flatnonzero(domains == domain)
            owner[members] = holders[(self.within or IID())(examples.take(members), len(holders), rng)]
        return owner


@dataclass(frozen=True)
class NaturalClients(Partitioner):
    """The clients that the data already has, e.g. one per writer, device or hospital.

    Args:
        client_of: Client number of each example of the only task, from 0 to ``clients`` - 1, or one such list per
            task. Names become numbers by ``np.unique(names, return_inverse=True)[1]``.
        min_examples: Fewest examples per client. A natural client may have no data for a task, so 0 by default.
    """

    client_of: Sequence[Any] = field(repr=False)
    _: KW_ONLY
    min_examples: int = 0

    @override
    def __call__(self, examples: Examples, clients: int, rng: np.random.Generator) -> IntArray:
        return ids_of("client_of", self.client_of, examples)


def check_at_least(name: str, value: float, low: float) -> None:
    """Raise unless ``value >= low``; NaN fails too."""
    if not value >= low:
        raise ValueError(f"`{name}` must be at least {low}, got {value}.")


def ids_of(name: str, ids: Sequence[Any], examples: Examples) -> IntArray:
    """The given ids of these examples: ``ids`` is one list for the only task, or one list per task."""
    nested = len(ids) > 0 and np.ndim(ids[0]) > 0
    if nested and examples.task >= len(ids):
        raise DatasetError(f"`{name}` must hold one list per task, got {len(ids)} lists and no list {examples.task}.")
    array = np.asarray(ids[examples.task] if nested else ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DatasetError(f"`{name}` must hold one integer per example, got {array.dtype} of shape {array.shape}.")
    top = int(examples.positions.max(initial=-1))
    if top >= len(array):
        raise DatasetError(f"`{name}` must hold one id per example, got {len(array)} ids for {top + 1} examples.")
    return array[examples.positions].astype(np.int64)


def _look_up(values: IntArray | Callable[[], IntArray] | None, name: str) -> IntArray:
    if values is None:
        raise DatasetError(f"This partition needs `{name}` of the examples, and none are known. Pass `{name}=`.")
    return values() if callable(values) else values
