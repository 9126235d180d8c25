"""A small convolutional net without normalisation layers."""

from torch import Tensor, nn
from typing_extensions import override


class SmallConvNet(nn.Module):
    """Two 3x3 convolutions with max pooling, and one hidden linear layer; no BatchNorm, no dropout.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of the images.
        image_size: Height and width of the images in pixels, a multiple of 4.
        width: Channels of the first convolution; the second has twice as many.
        hidden: Features before the last layer.

    Example:
        >>> import torch
        >>> SmallConvNet(num_classes=10)(torch.zeros(2, 1, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 1, image_size: int = 16, width: int = 16, hidden: int = 64
    ) -> None:
        super().__init__()
        if image_size < 4 or image_size % 4:
            raise ValueError(f"`image_size` must be a multiple of 4, got {image_size}.")
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * (image_size // 4) ** 2, hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(hidden, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape ``(B, num_classes)``, of images ``(B, in_channels, image_size, image_size)``."""
        logits: Tensor = self.head(self.features(x))
        return logits
