"""Teach the tiny LLaVA that is shipped with the library, from scratch, to name what is in a picture.

    nice python recipes/train_tiny_llava.py --minutes 50       # one core; writes lightning_fcl/models/tiny_llava
    python recipes/train_tiny_llava.py --steps 3 --out /tmp/tiny

The lessons are those of ``lightning_fcl.data.base_skills``: colours, shapes, places, counts, handwritten digits, levels
of bars, and repeating words. The tasks of the stream are not among them. First the vision tower and the projector alone
learn to give each patch the embeddings of the words for what is there; then the whole model answers questions, several
on each picture, as turns of one conversation. Every few minutes a checkpoint is written beside the output; the same
command goes on from it.
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
from lightning_fcl.data.base_skills import lesson
from lightning_fcl.models.tiny_lessons import collate, patch_loss, vocabulary
from lightning_fcl.models.tiny_llava import TINY_LLAVA, make_config, make_processor
from lightning_fcl.serialize import load_tree, save_tree

WARM_UP = 100  # steps
SEEING = 0.2  # share of the training that is spent on seeing alone
EASY = 0.4  # share of the training in which pictures become as crowded as they get


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
    model: Any = LlavaForConditionalGeneration(make_config(tokenizer, width=width, layers=layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    step, spent = resume(checkpoint, model, optimizer) if checkpoint.exists() else (0, 0.0)
    started, saved, losses = time.monotonic() - spent, time.monotonic(), deque[list[float]](maxlen=50)
    while (progress := step / steps if steps else (time.monotonic() - started) / (60 * minutes)) < 1:
        rng = np.random.default_rng([seed, step])
        see_only = progress < SEEING
        top = 1.0 if see_only else min(1.0, progress / EASY)
        levels = [top * (1.0 if rng.random() < 0.6 else rng.random()) for _ in range(batch_size)]
        batch, _ = collate([lesson(rng, "train", words, level) for level in levels], processor)
        factor = min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * progress)) / 2
        losses.append(one_step(model, optimizer, batch, lr * factor, see_only=see_only))
        step += 1
        if step % 50 == 0:
            recent = np.mean([one for one in losses if len(one) == len(losses[-1])], axis=0)
            print(f"step {step}  {progress:.0%}  losses {recent.round(4)}", flush=True)
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


def one_step(model: Any, optimizer: Any, batch: dict[str, Tensor], lr: float, *, see_only: bool) -> list[float]:
    """The losses before the weights moved: of the patches, and of the answers, in nats per patch and token."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    inputs = dict(batch)
    words, ids, pixels = inputs.pop("words"), inputs.pop("input_ids"), inputs.pop("pixel_values")
    seen = torch.stack(list(model.model.get_image_features(pixels).pooler_output))  # [B, 64, width]
    embed = model.get_input_embeddings()
    losses = [patch_loss(seen, embed.weight, words)]
    if not see_only:
        text = embed(ids)
        mixed = text.masked_scatter((ids == model.config.image_token_id)[..., None], seen)
        losses.append(model(inputs_embeds=mixed, **inputs).loss)
    torch.autograd.backward(losses)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item() for loss in losses]


@torch.no_grad()
def examine(model: nn.Module, processor: Any, words: list[str], pictures: int) -> dict[str, float]:
    """Share of answers of which every token is the most likely one, as in greedy decoding, by skill."""
    right: dict[str, list[bool]] = defaultdict(list)
    rng = np.random.default_rng(12345)
    for _ in range(0, pictures, 64):
        batch, spans = collate([lesson(rng, "test", words) for _ in range(64)], processor)
        del batch["words"]
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
