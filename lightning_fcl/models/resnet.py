"""ResNet-18, with BatchNorm or GroupNorm, for large or small images."""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

Norm = Callable[[int], nn.Module]


class ResNet18(nn.Module):
    """Four stages of two residual blocks; the last hidden layer has 512 features.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of the images.
        norm: ``"batch"``, or ``"group"`` (32 groups, no running statistics), which suits clients of unlike data.
        stem: ``"7x7"``: stride 2 and max pooling, for images of about 224 pixels; ``"3x3"``: stride 1, for about 32.

    Example:
        >>> sum(p.numel() for p in ResNet18(num_classes=10, stem="7x7").parameters())
        11181642

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1
    (https://arxiv.org/abs/1512.03385); GroupNorm: Wu & He, ECCV 2018 (https://arxiv.org/abs/1803.08494).

    Deviation: None for the 7x7 stem with BatchNorm. The 3x3 stem is the common one for 32-pixel images.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        norm: Literal["batch", "group"] = "batch",
        stem: Literal["3x3", "7x7"] = "3x3",
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise ValueError(f"`norm` must be 'batch' or 'group', got {norm!r}.")
        if stem not in ("3x3", "7x7"):
            raise ValueError(f"`stem` must be '3x3' or '7x7', got {stem!r}.")
        make_norm = _NORMS[norm]
        small = stem == "3x3"
        self.stem = nn.Sequential(
            _conv3(in_channels, 64) if small else nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
            make_norm(64),
            nn.ReLU(inplace=True),
            nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = [64, 64, 128, 256, 512]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(_Block(old, new, 1 if old == new else 2, make_norm), _Block(new, new, 1, make_norm))
                for old, new in pairwise(widths)
            )
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape ``(B, num_classes)``, of images ``(B, in_channels, H, W)``."""
        logits: Tensor = self.head(self.pool(self.stages(self.stem(x))))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions beside an identity, or a 1x1 projection where the shape changes."""

    def __init__(self, old: int, new: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv3(old, new, stride), norm(new), nn.ReLU(inplace=True), _conv3(new, new), norm(new)
        )
        self.shortcut: nn.Module = nn.Identity()
        if old != new:
            self.shortcut = nn.Sequential(nn.Conv2d(old, new, 1, stride=stride, bias=False), norm(new))
        self.act = nn.ReLU(inplace=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.body(x) + self.shortcut(x))
        return out


def _conv3(old: int, new: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(old, new, 3, stride=stride, padding=1, bias=False)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


_NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}
