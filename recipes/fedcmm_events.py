"""FedCMM on posts of picture and text about events that arrive one after another: the paper's tables I to V.

    python recipes/fedcmm_events.py                        # table I on drawn posts: a few minutes
    python recipes/fedcmm_events.py --table 2 --seeds 3    # which of the three parts does what
    python recipes/fedcmm_events.py --data-dir DIR         # real posts, as ``load_event_folder`` reads them

FedCMM is three parts, none of which knows of another: ``TSGA`` merges, ``ModalityEWC`` holds on to weights,
``EmbeddingReplay`` rehearses. Tables: 1 methods at two Dirichlet concentrations, 2 without each part, 3 kinds of EWC, 4
with 30 % of the clients one task behind, 5 rounds to 50 and 75 %. Drawn posts meet a network that knows scenes and
places but no event; real ones meet it untrained. See docs/guides/fedcmm-events.md.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities import rank_zero_only

from lightning_fcl import FederatedTrainer, TaskStream
from lightning_fcl._recipes import chosen_methods, command_line, real_data
from lightning_fcl.callbacks import ModalityDrift
from lightning_fcl.data import EventPosts, LabelDirichlet, cue_posts, drawn_events, event_stream, load_event_folder
from lightning_fcl.models import EventClassifier, TwoTower, event_log_likelihood, pretrain_towers
from lightning_fcl.reports import FEDCMM, compare, event_figures, save_figures
from lightning_fcl.suites.fedcmm import TITLES, Strengths, fedcmm_rules

# By table, the methods, and the settings: Dirichlet's alpha, share of clients behind, what tables call it.
SYNC = (0.5, 0.0, "")
TABLES: dict[int, tuple[list[str], list[tuple[float, float, str]]]] = {
    1: (list(TITLES)[:6], [SYNC, (0.1, 0.0, ", alpha 0.1")]),
    2: (["fedavg", "no-ewc", "no-replay", "no-tsga", "fedcmm"], [SYNC]),
    3: (["no-ewc", "uniform", "vision", "language", "fedcmm"], [SYNC]),
    4: (["fedavg", "ewc", "fedcmm"], [SYNC, (0.5, 0.3, ", 30 % behind")]),
    5: (["fedavg", "ewc", "fedcmm", "joint"], [SYNC]),
}


def main(
    out: Path = Path("runs/fedcmm_events"),
    seed: int = 0,
    seeds: int = 1,
    table: Literal[1, 2, 3, 4, 5] = 1,
    method: str | list[str] = "all",
    data_dir: Path | None = None,
    smoke: bool = False,
    rounds: int = 12,
    lr: float = 1e-3,
    ewc: float = 100.0,
    strength: float = 0.03,
    vision: float | None = None,
    language: float | None = None,
    projector: float | None = None,
    threshold: float | Literal["auto"] = 0.5,
    replay: float = 1.0,
) -> dict[str, dict[str, Any]]:
    """Train, report and compare.

    Args:
        out: Folder for the run folders, one per method, setting and seed.
        seed: Seeds the clients' shares, the initial weights, the sampling and every client's draws.
        seeds: How many seeds, counted from ``seed``.
        table: Which of the paper's tables to make.
        method: One or several, or all of the table's.
        data_dir: Folder with real posts; without it and ``$FCL_DATA``, posts are drawn and written.
        smoke: End in seconds: few posts, three rounds of two clients.
        rounds: Rounds per task.
        lr: Learning rate of the clients' AdamW in a task's first round; it falls to nearly zero by the last one.
        ewc: Strength of EWC-FL.
        strength: Of FedCMM's MA-EWC, for all modalities.
        vision: In the place of ``strength`` for the vision tower.
        language: The same for the language part.
        projector: The same for the projector.
        threshold: Of TSGA, or ``auto``.
        replay: Weight of the rehearsal's loss.

    Returns:
        The figures of each run, by the name of its folder.
    """
    names, settings = TABLES[table]
    chosen = names if method == "all" else chosen_methods(method, TITLES)
    own = {"vision": vision, "language": language, "projector": projector}
    by_group = {group: strength if value is None else value for group, value in own.items()}
    strengths = Strengths(ewc=ewc, threshold=threshold, replay=replay, **by_group)
    folder = real_data(data_dir, "mediaeval_events")
    posts = drawn_events(*((24, 8) if smoke else (120, 40))) if folder is None else load_event_folder(folder)
    reports, figures = [], {}
    for one, (alpha, lag, note), name in product(range(seed, seed + seeds), settings, chosen):
        shares = LabelDirichlet(alpha, min_examples=1)
        stream = event_stream(posts, clients=3 if smoke else 10, partition=shares, batch_size=8, seed=one, lag=lag)
        stream = stream.joint() if name == "joint" else stream.pooled() if name == "fine-tuning" else stream
        L.seed_everything(one, verbose=False)
        module = EventClassifier(make_net(folder is None, 200 if smoke else 600), lr=lr)
        run_dir = out / f"{name}-alpha{alpha}-lag{lag}-seed{one}"
        rules = fedcmm_rules(name, event_log_likelihood, strengths)
        sampled = (
            1 if name in ("joint", "fine-tuning") else 2 if smoke else 5
        )  # what learns in one place has one client
        rules |= {"method": TITLES[name] + note, "clients_per_round": sampled, "run_dir": run_dir, "seed": one}
        trainer = make_trainer(3 if smoke else rounds, **rules)
        reports.append(report := trainer.fit(module, stream, ckpt_path="auto"))
        figures[run_dir.name] = {**event_figures(report), **on_new_pictures(trainer, module, posts)}
        save_figures(report, figures[run_dir.name])
    more = (f"{name}: " + ", ".join(f"{key} {x:.3g}" for key, x in own.items()) for name, own in figures.items())
    lines = [*more, *(f"report: {report.run_dir / 'report.html'}" for report in reports)]
    rank_zero_only(print)(compare(reports, FEDCMM[table]), *lines, sep="\n")
    return {report.run_dir.name: {**report.summary, **figures[report.run_dir.name]} for report in reports}


def make_net(drawn: bool, posts: int) -> TwoTower:
    """A new network; for drawn posts one that has learned to see and to read, from so many posts of no event."""
    net = TwoTower() if drawn else TwoTower(image_size=32, vocabulary=4096, rank=0)
    if drawn:
        pretrain_towers(net, cue_posts(posts))
    return net


def make_trainer(rounds: int, *, callbacks: Sequence[L.Callback] = (), **rules: Any) -> FederatedTrainer:
    """A trainer of a method's parts, with a rate that falls within each task."""
    return FederatedTrainer(
        rounds=rounds,
        callbacks=[*callbacks, ModalityDrift(log_likelihood=event_log_likelihood)],
        lr_factor=lambda task, round: 0.5 * (1 + math.cos(math.pi * round / rounds)) + 0.02,
        measure_baseline=False,  # the paper's FWT has none
        eval_every=1,
        **{"accelerator": "cpu", "devices": 1, **rules},
    )


def on_new_pictures(trainer: FederatedTrainer, module: L.LightningModule, posts: EventPosts) -> dict[str, float]:
    """Score on real posts whose pictures nobody trained on."""
    if posts.unseen is None:
        return {}
    unseen = TaskStream.from_datasets([posts.unseen], [posts.unseen], clients=1, eval_batch_size=256)
    return {"new pictures": trainer.validate(module, unseen)[0]["val_acc"]}


if __name__ == "__main__":
    command_line(main)
