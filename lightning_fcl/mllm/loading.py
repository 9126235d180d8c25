"""Load an image-and-text model, with one clear error if that cannot work."""

from pathlib import Path
from typing import Any, Literal

import torch

from lightning_fcl._imports import optional_import
from lightning_fcl.exceptions import MisconfigurationError


def load_model(
    path: str | Path, *, dtype: str = "float32", bits: Literal[4, 8] | None = None, **where: Any
) -> torch.nn.Module:
    """Weights of any model that ``AutoModelForImageTextToText`` knows.

    Args:
        path: Folder or name of the model.
        dtype: Name of the weights' dtype, such as ``"float32"`` or ``"bfloat16"``; ``"auto"`` is that of the files.
        bits: Quantise the frozen base to 4 (NF4) or 8 bits by bitsandbytes.
        **where: ``revision``, ``local_files_only`` and the like, as ``from_pretrained`` takes them.

    Raises:
        MisconfigurationError: If the files are missing or do not hold all weights.
        MissingExtraError: If transformers is not installed (extra ``mllm``), or bitsandbytes (extra ``quantize``).
    """
    transformers = optional_import("transformers", extra="mllm")
    options: dict[str, Any] = dict(where, dtype=dtype, output_loading_info=True)
    if bits is not None:
        options["quantization_config"] = _quantization(transformers, bits)
    try:
        model, info = transformers.AutoModelForImageTextToText.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise no_files(path, error) from error
    if missing := sorted(info["missing_keys"]):
        raise MisconfigurationError(
            f"`path` must hold all weights of the model, got {str(path)!r}, which lacks {len(missing)}, such as "
            f"{missing[0]!r}. They would be random."
        )
    loaded: torch.nn.Module = model
    return loaded


def no_files(path: str | Path, error: Exception) -> MisconfigurationError:
    """The one error for files that are not there or no model."""
    reason = str(error).strip().splitlines()[0]
    return MisconfigurationError(
        f"`path` must be a folder with a model and its processor, or the name of one that is in the local cache or can "
        f"be downloaded (not with HF_HUB_OFFLINE=1), got {str(path)!r}: {reason}"
    )


def _quantization(transformers: Any, bits: int) -> Any:
    if bits not in (4, 8):
        raise MisconfigurationError(f"`bits` must be 4, 8 or None, got {bits!r}.")
    optional_import("bitsandbytes", extra="quantize")
    if bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
