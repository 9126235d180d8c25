"""Evaluation of the module as it stands: the user's ``validation_step`` and hooks over one loader."""

from typing import Any

from torch.utils.data import DataLoader

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.client import BatchTransfer, takes_index
from lightning_fcl.federated.context import ClientContext
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.hooks import HookTable
from lightning_fcl.types import Metrics


def evaluate(
    engine: Engine, hooks: HookTable, context: ClientContext, loader: DataLoader[Any], limit_batches: int | None = None
) -> Metrics:
    """Run ``validation_step`` over a loader in eval mode without gradients.

    Args:
        engine: Holds the module with the weights to evaluate.
        hooks: Callback and module hooks.
        context: A context with ``phase="evaluate"``.
        loader: The evaluation batches.
        limit_batches: At most so many; ``None`` for all.

    Returns:
        What the module logged, reduced over the whole loader: means weighted by batch size, metrics computed once.
    """
    module = engine.module
    transfer = BatchTransfer(engine)
    indexed = takes_index(module.validation_step)
    with context.attached(), engine.evaluating():
        hooks.call("on_validation_start", context, module)
        hooks.call("on_validation_epoch_start", context, module)
        for index, batch in enumerate(loader):
            if index == limit_batches:
                break
            batch = transfer(batch)
            context._log.batch = batch
            hooks.call("on_validation_batch_start", context, module, batch, index, 0)
            outputs = engine.validation_step(*((batch, index) if indexed else (batch,)))
            hooks.call("on_validation_batch_end", context, module, outputs, batch, index, 0)
        hooks.call("on_validation_epoch_end", context, module)
        hooks.call("on_validation_end", context, module)
    return context._log.reduced()


def predict(engine: Engine, hooks: HookTable, context: ClientContext, loader: DataLoader[Any]) -> list[Any]:
    """Outputs of ``predict_step`` for every batch of a loader, in eval mode without gradients."""
    module = engine.module
    transfer = BatchTransfer(engine)
    outputs = []
    with context.attached(), engine.evaluating(), engine.precision.forward_context():
        for index, batch in enumerate(loader):
            batch = transfer(batch)
            hooks.call("on_predict_batch_start", context, module, batch, index, 0)
            outputs.append(module.predict_step(*((batch, index) if takes_index(module.predict_step) else (batch,))))
            hooks.call("on_predict_batch_end", context, module, outputs[-1], batch, index, 0)
    return outputs


def pick_score(score: str | None, metrics: Metrics) -> str:
    """Name of the logged key that fills the score matrix.

    Args:
        score: What the user asked for, or ``None`` to find the one key that looks like an accuracy.
        metrics: What an evaluation logged.

    Returns:
        The key.

    Raises:
        MisconfigurationError: If the key was not logged, or not exactly one key looks like an accuracy.
    """
    if score is not None:
        if score not in metrics:
            raise MisconfigurationError(
                f"`score` must be a key that `validation_step` logs, got {score!r}; it logs {sorted(metrics)}."
            )
        return score
    similar = [key for key in metrics if "acc" in key.lower()]
    if len(similar) != 1:
        found = f"{similar} look like accuracies" if similar else "none looks like an accuracy"
        raise MisconfigurationError(
            f"`score` must name one of the keys that `validation_step` logs ({sorted(metrics)}), since {found}. "
            f"Write FederatedTrainer(score=...)."
        )
    return similar[0]
