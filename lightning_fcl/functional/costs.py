"""What a federated run costs, by arithmetic: bytes that travel, seconds on a link, bytes of memory."""

import math
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes that travel.

    Args:
        down: From the server to the clients.
        up: From the clients to the server.
    """

    down: int
    up: int


class LinkSeconds(NamedTuple):
    """Seconds that a run spends on sending, if nothing else takes time.

    Args:
        client: If each client has a link of this speed and the server's is not the limit.
        server: If all that travels passes one link of this speed, the server's.
    """

    client: float
    server: float


class ShardedMemory(NamedTuple):
    """Bytes on one rank; activations come on top.

    Args:
        weights: Frozen and trained ones.
        gradients: Of the trained ones.
        optimizer: Its state, with a master copy of the weights where there is one.
    """

    weights: int
    gradients: int
    optimizer: int


def run_traffic(payload: Traffic, clients: int, rounds: int) -> Traffic:
    """Payload times clients times rounds.

    Args:
        payload: Of one client in one round, bytes.
        clients: Clients per round.
        rounds: Rounds.

    Returns:
        Bytes of all clients in all rounds.

    Raises:
        ValueError: If a number is negative.

    Example:
        >>> run_traffic(Traffic(down=1000, up=1010), clients=5, rounds=10)
        Traffic(down=50000, up=50500)
    """
    _check_counts(down=payload.down, up=payload.up, clients=clients, rounds=rounds)
    return Traffic(payload.down * clients * rounds, payload.up * clients * rounds)


def link_seconds(payload: Traffic, clients: int, rounds: int, mbit: float) -> LinkSeconds:
    """How long :func:`run_traffic` takes on links of a given speed, used in one direction at a time.

    Args:
        payload: Of one client in one round, bytes.
        clients: Clients per round.
        rounds: Rounds.
        mbit: Speed in megabits (:math:`10^6` bits) per second.

    Returns:
        Seconds for all rounds.

    Raises:
        ValueError: If a number is negative, or ``mbit`` is not positive.

    Example:
        >>> link_seconds(Traffic(down=1_000_000, up=250_000), clients=5, rounds=10, mbit=100)
        LinkSeconds(client=1.0, server=5.0)
    """
    _check_counts(down=payload.down, up=payload.up, clients=clients, rounds=rounds)
    if not 0 < mbit < math.inf:
        raise ValueError(f"`mbit` must be a positive speed in megabits per second, got {mbit}.")
    one = 8 * sum(payload) * rounds / (1e6 * mbit)
    return LinkSeconds(client=one, server=one * clients)


def exact_mean_bytes(size: int, itemsize: int, clients: int, *, slab: int = 8) -> int:
    """Peak memory of the exact mean of client updates along a binary tree, one process.

    Three vectors (the global weights, the client's update, one to unpack into), a slab of rows, and one float64 node
    for each level of the tree that is waiting for its sibling.

    Args:
        size: Elements of the flat vector.
        itemsize: Bytes of an element.
        clients: Clients per round.
        slab: Rows that are summed at once.

    Returns:
        Bytes. They grow with the logarithm of the number of clients.

    Raises:
        ValueError: If a number is negative, or there is no client.

    Example:
        >>> exact_mean_bytes(1000, 4, clients=8), exact_mean_bytes(1000, 4, clients=1000)
        (52000, 100000)
    """
    _check_counts(size=size, itemsize=itemsize, clients=clients - 1)
    levels = math.ceil(clients / slab).bit_length()
    return size * (itemsize * (3 + slab) + 8 * levels)


def sharded_memory(
    frozen: int, trained: int, gradients: int, optimizer: int, *, stage: int, devices: int
) -> ShardedMemory:
    """Bytes on one rank if weights, gradients and optimiser state are cut over ranks as ZeRO does.

    Args:
        frozen: Bytes of the weights that are not trained.
        trained: Bytes of those that are.
        gradients: Bytes of their gradients.
        optimizer: Bytes of the optimiser's state; 12 per trained weight for Adam in mixed precision (float32 weights
            and two moments).
        stage: 0 cuts nothing, 1 the optimiser's state, 2 gradients too, 3 weights too.
        devices: Ranks.

    Raises:
        ValueError: If a number is negative, there is no device, or the stage is unknown.

    Example:
        >>> sharded_memory(1000, 40, 40, 240, stage=2, devices=4)
        ShardedMemory(weights=1040, gradients=10, optimizer=60)

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    sec. 3.1 and 5 (https://arxiv.org/abs/1910.02054).

    Deviation: without the buffers in which DeepSpeed gathers.
    """
    _check_counts(frozen=frozen, trained=trained, gradients=gradients, optimizer=optimizer, devices=devices - 1)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"`stage` must be 0, 1, 2 or 3, got {stage!r}.")
    share = [-(-count // (devices if cut else 1)) for count, cut in
             ((frozen + trained, stage == 3), (gradients, stage >= 2), (optimizer, stage >= 1))]  # fmt: skip
    return ShardedMemory(*share)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            least = "at least 1" if name in ("devices",) else "not negative"
            raise ValueError(f"`{name}` must be {least}, got {count}.")
