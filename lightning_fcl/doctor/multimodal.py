"""Whether an image-and-text model and its processor speak of the same tokens."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fcl.doctor.diagnosis import Diagnosis
from lightning_fcl.mllm.collate import InstructionCollator
from lightning_fcl.mllm.module import MultimodalInstructionModule

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream

_TEXT = ("input_ids", "attention_mask")


def check_multimodal(found: Diagnosis, module: Any, stream: "TaskStream") -> None:
    """Check a :class:`~lightning_fcl.mllm.MultimodalInstructionModule` on the stream's first example.

    Args:
        found: Gains findings; none for other modules.
        module: The module.
        stream: Its first client's first example is encoded.
    """
    if not isinstance(module, MultimodalInstructionModule):
        return
    try:
        row = stream.train_loader(0, stream.clients(0)[0]).dataset[0]
    except Exception as error:  # the dry run has said more
        found.add("error", "processor", f"the first example cannot be read: {error}")
        return
    model = module.model.get_base_model() if hasattr(module.model, "get_base_model") else module.model
    if isinstance(row, Mapping) and "conversations" in row:
        check_tokens(found, model, module.processor, row)
    else:
        found.add("note", "processor", "examples are no rows of instructions, so their tokens were not looked at")


def check_tokens(found: Diagnosis, model: Any, processor: Any, row: Mapping[str, Any]) -> None:
    """Check tokens on one example; every failing check says what to do.

    Args:
        found: Gains findings with the subject ``"processor"``.
        model: A model of transformers, without adapters around it; it may be on the meta device.
        processor: Its processor.
        row: An example with ``image`` and ``conversations``.
    """
    tokenizer, problems = processor.tokenizer, len(found.findings)
    if not (getattr(processor, "chat_template", None) or tokenizer.chat_template):
        found.add("error", "processor", "there is no chat template. Put chat_template.jinja beside the model's files.")
        return
    _check_vocabulary(found, model, tokenizer)
    mark = _image_token(model)
    theirs = getattr(processor, "image_token_id", None)
    if theirs is None:
        theirs = tokenizer.convert_tokens_to_ids(getattr(processor, "image_token", "<image>"))
    if mark is None or mark != theirs:
        found.add(
            "error",
            "processor",
            f"the image token has the id {theirs} in the processor and {mark} in the model's config. Take both from "
            f"one folder, or set `model.config.image_token_id = {theirs}`.",
        )
        return
    _check_count(found, model, processor, row, mark)
    if len(found.findings) == problems:
        found.add(
            "ok", "processor", f"image token {mark}, pad token {tokenizer.pad_token_id} and the chat template fit"
        )


def _check_vocabulary(found: Diagnosis, model: Any, tokenizer: Any) -> None:
    words, rows = len(tokenizer), model.get_input_embeddings().weight.shape[0]
    if words > rows:
        found.add(
            "error",
            "processor",
            f"the tokenizer knows {words} tokens and the model has embeddings for {rows}. Call "
            f"`model.resize_token_embeddings({words})` and train them, or take the model's own tokenizer.",
        )
    pad = tokenizer.pad_token_id
    if pad is None:
        found.add(
            "error",
            "processor",
            "the tokenizer has no pad token, so no batch can be made. Set `processor.tokenizer.pad_token = "
            "processor.tokenizer.eos_token`.",
        )
    elif pad == _image_token(model):
        found.add("error", "processor", "the pad token is the image token. Give the tokenizer a pad token of its own.")


def _image_token(model: Any) -> int | None:
    config = model.config
    token: int | None = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    return token


def _check_count(found: Diagnosis, model: Any, processor: Any, row: Mapping[str, Any], mark: int) -> None:
    try:
        batch = InstructionCollator(processor).prompts([row])
    except Exception as error:
        found.add("error", "processor", f"the first example cannot be encoded: {type(error).__name__}: {error}")
        return
    written = int(torch.eq(batch["input_ids"], mark).sum())
    try:
        seen = image_features(model, batch)
    except Exception as error:
        found.add("note", "processor", f"the vision tower's tokens were not counted: {type(error).__name__}: {error}")
        return
    if seen != written:
        found.add(
            "error",
            "processor",
            f"the text has {written} image tokens and the vision tower gives {seen} vectors. Set the processor's "
            "`patch_size`, `num_additional_image_tokens` and `vision_feature_select_strategy` to the model's.",
        )


@torch.no_grad()
def image_features(model: Any, batch: Mapping[str, Tensor]) -> int:
    """How many vectors the vision tower puts in the place of image tokens.

    Args:
        model: A model of transformers with ``get_image_features``.
        batch: What the processor gave for one example.
    """
    inner = getattr(model, "model", model)
    owner = inner if hasattr(inner, "get_image_features") else model
    known = inspect.signature(owner.get_image_features).parameters
    device, dtype = owner.device, owner.dtype
    given = {
        name: value.to(device, dtype) if value.is_floating_point() else value
        for name, value in batch.items()
        if name in known and name not in _TEXT
    }
    features = owner.get_image_features(**given)
    features = getattr(features, "pooler_output", features)
    parts = list(features) if isinstance(features, list | tuple) else [features]
    return sum(part.numel() // part.shape[-1] for part in parts)
