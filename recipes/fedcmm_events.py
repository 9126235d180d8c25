"""FedCMM on posts of picture and text about events that arrive one after another: the paper's tables I to V.

    python recipes/fedcmm_events.py                        # table I on drawn posts: a few minutes
    python recipes/fedcmm_events.py --table 2 --seeds 3    # which of the three parts does what
    python recipes/fedcmm_events.py --model tiny           # a LLaVA-like model names the events; any folder or hub id
    python recipes/fedcmm_events.py --data-dir DIR         # real posts, as ``load_event_folder`` reads them

FedCMM is three parts, none of which knows of another: ``TSGA`` merges, ``ModalityEWC`` holds on to weights,
``EmbeddingReplay`` rehearses. Tables: 1 methods at two Dirichlet concentrations, 2 without each part, 3 kinds of EWC, 4
with 30 % of the clients one task behind, 5 rounds to 50 and 75 %. Drawn posts meet a network that knows scenes and
places but no event; real ones meet it untrained. See docs/guides/fedcmm-events.md.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities import rank_zero_only

from lightning_fcl import FederatedTrainer, TaskStream
from lightning_fcl._recipes import chosen_methods, command_line, real_data
from lightning_fcl.callbacks import ModalityDrift
from lightning_fcl.data import EventPosts, InstructionDataset, LabelDirichlet, as_list, event_stream
from lightning_fcl.mllm import answer_log_likelihood
from lightning_fcl.models import event_log_likelihood
from lightning_fcl.models.tiny_llava import TINY_LLAVA
from lightning_fcl.reports import FEDCMM, compare, event_figures, save_figures
from lightning_fcl.suites.fedcmm import TABLES, TITLES, Strengths, event_module, event_posts, fedcmm_rules


def main(
    out: Path = Path("runs/fedcmm_events"),
    seed: int = 0,
    seeds: int = 1,
    table: Literal[1, 2, 3, 4, 5] = 1,
    method: str | list[str] = "all",
    data_dir: Path | None = None,
    model: str | None = None,
    smoke: bool = False,
    tasks: Literal[3, 7] = 3,
    rounds: int = 12,
    lr: float | None = None,
    ewc: float = 1000.0,
    strength: float = 0.3,
    vision: float | None = None,
    language: float | None = None,
    projector: float | None = None,
    threshold: float | Literal["auto"] = 0.5,
    replay: float = 3.0,
) -> dict[str, dict[str, Any]]:
    """Train, report and compare.

    Args:
        out: Folder for the run folders, one per method, setting and seed.
        seed: Seeds the clients' shares, the initial weights, the sampling and every client's draws.
        seeds: How many seeds, counted from ``seed``.
        table: Which of the paper's tables to make.
        method: One or several, or all of the table's. In no table are ``auto`` (strength of MA-EWC and threshold of
            TSGA set themselves; ``auto-ewc``, ``auto-tsga``: one of them) and ``last`` (memory of one task).
        data_dir: Folder with real posts; without it and ``$FCL_DATA``, posts are drawn and written.
        model: Folder or hub id of a LLaVA-like model that names events (``tiny``: the shipped one), not a classifier.
        smoke: End in seconds: few posts, three rounds of two clients.
        tasks: Three tasks of two, two and three events, or seven of one.
        rounds: Rounds per task.
        lr: Learning rate of AdamW in a task's first round, by default 1e-3 (with a ``model`` 2e-3); falls to nearly 0.
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
    by_group: dict[str, Any] = {group: strength if value is None else value for group, value in own.items()}
    strengths = Strengths(ewc=ewc, threshold=threshold, replay=replay, **by_group)
    folder = real_data(data_dir, "mediaeval_events")
    model = str(TINY_LLAVA) if model == "tiny" else model
    posts = event_posts(folder, ask=model is not None, small=smoke)
    likelihood = event_log_likelihood if model is None else answer_log_likelihood
    reports, figures = [], {}
    for one, (alpha, lag, note), name in product(range(seed, seed + seeds), settings, chosen):
        shares = LabelDirichlet(alpha, min_examples=1)
        options: dict[str, Any] = {"clients": 3 if smoke else 10, "partition": shares, "batch_size": 8, "lag": lag}
        stream = event_stream(posts, tasks=(2, 2, 3) if tasks == 3 else (1,) * 7, seed=one, **options)
        stream = stream.joint() if name == "joint" else stream.pooled() if name == "fine-tuning" else stream
        L.seed_everything(one, verbose=False)
        lessons = None if folder else 200 if smoke else 600
        module = event_module(
            posts.names, model=model, posts=lessons, lr=lr, lwf=strengths.lwf if name == "lwf" else None
        )
        run_dir = out / f"{name}-alpha{alpha}-lag{lag}{'' if tasks == 3 else '-tasks7'}-seed{one}"
        rules = fedcmm_rules(name, likelihood, strengths)
        rules["callbacks"] = [*rules.get("callbacks", ()), ModalityDrift(log_likelihood=likelihood)]
        alone = name in ("joint", "fine-tuning")  # what learns in one place has one client
        rules |= {"method": TITLES[name] + note, "clients_per_round": 1 if alone else 2 if smoke else 5}
        trainer = make_trainer(min(rounds, 3) if smoke else rounds, run_dir=run_dir, seed=one, **rules)
        reports.append(report := trainer.fit(module, stream, ckpt_path="auto"))
        figures[run_dir.name] = {**event_figures(report), **on_new_pictures(trainer, module, posts)}
        save_figures(report, figures[run_dir.name])
    more = (f"{name}: " + ", ".join(f"{key} {x:.3g}" for key, x in own.items()) for name, own in figures.items())
    lines = [*more, *(f"report: {report.run_dir / 'report.html'}" for report in reports)]
    rank_zero_only(print)(compare(reports, FEDCMM[table]), *lines, sep="\n")
    return {report.run_dir.name: {**report.summary, **figures[report.run_dir.name]} for report in reports}


def make_trainer(rounds: int, **rules: Any) -> FederatedTrainer:
    """A trainer of a method's parts, with a rate that falls within each task."""
    return FederatedTrainer(
        rounds=rounds,
        lr_factor=lambda task, round: 0.5 * (1 + math.cos(math.pi * round / rounds)) + 0.02,
        measure_baseline=False,  # the paper's FWT has none
        eval_every=1,
        score="val_acc",
        **{"accelerator": "cpu", "devices": 1, **rules},
    )


def on_new_pictures(trainer: FederatedTrainer, module: L.LightningModule, posts: EventPosts) -> dict[str, float]:
    """Score on real posts whose pictures nobody trained on."""
    if posts.unseen is None:
        return {}
    collate = as_list if isinstance(posts.unseen, InstructionDataset) else None
    unseen = TaskStream.from_datasets(
        [posts.unseen], [posts.unseen], clients=1, eval_batch_size=256, collate_fn=collate
    )
    return {"new pictures": trainer.validate(module, unseen)[0]["val_acc"]}


if __name__ == "__main__":
    command_line(main)
