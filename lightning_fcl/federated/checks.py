"""Checks of a trainer's arguments, all before any work starts."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.base import Engine

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer

_COUNTS = (
    "clients_per_round",
    "local_epochs",
    "local_steps",
    "accumulate_grad_batches",
    "eval_every",
    "keep_checkpoints",
    "max_empty_rounds",
    "limit_train_batches",
    "limit_eval_batches",
)
_CHOICES = {
    "parallel": ("clients", "model"),
    "engine": ("auto", "sequential", "stacked"),
    "channels_last": ("auto", True, False),
    "gradient_clip_algorithm": ("norm", "value"),
    "on_client_error": ("raise", "skip", "retry"),
}


def check_arguments(trainer: "FederatedTrainer") -> None:
    """Raise :class:`MisconfigurationError` for the first argument that is out of range."""
    rounds = [trainer.rounds] if isinstance(trainer.rounds, int) else list(trainer.rounds)
    for name, value in [("rounds", min(rounds, default=0)), *((n, getattr(trainer, n)) for n in _COUNTS)]:
        if value is not None and value < 1:
            raise MisconfigurationError(f"`{name}` must be at least 1, got {value}.")
    for name in ("gradient_clip_val", "client_timeout"):
        value = getattr(trainer, name)
        if value is not None and not value > 0:
            raise MisconfigurationError(f"`{name}` must be positive or None, got {value}.")
    for name, allowed in _CHOICES.items():
        if (value := getattr(trainer, name)) not in allowed:
            raise MisconfigurationError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
    for logger in trainer.loggers:
        if not hasattr(logger, "log_metrics"):
            raise MisconfigurationError(
                f"`loggers` must be Lightning loggers, got {logger!r}. CSV files are always written."
            )
    share = trainer.min_completed
    if not (0 < share <= 1 if isinstance(share, float) else share >= 1):
        raise MisconfigurationError(
            f"`min_completed` must be a number of clients (int) or a share in (0, 1] (float), got {share}."
        )


def check_module(trainer: "FederatedTrainer", module: L.LightningModule, stream: "TaskStream") -> None:
    """Raise :class:`MisconfigurationError` if module, stream and trainer cannot work together."""
    kind = type(module)
    if torch.is_inference_mode_enabled():
        raise MisconfigurationError(
            "`fit` must be called outside of `torch.inference_mode()`: nothing can be trained in it."
        )
    if hasattr(module, "_orig_mod"):
        raise MisconfigurationError(
            "`module` must be the LightningModule itself, got what `torch.compile` made of it. Compile the nets inside."
        )
    if empty := [task for task in range(len(stream)) if not stream.clients(task)]:
        raise MisconfigurationError(
            f"`stream` must have clients with data in every stage, but stages {empty[:3]} have none."
        )
    if not isinstance(module, L.LightningModule):
        raise MisconfigurationError(
            f"`module` must be a `lightning.LightningModule`, got {kind.__module__}.{kind.__name__}. "
            "Import it from `lightning`, not from `pytorch_lightning`: the two have different classes."
        )
    for name in ("training_step", "validation_step", "configure_optimizers"):
        if getattr(kind, name) is getattr(L.LightningModule, name):
            raise MisconfigurationError(f"`module` must define `{name}`, but {kind.__name__} does not.")
    if not module.automatic_optimization and (trainer.accumulate_grad_batches > 1 or trainer.gradient_clip_val):
        raise MisconfigurationError(
            "`accumulate_grad_batches` and `gradient_clip_val` must be left alone with manual optimization: "
            "accumulate and clip in your `training_step`."
        )
    if isinstance(trainer.rounds, Sequence) and len(trainer.rounds) != len(stream):
        raise MisconfigurationError(
            f"`rounds` must be one number or one per task ({len(stream)}), got {len(trainer.rounds)} numbers."
        )


def check_engine(trainer: "FederatedTrainer", engine: Engine) -> None:
    """Raise :class:`MisconfigurationError` for what ranks that share a client cannot do."""
    if engine.shard[1] > 1 and trainer.client_timeout is not None:
        raise MisconfigurationError(
            "`client_timeout` must be None with parallel='model': ranks that share a client would give up at different "
            "moments and then wait for each other."
        )
    if engine.sharded and trainer.keep_optimizer_state:
        raise MisconfigurationError(
            "`keep_optimizer_state` must be False with a strategy that shards optimiser states "
            f"({type(engine.fabric.strategy).__name__}): they cannot be kept per client. Use DDP."
        )


def method_name(trainer: "FederatedTrainer", module: L.LightningModule | None = None) -> str:
    """Card names of what makes the method, such as ``"SPECIAL"``; plain FedAvg is named only if it stands alone."""
    parts = [*trainer.chain.rules, *trainer.callbacks, *trainer.server_callbacks]
    cards = [part.card for part in parts if getattr(part, "card", None)]
    mixins = [vars(kind)["card"] for kind in type(module).__mro__ if "card" in vars(kind)]
    names = dict.fromkeys(card.name for card in [*cards, *mixins] if card.name != "FedAvg")  # FedADB has two halves
    return " + ".join(names or ["FedAvg"])


def as_list(value: Any) -> list[Any]:
    """``value`` as a list: ``None`` and ``False`` are empty, a single object is a list of one."""
    if value is None or value is False:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def quorum(min_completed: int | float, sampled: int) -> int:
    """Updates that a round needs, given how many clients were sampled; at least one.

    Example:
        >>> quorum(3, 8), quorum(3, 2), quorum(0.5, 5)
        (3, 2, 3)
    """
    if isinstance(min_completed, int):
        return max(1, min(sampled, min_completed))
    return max(1, math.ceil(min_completed * sampled))
