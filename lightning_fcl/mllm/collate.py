"""Rows of visual instructions to tensors: what the model reads, and which of its words count."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fcl.data.instructions import IMAGE, answer_of, question_of
from lightning_fcl.exceptions import DatasetError

IGNORED = -100
"""Label of tokens that do not count."""
Span = tuple[int, int]


class InstructionCollator:
    """Makes batches for one model.

    A batch is a dict: what the processor gives (``input_ids`` and ``attention_mask`` ``(B, L)``, ``pixel_values`` and
    whatever else the model reads), ``labels`` ``(B, L)``, equal to ``input_ids`` in answers with their closing token
    and ``-100`` elsewhere, and lists of length B: ``prompts`` (questions as text), ``answers``, ``metrics`` and the
    ``rows`` themselves.

    Args:
        processor: As :func:`~lightning_fcl.mllm.load_processor` gives it.
        max_length: Most tokens of an example, image tokens included; nothing is ever cut, longer ones are refused.
        padding_side: On which side training batches are padded. Prompts are always padded on the left.
    """

    def __init__(
        self, processor: Any, *, max_length: int | None = None, padding_side: Literal["left", "right"] = "right"
    ) -> None:
        if padding_side not in ("left", "right"):
            raise ValueError(f"`padding_side` must be 'left' or 'right', got {padding_side!r}.")
        self.processor = processor
        self.max_length = max_length
        self.padding_side = padding_side

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch to train on.

        Raises:
            DatasetError: If an example is longer than ``max_length``, or its tokens cannot be told apart.
        """
        rendered = [self._render(row) for row in rows]
        batch = self._encode([text for text, _ in rendered], rows, self.padding_side)
        batch["labels"] = torch.full_like(batch["input_ids"], IGNORED)
        for number, (text, spans) in enumerate(rendered):
            self._label(batch, number, text, spans)
        return batch | {
            "prompts": [question_of(row) for row in rows],
            "answers": [answer_of(row) for row in rows],
            "metrics": [row.get("metric", "exact") for row in rows],
            "rows": list(rows),
        }

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The first question of each row, up to where the model is to answer; padded on the left."""
        return self._encode([self._text(row, 1, prompt=True) for row in rows], rows, "left")

    def _render(self, row: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """A whole conversation as text, and where its answers stand."""
        spans = []
        for turn in range(1, len(row["conversations"]), 2):
            opening, closed = self._text(row, turn, prompt=True), self._text(row, turn + 1)
            if not closed.startswith(opening):
                raise DatasetError("The chat template must continue its own prompt, and this one does not.")
            spans.append((len(opening), len(closed.rstrip("\n"))))
        return closed, spans

    def _text(self, row: Mapping[str, Any], turns: int, *, prompt: bool = False) -> str:
        messages = []
        for turn in row["conversations"][:turns]:
            content = [{"type": "text", "text": turn["value"].replace(IMAGE, "").strip()}]
            if IMAGE in turn["value"]:
                content.insert(0, {"type": "image"})
            messages.append({"role": "user" if turn["from"] == "human" else "assistant", "content": content})
        tokenizer = self.processor.tokenizer
        text: str = tokenizer.apply_chat_template(
            messages,
            chat_template=getattr(self.processor, "chat_template", None) or tokenizer.chat_template,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        return text

    def _encode(self, texts: list[str], rows: Sequence[Mapping[str, Any]], side: str) -> dict[str, Tensor]:
        bos = self.processor.tokenizer.bos_token
        batch = self.processor(
            text=texts,
            images=[[row["image"]] for row in rows],
            return_tensors="pt",
            padding=True,
            padding_side=side,
            add_special_tokens=not (bos and texts[0].startswith(bos)),
        )
        lengths = batch["attention_mask"].sum(dim=1)
        if self.max_length is not None and lengths.max() > self.max_length:
            raise DatasetError(
                f"`max_length` must be at least {int(lengths.max())} for this batch, image tokens included, got "
                f"{self.max_length}. Nothing is cut, since a cut image cannot be read."
            )
        return dict(batch)

    def _label(self, batch: dict[str, Any], number: int, text: str, spans: list[Span]) -> None:
        """Copy the tokens of the answers to the labels.

        The processor expands the image into tokens that have no place in ``text``. All answers come after it, so places
        are counted from the end.
        """
        encoded = self.processor.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        size = len(encoded["input_ids"])
        counts = [
            place - size
            for place, (start, end) in enumerate(encoded["offset_mapping"])
            if any(start < last and end > first for first, last in spans) and start < end
        ]
        places = batch["attention_mask"][number].nonzero().flatten()
        ids, labels = batch["input_ids"][number], batch["labels"][number]
        tail = torch.tensor(encoded["input_ids"][counts[0] :])
        if not torch.equal(ids[places[counts[0] :]], tail):
            raise DatasetError(f"The answers' tokens must end the example, and do not in {text[-80:]!r}.")
        labels[places[counts]] = ids[places[counts]]
