"""The methods of the FCIT benchmark on a LLaVA-like model, all with LoRA of the same total rank in the same layers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl.aggregators import Chain, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi, MLoRA, SubspaceRouter
from lightning_fcl.callbacks import EWC, OLoRA, SaveSubspaces
from lightning_fcl.data import TaskStream
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.fsdp2 import fsdp2, shard_layers
from lightning_fcl.federated.routed import COUNT_BYTES
from lightning_fcl.mixins import SubspaceRoutingMixin
from lightning_fcl.mllm.likelihood import answer_log_likelihood
from lightning_fcl.mllm.lora import FEED_FORWARD, PROJECTOR
from lightning_fcl.mllm.module import MultimodalInstructionModule
from lightning_fcl.mllm.questions import QuestionEmbeddings
from lightning_fcl.models import add_experts, add_subspaces, subspace_layers

METHODS = ("zero-shot", "joint", "finetune", "ewc", "o-lora", "m-lora", "moelora", "disco")
GROUPS: Mapping[str, Sequence[str]] = {"all": METHODS, "ablation": ("disco",), "demo": ("finetune", "disco")}
"""What the recipe's ``method`` may say beside names."""
SERVER_STEPS: Mapping[str, Callable[[], Any]] = {
    "disco-fedavgm": partial(FedAvgM, 0.5),
    "disco-fedadam": partial(FedAdam, 1e-3),
    "disco-fedyogi": partial(FedYogi, 1e-3),
    "disco-fedadagrad": partial(FedAdagrad, 1e-3),
}
TITLES = {
    "zero-shot": "Zero-shot",
    "joint": "Joint",
    "finetune": "Finetune",
    "ewc": "EWC",
    "o-lora": "O-LoRA",
    "m-lora": "M-LoRA",
    "moelora": "MoELoRA",
    "disco": "DISCO",
    "disco-fedavgm": "DISCO + FedAvgM",
    "disco-fedadam": "DISCO + FedAdam",
    "disco-fedyogi": "DISCO + FedYogi",
    "disco-fedadagrad": "DISCO + FedAdagrad",
}
_SLICED = ("o-lora", "m-lora", "disco", *SERVER_STEPS)  # a subspace per task; the others have one of the whole rank


