"""The server's primitives against what one would write by hand: exact mean, cosine filter, saving a checkpoint.

    python recipes/bench/server.py --out docs/results/bench_server.json     # ten updates of ten million parameters

- ``exact mean``: the float64 tree sum of ``FedAvg`` as updates arrive, against reading the updates once (a dot product)
  and against one float32 matrix-vector product, which is what exactness costs.
- ``cosine filter``: ``TSGA`` as updates arrive, against the same filter on dicts of tensors in plain PyTorch. Scores
  must agree with float64 ones to 1e-6, or the command fails.
- ``checkpoint``: tensors to disk with fsync, with and without a hash, against ``torch.save`` with fsync and no hash.

One thread; in turns; ratios of wall and CPU seconds.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.nn import functional as F

from lightning_fcl import TSGA, FedAvg
from lightning_fcl._recipes import save_bench
from lightning_fcl.aggregators import Reducer, RoundStats
from lightning_fcl.serialize import write_tensors

TENSORS = 60  # a model's tensors, for what works on dicts
THRESHOLD = 0.3
HASH = ("with", "without")


def make_updates(clients: int, size: int) -> Tensor:
    """Updates with a shared direction; every fifth has it reversed."""
    shared, rows = torch.randn(size), torch.empty(clients, size)
    for client in range(clients):
        rows[client].normal_().mul_(0.5).add_(shared, alpha=1.0 if client % 5 else -1.0)
    return rows


def as_dicts(rows: Tensor) -> list[dict[str, Tensor]]:
    """The same updates as dicts of tensors."""
    cuts = [rows.shape[1] * i // TENSORS for i in range(TENSORS + 1)]
    return [{f"layer{i}": row[cuts[i] : cuts[i + 1]] for i in range(TENSORS)} for row in rows]


def streamed(reducer: Reducer, rows: Tensor) -> Callable[[], Tensor]:
    """A round's merge as the loop calls it."""
    clients, size = rows.shape
    reference, examples = torch.zeros(size), (10.0,) * clients
    facts: dict[str, Any] = {"task": 0, "round": 0, "num_tasks": 1, "num_params": size, "total_clients": clients}
    stats = RoundStats(clients=tuple(range(clients)), num_examples=examples, **facts)
    reducer.prepare({"weights": slice(0, size)})

    def run() -> Tensor:
        reducer.start(reference, clients, range(clients))
        for position, row in enumerate(rows):
            reducer.add(position, row, examples[position])
        return reducer.merge(lambda nodes, like=None: dict(nodes), stats)

    return run


def cosine_filter(updates: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What one would write: flatten, normalise, mean, cosine, mean of those that pass."""
    flat = [torch.cat([tensor.reshape(-1) for tensor in update.values()]) for update in updates]
    direction = torch.stack([row / row.norm() for row in flat]).mean(0)
    scores = torch.stack([F.cosine_similarity(row, direction, dim=0) for row in flat])
    kept = [update for update, score in zip(updates, scores, strict=True) if score >= THRESHOLD]
    return {name: sum((update[name] for update in kept), torch.zeros(())) / len(kept) for name in kept[0]}


def exact_scores(rows: Tensor) -> Tensor:
    """The filter's scores in float64."""
    norms = torch.stack([row.double().norm() for row in rows])
    direction = torch.zeros(rows.shape[1], dtype=torch.float64)
    for row, norm in zip(rows, norms, strict=True):
        direction += row.double() / norm
    scores: Tensor = torch.stack([row.double().dot(direction) for row in rows]) / norms / direction.norm()
    return scores


def in_turns(runs: dict[str, Callable[[], Any]], pairs: int) -> dict[str, tuple[list[float], list[float]]]:
    """Wall and CPU seconds of each, one after another, after one uncounted turn."""
    took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    for turn in range(pairs + 1):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if turn:
                took[name][0].append(time.perf_counter() - wall)
                took[name][1].append(time.process_time() - cpu)
    return took


def row_of(case: str, goal: str, slow: Any, fast: Any) -> dict[str, Any]:
    """Ratios slow / fast of each turn."""
    row: dict[str, Any] = {"case": case}
    for name, first, second in zip(("wall", "CPU"), slow, fast, strict=True):
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        row[name] = [min(ratios), statistics.median(ratios), max(ratios)]
    print(f"{case:55}", *(f"{name} {row[name][1]:.2f}" for name in ("wall", "CPU")), f"goal {goal}", sep="   ")
    return {**row, "goal": goal}


def merges(clients: int, size: int, pairs: int) -> list[dict[str, Any]]:
    """The mean and the filter."""
    rows = make_updates(clients, size)
    dicts, weights, flat = as_dicts(rows), torch.full((clients,), 1 / clients), rows.view(-1)
    tsga = TSGA(THRESHOLD)
    runs: dict[str, Callable[[], Any]] = {"read": lambda: flat.dot(flat), "mv": lambda: torch.mv(rows.t(), weights)}
    runs |= {"mean": streamed(FedAvg(), rows), "filter": streamed(tsga, rows), "dicts": lambda: cosine_filter(dicts)}
    took = in_turns(runs, pairs)
    assert tsga.result is not None
    error = (tsga.result.scores - exact_scores(rows)).abs().max().item()
    if error > 1e-6:
        raise SystemExit(f"the cosine filter's scores are off by {error:.1e}")
    return [
        row_of("exact mean: share of read bandwidth", ">= 0.5", took["read"], took["mean"]),
        row_of("one float32 matrix-vector product / exact mean", "-", took["mv"], took["mean"]),
        row_of("cosine filter on dicts of tensors / TSGA", ">= 12", took["dicts"], took["filter"]),
    ]


def saving(size: int, pairs: int) -> list[dict[str, Any]]:
    """A checkpoint of a hundred tensors, with and without the hash that finds a flipped bit."""
    tensors = {f"layer{i}": torch.randn(size // 100) for i in range(100)}
    with tempfile.TemporaryDirectory() as folder:

        def plain() -> None:
            with Path(folder, "plain.pt").open("wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        target = Path(folder, "ours.safetensors")
        runs: dict[str, Callable[[], Any]] = {"torch.save": plain}
        runs |= {f"{what} SHA-256": partial(write_tensors, target, tensors, digest=what == "with") for what in HASH}
        took = in_turns(runs, pairs)
    name = f"torch.save / checkpoint of {4 * size / 1e6:.0f} MB"
    return [row_of(f"{name}, {run}", ">= 1.4", took["torch.save"], took[run]) for run in list(runs)[1:]]


def main(
    clients: int = 10, size: int = 10_000_000, saved: int = 50_000_000, pairs: int = 5, out: Path | None = None
) -> dict[str, Any]:
    """Measure the server's primitives.

    Args:
        clients: Updates of a round.
        size: Parameters of an update.
        saved: Parameters of the checkpoint.
        pairs: Turns.
        out: JSON file for the figures.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [*merges(clients, size, pairs), *saving(saved, pairs)]
    command = f"python recipes/bench/server.py --clients {clients} --size {size} --pairs {pairs}"
    return save_bench(rows, command, out)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
