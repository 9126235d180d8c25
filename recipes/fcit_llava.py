"""FCIT: a LLaVA-like model is tuned on visual instructions by many clients, task after task; DISCO and its baselines.

    python recipes/fcit_llava.py                                    # DISCO and Finetune, embedded: under 6 minutes
    python recipes/fcit_llava.py --method all --seeds 3 --scenario het --beta 0.5
    python recipes/fcit_llava.py --preset --model llava-hf/llava-1.5-7b-hf --data-dir DIR --accelerator cuda

All train LoRA of one total rank in the language model's feed-forward layers. ``DIR`` has a folder per task with
``train.jsonl`` and ``test.jsonl``. A finished run is not repeated, a killed one goes on. Last is the mean score at the
end, Avg that over the tasks seen, averaged over stages; unseen is the score on tasks that the stream leaves out.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities import rank_zero_only

from lightning_fcl import FederatedTrainer
from lightning_fcl._recipes import chosen_methods, command_line
from lightning_fcl.data.fcit import FCIT_PRESET, fcit_stream
from lightning_fcl.federated.zero_shot import zero_shot
from lightning_fcl.functional.subspace_lora import Activation
from lightning_fcl.models.tiny_llava import TINY_LLAVA
from lightning_fcl.reports import FCIT, compare
from lightning_fcl.suites.fcit import GROUPS, TITLES, fcit_machine, fcit_module, fcit_rules, routing_threshold, uplink
from lightning_fcl.suites.fcit_scores import HeldOut, ablate_activation, fcit_table


def main(
    out: Path = Path("runs/fcit_llava"),
    seed: int = 0,
    seeds: int = 1,
    method: str | list[str] = "demo",
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
    max_new_tokens: int = 128,
    strength: float | None = None,
    threshold: float | None = 0.9,
    activation: Activation = "softmax",
    temperature: float = 0.05,
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
        seeds: Number of seeds, from ``seed`` on.
        method: ``zero-shot``, ``joint`` (all data at once), ``finetune``, ``ewc``, ``o-lora``, ``m-lora``, ``moelora``,
            ``disco``, ``disco-fedavgm`` (``-fedadam``, ``-fedyogi``, ``-fedadagrad``); several; ``demo`` (finetune and
            disco); ``all`` (but the latter four); ``ablation``: DISCO trained once and scored under every activation.
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
        max_new_tokens: Most tokens of an answer; drawn tasks need 16, and models that ramble take their time.
        strength: Of EWC's or O-LoRA's penalty.
        threshold: Of DISCO's routing; ``null`` for the proposal from held-out prompts of the first two tasks.
        activation: How DISCO weighs subspaces at evaluation.
        temperature: Of the softmax among them.
        source: What DISCO compares.
        train_projector: Train the projector too, shared by all tasks, as the published code does.
        preset: The paper's federation: 50 clients, 5 per round, 10 rounds, rank 8, learning rate 2e-4.
        smoke: End in seconds: two tasks, few examples.
        accelerator: As in ``lightning.Fabric``.
        devices: Processes; they share a round's clients, or with a strategy of shards each client.
        strategy: ``auto``, or for large models ``deepspeed_stage_2``, ``deepspeed_stage_3`` or ``fsdp``.
        precision: As in ``lightning.Fabric``.

    Returns:
        The figures of each run, by the name of its folder.
    """
    names = chosen_methods(method or (), TITLES, GROUPS)
    if preset:
        clients, sampled, rounds, epochs, rank, lr = *FCIT_PRESET.values(), 1, 8, 2e-4
    if smoke:
        tasks, train_size, test_size, clients, sampled, rounds = tasks or ["odd", "reach"], 48, 8, 3, 2, 1
    machine = fcit_machine(accelerator, devices, strategy, precision)
    say, reports, figures = rank_zero_only(print), [], {}
    for one in range(seed, seed + seeds):
        stream = fcit_stream(
            scenario, setting, beta=beta, skew=skew, clients=clients, data_dir=data_dir, tasks=tasks,
            train_size=train_size, test_size=test_size, batch_size=batch_size, seed=one,
        )  # fmt: skip
        stages = len(stream.names)
        options: dict[str, Any] = {"stages": stages, "rank": rank, "train_projector": train_projector, "lr": lr}
        options |= {"routing_activation": activation, "routing_temperature": temperature, "routing_source": source}
        options |= {"max_new_tokens": max_new_tokens}
        start = partial(fcit_module, "zero-shot", model, **options)
        held_out = HeldOut(stream.names, start, data_dir=data_dir, size=test_size, batch_size=batch_size, seed=one)
        for name in names:
            L.seed_everything(one, verbose=False)
            module = fcit_module(name, model, **options)
            limit = routing_threshold(threshold, module, stream)
            trainer = FederatedTrainer(
                method=TITLES[name], run_dir=out / f"{name}-seed{one}", rounds=rounds, clients_per_round=sampled,
                local_epochs=epochs, seed=one, score="val_acc", **machine,
                **fcit_rules(name, module, threshold=limit, strength=strength),
            )  # fmt: skip
            if name == "zero-shot":
                reports.append(zero_shot(trainer, module, stream))
            else:
                reports.append(trainer.fit(module, stream.joint() if name == "joint" else stream, "auto"))
            figures[trainer.run_dir] = held_out.figures(reports[-1], trainer, module)
            if name == "disco":
                say(f"{module.num_subspaces} subspaces for {stages} tasks, threshold {limit:.3f}")
                say("bytes up per client and round:", uplink(module, stages))
            reports += ablate_activation(trainer, module, stream) if method == "ablation" else []
    pages = (f"report: {report.run_dir / 'report.html'}" for report in reports)
    theirs = FCIT.get((scenario, "activation" if method == "ablation" else setting))
    say(compare(reports, theirs), fcit_table(reports, figures), *pages, sep="\n")
    return {report.run_dir.name: {**report.summary, **figures.get(report.run_dir, {})} for report in reports}


if __name__ == "__main__":
    command_line(main)
