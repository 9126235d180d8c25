"""FedADB beside FedAvg on clients that lack classes: class anchors from the server, two branches on the clients.

    python recipes/fedadb_images.py                                # scikit-learn's digits, two methods: under 3 minutes
    python recipes/fedadb_images.py --data-dir DIR --alpha 0.05    # DIR: cifar10, fashion_mnist, pneumoniamnist, ...
    python recipes/fedadb_images.py --method ablation              # without anchors, without the local branch
    python recipes/fedadb_images.py --method fedadb --weight "[0.1, 0.5, 0.9]"    # fixed branch weights
    python recipes/fedadb_images.py --tasks 5 --alpha 100 --method stream         # classes arrive two by two
    python recipes/fedadb_images.py --shift domain                 # each client has one way of seeing digits
    python recipes/fedadb_images.py --data-dir DIR/omniglot --shift natural       # drawers as clients

``DIR`` is read by ``load_images``. A finished run is not repeated, and a killed one goes on where it was.
"""

from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities import rank_zero_only

from lightning_fcl import ClassAnchors, FederatedTrainer, FedProx, ServerProximal
from lightning_fcl._recipes import chosen_methods, command_line, write_parts
from lightning_fcl.callbacks import PerClassAccuracy
from lightning_fcl.data import image_stream
from lightning_fcl.models import image_classifier
from lightning_fcl.reports import compare, curve_figures, save_figures, speed_up

# What tables call it; options of the dual branch (None: plain training); whether there are anchors; what else acts.
METHODS: dict[str, tuple[str, dict[str, Any] | None, bool, dict[str, Any]]] = {
    "fedavg": ("FedAvg", None, False, {}),
    "no-anchors": ("FedADB, no anchors", {}, False, {}),
    "no-local": ("FedADB, no local branch", {"local_branch": False}, True, {}),
    "personal": ("FedADB, local heads stay", {"share_local": False}, True, {}),
    "special": ("SPECIAL", None, False, {"aggregator": ServerProximal(0.05, lr=1.0)}),
    "fedadb+special": ("FedADB + SPECIAL", {}, True, {"aggregator": ServerProximal(0.05, lr=1.0)}),
    "fedadb+fedprox": ("FedADB + FedProx", {}, True, {"callbacks": [FedProx(0.01)]}),
    "fedadb": ("FedADB", {}, True, {}),
}
GROUPS = {
    "all": ["fedavg", "fedadb"],
    "ablation": ["fedavg", "no-anchors", "no-local", "fedadb"],
    "stream": ["fedavg", "special", "fedadb+special", "fedadb"],
}
SETTINGS = {"device": (100, 5), "silo": (20, 4)}  # clients, and how many of them train in a round


