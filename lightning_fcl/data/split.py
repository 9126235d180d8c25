"""Run a partitioner by name or object, check what it says, and repair clients that have too little."""

import heapq
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from lightning_fcl.data.dirichlet import ExtendedDirichlet, LabelDirichlet, QuantityDirichlet
from lightning_fcl.data.labels import IntArray
from lightning_fcl.data.partition import IID, ByDomain, Examples, Partitioner, Shards, check_at_least
from lightning_fcl.exceptions import DatasetError

Partition: TypeAlias = str | Partitioner | Callable[[Examples, int, np.random.Generator], IntArray]

PARTITIONERS: dict[str, type[Partitioner]] = {
    "by_domain": ByDomain,
    "extended_dirichlet": ExtendedDirichlet,
    "iid": IID,
    "label_dirichlet": LabelDirichlet,
    "quantity_dirichlet": QuantityDirichlet,
    "shards": Shards,
}


def partitioner(partition: Partition) -> Callable[[Examples, int, np.random.Generator], IntArray]:
    """The partitioner behind a name, with its defaults; objects and functions come back as they are.

    Raises:
        ValueError: If the name is unknown or the object cannot be called.
    """
    if isinstance(partition, str) and partition in PARTITIONERS:
        return PARTITIONERS[partition]()
    if callable(partition) and not isinstance(partition, type):
        return partition
    raise ValueError(
        f"`partition` must be one of {', '.join(map(repr, PARTITIONERS))}, or an object such as "
        f"`LabelDirichlet(alpha=0.1)` or `NaturalClients(ids)`, got {partition!r}."
    )


def split(examples: Examples, partition: Partition, clients: int, *, seed: int = 0) -> tuple[tuple[IntArray, ...], int]:
    """Share one training set among the clients.

    Args:
        examples: The training set.
        partition: Name or partitioner.
        clients: Number of clients K.
        seed: Seeds the draw, together with the task's number. NumPy's global generator is neither read nor changed.

    Returns:
        The sorted indices of each client (K arrays, int64; disjoint, and together all of the set), and how many
        examples the repair moved.

    Raises:
        DatasetError: If there are not enough examples for all clients, or the partitioner's answer is no partition.

    Example:
        >>> parts, moved = split(Examples(5), "iid", 2)
        >>> [len(part) for part in parts], moved
        ([3, 2], 0)
    """
    check_at_least("clients", clients, 1)
    draw = partitioner(partition)
    least = int(getattr(draw, "min_examples", 1))
    check_at_least("min_examples", least, 0)
    if len(examples) < max(1, clients * least):
        raise DatasetError(
            f"`train[{examples.task}]` must hold at least `clients` x `min_examples` = {max(1, clients * least)} "
            f"examples, got {len(examples)}. Use fewer clients or a smaller `min_examples`."
        )
    rng = np.random.default_rng([seed, examples.task])
    owner = _checked(draw(examples, clients, rng), len(examples), clients, draw)
    moved = repair(owner, clients, least, rng)
    order = np.argsort(owner, kind="stable")
    stops = np.cumsum(np.bincount(owner, minlength=clients)).tolist()
    return tuple(order[start:stop] for start, stop in pairwise([0, *stops])), moved


def repair(owner: IntArray, clients: int, least: int, rng: np.random.Generator) -> int:
    """Move examples, one at a time, from the largest client to those below ``least``, in place.

    Ends after at most ``clients * least`` moves: while one client lacks examples, the largest has some to spare.

    Args:
        owner: Client of each example, shape ``(N,)``; N is at least ``clients * least``.
        clients: Number of clients.
        least: Fewest examples per client.
        rng: Chooses which examples move.

    Returns:
        How many examples moved.
    """
    counts = np.bincount(owner, minlength=clients)
    missing = np.maximum(least - counts, 0)
    heap = [(-int(count), client) for client, count in enumerate(counts) if count > least]
    heapq.heapify(heap)
    spare: dict[int, list[int]] = {}
    for client in np.repeat(np.arange(clients), missing):
        count, donor = heap[0]
        if donor not in spare:
            spare[donor] = rng.permutation(np.flatnonzero(owner == donor)).tolist()
        owner[spare[donor].pop()] = client
        heapq.heapreplace(heap, (count + 1, donor))
    return int(missing.sum())


def _checked(owner: IntArray, size: int, clients: int, draw: object) -> IntArray:
    owner = np.array(owner)  # a copy: the repair writes into it
    if owner.shape != (size,) or owner.dtype.kind not in "iu":
        raise DatasetError(
            f"`partition` must give one client number per example, shape ({size},), got {owner.dtype} of shape "
            f"{owner.shape} from {draw!r}."
        )
    if owner.min() < 0 or owner.max() >= clients:
        raise DatasetError(
            f"`partition` must give client numbers from 0 to {clients - 1}, got {owner.min()} to {owner.max()} from "
            f"{draw!r}. Is `clients` too small?"
        )
    return owner.astype(np.int64)
