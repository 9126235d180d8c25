"""Adding a weights-only term to the gradients, in a stock ``Trainer`` and in a client job."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.types import Params

_SHARDED = ("DeepSpeed", "FSDP", "ModelParallel", "XLA")


def check_gradient_access(trainer: Any, name: str) -> None:
    """Refuse, at ``setup``, a stock ``Trainer`` whose gradients are not whole in ``on_before_optimizer_step``.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context; a context's engine knows how to reach them.
        name: Name of the callback, for the message.

    Raises:
        MisconfigurationError: With the reason and what to use instead.
    """
    if isinstance(trainer, L.Trainer):
        strategy = type(trainer.strategy).__name__
        if strategy.startswith(_SHARDED):
            raise MisconfigurationError(
                f"`{name}` must see whole gradients before the optimiser step, but {strategy} keeps them in shards of "
                "its own. Use DDP, or FederatedTrainer(parallel='model'), whose engines hand them out."
            )


def check_weight_access(trainer: Any, name: str, instead: str) -> None:
    """Refuse, at ``setup``, a strategy whose optimiser steps on copies or shards of the weights.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context.
        name: Name of the callback, for the message.
        instead: What to use there, for the message.

    Raises:
        MisconfigurationError: With the reason and what to use instead.
    """
    if type(trainer.strategy).__name__.startswith(_SHARDED) or getattr(trainer, "sharded", False):
        raise MisconfigurationError(
            f"`{name}` must reach the weights around each optimiser step, which sharded optimisers (DeepSpeed, FSDP) "
            f"keep copies of. Use {instead}, or DDP."
        )


def check_federated(trainer: Any, name: str) -> None:
    """Refuse, at ``setup``, a stock ``Trainer`` for a method that has no meaning without a server.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context.
        name: Name of the callback, for the message.

    Raises:
        MisconfigurationError: In a stock ``Trainer``.
    """
    if isinstance(trainer, L.Trainer):
        raise MisconfigurationError(f"`{name}` must run in a FederatedTrainer: alone, there is nobody to agree with.")


def weights_of(trainer: Any, pl_module: L.LightningModule) -> dict[str, Tensor]:
    """Whole values of the trainable parameters, by name; no copies where they live whole on this device."""
    if isinstance(trainer, L.Trainer):
        return {name: p.detach() for name, p in pl_module.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = trainer.weights()
    return found


def travelling_of(trainer: Any, pl_module: L.LightningModule) -> dict[str, Tensor]:
    """As :func:`weights_of`, without what stays with the client: it has no global value that clients could agree on."""
    return {name: weight for name, weight in weights_of(trainer, pl_module).items() if name in trainer.travelling}


def add_penalty(
    trainer: Any, pl_module: L.LightningModule, gradient: Callable[[Params], Params], known: Params
) -> None:
    """Add the gradient of a penalty on the weights to the gradients of the loss.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context.
        pl_module: The module.
        gradient: Maps weights to the penalty's gradient, both by name.
        known: Only parameters named here are penalised (a head that grew since has no anchor).
    """
    with torch.no_grad():
        weights = weights_of(trainer, pl_module)
        terms = gradient({name: weight for name, weight in weights.items() if name in known})
        if not isinstance(trainer, L.Trainer):
            trainer.add_to_gradients(terms)
            return
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and name in terms:
                parameter.grad.add_(terms[name])
