"""How the tiny LLaVA's lessons become batches, and what it is told about patches of pictures."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fcl.data.base_skills import Lesson, lesson, patch_words
from lightning_fcl.data.drawn_instructions import DRAWN_TASKS, drawn_instructions
from lightning_fcl.models.tiny_llava import IMAGE_TOKENS, PATCH, make_tokenizer

SHARP = 10.0
COORDINATES = [f"{eighth / 8:.2f}" for eighth in range(9)]


def vocabulary() -> tuple[Any, list[str]]:
    """The tokenizer, and what the model repeats so that it can say every word that some task may ask for."""
    rows = [row for task in DRAWN_TASKS for row in drawn_instructions(task, 400)]
    tasks = [text for row in rows for text in (row["question"], f" {row['answer']}")]
    rng = np.random.default_rng(0)
    turns = [turn for _ in range(400) for turn in lesson(rng, "train", ["so"])[1]]
    names = [text for _, question, answer in turns for text in (question, f" {answer}")]
    tokenizer = make_tokenizer([*tasks, *names, "USER: ASSISTANT:", " ASSISTANT:", "Repeat: "])
    words = sorted({word.strip() for word in tokenizer.get_vocab() if word.strip().isalpha()})
    pairs = [f"[{first},{second}]" for first in COORDINATES for second in COORDINATES]
    return tokenizer, [*words, *map(str, range(100)), *pairs]


def collate(lessons: list[Lesson], processor: Any) -> tuple[dict[str, Tensor], list[list[tuple[str, int, int]]]]:
    """A batch padded on the right, and where the answer to each question of each skill starts and ends."""
    tokenizer = processor.tokenizer
    pieces, spans = [], []
    for _, turns, _ in lessons:
        ids: list[int] = tokenizer("USER: ")["input_ids"] + [tokenizer.convert_tokens_to_ids("<image>")] * IMAGE_TOKENS
        marks = []
        for number, (skill, question, answer) in enumerate(turns):
            opening = f"\n{question} ASSISTANT:" if number == 0 else f"USER: {question} ASSISTANT:"
            ids += tokenizer(opening)["input_ids"]
            start = len(ids)
            ids += [*tokenizer(f" {answer}")["input_ids"], tokenizer.eos_token_id]
            marks.append((skill, start, len(ids)))
        pieces.append(ids)
        spans.append(marks)
    length = max(map(len, pieces))
    input_ids = torch.full((len(pieces), length), tokenizer.pad_token_id)
    labels = torch.full_like(input_ids, -100)
    for row, (ids, marks) in enumerate(zip(pieces, spans, strict=True)):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        for _, start, end in marks:
            labels[row, start:end] = input_ids[row, start:end]
    pixels = processor.image_processor([picture for picture, _, _ in lessons], return_tensors="pt")["pixel_values"]
    mask = torch.arange(length) < torch.tensor([[len(ids)] for ids in pieces])
    batch = {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels, "pixel_values": pixels}
    return batch | {"words": targets_of(lessons, tokenizer)}, spans


def targets_of(lessons: list[Lesson], tokenizer: Any) -> Tensor:
    """For each patch an even distribution over the words for it, ``(B, 64, vocabulary)``."""
    targets = torch.zeros(len(lessons), IMAGE_TOKENS, len(tokenizer))
    for number, (_, _, marks) in enumerate(lessons):
        for patch, words in enumerate(patch_words(marks, PATCH)):
            ids = tokenizer.convert_tokens_to_ids([f" {word}" for word in words])
            targets[number, patch, ids] = 1 / len(ids)
    return targets


def patch_loss(seen: Tensor, words: Tensor, targets: Tensor) -> Tensor:
    """How far projected patches are from the embeddings of the words for them; empty patches count a tenth."""
    logits = nn.functional.normalize(seen, dim=-1) @ nn.functional.normalize(words, dim=-1).T * SHARP
    losses = -(targets * logits.log_softmax(dim=-1)).sum(dim=-1)
    weights = torch.where(targets.amax(dim=-1) < 1, 1.0, 0.1)  # only "none" stands alone
    return (weights * losses).sum() / weights.sum()
