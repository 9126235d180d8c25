"""The way into a multimodal language model of transformers: behind the projector, through ``inputs_embeds``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.mixins.embedding_forward import EmbeddingForwardMixin


class MultimodalForwardMixin(EmbeddingForwardMixin):
    """Lets :class:`~lightning_fcl.EmbeddingReplay` rehearse in a LLaVA-like model that names its class in one token.

    The module has such a model, and trains it on batches that are dictionaries with ``input_ids`` (all of one length,
    each with the same number of image tokens at the same place), ``pixel_values`` and ``labels`` (class numbers). The
    embeddings are the projected visual tokens and those of the other tokens. The logits of the classes are the
    model's at the last position, for the token of each class's answer.

    Attributes:
        model_name: Name of the attribute that holds the model: any with ``get_image_features``,
            ``get_input_embeddings`` and ``inputs_embeds``.
        answers: Token of each class's answer, in the order of the class numbers.
        tokens_before_image: Text tokens in front of the image.
    """

    model_name: str = "model"
    answers: Sequence[int] = ()
    tokens_before_image: int = 1

    @property
    def multimodal_model(self) -> Any:
        """The model that ``model_name`` names.

        Raises:
            MisconfigurationError: If there is none with the methods that it takes.
        """
        model: Any = getattr(self, self.model_name, None)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper
        if not (hasattr(inner, "get_image_features") and hasattr(inner, "get_input_embeddings")):
            raise MisconfigurationError(
                f"`model_name` must name a model with `get_image_features` and `get_input_embeddings`, got "
                f"{type(model).__name__} for {self.model_name!r}."
            )
        return inner

    @override
    def embeddings_of(self, batch: Any) -> tuple[Tensor, ...]:
        model, ids = self.multimodal_model, batch["input_ids"]
        is_image = ids == model.config.image_token_id
        start, count = self.tokens_before_image, int(is_image[0].sum())
        expected = torch.zeros_like(is_image)
        expected[:, start : start + count] = True
        if not count or not torch.equal(is_image, expected):
            raise MisconfigurationError(
                f"`input_ids` must have their image tokens at position {start} in every text, got another place. Set "
                "`tokens_before_image`."
            )
        visual = model.get_image_features(pixel_values=batch["pixel_values"])
        visual = getattr(visual, "pooler_output", visual)
        if not isinstance(visual, Tensor):
            visual = torch.stack(list(visual))
        text = model.get_input_embeddings()(ids[~is_image].reshape(len(ids), -1))
        return visual.reshape(len(ids), count, -1), text

    @override
    def forward_embeddings(self, *embeddings: Tensor) -> Tensor:
        visual, text = embeddings
        start = self.tokens_before_image
        joined = torch.cat([text[:, :start], visual, text[:, start:]], dim=1)
        last = self.multimodal_model(inputs_embeds=joined).logits[:, -1]
        return self.class_logits(last)

    def class_logits(self, logits: Tensor) -> Tensor:
        """Logits of the classes, shape ``(B, C)``, among those of all tokens at the last position, ``(B, V)``."""
        return logits[:, torch.as_tensor(self.answers, device=logits.device)]

    @override
    def find_head(self) -> nn.Module:
        """The output layer of the language model."""
        head = self.multimodal_model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        return head
