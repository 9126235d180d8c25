"""What the loop costs over a hand-written PyTorch loop that does the same work, measured in pairs in one process.

    python recipes/bench/rounds.py                    # LeNet and ResNet-18, some minutes
    python recipes/bench/rounds.py --case lenet-5-epochs --pairs 9

``lenet`` is the hardest case for a loop: a client job of two optimiser steps.

Both sides train the same clients on the same batches with ``torch.optim.SGD`` on one thread; the final weights must
agree to 1e-5, or the command fails. Evaluation and commits are off on both sides. Prints the ratio of each pair
(loop / hand-written, by wall clock and by CPU time) and writes them as JSON.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fcl import FederatedTrainer, ServerCallback, TaskStream
from lightning_fcl._recipes import save_bench
from lightning_fcl.federated.sampling import client_seed, sample_clients
from lightning_fcl.models import ImageClassifier, LeNet, ResNet18

LR = 0.05


class Case(NamedTuple):
    """One workload."""

    clients: int
    sampled: int
    examples: int  # a client
    batch_size: int
    epochs: int
    rounds: int
    shape: tuple[int, int, int]


CASES = {
    "lenet": Case(40, 10, 64, 32, 1, 10, (1, 28, 28)),
    "lenet-5-epochs": Case(40, 10, 64, 32, 5, 3, (1, 28, 28)),
    "resnet18": Case(8, 4, 256, 128, 1, 1, (3, 32, 32)),
}


def make_net(case: str) -> nn.Module:
    """The same initial weights on every call."""
    torch.manual_seed(0)
    return LeNet(num_classes=10, in_channels=1) if case.startswith("lenet") else ResNet18(num_classes=10, norm="group")


def make_stream(case: str) -> TaskStream:
    """Random images; the work does not depend on what they show."""
    clients, _, examples, batch_size, _, _, shape = CASES[case]
    generator = torch.Generator().manual_seed(1)
    count = clients * examples
    data = TensorDataset(torch.randn(count, *shape, generator=generator), torch.arange(count) % 10)
    few = TensorDataset(*(t[:32] for t in data.tensors))
    return TaskStream.from_datasets([data], [few], clients=clients, batch_size=batch_size)


class Clock(ServerCallback):
    """Wall and CPU seconds from the sampling of clients to the new global weights, summed over rounds."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def on_round_start(self, trainer: FederatedTrainer, pl_module: L.LightningModule) -> None:  # noqa: D102
        self.wall -= time.perf_counter()
        self.cpu -= time.process_time()

    def on_after_aggregate(self, trainer: FederatedTrainer, pl_module: L.LightningModule) -> None:  # noqa: D102
        self.wall += time.perf_counter()
        self.cpu += time.process_time()


def ours(case: str, run_dir: str) -> tuple[dict[str, Tensor], float, float]:
    """Final weights, wall seconds and CPU seconds of the rounds."""
    _, sampled, _, _, epochs, rounds, _ = CASES[case]
    net, clock = make_net(case), Clock()
    trainer = FederatedTrainer(
        rounds=rounds,
        clients_per_round=sampled,
        local_epochs=epochs,
        server_callbacks=[clock],
        accelerator="cpu",
        devices=1,
        run_dir=run_dir,
        checkpoint_every=0,
        measure_baseline=False,
        limit_eval_batches=1,
        enable_progress_bar=False,
    )
    trainer.fit(ImageClassifier(net, lr=LR), make_stream(case))
    return net.state_dict(), clock.wall, clock.cpu


def by_hand(case: str) -> tuple[dict[str, Tensor], float, float]:
    """The same rounds in plain PyTorch: one model, in-place loading, a running weighted sum."""
    _, sampled, examples, batch_size, epochs, rounds, _ = CASES[case]
    net, stream = make_net(case), make_stream(case)
    data = {}
    for client in stream.clients(0):
        examples_of: Any = stream.train_loader(0, client).dataset
        data[client] = [column[list(examples_of.indices)] for column in examples_of.dataset.tensors]
    params: list[Tensor] = list(net.parameters())
    weights = [p.detach().clone() for p in params]
    cpu, started = time.process_time(), time.perf_counter()
    for round in range(rounds):
        total = [torch.zeros_like(w) for w in weights]
        chosen = sample_clients(stream.clients(0), sampled, 0, 0, round)
        for client in chosen:
            torch.default_generator.manual_seed(client_seed(0, 0, round, client))
            with torch.no_grad():
                torch._foreach_copy_(params, weights)
            optimizer = torch.optim.SGD(params, lr=LR)
            features, labels = data[client]
            for _ in range(epochs):
                torch.empty((), dtype=torch.int64).random_()  # the loader's own draw
                generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
                for indices in torch.split(torch.randperm(examples, generator=generator), batch_size):
                    loss = nn.functional.cross_entropy(net(features[indices]), labels[indices])
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, params, alpha=1.0 / len(chosen))
        weights = total
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    with torch.no_grad():
        torch._foreach_copy_(params, weights)
    return net.state_dict(), wall, cpu


def compare(case: str, pairs: int) -> dict[str, Any]:
    """Ratios of ``pairs`` runs in turn, after one uncounted pair."""
    wall, cpu = [], []
    for pair in range(pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            first, our_wall, our_cpu = ours(case, folder)
        second, their_wall, their_cpu = by_hand(case)
        worst = max((first[name] - second[name]).abs().max().item() for name in first)
        if worst > 1e-5:
            raise SystemExit(f"{case}: the two loops do different work, weights differ by {worst:.1e}")
        if pair:
            wall.append(our_wall / their_wall)
            cpu.append(our_cpu / their_cpu)
    row = {name: [min(v), statistics.median(v), max(v)] for name, v in (("wall", wall), ("cpu", cpu))}
    shown = "   ".join(f"{name} {' / '.join(f'{value:.3f}' for value in values)}" for name, values in row.items())
    print(f"{case:15} ours / by hand, min / median / max of {pairs} pairs: {shown}")
    return {"case": case, "pairs": pairs, **row}


def main(
    case: Literal["all", "lenet", "lenet-5-epochs", "resnet18"] = "all", pairs: int = 7, out: Path | None = None
) -> dict[str, Any]:
    """Measure the overhead of the loop.

    Args:
        case: Which workload.
        pairs: Counted pairs of runs.
        out: JSON file for the figures.
    """
    torch.set_num_threads(1)
    rows = [compare(name, pairs) for name in (CASES if case == "all" else [case])]
    command = f"python recipes/bench/rounds.py --case {case} --pairs {pairs}"
    return save_bench(rows, command, out)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
