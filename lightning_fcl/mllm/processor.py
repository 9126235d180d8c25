"""Processors of image-and-text models, for images only where torchvision is missing."""

from functools import cache
from pathlib import Path
from typing import Any

from lightning_fcl._imports import optional_import
from lightning_fcl.exceptions import MisconfigurationError


def load_processor(path: str | Path, **where: Any) -> Any:
    """The processor of a model: image processor, tokenizer and chat template.

    With torchvision it is what ``AutoProcessor`` gives. Without, the processors of Qwen-VL, LLaVA-onevision and SmolVLM
    cannot be made, since they hold a video processor; then it is the same class without one, around the image processor
    that works with Pillow alone.

    Args:
        path: Folder or name of the model.
        **where: ``revision``, ``local_files_only`` and the like, as ``from_pretrained`` takes them.

    Raises:
        MissingExtraError: If transformers is not installed (extra ``mllm``).
        MisconfigurationError: If the model has no chat template, or no fast tokenizer.
        OSError: If there are no such files.
    """
    transformers = optional_import("transformers", extra="mllm")
    if _has_torchvision():
        processor = transformers.AutoProcessor.from_pretrained(path, **where)
    else:
        kind = transformers.AutoConfig.from_pretrained(path, **where).model_type
        names = optional_import("transformers.models.auto.processing_auto", extra="mllm").PROCESSOR_MAPPING_NAMES
        if kind not in names:
            raise MisconfigurationError(f"`path` must hold a model of images and text, got model_type={kind!r}.")
        processor = images_only(names[kind]).from_pretrained(path, **where)
    check_processor(processor, path)
    return processor


def images_only(name: str) -> Any:
    """The processor class of that name, without its video processor if it has one.

    Raises:
        MissingExtraError: If transformers or num2words is not installed (extra ``mllm``).
    """
    transformers = optional_import("transformers", extra="mllm")
    if name == "SmolVLMProcessor":
        optional_import("num2words", extra="mllm")
    whole = getattr(transformers, name)
    return _without_video(whole) if "video_processor" in whole.get_attributes() else whole


def check_processor(processor: Any, path: str | Path) -> None:
    """Raise MisconfigurationError unless the processor can render conversations and tell where answers start."""
    if not (getattr(processor, "chat_template", None) or processor.tokenizer.chat_template):
        raise MisconfigurationError(
            f"`path` must hold a chat template, got none in {str(path)!r}. Put one into chat_template.jinja beside it."
        )
    if not processor.tokenizer.is_fast:
        raise MisconfigurationError(
            f"`path` must hold a fast tokenizer (tokenizer.json), got {type(processor.tokenizer).__name__}."
        )


@cache
def _without_video(whole: Any) -> Any:
    class ImagesOnly(whole):  # type: ignore[misc]
        def __init__(self, image_processor: Any, tokenizer: Any, **options: Any) -> None:
            options.pop("video_processor", None)
            super().__init__(image_processor, tokenizer, video_processor=None, **options)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in whole.get_attributes() if name != "video_processor"]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    ImagesOnly.__name__ = whole.__name__  # written to processor_config.json
    return ImagesOnly


def _has_torchvision() -> bool:
    available: bool = optional_import("transformers.utils", extra="mllm").is_torchvision_available()
    return available
