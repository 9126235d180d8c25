"""LeNet-5 with ReLU and max pooling."""

from torch import Tensor, nn
from typing_extensions import override


class LeNet(nn.Module):
    """Two 5x5 convolutions and three linear layers; the last hidden layer has 84 features.

    Args:
        num_classes: Number of logits.
        in_channels: Channels of the images.
        image_size: Height and width of the images in pixels, at least 12.

    Example:
        >>> import torch
        >>> LeNet(num_classes=10)(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])

    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998, section II.B.

    Deviation: ReLU for tanh, max pooling for trained subsampling, full connections between the maps, plain logits; the
    first layer pads by two pixels (which the original's 32x32 frame around 28x28 digits does).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        side = (image_size // 2 - 4) // 2
        if side < 1:
            raise ValueError(f"`image_size` must be at least 12, got {image_size}.")
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        self.head = nn.Linear(84, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape ``(B, num_classes)``, of images ``(B, in_channels, image_size, image_size)``."""
        logits: Tensor = self.head(self.features(x))
        return logits
