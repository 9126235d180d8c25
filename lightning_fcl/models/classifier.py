"""An ordinary LightningModule for image classification: nothing in it knows of clients or tasks."""

from typing import Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

Batch = tuple[Tensor, Tensor]


class ImageClassifier(L.LightningModule):
    """Cross-entropy training of a network that gives logits.

    Logs ``train_loss`` (nats, per step) and, in validation, ``val_loss`` and ``val_acc`` (share of right answers), all
    averaged over examples.

    Args:
        net: Images ``(B, C, H, W)`` to logits ``(B, num_classes)``.
        lr: Learning rate.
        momentum: Momentum of SGD; the other optimisers ignore it.
        weight_decay: L2 decay (decoupled in ``"adamw"``).
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``.
    """

    def __init__(
        self,
        net: nn.Module,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: Literal["sgd", "adam", "adamw"] = "sgd",
    ) -> None:
        super().__init__()
        if optimizer not in ("sgd", "adam", "adamw"):
            raise ValueError(f"`optimizer` must be 'sgd', 'adam' or 'adamw', got {optimizer!r}.")
        self.save_hyperparameters(ignore=["net"])
        self.net = net
        self.lr, self.momentum, self.weight_decay, self.optimizer = lr, momentum, weight_decay, optimizer

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape ``(B, num_classes)``."""
        logits: Tensor = self.net(x)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean cross-entropy of the batch, in nats."""
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, batch_size=len(y))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of the batch."""
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), batch_size=len(y))
        self.log("val_acc", (logits.argmax(dim=1) == y).float().mean(), batch_size=len(y), prog_bar=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser named at construction."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
            )
        rule = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return rule(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
