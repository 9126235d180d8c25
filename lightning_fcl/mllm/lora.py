"""LoRA on a multimodal model, by PEFT."""

import re
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_fcl._imports import optional_import
from lightning_fcl.exceptions import MisconfigurationError

FEED_FORWARD = r".*\.(language_model|text_model)\..*\.(gate_proj|up_proj|down_proj)"
"""Feed-forward layers of the language model, and nothing of the vision tower: what the FCIT benchmark tunes."""
PROJECTOR = re.compile(r"\b(multi_modal_projector|connector|merger)\.")


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Settings of low-rank adapters.

    Args:
        rank: Rank of an update.
        alpha: The update is scaled by ``alpha / rank``.
        dropout: Of the adapters' input, in training.
        target: Regular expression for full names of the linear layers to adapt.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.05
    target: str = FEED_FORWARD

    def __post_init__(self) -> None:
        if not self.rank >= 1:
            raise MisconfigurationError(f"`rank` must be at least 1, got {self.rank}.")
        if not 0 <= self.dropout < 1:
            raise MisconfigurationError(f"`dropout` must lie in [0, 1), got {self.dropout}.")


def add_lora(model: Any, lora: LoRA) -> Any:
    """A ``PeftModel`` around ``model``, with the adapters trainable and all else frozen.

    Raises:
        MisconfigurationError: If no linear layer has such a name.
        MissingExtraError: If peft is not installed (extra ``mllm``).
    """
    peft = optional_import("peft", extra="mllm")
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not any(re.fullmatch(lora.target, name) for name in names):
        raise MisconfigurationError(
            f"`target` must match the full name of a linear layer, got {lora.target!r}; names are like {names[-3:]}."
        )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target,
        init_lora_weights=True,
    )
    with warnings.catch_warnings():  # PEFT asks transformers in a way that transformers has given up
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, config)


def thaw_projector(model: nn.Module) -> None:
    """Make the layers between the vision tower and the language model trainable.

    Raises:
        MisconfigurationError: If there are none that we know.
    """
    found = [
        parameter for name, parameter in model.named_parameters() if PROJECTOR.search(name) and "lora_" not in name
    ]
    if not found:
        raise MisconfigurationError(
            "`train_projector` must be False for this model: it has no multi_modal_projector, connector or merger."
        )
    for parameter in found:
        parameter.requires_grad_(True)