def main(
    out: Path = Path("runs/fedadb_images"),
    seed: int = 0,
    seeds: int = 1,
    method: str | list[str] = "all",
    data_dir: Path | None = None,
    smoke: bool = False,
    setting: Literal["device", "silo"] = "silo",
    alpha: float = 0.1,
    shift: Literal["label", "domain", "natural"] = "label",
    tasks: int = 1,
    rounds: int = 30,
    epochs: int = 5,
    net: Literal["lenet", "resnet18"] = "lenet",
    size: int = 28,
    limit: int | None = None,
    lr: float = 0.01,
    batch_size: int = 32,
    anchors: int = 1,
    steps: int = 100,
    warm_steps: int | None = None,
    uint8: bool = False,
    weight: list[float] | float | None = None,
    targets: list[float] | None = None,
    devices: int = 1,
) -> dict[str, dict[str, float]]:
    """Train, report and compare.

    Args:
        out: Folder for the run folders, one per method, weight and seed.
        seed: Seeds the clients' shares, the initial weights, the sampling and every client's draws.
        seeds: How many seeds, counted from ``seed``.
        method: ``all`` (fedavg, fedadb), ``ablation``, ``stream``, or one or several names of ``METHODS``.
        data_dir: Folder of an image set; without it, scikit-learn's digits.
        smoke: End in seconds.
        setting: ``silo``: 20 clients, 4 per round. ``device``: 100 clients, 5 per round.
        alpha: Dirichlet concentration of each class over the clients; the paper has 0.05 to 0.5.
        shift: ``label``, ``domain`` (digits seen in four ways) or ``natural`` (the clients that the set knows).
        tasks: Number of tasks, each with its own classes.
        rounds: Rounds per task; the paper has 1000.
        epochs: Local epochs per round.
        net: The model.
        size: Height and width of the images in pixels.
        limit: Most images for training.
        lr: Learning rate of the clients' SGD (momentum 0.9) in the first round; it falls by 1 % per round.
        batch_size: Examples per training batch; the paper has 128.
        anchors: Anchors per class.
        steps: Steps of their descent.
        warm_steps: Start from the last round's anchors and take so many steps.
        uint8: Send anchors at one byte per value.
        weight: Fixed weights of the local branch, one run each, in the place of the formula.
        targets: Accuracies whose rounds are counted; by default 45, 65 and 85 % of the best.
        devices: Processes that share the clients of a round.

    Returns:
        The figures of each run, by the name of its folder.
    """
    names = chosen_methods(method, METHODS, GROUPS)
    clients, sampled = SETTINGS[setting]
    if smoke:
        rounds, epochs, clients, sampled, steps = 2, 2, 6, 3, 20
    reports = []
    for one in range(seed, seed + seeds):
        options: dict[str, Any] = {"path": data_dir and str(data_dir), "batch_size": batch_size, "seed": one}
        options |= {"clients": clients, "alpha": alpha, "shift": shift, "tasks": tasks, "size": size, "limit": limit}
        stream = image_stream(**options, drop_last=net == "resnet18")
        seen = [batch for task in range(len(stream.names)) for batch in stream.eval_loader(task)]
        channels, top = seen[0][0].shape[1], max(int(y.max()) for _, y in seen)
        classes = 1 + max(top, stream.classes(tasks - 1)[-1])
        fixed = [None] if weight is None else weight if isinstance(weight, list) else [weight]
        for name, beta in [(n, b) for n in names for b in (fixed if METHODS[n][1] is not None else [None])]:
            title, dual, has_anchors, rules = METHODS[name]
            dual = dual if beta is None or dual is None else {**dual, "weight": beta}
            server = ClassAnchors(anchors, steps=steps, warm_steps=warm_steps, uint8=uint8)
            trainer = FederatedTrainer(
                method=title if beta is None else f"{title}, weight {beta:g}",
                run_dir=out / f"{name}{'' if beta is None else f'-{beta:g}'}-seed{one}",
                rounds=rounds,
                clients_per_round=sampled,
                local_epochs=epochs,
                lr_factor=falling,
                server_callbacks=[server] if has_anchors else [],
                accelerator="cpu",
                devices=devices,
                seed=one,
                eval_every=1,
                **{**rules, "callbacks": [*rules.get("callbacks", []), PerClassAccuracy()]},
            )
            L.seed_everything(one, verbose=False)
            model = {"net": net, "num_classes": classes, "channels": channels, "size": size, "lr": lr, "dual": dual}
            reports.append(trainer.fit(image_classifier(**model), stream, ckpt_path="auto"))
            save_figures(reports[-1], curve_figures(reports[-1], targets or ()))
            write_parts(trainer, image_classifier, model, image_stream, options)
    pages = (f"report: {report.run_dir / 'report.html'}" for report in reports)
    rank_zero_only(print)(compare(reports), speed_up(reports, targets or ()), *pages, sep="\n")
    return {report.run_dir.name: {**report.summary, **curve_figures(report, targets or ())} for report in reports}


def falling(task: int, round: int) -> float:
    """Factor of the learning rate: the paper's, from anew in each task."""
    return float(0.99**round)


if __name__ == "__main__":
    command_line(main)
