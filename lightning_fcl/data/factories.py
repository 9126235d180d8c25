"""Streams that a configuration file can name: one call from plain values to a TaskStream."""

from collections.abc import Sequence
from typing import Literal

from lightning_fcl.data.digits import digit_domains
from lightning_fcl.data.split import Partition
from lightning_fcl.data.stream import TaskStream


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
