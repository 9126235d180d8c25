"""Image classifiers that a configuration file can name: one call from plain values to a module."""

from typing import Any, Literal

import lightning as L

from lightning_fcl.mixins.dual_branch import DualBranchMixin
from lightning_fcl.models.classifier import ImageClassifier
from lightning_fcl.models.lenet import LeNet
from lightning_fcl.models.resnet import ResNet18


class DualImageClassifier(DualBranchMixin, ImageClassifier):
    """:class:`ImageClassifier` with FedADB's two branches; takes the arguments of both."""


def image_classifier(
    net: Literal["lenet", "resnet18"] = "lenet",
    *,
    num_classes: int = 10,
    channels: int = 1,
    size: int = 28,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 1e-5,
    dual: dict[str, Any] | None = None,
) -> L.LightningModule:
    """A classifier at the settings of FedADB's protocol.

    Args:
        net: ``"lenet"``, or ``"resnet18"`` (3x3 stem).
        num_classes: Number of logits.
        channels: Channels of the images.
        size: Height and width in pixels.
        lr: Learning rate of SGD.
        momentum: Its momentum.
        weight_decay: Its L2 decay.
        dual: Arguments of :class:`~lightning_fcl.mixins.DualBranchMixin` without their prefix; ``{}`` for its defaults,
            ``None`` for a plain classifier.

    Returns:
        The module, with random weights from torch's generator.
    """
    body = LeNet(num_classes, channels, size) if net == "lenet" else ResNet18(num_classes, channels)
    options: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    if dual is None:
        return ImageClassifier(body, **options)
    return DualImageClassifier(body, **options, **{f"dual_{name}": value for name, value in dual.items()})
