"""Peak memory against the number of virtual clients, each size in a process of its own.

    python recipes/bench/memory.py --out docs/results/bench_memory.json

Every client has 64 examples that are made when they are asked for, and keeps an EWC state between rounds. Memory for
preloaded examples and for client states is held at 2 MiB each, which ten clients fill already; the rest is on disk.
Prints the peak resident memory of each process and what the run added to the process before it.
"""

import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fcl._recipes import save_bench

EXAMPLES = 64


class MadeOnDemand(Dataset[tuple[Tensor, int]]):
    """Images that depend on their index alone and are stored nowhere."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 28, 28, generator=generator), index % 10


def peak_kib() -> int:
    """Largest resident memory of this process so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(clients: int, rounds: int, answers: Any) -> None:
    """Train in this process and report its peak."""
    from lightning_fcl import EWC, FederatedTrainer, TaskStream
    from lightning_fcl.models import ImageClassifier, LeNet

    torch.set_num_threads(1)
    stream = TaskStream.from_datasets([MadeOnDemand(clients * EXAMPLES)], [MadeOnDemand(256)], clients=clients)
    module = ImageClassifier(LeNet(num_classes=10, in_channels=1), lr=0.05)
    before, started = peak_kib(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            rounds=rounds,
            clients_per_round=10,
            callbacks=[EWC(1.0, num_samples=8)],
            accelerator="cpu",
            devices=1,
            run_dir=folder,
            preload_mb=2,
            client_state_mb=2,
            enable_progress_bar=False,
            measure_baseline=False,
        )
        trainer.fit(module, stream)
        states = sum(p.stat().st_size for p in Path(folder, "clients").rglob("*.safetensors"))
    answers.put(
        {
            "case": f"{clients} clients",
            "peak_mib": peak_kib() / 1024,
            "added_mib": (peak_kib() - before) / 1024,
            "client_states_on_disk_mib": states / 2**20,
            "seconds": time.perf_counter() - started,
        }
    )


def main(clients: tuple[int, ...] = (10, 100, 1000), rounds: int = 5, out: Path | None = None) -> dict[str, Any]:
    """Measure peak memory at several numbers of clients.

    Args:
        clients: Numbers of virtual clients.
        rounds: Training rounds; a boundary pass over all clients follows.
        out: JSON file for the figures.
    """
    context, rows = multiprocessing.get_context("spawn"), []
    for count in clients:
        answers = context.SimpleQueue()
        process = context.Process(target=run, args=(count, rounds, answers))
        process.start()
        process.join()
        rows.append(row := answers.get())
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else value for key, value in row.items()))
    growth = rows[-1]["peak_mib"] / rows[0]["peak_mib"] - 1
    print(f"peak at {clients[-1]} clients is {growth:+.1%} of that at {clients[0]}")
    return save_bench(rows, f"python recipes/bench/memory.py --rounds {rounds}", out, growth=growth)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
