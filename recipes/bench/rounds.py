"""What the loop costs over a hand-written PyTorch loop that does the same work, measured in pairs in one process.

    python recipes/bench/rounds.py                    # small conv net and ResNet-18, a few minutes
    python recipes/bench/rounds.py --model lenet --pairs 9

Both sides train the same clients on the same batches with ``torch.optim.SGD`` on one thread; the final weights must
agree to 1e-5, or the command fails. Evaluation and commits are off on both sides. Prints the ratio of each pair
(loop / hand-written, by wall clock and by user CPU) and writes them as JSON.
"""

import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fcl import FederatedTrainer, TaskStream
from lightning_fcl.federated.sampling import client_seed, sample_clients
from lightning_fcl.models import ImageClassifier, LeNet, ResNet18

# model: (clients, sampled, examples a client, batch size, rounds, image shape)
SIZES = {"lenet": (40, 10, 64, 32, 8, (1, 28, 28)), "resnet18": (8, 4, 256, 128, 1, (3, 32, 32))}
LR = 0.05


def make_net(model: str) -> nn.Module:
    """The same initial weights on every call."""
    torch.manual_seed(0)
    return LeNet(num_classes=10, in_channels=1) if model == "lenet" else ResNet18(num_classes=10, norm="group")


def make_stream(model: str) -> TaskStream:
    """Random images; the work does not depend on what they show."""
    clients, _, examples, batch_size, _, shape = SIZES[model]
    generator = torch.Generator().manual_seed(1)
    count = clients * examples
    data = TensorDataset(torch.randn(count, *shape, generator=generator), torch.arange(count) % 10)
    few = TensorDataset(*(t[:32] for t in data.tensors))
    return TaskStream.from_datasets([data], [few], clients=clients, batch_size=batch_size)


def ours(model: str, run_dir: str) -> tuple[dict[str, Tensor], float, float]:
    """Final weights, wall seconds and user seconds of the rounds."""
    _, sampled, _, _, rounds, _ = SIZES[model]
    module, stream = ImageClassifier(make_net(model), lr=LR), make_stream(model)
    quiet = {"enable_progress_bar": False, "checkpoint_every": 0, "measure_baseline": False, "limit_eval_batches": 1}
    trainer = FederatedTrainer(rounds=rounds, clients_per_round=sampled, accelerator="cpu", run_dir=run_dir, **quiet)  # type: ignore[arg-type]
    user = time.process_time()
    trainer.fit(module, stream)
    user = time.process_time() - user
    lines = (Path(run_dir) / "timing.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    wall = sum(float(row["train"]) + float(row["aggregate"]) for row in rows)
    return module.net.state_dict(), wall, user


def by_hand(model: str) -> tuple[dict[str, Tensor], float, float]:
    """The same rounds in plain PyTorch: one model, in-place loading, a running weighted sum."""
    _, sampled, examples, batch_size, rounds, _ = SIZES[model]
    net, stream = make_net(model), make_stream(model)
    x, y = stream.train_loader(0, 0).dataset.dataset.tensors  # type: ignore[attr-defined]
    columns = {c: stream.train_loader(0, c).dataset.indices for c in stream.clients(0)}  # type: ignore[attr-defined]
    data = {c: (x[list(i)], y[list(i)]) for c, i in columns.items()}
    params = list(net.parameters())
    weights = [p.detach().clone() for p in params]
    user, started = time.process_time(), time.perf_counter()
    for round in range(rounds):
        total = [torch.zeros_like(w) for w in weights]
        chosen = sample_clients(stream.clients(0), sampled, 0, 0, round)
        for client in chosen:
            torch.default_generator.manual_seed(client_seed(0, 0, round, client))
            torch.empty((), dtype=torch.int64).random_()  # the loader's own draw
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            with torch.no_grad():
                torch._foreach_copy_(params, weights)
            optimizer = torch.optim.SGD(params, lr=LR)
            features, labels = data[client]
            for indices in torch.randperm(examples, generator=generator).split(batch_size):
                loss = nn.functional.cross_entropy(net(features[indices]), labels[indices])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, params, alpha=1.0 / len(chosen))
        weights = total
    wall, user = time.perf_counter() - started, time.process_time() - user
    with torch.no_grad():
        torch._foreach_copy_(params, weights)
    return net.state_dict(), wall, user


def compare(model: str, pairs: int) -> dict[str, Any]:
    """Ratios of ``pairs`` runs in turn, after one uncounted pair."""
    wall, user = [], []
    for pair in range(pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            first, our_wall, our_user = ours(model, folder)
        second, their_wall, their_user = by_hand(model)
        worst = max((first[name] - second[name]).abs().max().item() for name in first)
        if worst > 1e-5:
            raise SystemExit(f"{model}: the two loops do different work, weights differ by {worst:.1e}")
        if pair:
            wall.append(our_wall / their_wall)
            user.append(our_user / their_user)
    spread = lambda values: [min(values), statistics.median(values), max(values)]  # noqa: E731
    print(f"{model:10} wall min/median/max {' / '.join(f'{v:.3f}' for v in spread(wall))}", end="   ")
    print(f"user, start-up included {' / '.join(f'{v:.3f}' for v in spread(user))}")
    return {"model": model, "pairs": pairs, "wall": spread(wall), "user_with_startup": spread(user)}


def main(model: Literal["all", "lenet", "resnet18"] = "all", pairs: int = 7, out: Path | None = None) -> dict[str, Any]:
    """Measure the overhead of the loop.

    Args:
        model: Which net to train.
        pairs: Counted pairs of runs.
        out: JSON file for the figures.
    """
    torch.set_num_threads(1)
    rows = [compare(name, pairs) for name in (SIZES if model == "all" else [model])]
    report = {"command": f"python recipes/bench/rounds.py --model {model} --pairs {pairs}", "rows": rows}
    report |= {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
