"""Acting on the weights after each optimiser step."""

from collections.abc import Callable
from typing import Any

import lightning as L
from typing_extensions import override

from lightning_fcl.callbacks.base import ContinualCallback


class AfterStep(ContinualCallback):
    """Holds hooks on the optimisers while a fit lasts; subclasses call :meth:`attach` in ``on_fit_start``."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def attach(self, trainer: Any, action: Callable[[], None]) -> None:
        """Call ``action`` after every step of every optimiser of ``trainer``, until the fit ends."""
        self._handles = [o.register_step_post_hook(lambda *_: action()) for o in trainer.optimizers]

    def detach(self) -> None:
        """Let go of the optimisers, and of what was kept for this fit alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.detach()

    @override
    def on_exception(self, trainer: Any, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.detach()
