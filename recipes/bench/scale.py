"""What grows with the number of virtual clients, each number in a process of its own.

    python recipes/bench/scale.py --out docs/results/bench_scale.json
    python recipes/bench/scale.py --clients "[10, 1000]" --rounds 5

Ten clients train in a round, whatever their number. Each has 4 examples that are made when they are asked for, and
keeps a SCAFFOLD variate between rounds, in memory up to 2 MiB and on disk beyond. Prints, for each number of clients:
seconds to share the data and to start and end a run, the median round after the first, what stream and run added to the
process's peak of resident memory, bytes on disk (the plan, the newest commit and the clients' states among them), and
bytes sent beside those that the doctor foretold.
"""

import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fcl._recipes import save_bench

EXAMPLES, COHORT = 4, 10


class MadeOnDemand(Dataset[tuple[Tensor, int]]):
    """Vectors that depend on their index alone and are stored nowhere."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), index % 10


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(clients: int, rounds: int, answers: Any) -> None:
    """Share data, ask the doctor, train, and report."""
    from lightning_fcl import SCAFFOLD, FederatedTrainer, TaskStream
    from lightning_fcl.doctor import diagnose
    from lightning_fcl.models import ImageClassifier

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = ImageClassifier(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), lr=0.05)

    def trainer(folder: str, **options: Any) -> FederatedTrainer:
        return FederatedTrainer(
            clients_per_round=COHORT, callbacks=[SCAFFOLD()], accelerator="cpu", devices=1, run_dir=folder,
            client_state_mb=2, preload_mb=2, enable_progress_bar=False, measure_baseline=False, **options,
        )  # fmt: skip

    few = TaskStream.from_datasets([MadeOnDemand(40)], [MadeOnDemand(64)], clients=10)
    with tempfile.TemporaryDirectory() as folder:
        trainer(folder, rounds=2).fit(module, few)  # what the first round ever wakes is no matter of scale
    before, started = peak_mib(), time.perf_counter()
    stream = TaskStream.from_datasets([MadeOnDemand(clients * EXAMPLES)], [MadeOnDemand(64)], clients=clients)
    shared = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer(folder, rounds=rounds)
        report = whole.fit(module, stream)
        timing = Path(folder, "timing.csv").read_text().splitlines()
        place = timing[0].split(",").index("seconds")
        seconds = [float(line.split(",")[place]) for line in timing[1:]]
        grown, commit = peak_mib() - before, sorted(Path(folder, "checkpoints").iterdir())[-1]
        summary = {
            "seconds to start": shared + report.wall_seconds - sum(seconds),
            "ms per round": 1000 * statistics.median(seconds[1:]),
            "added MiB": grown,
            "MB on disk": folder_bytes(Path(folder)) / 1e6,
            "plan MB": Path(folder, "plan.json").stat().st_size / 1e6,
            "commit MB": folder_bytes(commit) / 1e6,
            "states MB": folder_bytes(Path(folder, "clients")) / 1e6,
        }
    numbers = diagnose(trainer("never written", rounds=rounds), module, stream).numbers
    summary["MB sent"] = (report.bytes_down + report.bytes_up) / 1e6
    summary["MB foretold"] = (numbers["bytes_down"] + numbers["bytes_up"]) / 1e6
    answers.put({"case": f"{clients:,} clients", **summary})


def main(
    clients: tuple[int, ...] = (10, 100, 1000, 10_000, 100_000, 1_000_000), rounds: int = 20, out: Path | None = None
) -> dict[str, Any]:
    """Measure at several numbers of clients.

    Args:
        clients: Numbers of virtual clients.
        rounds: Training rounds.
        out: JSON file for the figures.
    """
    context, rows = multiprocessing.get_context("spawn"), []
    for count in clients:
        answers = context.SimpleQueue()
        process = context.Process(target=run, args=(count, rounds, answers))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"error: {count} clients could not be run (exit code {process.exitcode}).")
        rows.append(row := answers.get())
        print({name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()}, flush=True)
    return save_bench(rows, f"python recipes/bench/scale.py --rounds {rounds}", out)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
