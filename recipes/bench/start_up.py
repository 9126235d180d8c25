"""From ``import lightning`` to the first finished round of a small federation, in fresh processes.

    python recipes/bench/start_up.py --out docs/results/bench_start_up.json

LeNet, ten clients of 60 examples, batches of 32 (size S of the peers' bench). Seconds count from the moment in which
``import lightning`` has returned: wall time and user CPU until the library is imported, until the first round is
finished (trained, merged, evaluated, committed), and until ``fit`` has returned (figures and page drawn).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

CLIENTS, EXAMPLES, BATCH = 10, 60, 32
POINTS = ("imported", "first round", "fit returned")


def now() -> tuple[float, float]:
    """Wall and user seconds of this process."""
    return time.perf_counter(), os.times().user


def measure() -> dict[str, Any]:
    """One start in this process."""
    began = now()
    import lightning as L

    ready = now()
    import torch
    from torch.utils.data import TensorDataset

    from lightning_fcl import FederatedTrainer, ServerCallback, TaskStream
    from lightning_fcl.models import ImageClassifier, LeNet

    points = [now()]

    class Watch(ServerCallback):
        needs_weights = False

        def on_task_start(self, trainer: FederatedTrainer, pl_module: L.LightningModule) -> None:
            if trainer.state.task == 1:  # the first round has been committed
                points.append(now())

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 1, 28, 28, generator=draw), torch.randint(10, (count,), generator=draw))

    sets = [images(CLIENTS * EXAMPLES) for _ in range(2)]
    stream = TaskStream.from_datasets(sets, [images(60)] * 2, clients=CLIENTS, batch_size=BATCH)
    module = ImageClassifier(LeNet(num_classes=10, in_channels=1), lr=0.05)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            rounds=1, clients_per_round=CLIENTS, server_callbacks=[Watch()], run_dir=folder, accelerator="cpu",
            devices=1, enable_progress_bar=False, measure_baseline=False,
        )  # fmt: skip
        trainer.fit(module, stream)
    points.append(now())
    seconds = [(wall - ready[0], user - ready[1]) for wall, user in points]
    row: dict[str, Any] = {"import lightning": [ready[0] - began[0], ready[1] - began[1]]}
    return row | dict(zip(POINTS, map(list, seconds), strict=True))


def main(repeats: int = 5, out: Path | None = None, worker: bool = False) -> dict[str, Any]:
    """Measure, print and write.

    Args:
        repeats: Fresh processes.
        out: JSON file for the figures.
        worker: Be one of those processes: print one line of JSON.
    """
    if worker:
        print(json.dumps(row := measure()))
        return row
    from lightning_fcl._recipes import save_bench  # late: a worker measures what importing the library takes

    rows = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, __file__, "--worker", "true"], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    table = []
    for name in ("import lightning", *POINTS):
        wall, user = ([row[name][kind] for row in rows] for kind in (0, 1))
        three = {"wall s": spread(wall), "user CPU s": spread(user)}
        table.append({"case": name, **three})
        print(f"{name:<16}", *(f"{what} {' / '.join(f'{x:.2f}' for x in found)}" for what, found in three.items()))
    return save_bench(table, f"python recipes/bench/start_up.py --repeats {repeats}", out)


def spread(values: list[float]) -> list[float]:
    """Minimum, median, maximum."""
    return [min(values), statistics.median(values), max(values)]


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
