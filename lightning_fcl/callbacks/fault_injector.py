"""Breaks things on purpose, so that anyone can see what a run survives."""

import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.types import ClientUpdate

Where = Literal["train", "upload", "boundary"]


def _first(update: ClientUpdate, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    tensors = {name: tensor.clone() for name, tensor in update.tensors.items()}
    name = next(n for n, t in tensors.items() if t.is_floating_point())
    tensors[name] = change(tensors[name])
    return tensors


def _poison(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return change


def _renamed(update: ClientUpdate) -> dict[str, Tensor]:
    (name, tensor), *others = update.tensors.items()
    return {f"{name}_": tensor, **dict(others)}


_TENSORS: dict[str, Callable[[ClientUpdate], dict[str, Tensor]]] = {
    "nan": lambda u: _first(u, _poison(math.nan)),
    "inf": lambda u: _first(u, _poison(math.inf)),
    "shape": lambda u: _first(u, lambda t: t.reshape(-1)[:-1]),
    "dtype": lambda u: _first(u, lambda t: t.to(torch.int64)),
    "half": lambda u: _first(u, lambda t: t.to(torch.bfloat16)),
    "missing": lambda u: dict(list(u.tensors.items())[1:]),
    "extra": lambda u: {**u.tensors, "unknown": torch.zeros(1)},
    "renamed": _renamed,
}
_FIELDS: dict[str, Callable[[ClientUpdate], dict[str, Any]]] = {
    "zero_examples": lambda u: {"num_examples": 0.0},
    "negative_examples": lambda u: {"num_examples": -1.0},
    "nan_examples": lambda u: {"num_examples": math.nan},
    "unsampled": lambda u: {"client": 10**6},
    "stale": lambda u: {"round": u.round - 3},
}
_ACTIONS = ("exception", "hang", "kill", "nan_gradient", "duplicate", "drop")


class FaultInjector(ContinualCallback):
    """Injects one kind of fault into chosen client jobs.

    Args:
        kind: What goes wrong. In the job: ``"exception"``, ``"hang"``, ``"kill"`` (SIGKILL to this process),
            ``"nan_gradient"``. In what is sent: ``"nan"``, ``"inf"``, ``"shape"``, ``"dtype"``, ``"half"`` (another
            float type; accepted), ``"missing"``, ``"extra"``, ``"renamed"``, ``"zero_examples"``,
            ``"negative_examples"``, ``"nan_examples"``, ``"unsampled"``, ``"stale"``, ``"duplicate"``, ``"drop"``.
        task: Task in which it happens; ``None`` for every one.
        round: Round in which it happens; ``None`` for every one.
        clients: Clients that it happens to; ``None`` for all.
        where: When ``"exception"``, ``"hang"`` and ``"kill"`` strike: in the first batch of local ``"train"``-ing, at
            ``"upload"`` (earlier clients' updates have been merged already), or in the ``"boundary"`` pass.
        times: How often per process; ``None`` for without end.
        seconds: Length of a ``"hang"``.

    Raises:
        MisconfigurationError: If ``kind`` or ``where`` is unknown.

    Example:
        >>> FaultInjector("nan", clients=[0]).kind
        'nan'
    """

    affects_results = False  # a run that was broken on purpose must resume without the fault

    def __init__(
        self,
        kind: str,
        *,
        task: int | None = None,
        round: int | None = None,
        clients: list[int] | None = None,
        where: Where = "train",
        times: int | None = None,
        seconds: float = 60.0,
    ) -> None:
        kinds = (*_ACTIONS, *_TENSORS, *_FIELDS)
        if kind not in kinds:
            raise MisconfigurationError(f"`kind` must be one of {', '.join(kinds)}, got {kind!r}.")
        if where not in ("train", "upload", "boundary"):
            raise MisconfigurationError(f'`where` must be "train", "upload" or "boundary", got {where!r}.')
        self.kind = kind
        self.task = task
        self.round = round
        self.clients = clients
        self.where = where
        self.times = times
        self.seconds = seconds
        self._count = 0
        if where == "boundary":  # otherwise the run must not gain boundary passes
            self.on_task_end = self._strike_in_boundary_pass  # type: ignore[method-assign]

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(
            kind=self.kind, task=self.task, round=self.round, clients=self.clients, where=self.where
        )

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and trainer.current_epoch == 0:
            self._act(trainer, "train")

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.kind == "nan_gradient" and self._strikes(trainer):
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)

    def _strike_in_boundary_pass(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._act(trainer, "boundary")

    @override
    def on_upload(self, trainer: Any, pl_module: L.LightningModule, update: ClientUpdate) -> Any:
        self._act(trainer, "upload")
        if self.kind in _TENSORS and self._strikes(trainer):
            return dataclasses.replace(update, tensors=_TENSORS[self.kind](update), flat=None)
        if self.kind in _FIELDS and self._strikes(trainer):
            return dataclasses.replace(update, **_FIELDS[self.kind](update))
        if self.kind in ("duplicate", "drop") and self._strikes(trainer):
            return [update, update] if self.kind == "duplicate" else None
        return update

    def _act(self, trainer: Any, where: str) -> None:
        if where != self.where or self.kind not in ("exception", "hang", "kill") or not self._strikes(trainer):
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "hang":
            time.sleep(self.seconds)
        else:
            raise RuntimeError(f"injected fault in client {trainer.client}")

    def _strikes(self, trainer: Any) -> bool:
        here = (
            self.task in (None, trainer.task)
            and self.round in (None, trainer.round)
            and (self.clients is None or trainer.client in self.clients)
            and (self.times is None or self._count < self.times)
        )
        self._count += here
        return here
