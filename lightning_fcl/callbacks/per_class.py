"""Accuracy of every class, in every evaluation, without a second pass."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._heads import find_head, inputs_and_targets
from lightning_fcl.functional.per_class import per_class_accuracy

PREFIX = "class_"


class PerClassAccuracy(L.Callback):
    """Logs the share of right answers within each class as ``class_<label>`` in every evaluation.

    It reads the logits where ``validation_step`` makes them, at the head. A class without examples is not logged. In a
    federation the run's report draws them over the rounds (``classes.png``), with the oscillation and the number of
    class-rounds at zero.

    Args:
        feature_module: Dotted name of the head; by default the module's own ``feature_module``, else its last linear
            layer.
    """

    affects_results = False

    def __init__(self, feature_module: str | None = None) -> None:
        self.feature_module = feature_module
        self._handle: Any = None
        self._logits: list[Tensor] = []
        self._answers: list[tuple[Tensor, Tensor]] = []

    @override
    def on_validation_epoch_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        name = self.feature_module or getattr(pl_module, "feature_module", None)
        _, head = find_head(pl_module, name)
        self._answers, self._logits = [], []
        self._handle = head.register_forward_hook(lambda _, __, output: self._logits.append(output))

    @override
    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._logits:
            _, targets = inputs_and_targets(batch)
            self._answers.append((self._logits[-1].argmax(dim=1).cpu(), targets.cpu()))
            self._logits.clear()

    @override
    def on_validation_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._handle.remove()
        self._handle = None
        if self._answers:
            predictions, targets = (torch.cat(parts) for parts in zip(*self._answers, strict=True))
            classes = int(torch.maximum(predictions.max(), targets.max())) + 1
            for label, share in enumerate(per_class_accuracy(predictions, targets, classes).tolist()):
                if share == share:  # not NaN: the class has examples
                    pl_module.log(f"{PREFIX}{label}", share, batch_size=1)
