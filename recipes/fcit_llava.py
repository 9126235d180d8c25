"""FCIT: a LLaVA-like model is tuned on visual instructions by many clients, task after task; DISCO and its baselines.

    python recipes/fcit_llava.py                                    # DISCO and Finetune, embedded: under 6 minutes
    python recipes/fcit_llava.py --method all --seeds 3 --scenario het --beta 0.5
    python recipes/fcit_llava.py --preset --model llava-hf/llava-1.5-7b-hf --data-dir DIR --accelerator cuda

Every method trains LoRA in the feed-forward layers of the language model, with the same total rank. ``DIR`` holds a
folder per task with ``train.jsonl`` and ``test.jsonl``. A finished run is not repeated, and a killed one goes on where
it was. Last is the mean score over all tasks at the end; Avg is that over the tasks seen, averaged over stages.
"""

from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities import rank_zero_only

from lightning_fcl import FederatedTrainer
from lightning_fcl._recipes import chosen_methods, command_line
from lightning_fcl.data.fcit import FCIT_PRESET, fcit_stream
from lightning_fcl.federated.zero_shot import zero_shot
from lightning_fcl.models.tiny_llava import TINY_LLAVA
from lightning_fcl.reports import compare
from lightning_fcl.suites.fcit import METHODS, TITLES, fcit_module, fcit_rules, uplink


def main(
    out: Path = Path("runs/fcit_llava"),
    seed: int = 0,
    seeds: int = 1,
    method: str | list[str] | None = None,
    model: str = str(TINY_LLAVA),
    data_dir: Path | None = None,
    scenario: Literal["hom", "het"] = "hom",
    setting: Literal["task", "capability"] = "task",
    beta: float = 1.0,
    skew: Literal["quantity", "label"] = "quantity",
    tasks: list[str] | None = None,
    train_size: int = 1000,
    test_size: int = 100,
    clients: int = 10,
    sampled: int = 5,
    rounds: int = 2,
    epochs: int = 2,
    batch_size: int = 16,
    rank: int = 4,
    lr: float = 5e-3,
    strength: float | None = None,
    threshold: float | None = 0.9,
    activation: Literal["softmax", "argmax", "cosine", "concatenation"] = "softmax",
    source: Literal["text", "image", "both"] = "text",
    train_projector: bool = False,
    preset: bool = False,
    smoke: bool = False,
    accelerator: str = "cpu",
    devices: int = 2,
    strategy: str = "auto",
    precision: str = "32-true",
) -> dict[str, dict[str, float]]:
    """Train, score and compare.

    Args:
        out: Folder for the run folders, one per method and seed.
        seed: Seeds data, shares, sampling and every client's draws.
        seeds: How many seeds, counted from ``seed``.
        method: ``zero-shot``, ``joint`` (all data at once), ``finetune``, ``ewc``, ``o-lora``, ``m-lora``,
            ``moelora``, ``disco``, ``disco-fedavgm`` (``-fedadam``, ``-fedyogi``, ``-fedadagrad``); several, or ``all``
            (without DISCO's server optimisers).
        model: Folder or hub id of a LLaVA-like model.
        data_dir: Folder of instruction files; without it, drawn pictures.
        scenario: Whether all clients train the same task in a stage, or several.
        setting: A stage per task, or per group of tasks.
        beta: Dirichlet concentration of the shares.
        skew: Whether shares differ in size or in answers.
        tasks: Names of the tasks, in order.
        train_size: Training examples per task.
        test_size: Test examples per task.
        clients: Number of clients.
        sampled: Clients per round.
        rounds: Rounds per stage.
        epochs: Local epochs per round.
        batch_size: Examples per batch.
        rank: Rank of one subspace; methods without subspaces get it times the number of stages.
        lr: Learning rate of AdamW.
        strength: Of EWC's or O-LoRA's penalty.
        threshold: Of DISCO's routing; ``null`` for the proposal from held-out prompts of the first two tasks.
        activation: How DISCO weighs subspaces at evaluation.
        source: What DISCO compares.
        train_projector: Train the projector too, shared by all tasks, as the published code does.
        preset: The paper's federation: 50 clients, 5 per round, 10 rounds, rank 8, learning rate 2e-4.
        smoke: End in seconds: two tasks, few examples.
        accelerator: As in ``lightning.Fabric``.
        devices: Processes; they share a round's clients, or with a strategy of shards each client.
        strategy: ``auto``, or ``deepspeed_stage_2`` and the like for large models.
        precision: As in ``lightning.Fabric``.

    Returns:
        The figures of each run, by the name of its folder.
    """
    names = list(METHODS) if method == "all" else chosen_methods(method or ["finetune", "disco"], TITLES)
    if preset:
        clients, sampled, rounds, epochs, rank, lr = *FCIT_PRESET.values(), 1, 8, 2e-4
    if smoke:
        tasks, train_size, test_size, clients, sampled, rounds = tasks or ["odd", "reach"], 48, 8, 3, 2, 1
    machine: dict[str, Any] = {"accelerator": accelerator, "devices": devices, "strategy": strategy}
    machine |= {"parallel": "clients" if strategy == "auto" else "model", "precision": precision}
    reports = []
    for one in range(seed, seed + seeds):
        stream = fcit_stream(
            scenario, setting, beta=beta, skew=skew, clients=clients, data_dir=data_dir, tasks=tasks,
            train_size=train_size, test_size=test_size, batch_size=batch_size, seed=one,
        )  # fmt: skip
        stages = len(stream.names)
        options: dict[str, Any] = {"routing_activation": activation, "routing_source": source, "lr": lr}
        for name in names:
            L.seed_everything(one, verbose=False)
            module = fcit_module(name, model, stages=stages, rank=rank, train_projector=train_projector, **options)
            limit = threshold or module.propose_threshold([stream.eval_loader(0), stream.eval_loader(1)]).threshold
            trainer = FederatedTrainer(
                method=TITLES[name], run_dir=out / f"{name}-seed{one}", rounds=rounds, clients_per_round=sampled,
                local_epochs=epochs, seed=one, score="val_acc",
                **machine, **fcit_rules(name, module, threshold=limit, strength=strength),
            )  # fmt: skip
            if name == "zero-shot":
                reports.append(zero_shot(trainer, module, stream))
                continue
            reports.append(trainer.fit(module, stream.joint() if name == "joint" else stream, "auto"))
            if name == "disco":
                rank_zero_only(print)(f"{module.num_subspaces} subspaces for {stages} tasks, threshold {limit:.3f}")
                rank_zero_only(print)("bytes of weights up per client and round:", uplink(module, stages))
    pages = (f"report: {report.run_dir / 'report.html'}" for report in reports)
    rank_zero_only(print)(compare(reports), *pages, sep="\n")
    return {report.run_dir.name: report.summary for report in reports}


if __name__ == "__main__":
    command_line(main)
