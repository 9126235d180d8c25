"""Images with their channels last: on CPU the faster way to wide convolutions, with other last bits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_WIDE = 32  # channels


def wide_convolutions(module: nn.Module) -> bool:
    """The rule of ``channels_last="auto"``: there are convolutions over images, and all give 32 channels or more.

    It looks at layers alone, so that a run elsewhere takes the same path.
    """
    channels = [child.out_channels for child in module.modules() if isinstance(child, nn.Conv2d)]
    return bool(channels) and min(channels) >= _WIDE


def channels_last(batch: Any) -> Any:
    """The batch with its float images, shape ``(B, C, H, W)``, stored channels last; same values, same shapes."""
    if isinstance(batch, Tensor):
        images = batch.dim() == 4 and batch.is_floating_point()
        return batch.contiguous(memory_format=torch.channels_last) if images else batch
    if isinstance(batch, Mapping):
        return {key: channels_last(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(channels_last(value) for value in batch)
    return batch
