"""What FedADB costs: the server's anchors as a share of a round, and a client's work over FedAvg's, in pairs.

    python recipes/bench/anchors.py                         # some minutes; prints
    python recipes/bench/anchors.py --case lenet-500 --pairs 9
    python recipes/bench/anchors.py --out docs/results/bench_anchors.json

Digits of scikit-learn, as often as it takes, go to clients that lack classes (Dirichlet 0.1); a client has so many
images on average. FedAvg, FedADB, and FedADB whose anchors go on from the last round's with few steps, make the same
run in turn, on one thread. ``anchors`` is their share of a round, ``client`` the rest of the round over FedAvg's: both
by CPU time, from the sampling of the clients to the new global weights. ``seconds`` is CPU time of the anchors per
round, and ``accuracy`` that after the last round.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from jsonargparse import auto_cli
from torch.utils.data import TensorDataset

from lightning_fcl import ClassAnchors, FederatedTrainer, ServerCallback, TaskStream
from lightning_fcl._recipes import save_bench
from lightning_fcl.data import LabelDirichlet, load_images
from lightning_fcl.models import image_classifier


class Case(NamedTuple):
    """One workload."""

    net: Literal["lenet", "resnet18"]
    examples: int  # a client
    clients: int
    sampled: int
    rounds: int
    epochs: int
    batch_size: int


CASES = {
    "lenet-320": Case("lenet", 320, 20, 4, 4, 5, 32),
    "lenet-500": Case("lenet", 500, 20, 4, 4, 5, 32),
    "resnet18": Case("resnet18", 320, 8, 2, 2, 1, 64),
}
STEPS, WARM = 100, 20  # of the descent, from noise and from the last round's anchors


class Clock(ServerCallback):
    """CPU seconds: in front of the anchors it times whole rounds, behind them it notes what they took."""

    def __init__(self, first: "Clock | None" = None) -> None:
        self.first = first
        self.started = self.spent = 0.0

    @property
    def state_key(self) -> str:  # noqa: D102
        return f"Clock{self.first is None}"

    def on_round_start(self, trainer: FederatedTrainer, pl_module: L.LightningModule) -> None:  # noqa: D102
        self.started = time.process_time()
        if self.first is not None:
            self.spent += self.started - self.first.started

    def on_after_aggregate(self, trainer: FederatedTrainer, pl_module: L.LightningModule) -> None:  # noqa: D102
        if self.first is None:
            self.spent += time.process_time() - self.started


def make_stream(case: Case) -> TaskStream:
    """Digits for all clients, the same ones several times over."""
    size, channels = (32, 3) if case.net == "resnet18" else (28, 1)
    images = load_images(size=size)
    places = torch.arange(case.clients * case.examples) % len(images.train)
    sets = [(images.train.tensors, places), (images.test.tensors, torch.arange(len(images.test)))]
    train, test = (TensorDataset(x[rows].expand(-1, channels, -1, -1), y[rows]) for (x, y), rows in sets)
    shares = LabelDirichlet(0.1, min_examples=case.batch_size)
    options: dict[str, Any] = {"clients": case.clients, "partition": shares, "batch_size": case.batch_size}
    return TaskStream.from_datasets([train], [test], drop_last=case.net == "resnet18", eval_batch_size=500, **options)


def run(case: Case, anchors: ClassAnchors | None) -> tuple[float, float, float]:
    """CPU seconds of the anchors and of the rest of the rounds, and the last accuracy."""
    torch.manual_seed(0)
    channels, size = (3, 32) if case.net == "resnet18" else (1, 28)
    net = image_classifier(case.net, channels=channels, size=size, dual=None if anchors is None else {})
    whole = Clock()
    server: list[ServerCallback] = [whole] if anchors is None else [whole, anchors, Clock(whole)]
    with tempfile.TemporaryDirectory() as folder:
        report = FederatedTrainer(
            rounds=case.rounds,
            clients_per_round=case.sampled,
            local_epochs=case.epochs,
            server_callbacks=server,
            accelerator="cpu",
            devices=1,
            run_dir=folder,
            checkpoint_every=0,
            measure_baseline=False,
            enable_progress_bar=False,
        ).fit(net, make_stream(case))
    made = sum(clock.spent for clock in server if isinstance(clock, Clock) and clock.first is not None)
    return made, whole.spent - made, float(report.accuracy[-1, 0])


def compare(name: str, pairs: int) -> list[dict[str, Any]]:
    """A row per way of making anchors: figures of ``pairs`` runs in turn, after one uncounted."""
    case = CASES[name]
    figures: dict[str, dict[str, list[float]]] = {"cold": {}, "warm": {}}
    accuracy: dict[str, float] = {}
    for pair in range(pairs + 1):
        _, plain, accuracy["FedAvg"] = run(case, None)
        for kind, own in figures.items():
            made, rest, accuracy[kind] = run(
                case, ClassAnchors(steps=STEPS, warm_steps=WARM if kind == "warm" else None)
            )
            if pair:
                found = {"anchors": made / (made + rest), "client": rest / plain, "seconds": made / case.rounds}
                for key, value in found.items():
                    own.setdefault(key, []).append(value)
    rows = []
    for kind, own in figures.items():
        steps = {"cold": [STEPS] * case.rounds, "warm": [STEPS] + [WARM] * (case.rounds - 1)}[kind]
        row: dict[str, Any] = {"case": f"{name}, {kind}", "steps a round": sum(steps) / case.rounds}
        row |= {key: [min(values), statistics.median(values), max(values)] for key, values in own.items()}
        rows.append({**row, "accuracy": accuracy[kind], "FedAvg's": accuracy["FedAvg"]})
        print(rows[-1], flush=True)
    return rows


def main(
    case: Literal["all", "lenet-320", "lenet-500", "resnet18"] = "all", pairs: int = 5, out: Path | None = None
) -> dict[str, Any]:
    """Measure what anchors and two branches cost.

    Args:
        case: Which workload.
        pairs: Counted runs of each kind.
        out: JSON file for the figures.
    """
    torch.set_num_threads(1)
    rows = [row for name in (CASES if case == "all" else [case]) for row in compare(name, pairs)]
    return save_bench(rows, f"python recipes/bench/anchors.py --case {case} --pairs {pairs}", out)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
