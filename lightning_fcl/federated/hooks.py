"""Which hooks exist, and calling them without paying for the ones nobody overrides."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L

from lightning_fcl.aggregators.base import Reducer, ServerStep
from lightning_fcl.aggregators.router import Router
from lightning_fcl.callbacks.base import ContinualCallback, ServerCallback
from lightning_fcl.exceptions import MisconfigurationError

CLIENT_HOOKS = frozenset(n for n in dir(ContinualCallback) if n.startswith("on_")) | {"setup", "teardown"}
SERVER_HOOKS = frozenset(n for n in dir(ServerCallback) if n.startswith("on_"))
_MODULE_HOOKS = frozenset(n for n in dir(L.LightningModule) if n.startswith("on_")) | {"on_task_end"}
_REFUSED = {
    "ModelCheckpoint": "FederatedTrainer commits a checkpoint after each round: use `checkpoint_every=`",
    "EarlyStopping": "use the server callback `lightning_fcl.callbacks.RoundEarlyStopping` in `server_callbacks=`",
    "LearningRateMonitor": "log `self.trainer.optimizers[0].param_groups[0]['lr']` in your module",
    "GradientAccumulationScheduler": "use `accumulate_grad_batches=`",
    "StochasticWeightAveraging": "average on the server: write a `ServerStep`",
    "ProgressBar": "FederatedTrainer shows its own progress: `enable_progress_bar=`",
    "ModelSummary": "call `lightning.pytorch.utilities.model_summary.summarize(module)` once, before `fit`",
    "DeviceStatsMonitor": "read `timing.csv` and `report.json` of the run folder",
    "ThroughputMonitor": "read `timing.csv` of the run folder",
    "Timer": "use `client_timeout=`",
}


def check_callbacks(client: Sequence[Any], server: Sequence[Any]) -> None:
    """Refuse misspelt hooks, doubled state keys, misplaced and unusable callbacks before any work starts.

    Args:
        client: What the user passed as ``callbacks=``.
        server: What the user passed as ``server_callbacks=``.

    Raises:
        MisconfigurationError: With the name of the callback, what is wrong and the fix.
    """
    for callback in client:
        for parent in type(callback).__mro__:
            if parent.__module__.startswith(("lightning.", "pytorch_lightning.")) and parent.__name__ in _REFUSED:
                raise MisconfigurationError(
                    f"`callbacks` must not hold `{parent.__name__}`: a client job is short and fresh. "
                    f"Instead, {_REFUSED[parent.__name__]}."
                )
        if not isinstance(callback, L.Callback):
            where = " It belongs in `server_callbacks=`." if isinstance(callback, ServerCallback) else ""
            where = " It belongs in `aggregator=`." if isinstance(callback, Router | Reducer | ServerStep) else where
            raise MisconfigurationError(
                f"`callbacks` must hold `lightning.Callback` objects, got {_name(callback)}.{where}"
            )
        _check_spelling(callback, CLIENT_HOOKS)
    for callback in server:
        if not isinstance(callback, ServerCallback):
            where = " It belongs in `callbacks=`." if isinstance(callback, L.Callback) else ""
            raise MisconfigurationError(
                f"`server_callbacks` must hold `ServerCallback` objects, got {_name(callback)}.{where}"
            )
        _check_spelling(callback, SERVER_HOOKS)
    _check_keys("callbacks", client)
    _check_keys("server_callbacks", server)


def with_module_callbacks(callbacks: list[Any], module: L.LightningModule) -> list[Any]:
    """The trainer's callbacks and those of ``module.configure_callbacks``, which replace others of their type.

    Args:
        callbacks: The trainer's.
        module: Asked for its own.

    Returns:
        A new list.

    Raises:
        MisconfigurationError: If one of the module's has a part on the server, which is fixed before a module is known.
    """
    own = module.configure_callbacks()
    added = list(own) if isinstance(own, Sequence) else [own]
    for callback in added:
        if getattr(callback, "server_rules", list)():
            raise MisconfigurationError(
                f"`configure_callbacks` must not return {_name(callback)}, which has a part on the server. Pass it to "
                "FederatedTrainer as one of `callbacks`."
            )
    return [c for c in callbacks if type(c) not in {type(a) for a in added}] + added


def _check_spelling(callback: Any, known: frozenset[str]) -> None:
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in known and callable(getattr(type(callback), name)):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else " Give a helper method another prefix than `on_`."
            raise MisconfigurationError(f"`{_name(callback)}.{name}` is not a hook and would never be called.{hint}")


def _check_keys(argument: str, callbacks: Iterable[Any]) -> None:
    seen: dict[str, Any] = {}
    for callback in callbacks:
        key = callback.state_key
        if key in seen:
            raise MisconfigurationError(
                f"`{argument}` must have distinct state keys, but two of them ({_name(seen[key])}, {_name(callback)}) "
                f"share {key!r}: their states would overwrite each other. Override `state_key` in one of them."
            )
        seen[key] = callback


def _name(callback: Any) -> str:
    return type(callback).__qualname__


class HookTable:
    """Bound hook methods by name, holding only what somebody overrides.

    Args:
        callbacks: Callbacks in call order.
        base: Their base class, whose methods count as "not overridden".
        module: A module whose own hooks run after the callbacks', as in ``Trainer``; ``None`` for server callbacks.
    """

    def __init__(self, callbacks: Sequence[Any], base: type, module: L.LightningModule | None = None) -> None:
        self._callbacks: dict[str, list[Callable[..., Any]]] = {}
        self._module: dict[str, Callable[..., Any]] = {}
        names = CLIENT_HOOKS if base is L.Callback else SERVER_HOOKS
        for name in names:
            if found := [getattr(c, name) for c in callbacks if _overrides(c, name, base)]:
                self._callbacks[name] = found
        if module is not None:
            for name in _MODULE_HOOKS:
                if _overrides(module, name, L.LightningModule):
                    self._module[name] = getattr(module, name)

    def has(self, name: str) -> bool:
        """Whether anybody listens to hook ``name``."""
        return name in self._callbacks or name in self._module

    def names(self) -> set[str]:
        """The hooks that anybody listens to."""
        return self._callbacks.keys() | self._module.keys()

    def call_callbacks(self, name: str, trainer: Any, pl_module: L.LightningModule, *args: Any) -> None:
        """Call hook ``name`` on the callbacks only."""
        for method in self._callbacks.get(name, ()):
            method(trainer, pl_module, *args)

    def call(self, name: str, trainer: Any, pl_module: L.LightningModule, *args: Any) -> Any:
        """Call hook ``name`` on the callbacks, then on the module; returns what the module returned."""
        for method in self._callbacks.get(name, ()):
            method(trainer, pl_module, *args)
        method = self._module.get(name)  # type: ignore[assignment]
        return None if method is None else method(*args)


def overridden(module: L.LightningModule, name: str) -> bool:
    """Whether the user's module has its own method ``name``."""
    return getattr(type(module), name, None) is not getattr(L.LightningModule, name) or name in vars(module)


def _overrides(instance: Any, name: str, base: type) -> bool:
    if name in vars(instance):  # a hook set on the instance, as mocks and wrappers do
        return True
    own = getattr(type(instance), name, None)
    return (
        own is not None and own is not getattr(base, name, None) and own is not getattr(ContinualCallback, name, None)
    )
