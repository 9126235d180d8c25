"""Every random stream of a run derives from (seed, purpose, task, round, client)."""

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, *path: str | int) -> int:
    """A 32-bit seed from the run's seed and a path of labels, stable across machines and versions.

    Args:
        seed: The run's seed.
        path: What the stream is for, e.g. ``"client", task, round, client``.

    Returns:
        An integer in ``[0, 2**32)``; different paths give independent streams.

    Example:
        >>> derive_seed(0, "client", 0, 0, 3) == derive_seed(0, "client", 0, 0, 3)
        True
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def client_seed(seed: int, task: int, round: int, client: int) -> int:
    """Seed of one client job: ``seed_everything(client_seed(...))`` before ``Trainer.fit`` gives the same draws.

    Args:
        seed: The run's seed.
        task: Task of the job, from 0.
        round: Round inside the task, from 0; the boundary pass is round ``rounds``.
        client: Client id.

    Returns:
        An integer in ``[0, 2**32)``.
    """
    return derive_seed(seed, "client", task, round, client)


def sample_clients(available: list[int], count: int, seed: int, task: int, round: int) -> list[int]:
    """Draw the clients of one round uniformly without replacement.

    Args:
        available: Ids of the clients with data of the task.
        count: How many to draw; all of them if there are fewer.
        seed: The run's seed.
        task: Task, from 0.
        round: Round inside the task, from 0.

    Returns:
        The drawn ids in ascending order.
    """
    stream = random.Random(derive_seed(seed, "sample", task, round))
    return sorted(stream.sample(sorted(available), min(count, len(available))))


def seed_generators(seed: int) -> None:
    """What ``lightning.seed_everything(seed)`` draws from, without its environment variables.

    ``torch.manual_seed`` would also queue a call with a stack trace for every kind of device that was never started,
    which costs more than a small client's forward pass.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