class RoutedInstructionModule(SubspaceRoutingMixin, MultimodalInstructionModule):
    """Any LLaVA-like model, evaluated with its subspaces if it has some.

    Without an encoder, tokens are made by :class:`~lightning_fcl.mllm.QuestionEmbeddings` of the question and its
    format hint alone: what the chat template adds is common to all tasks. The published code drops it, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._questions = QuestionEmbeddings.of(self)  # now, while all weights are whole

    @property
    @override
    def routing_features(self) -> str:
        own = self.routing_encoder is None and self.routing_source != "image"
        return f"{self.routing_source} by {QuestionEmbeddings.__name__}" if own else super().routing_features

    @override
    def _text_features(self, batch: Any) -> Tensor:
        return self._questions(batch) if self.routing_encoder is None else super()._text_features(batch)


def fcit_module(
    method: str,
    model: str | Path,
    *,
    stages: int,
    rank: int = 8,
    scaling: float = 2.0,
    dropout: float = 0.05,
    train_projector: bool = False,
    **options: Any,
) -> RoutedInstructionModule:
    """The model with what a method trains.

    Args:
        method: A name of ``TITLES``.
        model: Folder or hub id of a LLaVA-like model.
        stages: Stages of the stream; methods without a subspace per task get ``stages`` times the rank.
        rank: Rank of one subspace.
        scaling: LoRA's alpha over the total rank.
        dropout: In front of LoRA.
        train_projector: Train the projector too, shared by all tasks.
        **options: Of the module: ``lr``, ``max_new_tokens``, ``routing_activation`` and the like.
    """
    torch.manual_seed(0)  # the same start for every seed of the stream
    module = RoutedInstructionModule.from_pretrained(model, lora=None, **options)
    shared: Any = PROJECTOR if train_projector else ()
    settings: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "trainable": shared}
    if method == "moelora":
        add_experts(module.model, f"re:{FEED_FORWARD}", rank=rank * stages, experts=stages, **settings)
    else:
        add_subspaces(module.model, f"re:{FEED_FORWARD}", rank=rank * (1 if method in _SLICED else stages), **settings)
    return module


def fcit_rules(
    method: str, module: RoutedInstructionModule, *, threshold: float, strength: float | None = None
) -> dict[str, Any]:
    """What a method adds to the trainer's arguments.

    Args:
        method: A name of ``TITLES``.
        module: What :func:`fcit_module` made.
        threshold: Of DISCO's routing.
        strength: Of EWC's or O-LoRA's penalty; each has its default.
    """
    lora = {f"{name}.lora_{factor}" for name in subspace_layers(module) for factor in "AB"}
    shared = [name for name, p in module.named_parameters() if p.requires_grad and name not in lora]
    if method == "ewc":
        return {"callbacks": EWC(100.0 if strength is None else strength, log_likelihood=answer_log_likelihood)}
    if method == "o-lora":
        return {"callbacks": OLoRA(0.05 if strength is None else strength)}
    if method == "m-lora":
        return {"aggregator": MLoRA(shared=shared)}
    if method.startswith("disco"):
        steps = [SERVER_STEPS[method]()] if method in SERVER_STEPS else []
        chain = Chain(SubspaceRouter(threshold, shared=shared), FedAvg(), *steps)
        return {"aggregator": chain, "server_callbacks": SaveSubspaces()}
    return {}


def fcit_machine(accelerator: str, devices: int, strategy: str, precision: Any) -> dict[str, Any]:
    """The trainer's arguments that say where a run runs.

    Args:
        accelerator: As in ``lightning.Fabric``.
        devices: Processes.
        strategy: ``"auto"``: they share a round's clients. Otherwise they share each client's model:
            ``"deepspeed_stage_2"`` and the like, ``"ddp"``, or ``"fsdp"`` for FSDP 2, layer by layer.
        precision: As in ``lightning.Fabric``.
    """
    return {
        "accelerator": accelerator,
        "devices": devices,
        "strategy": fsdp2(shard_layers) if strategy == "fsdp" else strategy,
        "parallel": "clients" if strategy == "auto" else "model",
        "precision": precision,
    }


def routing_threshold(given: float | None, module: RoutedInstructionModule, stream: TaskStream) -> float:
    """The threshold of DISCO's routing: the given one, or the proposal from held-out prompts of the first two stages.

    Args:
        given: A cosine, or ``None``.
        module: Makes the tokens.
        stream: Its first two evaluation sets are read.

    Raises:
        MisconfigurationError: If there is nothing to propose a threshold from.
    """
    if given is not None:
        return given
    if len(stream.names) < 2:
        raise MisconfigurationError(
            f"`threshold` must be a number in a stream of {len(stream.names)} stage: a proposal takes two tasks."
        )
    return float(module.propose_threshold([stream.eval_loader(0), stream.eval_loader(1)]).threshold)


def uplink(module: RoutedInstructionModule, stages: int) -> dict[str, int]:
    """Bytes that a client sends per round under DISCO, and what the published code sends.

    Args:
        module: What :func:`fcit_module` made for DISCO, after its run.
        stages: Slots of the published code.

    Returns:
        ``slot``: one subspace, the second phase. ``projector``: the trained part of it, or 0. ``token``: the identity
        token and its count, the first phase; 0 before a run. ``here``: their sum. ``published``: all slots and the
        whole projector, trained or not, without any token.
    """
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    slot = sum(size for name, size in sizes.items() if name in trained and "lora_" in name)
    projector = sum(size for name, size in sizes.items() if name in trained and "lora_" not in name)
    tokens = module.subspace_tokens
    token = 0 if tokens is None else tokens[0].numel() * tokens.element_size() + COUNT_BYTES
    whole = sum(size for name, size in sizes.items() if PROJECTOR.search(name))
    return {
        "slot": slot,
        "projector": projector,
        "token": token,
        "here": slot + projector + token,
        "published": stages * slot + whole,
    }
