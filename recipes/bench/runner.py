"""The library on the peers' own work: weights, data, cohorts and batch order come from a bench folder's ``common.py``.

    python recipes/bench/runner.py --bench-dir ../shared/bench --size S
    python recipes/bench/runner.py --bench-dir ../shared/bench --size X --engine stacked --hooks=false
    python recipes/bench/runner.py --bench-dir ../shared/bench --size M --procs 2

Prints the one line ``JSON {...}`` that the folder's other runners print, so that its interleaved driver can run it; the
final norm of the parameters must be theirs to about 1e-6. On are a client callback with hooks in every step,
``self.log``, the guard and the CSV tables; off are evaluation, commits (``--commit`` turns them on) and the progress
bar, which the others do not have either. A round is timed from one aggregation to the next.
"""
# ruff: noqa: E402

import time

_STARTED = time.time()  # imports are a part of the start-up

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import TensorDataset

from lightning_fcl import FederatedTrainer, ServerCallback, TaskStream
from lightning_fcl._recipes import command_line, load_script
from lightning_fcl.models import ImageClassifier


class Cohorts(TaskStream):
    """A stream whose clients in a round are the schedule's."""

    cohorts: list[list[int]]
    trainer: FederatedTrainer | None = None

    def clients(self, task: int) -> list[int]:
        """The round's cohort while a run is on, else all clients."""
        running = self.trainer is not None and self.trainer._run is not None
        return sorted(self.cohorts[self.trainer.state.round]) if running else super().clients(task)  # type: ignore


class CountSteps(L.Callback):
    """A method's hooks around every step, doing next to nothing."""

    def __init__(self) -> None:
        self.steps = self.batches = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: D102
        self.batches += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: D102
        self.steps += 1


class Marks(ServerCallback):
    """Seconds and user CPU of each round, kept as the bench folder keeps them."""

    needs_weights = False

    def __init__(self, walls: Any) -> None:
        self.walls = walls

    def on_fit_start(self, trainer: FederatedTrainer, pl_module: L.LightningModule) -> None:  # noqa: D102
        launcher = trainer.fabric.strategy.launcher
        self.walls.pids = [process.pid for process in getattr(launcher, "procs", [])]
        self.last = time.perf_counter()

    def on_after_aggregate(self, trainer: FederatedTrainer, pl_module: L.LightningModule) -> None:  # noqa: D102
        now = time.perf_counter()
        self.walls.append(now - self.last)
        self.last = now


def make_stream(common: ModuleType, cfg: dict[str, Any]) -> Cohorts:
    """The folder's clients, unshuffled, with its cohorts."""
    data = common.client_data(cfg)
    owners = torch.cat([torch.full((len(y),), client) for client, (_, y) in enumerate(data)])
    whole = TensorDataset(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    few = TensorDataset(*(column[:8] for column in whole.tensors))
    stream = Cohorts.from_datasets(
        [whole],
        [few],
        clients=cfg["clients"],
        partition=lambda examples, clients, rng: owners.numpy(),
        batch_size=cfg["batch"],
        shuffle=False,
    )
    assert isinstance(stream, Cohorts)
    stream.cohorts = common.schedule(cfg)
    return stream


def main(
    bench_dir: Path,
    size: Literal["X", "T", "S", "M", "L"] = "S",
    rounds: int | None = None,
    cohort: int | None = None,
    clients: int | None = None,
    samples: int | None = None,
    threads: int = 1,
    procs: int = 1,
    engine: str = "sequential",
    channels_last: bool = False,
    ragged: bool = False,
    hooks: bool = True,
    commit: bool = False,
    out: Path | None = None,
) -> None:
    """Run one size and print its line.

    Args:
        bench_dir: Folder with ``common.py``.
        size: Which workload.
        rounds: Rounds; by default the size's.
        cohort: Clients a round; by default the size's.
        clients: Clients in all; by default the size's.
        samples: Examples a client; by default the size's.
        threads: Accepted for the driver; the library uses one thread a process.
        procs: Processes that share the clients of a round.
        engine: As in ``FederatedTrainer``.
        channels_last: As in ``FederatedTrainer``.
        ragged: Clients of unequal size.
        hooks: A callback that listens to every step; it keeps jobs from being stacked.
        commit: Commit every round.
        out: Run folder; by default one that is deleted.
    """
    common = load_script(bench_dir, "common.py")
    common.T_PROC = _STARTED  # type: ignore[attr-defined]
    given = {"rounds": rounds, "cohort": cohort, "clients": clients, "samples": samples}
    cfg = {**common.SIZES[size], **{name: value for name, value in given.items() if value is not None}}
    cfg["clients"] = max(cfg["clients"], cfg["cohort"])
    cfg |= {"size": size, "threads": threads, "ragged": ragged, "variant": engine, "check": ""}
    torch.set_num_threads(1)
    walls, stream = common.Walls(), make_stream(common, cfg)
    module = ImageClassifier(common.build_model(size), lr=cfg["lr"])
    with tempfile.TemporaryDirectory() as folder:
        stream.trainer = trainer = FederatedTrainer(
            rounds=cfg["rounds"],
            clients_per_round=cfg["cohort"],
            callbacks=[CountSteps()] if hooks else [],
            server_callbacks=[Marks(walls)],
            accelerator="cpu",
            devices=procs,
            engine=engine,  # type: ignore[arg-type]
            channels_last=channels_last,
            run_dir=out or Path(folder) / "run",
            checkpoint_every=int(commit),
            measure_baseline=False,
            enable_progress_bar=False,
        )
        ready, before = time.time(), common.cpu_user()
        trainer.fit(module, stream)
        used = walls.user() - before
    if trainer.is_global_zero:
        flat = common.flat_of(module.net.parameters())
        name = f"fcl-{engine}" + ("-cl" if channels_last else "") + (f"-p{procs}" if procs > 1 else "")
        common.report(name, cfg, ready, walls, flat, cpu_rounds=used)


if __name__ == "__main__":
    command_line(main)
