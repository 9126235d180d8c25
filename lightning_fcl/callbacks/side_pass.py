"""Gradients of the module's own loss on other batches or at other weights, beside the loop and without a trace.

Methods that need more than one pass per step (GEM on stored examples, SAM at moved weights) take them here, inside
``on_before_optimizer_step``: gradients of the step are whole there, clipping comes later, and the optimiser is the
user's own, untouched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fcl._heads import silent
from lightning_fcl.callbacks.gradients import check_gradient_access
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.types import Params

Batch = tuple[Any, int]
"""A batch as ``training_step`` gets it, and its index."""


def check_side_pass(trainer: Any, pl_module: L.LightningModule, name: str) -> None:
    """Refuse, at ``setup``, what a further pass inside a step cannot be exact under.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context.
        pl_module: The module.
        name: Name of the callback, for the message.

    Raises:
        MisconfigurationError: With manual optimisation, a gradient scaler, or weights that are spread over ranks.
    """
    check_gradient_access(trainer, name)
    if not pl_module.automatic_optimization:
        raise MisconfigurationError(
            f"`{name}` must run `training_step` once more inside a step, but with manual optimisation that would step "
            "the optimiser too. Use automatic optimisation."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise MisconfigurationError(
            f"`{name}` must take further gradients inside a step, which a gradient scaler (16-mixed) does not scale. "
            "Use precision='bf16-mixed' or '32-true'."
        )
    if not isinstance(trainer, L.Trainer) and trainer.world_size > 1:
        raise MisconfigurationError(
            f"`{name}` must run `training_step` by itself, but with parallel='model' ranks share each batch behind a "
            "wrapper. Use parallel='clients'."
        )


def check_stands_first(trainer: Any, callback: L.Callback) -> None:
    """Refuse, at ``setup``, a callback that changes gradients before ``callback`` replaces them.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context.
        callback: The callback that takes the step's gradients anew.

    Raises:
        MisconfigurationError: With the name of the callback in front.
    """
    for other in trainer.callbacks:
        if other is callback:
            return
        if type(other).on_before_optimizer_step is not L.Callback.on_before_optimizer_step:
            raise MisconfigurationError(
                f"`callbacks` must name {type(callback).__name__} before {type(other).__name__}: it takes the step's "
                "gradients anew, and what stood before it would be lost."
            )


def as_in_training(trainer: Any, pl_module: L.LightningModule, batch: Any) -> Any:
    """The batch as ``training_step`` gets it: cast, moved, and through the module's own transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = pl_module.on_before_batch_transfer(batch, 0)
    batch = pl_module.transfer_batch_to_device(batch, pl_module.device, 0)
    return pl_module.on_after_batch_transfer(batch, 0)


def side_gradients(
    trainer: Any,
    pl_module: L.LightningModule,
    batches: Sequence[Batch],
    *,
    scale: float = 1.0,
    loss_of: Callable[[Any], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Gradient of ``scale`` times the sum over batches of the loss, at the module's present weights.

    The module's own ``training_step`` runs in its present mode. Afterwards ``.grad``, buffers, Metric objects and
    torch's random state are as before, and nothing was logged. What else ``training_step`` writes into ``self`` stays.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context.
        pl_module: The module.
        batches: Batches as ``training_step`` gets them, with their indices.
        scale: Factor of every batch's loss; ``1 / accumulate_grad_batches`` for the window of a step.
        loss_of: ``f(batch) -> scalar`` in the place of ``training_step``.

    Returns:
        One tensor per trainable parameter, zero where the loss does not reach; the mean over ranks of a stock
        ``Trainer``.
    """
    step = pl_module.training_step
    indexed = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    weights = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with without_traces(pl_module), torch.enable_grad():
        for batch, index in batches:
            with trainer.precision_plugin.forward_context():
                result = loss_of(batch) if loss_of is not None else step(batch, index) if indexed else step(batch)
            loss = result["loss"] if isinstance(result, Mapping) else result
            if loss is None:
                continue
            grads = torch.autograd.grad(loss * scale, list(weights.values()), materialize_grads=True)
            torch._foreach_add_(list(sums.values()), list(grads))
    if isinstance(trainer, L.Trainer) and trainer.world_size > 1:
        sums = {name: trainer.strategy.reduce(total, reduce_op="mean") for name, total in sums.items()}
    return sums


@contextmanager
def moved(pl_module: nn.Module, offsets: Params) -> Iterator[None]:
    """Inside, parameters stand at their value plus ``offsets`` (by name); afterwards at the old one, bit for bit."""
    own = {name: p for name, p in pl_module.named_parameters() if name in offsets}
    before = {name: p.detach().clone() for name, p in own.items()}
    try:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.add_(offsets[name])
        yield
    finally:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(before[name])


@contextmanager
def without_traces(module: nn.Module) -> Iterator[None]:
    """Undo afterwards what a forward pass leaves in buffers, Metric objects and random state; log nothing inside."""
    tables = [(child._buffers, dict(child._buffers)) for child in module.modules() if child._buffers]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [(metric, dict(vars(metric))) for metric in module.modules() if isinstance(metric, Metric)]
    for metric, _ in metrics:
        for name in metric._defaults:
            value = getattr(metric, name)
            setattr(metric, name, [*value] if isinstance(value, list) else value.clone())
    devices = [module.device] if getattr(module, "device", torch.device("cpu")).type == "cuda" else []
    try:
        with silent(module), torch.random.fork_rng(devices):
            yield
    finally:
        for metric, kept in metrics:
            vars(metric).clear()
            vars(metric).update(kept)
        for table, entries in tables:  # code may have put others in their place
            table.update(entries)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def write_gradients(pl_module: nn.Module, gradients: Params) -> None:
    """Replace the gradients by ``gradients``, by name; a parameter that had none gets one only where it is not zero."""
    with torch.no_grad():
        for name, parameter in pl_module.named_parameters():
            if name not in gradients:
                continue
            if parameter.grad is not None:
                parameter.grad.copy_(gradients[name])
            elif bool(gradients[name].any()):
                parameter.grad = gradients[name].clone()
