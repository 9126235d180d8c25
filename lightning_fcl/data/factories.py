"""Streams that a configuration file can name: one call from plain values to a TaskStream."""

from collections.abc import Sequence
from typing import Any, Literal

from torch.utils.data import ConcatDataset

from lightning_fcl.data.digits import digit_domains
from lightning_fcl.data.dirichlet import ExtendedDirichlet, LabelDirichlet
from lightning_fcl.data.images import load_images
from lightning_fcl.data.partition import ByDomain, NaturalClients
from lightning_fcl.data.split import Partition
from lightning_fcl.data.stream import TaskStream
from lightning_fcl.exceptions import DatasetError


def digit_stream(
    clients: int = 8,
    *,
    partition: Partition = "label_dirichlet",
    batch_size: int = 32,
    seed: int = 0,
    domains: Sequence[str] = ("clean", "inverted", "turned", "textured"),
    size: int = 16,
    channels: int = 1,
    schedule: Literal["hom", "het"] = "hom",
    lag: float = 0.0,
) -> TaskStream:
    """Real digits in several domains as a stream, offline: :func:`digit_domains`, shared among clients.

    Args:
        clients: Number of clients.
        partition: How each domain is shared, as in :meth:`TaskStream.from_datasets`.
        batch_size: Examples per batch.
        seed: Seeds the images' split and backgrounds, and the partition.
        domains: The domains, in the order of the tasks.
        size: Height and width of the images in pixels.
        channels: 1, or 3 equal ones.
        schedule: Who trains on what when, as in :meth:`TaskStream.stages`.
        lag: Share of the clients, in [0, 1), that are one stage behind.

    Returns:
        One task per domain.

    Raises:
        ValueError: If a domain is unknown or a number is out of range.
        DatasetError: If the data cannot be shared as asked.
        MissingExtraError: If scikit-learn is not installed (extra ``recipes``).
    """
    data = digit_domains(domains, size=size, channels=channels, seed=seed)
    stream = TaskStream.domains(data, clients=clients, partition=partition, batch_size=batch_size, seed=seed)
    return stream.stages(schedule, lag=lag)


def image_stream(
    path: str | None = None,
    clients: int = 20,
    *,
    alpha: float = 0.1,
    shift: Literal["label", "domain", "natural"] = "label",
    tasks: int = 1,
    batch_size: int = 128,
    seed: int = 0,
    size: int = 28,
    limit: int | None = None,
    drop_last: bool = False,
) -> TaskStream:
    """One image set over clients that lack classes: :func:`load_images`, as one task or class by class.

    Args:
        path: Folder of the set; ``None`` for scikit-learn's digits.
        clients: Number of clients; ``"natural"`` has its own.
        alpha: Dirichlet concentration of each class over the clients.
        shift: ``"label"``: classes are shared by Dirichlet draws. ``"domain"``: digits seen in four ways; each client
            has one of them, and 3 classes of it (more, where few clients must hold all). ``"natural"``: the clients
            that the set knows.
        tasks: Number of tasks, each with its own classes.
        batch_size: Examples per batch.
        seed: Seeds the split of the digits and the partition.
        size: Height and width of the images in pixels.
        limit: Most images for training.
        drop_last: As in :class:`TaskStream`; for nets with BatchNorm.

    Returns:
        The stream.

    Raises:
        ValueError: If a number is out of range.
        DatasetError: If the folder holds no known set, or one without natural clients.
        MissingExtraError: If scikit-learn or Pillow is needed and not installed (extra ``recipes``).
    """
    options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "eval_batch_size": 500, "drop_last": drop_last}
    if shift == "domain":
        train, test = zip(*digit_domains(size=size, seed=seed).values(), strict=True)
        held = max(3, -(-10 // max(1, clients // len(train))))  # else few clients could not hold all ten
        parts = ByDomain(within=ExtendedDirichlet(min(held, 10), alpha=alpha), min_examples=2)
        joined: list[Any] = [[ConcatDataset(sets)] for sets in (train, test)]
        return TaskStream.from_datasets(*joined, clients=clients, partition=parts, names=["digits"], **options)
    sets = load_images(path, size=size, limit=limit, seed=seed)
    partition: Partition = LabelDirichlet(alpha, min_examples=2)
    if shift == "natural":
        if sets.owners is None:
            raise DatasetError(f"`shift='natural'` needs a set that knows its clients, got {path!r}. Use Omniglot.")
        partition, clients = NaturalClients(sets.owners.tolist()), int(sets.owners.max()) + 1
    if tasks > 1:
        return TaskStream.split_classes(
            sets.train, sets.test, tasks=tasks, clients=clients, partition=partition, **options
        )
    return TaskStream.from_datasets(
        [sets.train], [sets.test], clients=clients, partition=partition, names=["images"], **options
    )
