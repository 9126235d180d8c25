"""Teach the tiny LLaVA that is shipped with the library, from scratch, to name what is in a picture.

    nice python recipes/train_tiny_llava.py --minutes 50       # one core; writes lightning_fcl/models/tiny_llava
    python recipes/train_tiny_llava.py --steps 3 --out /tmp/tiny

The lessons are those of ``lightning_fcl.data.base_skills``: colours, shapes, places, counts, handwritten digits, levels
of bars, and repeating words. The tasks of the stream are not among them. One picture comes with several questions, as
turns of one conversation. Every few minutes a checkpoint is written beside the output; the same command goes on from
it.
"""

import json
import math
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fcl._recipes import command_line
from lightning_fcl.data.base_skills import Lesson, lesson
from lightning_fcl.data.drawn_instructions import DRAWN_TASKS, drawn_instructions
from lightning_fcl.data.pictures import Part
from lightning_fcl.models.tiny_llava import IMAGE_TOKENS, TINY_LLAVA, make_config, make_processor, make_tokenizer
from lightning_fcl.serialize import load_tree, save_tree

WARM_UP = 100  # steps
EASY = 0.3  # share of the training in which pictures become as crowded as they get
COORDINATES = [f"{eighth / 8:.2f}" for eighth in range(9)]


def main(
    out: Path = TINY_LLAVA,
    minutes: float = 50.0,
    steps: int | None = None,
    seed: int = 0,
    batch_size: int = 16,
    lr: float = 1.5e-3,
    width: int = 128,
    layers: int = 4,
    save_minutes: float = 4.0,
    exam: int = 2000,
) -> dict[str, float]:
    """Train, save and examine.

    Args:
        out: Folder of the model; the checkpoint is ``<out>.checkpoint``.
        minutes: Time to train, unless ``steps`` is given; the learning rate falls to zero by then (cosine).
        steps: Steps to train, for a result that does not depend on the machine's speed.
        seed: Seeds weights and lessons.
        batch_size: Pictures per step.
        lr: Highest learning rate of AdamW.
        width: Width of both towers.
        layers: Layers of each tower.
        save_minutes: Minutes between checkpoints.
        exam: Pictures on which the trained model is examined.

    Returns:
        Share of right answers by skill, on pictures with handwritten digits that were not trained on.
    """
    from transformers import LlavaForConditionalGeneration

    torch.manual_seed(seed)
    tokenizer, words = vocabulary()
    processor = make_processor(tokenizer)
    model = LlavaForConditionalGeneration(make_config(tokenizer, width=width, layers=layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    step, spent = resume(checkpoint, model, optimizer) if checkpoint.exists() else (0, 0.0)
    started, saved, losses = time.monotonic() - spent, time.monotonic(), deque[float](maxlen=50)
    while (progress := step / steps if steps else (time.monotonic() - started) / (60 * minutes)) < 1:
        rng = np.random.default_rng([seed, step])
        top = min(1.0, progress / EASY)
        levels = [top * (1.0 if rng.random() < 0.6 else rng.random()) for _ in range(batch_size)]
        batch, _ = collate([lesson(rng, "train", words, level) for level in levels], processor)
        factor = min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * progress)) / 2
        losses.append(one_step(model, optimizer, batch, lr * factor))
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {progress:.0%}  loss {np.mean(losses):.4f}", flush=True)
        if time.monotonic() - saved > 60 * save_minutes:
            state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
            save_tree(state | {"step": step, "spent": time.monotonic() - started}, checkpoint)
            print(json.dumps(examine(model, processor, words, 256)), flush=True)
            saved = time.monotonic()
    scores = examine(model, processor, words, exam)
    model.half().save_pretrained(out)
    processor.save_pretrained(out)
    (out / "skills.json").write_text(json.dumps({"steps": step, "accuracy": scores}, indent=1) + "\n")
    print(json.dumps(scores), out, sep="\n")
    return scores


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], lr: float) -> float:
    """The loss, in nats per token, before the weights moved."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss: Tensor = model(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


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
    for _, turns in lessons:
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
    pixels = processor.image_processor([picture for picture, _ in lessons], return_tensors="pt")["pixel_values"]
    mask = torch.arange(length) < torch.tensor([[len(ids)] for ids in pieces])
    return {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels, "pixel_values": pixels}, spans


@torch.no_grad()
def examine(model: nn.Module, processor: Any, words: list[str], pictures: int, part: Part = "test") -> dict[str, float]:
    """Share of answers of which every token is the most likely one, as in greedy decoding, by skill."""
    right: dict[str, list[bool]] = defaultdict(list)
    rng = np.random.default_rng(12345)
    for _ in range(0, pictures, 64):
        batch, spans = collate([lesson(rng, part, words) for _ in range(64)], processor)
        best = model(**batch).logits.argmax(dim=-1)
        for row, marks in enumerate(spans):
            for skill, start, end in marks:
                right[skill].append(torch.equal(best[row, start - 1 : end - 1], batch["labels"][row, start:end]))
    return {skill: round(float(np.mean(hits)), 4) for skill, hits in sorted(right.items())}


def resume(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
    """Load what was saved; the steps done and the seconds spent."""
    state = load_tree(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["spent"]


if __name__ == "__main__":
    command_line(main)
