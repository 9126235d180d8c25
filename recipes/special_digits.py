"""SPECIAL, SPECIAL-C, FedProx and FedAvg on handwritten digits that arrive in four domains, one after another.

    python recipes/special_digits.py                       # five methods, scikit-learn's digits: under 3 minutes
    python recipes/special_digits.py --method special --strength "[0.05, 0.1, 0.25]" --seeds 3
    python recipes/special_digits.py --data-dir DIR        # MNIST, MNIST-M, USPS, SVHN

``DIR`` holds files as ``load_digit_folder`` reads them; ``$FCL_DATA/digits`` if that variable is set. A finished run is
not repeated, and a killed one goes on where it was. docs/guides/special-study.md is made with this recipe.

All methods take the plain mean over the sampled clients, as the paper does, so that only the rule under test differs.
Nets with BatchNorm drop an incomplete last batch (each epoch another one), since one example has no variance.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities import rank_zero_only
from torch import nn

from lightning_fcl import ClientProximal, FedAvg, FederatedTrainer, FedProx, ServerProximal, TaskStream
from lightning_fcl._recipes import chosen_methods, command_line, real_data
from lightning_fcl.data import LabelDirichlet, digit_domains, load_digit_folder
from lightning_fcl.models import ImageClassifier, LeNet, ResNet18, SmallConvNet
from lightning_fcl.reports import SPECIAL_DIGIT10, compare

# What tables call it, the strength if none is given, and what makes it, of strength and treatment of BatchNorm.
METHODS: dict[str, tuple[str, float, Callable[[float, Any], dict[str, Any]]]] = {
    "fedavg": ("FedAvg", 0, lambda s, bn: {"aggregator": FedAvg("uniform")}),
    "fedavg-1/i": ("FedAvg, step 1/i", 0, lambda s, bn: {"aggregator": FedAvg("uniform", lr="inverse_task")}),
    "fedprox": ("FedProx{}", 0.1, lambda s, bn: {"aggregator": FedAvg("uniform"), "callbacks": FedProx(s)}),
    "special-c": ("SPECIAL-C{}", 0.2, lambda s, bn: {"aggregator": FedAvg("uniform"), "callbacks": ClientProximal(s)}),
    "special": ("SPECIAL{}", 0.05, lambda s, bn: {"aggregator": ServerProximal(s, bn_stats=bn)}),
    "special-lr1": ("SPECIAL{}, step 1", 0.05, lambda s, bn: {"aggregator": ServerProximal(s, lr=1.0, bn_stats=bn)}),
}


def main(
    out: Path = Path("runs/special_digits"),
    seed: int = 0,
    seeds: int = 1,
    method: str | list[str] = "all",
    strength: list[float] | float | None = None,
    data_dir: Path | None = None,
    domains: list[str] | None = None,
    limit: int = 2400,
    smoke: bool = False,
    rounds: int = 20,
    epochs: int = 2,
    clients: int = 8,
    sampled: int = 4,
    alpha: float = 0.3,
    net: Literal["small", "small-bn", "lenet", "resnet18"] = "small",
    bn_stats: Literal["blend", "current"] = "blend",
    lr: float = 0.1,
    batch_size: int = 16,
    size: int = 16,
    devices: int = 1,
) -> dict[str, dict[str, float]]:
    """Train, report and compare.

    Args:
        out: Folder for the run folders, one per method, strength and seed.
        seed: Seeds the clients' shares, the initial weights, the sampling and every client's draws.
        seeds: How many seeds, counted from ``seed``.
        method: ``fedavg``, ``fedavg-1/i`` (FedAvg with SPECIAL's server step), ``fedprox``, ``special-c``, ``special``,
            ``special-lr1`` (SPECIAL without that step), several, or ``all`` but the last.
        strength: Of the pull of FedProx, SPECIAL and SPECIAL-C, one or several; each has its default.
        data_dir: Folder with real digits; without it, scikit-learn's digits seen in four ways.
        domains: Names of the domains in the order of the tasks.
        limit: Most images of each real domain, for training and for evaluation.
        smoke: End in seconds: two domains, three rounds, even shares.
        rounds: Rounds per task.
        epochs: Local epochs per round.
        clients: Number of clients.
        sampled: Clients per round.
        alpha: Dirichlet concentration of labels over clients; the paper has 0.1.
        net: The model; ``small-bn`` is the small net with BatchNorm after each convolution.
        bn_stats: Whether SPECIAL's anchor pulls at BatchNorm's statistics, too.
        lr: Learning rate of the clients' SGD in a task's first round; it falls by 4 % per round, as in the paper.
        batch_size: Examples per training batch.
        size: Height and width of the images in pixels.
        devices: Processes that share the clients of a round.

    Returns:
        The figures of each run, by the name of its folder.
    """
    names = list(METHODS)[:5] if method == "all" else chosen_methods(method, METHODS)
    if (folder := real_data(data_dir, "digits")) is None:
        data = digit_domains(domains or ("clean", "inverted", "turned", "textured"), size=size)
    else:
        data = load_digit_folder(folder, domains or ("mnist", "mnistm", "usps", "svhn"), size=size, limit=limit)
    if smoke:
        rounds, epochs, alpha, data = 3, 4, 100.0, dict(list(data.items())[:2])
    pulls = strength if isinstance(strength, list) else [strength]
    reports = []
    for one in range(seed, seed + seeds):
        stream = TaskStream.domains(
            data,
            clients=clients,
            partition=LabelDirichlet(alpha, min_examples=2),
            seed=one,
            batch_size=batch_size,
            eval_batch_size=500,
            drop_last=net in ("small-bn", "resnet18"),
        )
        for name, pull in [(n, p) for n in names for p in (pulls if METHODS[n][1] else [None])]:
            title, default, rules = METHODS[name]
            trainer = FederatedTrainer(
                method=title.format("" if pull is None else f" {pull:g}"),
                run_dir=out / f"{name.replace('/', '')}{'' if pull is None else f'-{pull:g}'}-seed{one}",
                rounds=rounds,
                clients_per_round=sampled,
                local_epochs=epochs,
                lr_factor=falling,
                accelerator="cpu",
                devices=devices,
                seed=one,
                eval_every=max(1, rounds // 10),
                **rules(default if pull is None else pull, bn_stats),
            )
            L.seed_everything(one, verbose=False)
            module = ImageClassifier(make_net(net, 1 if folder is None else 3, size), lr=lr)
            reports.append(trainer.fit(module, stream, ckpt_path="auto"))
    pages = (f"report: {report.run_dir / 'report.html'}" for report in reports)
    rank_zero_only(print)(compare(reports, SPECIAL_DIGIT10), *pages, sep="\n")
    return {report.run_dir.name: report.summary for report in reports}


def make_net(kind: str, channels: int, size: int) -> nn.Module:
    """A new net with random weights."""
    if kind == "resnet18":
        return ResNet18(in_channels=channels)
    if kind == "lenet":
        return LeNet(in_channels=channels, image_size=size)
    net = SmallConvNet(in_channels=channels, image_size=size)
    if kind == "small-bn":
        pairs = ([m, nn.BatchNorm2d(m.out_channels)] if isinstance(m, nn.Conv2d) else [m] for m in net.features)
        net.features = nn.Sequential(*(layer for pair in pairs for layer in pair))
    return net


def falling(task: int, round: int) -> float:
    """Factor of the learning rate: the paper's, from anew in each task."""
    return float(0.96**round)


if __name__ == "__main__":
    command_line(main)
