"""Frozen encoders that tell tasks apart by their instructions or pictures; each maps a batch to ``[B, d]``."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fcl._imports import optional_import
from lightning_fcl.exceptions import MisconfigurationError

IGNORED = -100
"""Label of tokens that are not an answer, as ``transformers`` has it."""


class PromptEmbeddings:
    """Mean of the language model's own token embeddings over the prompt, about the vocabulary's mean; no dependency.

    The vocabulary's mean is taken away since all embeddings share it: what is left tells prompts apart. Answers (tokens
    with a label), padding and image placeholders do not count.

    Args:
        embedding: Frozen token embeddings.
        ignore: Token ids to leave out, such as the image placeholder's.
    """

    def __init__(self, embedding: nn.Embedding, ignore: tuple[int, ...] = ()) -> None:
        self.embedding = (embedding,)  # a tuple, so that no module takes it for a child of its own
        self.ignore = ignore

    @classmethod
    def of(cls, module: nn.Module) -> "PromptEmbeddings":
        """Those of the first model inside ``module`` that has ``get_input_embeddings``.

        Raises:
            MisconfigurationError: If there is none, or it is trained.
        """
        for child in module.modules():
            if child is not module and hasattr(child, "get_input_embeddings"):
                config = getattr(child, "config", None)
                image = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
                embedding: nn.Embedding = child.get_input_embeddings()  # type: ignore[operator]
                if embedding.weight.requires_grad:
                    break
                return cls(embedding, () if image is None else (int(image),))
        raise MisconfigurationError(
            "`routing_encoder` must be given: the module has no frozen language model of transformers whose embeddings "
            "could stand in. Pass one, or override `identity_features`."
        )

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Features of the prompts, shape ``[B, d]``; zero for an empty one."""
        ids = batch["input_ids"]
        counts = torch.ones_like(ids, dtype=torch.bool)
        if (mask := batch.get("attention_mask")) is not None:
            counts &= mask.bool()
        if (labels := batch.get("labels")) is not None and labels.shape == ids.shape:
            counts &= labels == IGNORED
        for token in self.ignore:
            counts &= ids != token
        weight = self.embedding[0].weight
        vectors = nn.functional.embedding(ids, weight) - weight.mean(0)
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        return torch.einsum("bl,bld->bd", shares.to(vectors.dtype), vectors)


class TextEncoder(nn.Module):
    """A frozen text encoder of ``transformers``: the CLIP text tower, as in the paper, or any ``AutoModel``.

    Args:
        model: The encoder.
        tokenizer: Its tokenizer.
        pooling: ``"pooler"`` takes ``pooler_output`` (for CLIP the state at the end of the text, before the projection:
            what the benchmark uses), ``"mean"`` the mean of the last states over the text.
        prompts: Finds the instructions in a batch: a key, or a function to a list of texts; without the answers.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        pooling: Literal["pooler", "mean"] = "pooler",
        prompts: str | Callable[[Any], list[str]] = "prompts",
    ) -> None:
        super().__init__()
        if pooling not in ("pooler", "mean"):
            raise MisconfigurationError(f'`pooling` must be "pooler" or "mean", got {pooling!r}.')
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.prompts = prompts

    @classmethod
    def from_pretrained(cls, name: str, *, local_files_only: bool = False, **options: Any) -> "TextEncoder":
        """The encoder of a folder or hub id; of a CLIP model its text tower.

        Args:
            name: Folder or hub id, e.g. ``"openai/clip-vit-large-patch14-336"``.
            local_files_only: Whether to open no connection.
            **options: ``pooling`` and ``prompts``.
        """
        hf = optional_import("transformers", extra="mllm")
        config = hf.AutoConfig.from_pretrained(name, local_files_only=local_files_only)
        kind = hf.CLIPTextModel if config.model_type.startswith("clip") else hf.AutoModel
        model = kind.from_pretrained(name, local_files_only=local_files_only)
        return cls(model, hf.AutoTokenizer.from_pretrained(name, local_files_only=local_files_only), **options)

    def forward(self, batch: Any) -> Tensor:
        """Features of the prompts, shape ``[B, d]``; not normalised."""
        texts = self.prompts(batch) if callable(self.prompts) else batch[self.prompts]
        longest = getattr(getattr(self.model.config, "text_config", self.model.config), "max_position_embeddings", 512)
        tokens = self.tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        device = next(self.model.parameters()).device
        tokens = {key: value.to(device) for key, value in tokens.items() if key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            output = self.model.eval()(**tokens)
        if self.pooling == "pooler":
            pooled: Tensor = output.pooler_output
            return pooled
        shares = tokens["attention_mask"] / tokens["attention_mask"].sum(1, keepdim=True).clamp_min(1)
        return torch.einsum("bl,bld->bd", shares.to(output.last_hidden_state.dtype), output.last_hidden_state)


class ImageMean:
    """Mean of a vision tower's last states over one picture per sample.

    Args:
        tower: A frozen vision model of ``transformers``.
        key: Where a batch holds pictures, shape ``[B, channels, height, width]``.
    """

    def __init__(self, tower: nn.Module, key: str = "pixel_values") -> None:
        self.tower = (tower,)
        self.key = key

    @classmethod
    def of(cls, module: nn.Module) -> "ImageMean":
        """Of the first part of ``module`` called ``vision_tower`` or ``vision_model``.

        Raises:
            MisconfigurationError: If there is none.
        """
        for name, child in module.named_modules():
            if name.rpartition(".")[2] in ("vision_tower", "vision_model"):
                return cls(child)
        raise MisconfigurationError(
            "`routing_image_encoder` must be given: the module has no `vision_tower`. Or route by text."
        )

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Features of the pictures, shape ``[B, d]``."""
        output = self.tower[0](batch[self.key])
        states: Tensor = output.last_hidden_state if hasattr(output, "last_hidden_state") else output
        return states.flatten(1, -2).mean(1)
