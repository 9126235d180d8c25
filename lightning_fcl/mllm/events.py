"""A LLaVA-like model that names events, with a way in for rehearsal behind its projector."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.mixins.multimodal_forward import MultimodalForwardMixin
from lightning_fcl.mllm.lora import LoRA
from lightning_fcl.mllm.module import MultimodalInstructionModule

ATTENTION = r"q_proj|k_proj|v_proj|o_proj|out_proj|qkv"
ALL_MODALITIES = (
    rf".*\.({ATTENTION})|.*\b(multi_modal_projector|connector|merger)\.(.*\.)?(linear_\w+|proj|mlp\.[02]|fc\d)"
)
"""Attention of the vision tower and of the language model, and the linear layers of the projector between them."""


class EventInstructionModule(MultimodalForwardMixin, MultimodalInstructionModule):
    """Any LLaVA-like model, asked which of some events a post is about.

    It trains and answers as :class:`~lightning_fcl.mllm.MultimodalInstructionModule` does. For
    :class:`~lightning_fcl.EmbeddingReplay` the embeddings of a post are its projected visual tokens and the word
    embeddings of its prompt, and the belief in an event is the likelihood of its whole name after them. That reads each
    rehearsed prompt once per name: with many names, give the callback a small ``batch_size``.

    Args:
        *args: As there.
        names: Names of the events, in the order of their numbers: the answers.
        text_length: Tokens of a prompt that are rehearsed: the first, and the last ones. Of a shorter prompt the first
            is repeated.
        **options: As there. By default LoRA is in the attention of both towers and in the projector.

    Raises:
        MisconfigurationError: If there are fewer than two names or one stands twice; in a rehearsal, if the posts have
            another answer or differ in their number of image tokens.

    Source: FedCMM (arXiv 2607.12112), sec. IV-C: replay bypasses the input encoders.

    Deviation: the paper does not say how a model's answer becomes a soft label over events. A model whose layers take
    visual tokens at several depths (deepstack) is rehearsed at the first only.
    """

    tokens_before_image = 1

    def __init__(self, *args: Any, names: Sequence[str], text_length: int = 32, **options: Any) -> None:
        super().__init__(*args, **{"lora": LoRA(alpha=8.0, target=ALL_MODALITIES), **options})
        if len(names) < 2 or len(set(names)) < len(names):
            raise MisconfigurationError(f"`names` must be two or more that differ, got {list(names)}.")
        if text_length < 2:
            raise MisconfigurationError(f"`text_length` must be at least 2, got {text_length}.")
        self.names = tuple(names)
        self.text_length = text_length
        self._name_ids: tuple[Tensor, Tensor] | None = None

    @override
    def targets_of(self, batch: Any) -> Tensor:
        if strange := sorted(set(batch["answers"]) - set(self.names)):
            raise MisconfigurationError(f"`names` must hold every answer, got posts of {strange[:3]}.")
        return torch.tensor([self.names.index(answer) for answer in batch["answers"]], device=self.device)

    @override
    def embeddings_of(self, batch: Any) -> tuple[Tensor, ...]:
        prompts = self._cast(self.collator.prompts(batch["rows"]))
        prompts = {name: value.to(self.device) for name, value in prompts.items()}
        ids = prompts["input_ids"]
        is_image = ids == self.multimodal_model.config.image_token_id
        counts = is_image.sum(1)
        if not (counts == counts[0]).all() or not counts[0]:
            raise MisconfigurationError(
                f"`rows` must have the same number of image tokens each, got {counts.tolist()}. Resize the pictures to "
                "one size, or switch the processor's tiling off."
            )
        joined = self._merged(prompts)
        visual = joined[is_image].reshape(len(ids), int(counts[0]), -1)
        is_text = prompts["attention_mask"].bool() & ~is_image
        return visual, torch.stack([self._cut(one[kept]) for one, kept in zip(joined, is_text, strict=True)])

    def _merged(self, prompts: dict[str, Tensor]) -> Tensor:
        """What the language model takes in, ``(B, L, d)``: words and projected visual tokens at their places."""
        found: list[Tensor] = []

        def look(module: Any, args: Any, options: dict[str, Any]) -> None:
            found.append(options["inputs_embeds"] if "inputs_embeds" in options else args[0])
            raise _SeenError

        handle = self.multimodal_model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
        try:
            self.multimodal_model(**prompts)
        except _SeenError:
            return found[0]
        finally:
            handle.remove()
        raise MisconfigurationError(f"{type(self.multimodal_model).__name__} must run its decoder, and does not.")

    def _cut(self, words: Tensor) -> Tensor:
        """The first word and the last ones, ``(text_length, d)``."""
        last = torch.arange(len(words) - self.text_length + 1, len(words), device=words.device).clamp_min(0)
        return torch.cat([words[:1], words[last]])

    @override
    def forward_embeddings(self, *embeddings: Tensor) -> Tensor:
        visual, text = embeddings
        start, (ids, counts) = self.tokens_before_image, self._tokens_of_names()
        prompts = torch.cat([text[:, :start], visual, text[:, start:]], dim=1)
        right = ids.repeat(len(prompts), 1)
        logits = self._logits_of_names(prompts, ids).transpose(1, 2).float()
        said = -F.cross_entropy(logits, right, reduction="none") * counts.repeat(len(prompts), 1)
        return said.sum(1).reshape(len(prompts), len(ids))

    def _logits_of_names(self, prompts: Tensor, ids: Tensor) -> Tensor:
        """Logits of each token of each name after each prompt, ``(B * C, A, V)``."""
        model = self.multimodal_model
        words = model.get_input_embeddings()(ids[:, :-1]).to(prompts.dtype).repeat(len(prompts), 1, 1)
        joined = torch.cat([prompts.repeat_interleave(len(ids), 0), words], dim=1)
        logits: Tensor = model(inputs_embeds=joined, use_cache=False).logits[:, prompts.shape[1] - 1 :]
        return logits

    def _tokens_of_names(self) -> tuple[Tensor, Tensor]:
        """Tokens of each name with the one that closes the answer, ``(C, A)``, and 1 where they count."""
        if self._name_ids is None:
            tokenizer, found = self.processor.tokenizer, []
            for name in self.names:
                turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": name}]
                text, [(start, end)] = self.collator._render({"conversations": turns})
                encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
                pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
                found.append(torch.tensor([token for token, (low, high) in pairs if low < end and high > start]))
            counts = [torch.ones(len(one)) for one in found]
            padded = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
            self._name_ids = padded, torch.nn.utils.rnn.pad_sequence(counts, batch_first=True)
        ids, counted = self._name_ids
        return ids.to(self.device), counted.to(self.device)


class _SeenError(Exception):
    """Ends a forward pass of which only the beginning is wanted."""
