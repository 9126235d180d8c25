"""Whether clients are trained in stacks: fixed rules on settings, hooks, layers and shapes, so that a rerun agrees."""

from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.federated.engines.replica import ReplicaEngine
from lightning_fcl.federated.hooks import HookTable, overridden
from lightning_fcl.federated.stacked import StackedJobs, warn_sequential

if TYPE_CHECKING:
    from lightning_fcl.federated.run import Run
    from lightning_fcl.federated.trainer import FederatedTrainer

_CPU_ELEMENTS = 1 << 19  # of a stack's weights: they stay in cache
_CPU_SMALL = 1 << 15  # parameters up to which a step is calls more than arithmetic
_GPU_ELEMENTS = 1 << 27
_MOST_LANES = 256
_LEAST_LANES = 4
_MODULE_METHODS = (
    *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
_JOB_HOOKS = ("setup", "teardown", "on_fit", "on_train", "on_before", "on_after")
_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU)
_AUTO_LAYERS = (nn.Linear, nn.Flatten, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity)


def stack(run: "Run") -> StackedJobs | None:
    """What trains the clients of a run in stacks, or ``None`` if they are trained one after another.

    ``engine="auto"`` stacks on CPU if all layers are linear or act element by element and there are at most 32,768
    parameters, since wider layers of one client use the cache better; on an accelerator whatever can be stacked.

    Args:
        run: Not started.
    """
    trainer, engine = run.trainer, run.engine
    if trainer.engine == "sequential":
        return None
    on_cpu = engine.fabric.device.type == "cpu"
    fitting = min(_MOST_LANES, (_CPU_ELEMENTS if on_cpu else _GPU_ELEMENTS) // engine.layout.size)
    reason = _why_not(trainer, run)
    if reason is None and trainer.engine == "auto":
        leaves = [child for child in engine.module.modules() if next(child.children(), None) is None]
        if on_cpu and (engine.layout.size > _CPU_SMALL or not all(type(leaf) in _AUTO_LAYERS for leaf in leaves)):
            return None
    if reason is not None:
        if trainer.engine == "stacked":
            warn_sequential(reason)
        return None
    return StackedJobs(run.jobs, max(fitting, _LEAST_LANES))


def _why_not(trainer: "FederatedTrainer", run: "Run") -> str | None:
    engine = run.engine
    replica = isinstance(engine, ReplicaEngine) and engine.flat is not None
    settings = ("gradient_clip_val", "client_timeout", "keep_optimizer_state", "channels_last")
    reasons = {
        "it needs `parallel='clients'` and weights of one dtype": not replica,
        "clients start from weights of their own (a router)": trainer.chain.router is not None,
        "`precision` is not '32-true' or '64-true'": str(engine.precision.precision) not in ("32-true", "64-true"),
        "`accumulate_grad_batches` is set": trainer.accumulate_grad_batches > 1,
        **{f"`{name}` is set": bool(getattr(trainer, name)) for name in settings},
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return found or _module_reason(run) or _hooked(run.client_hooks, trainer.callbacks)


def _module_reason(run: "Run") -> str | None:
    module, layout = run.engine.module, run.engine.layout
    buffers = layout.counters or layout.local or layout.transient or layout.slots[-1].start >= layout.num_params
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))
    draws = any(isinstance(child, _DRAWING) and getattr(child, "p", 1.0) for child in module.modules())
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())
    hooked |= any(child._backward_hooks or child._backward_pre_hooks for child in module.modules())
    reasons = {
        "the module optimises by hand": not module.automatic_optimization,
        "the module has buffers, or parameters that stay with the client": bool(buffers),
        "the module has tied weights": tied,
        "a hook of a parameter or layer acts on gradients": hooked,
        "the module draws random numbers (dropout)": draws,
        **{f"the module has its own `{name}`": overridden(module, name) for name in _MODULE_METHODS},
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _hooked(hooks: HookTable, callbacks: list[Any]) -> str | None:
    for callback in callbacks:
        if isinstance(callback, ContinualCallback) or callback.state_dict():
            return f"`{type(callback).__name__}` acts on one client at a time"
    name = next((name for name in sorted(hooks.names()) if name.startswith(_JOB_HOOKS)), None)
    return None if name is None else f"somebody listens to `{name}`"
