"""Ends a task early when a logged number stops improving."""

import math
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
from typing_extensions import override

from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.exceptions import MisconfigurationError

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer


class RoundEarlyStopping(ServerCallback):
    """Ends the current task's rounds when ``monitor`` has not improved for ``patience`` evaluations.

    Args:
        monitor: Tag of a number in the round's log, e.g. ``"round/val_acc"``; rounds without it do not count.
        patience: Evaluations without improvement that are put up with.
        mode: Whether ``"max"`` or ``"min"`` is better.
        min_delta: Smallest change that counts as an improvement.

    Raises:
        MisconfigurationError: If an argument is out of range.
    """

    needs_weights = False

    def __init__(
        self, monitor: str, *, patience: int = 3, mode: Literal["max", "min"] = "max", min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise MisconfigurationError(f"`patience` must be at least 1, got {patience}.")
        if mode not in ("max", "min"):
            raise MisconfigurationError(f'`mode` must be "max" or "min", got {mode!r}.')
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self._best = -math.inf
        self._waited = 0
        self._seen = False

    @override
    def on_task_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        self._best, self._waited = -math.inf, 0

    @override
    def on_round_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        value = trainer.state.metrics.get(self.monitor)
        if value is None or trainer.state.phase != "train":
            return
        self._seen = True
        score = value if self.mode == "max" else -value
        if score > self._best + self.min_delta:
            self._best, self._waited = score, 0
        else:
            self._waited += 1
        if self._waited >= self.patience:
            trainer.should_stop = True

    @override
    def on_task_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        if not self._seen:
            raise MisconfigurationError(
                f"`monitor` must be a tag that training rounds log, but {self.monitor!r} came in none; logged at last: "
                f"{sorted(trainer.state.metrics)}. Set `eval_every=1` to evaluate in every round."
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited, "seen": self._seen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._waited = state_dict.get("best", -math.inf), state_dict.get("waited", 0)
        self._seen = state_dict.get("seen", False)
