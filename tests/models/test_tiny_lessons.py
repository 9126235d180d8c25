import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fcl.data.base_skills import lesson, patch_words
from lightning_fcl.data.pictures import Mark
from lightning_fcl.models.tiny_lessons import collate, patch_loss, targets_of
from lightning_fcl.models.tiny_llava import make_processor, make_tokenizer

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "train_tiny_llava.py"


@pytest.fixture(scope="module")
def processor():
    rng = np.random.default_rng(0)
    turns = [turn for _ in range(200) for turn in lesson(rng, "train", ["so"])[1]]
    texts = [text for _, question, answer in turns for text in (question, f" {answer}")]
    return make_processor(make_tokenizer([*texts, "USER: ASSISTANT:", " ASSISTANT:", " none"]))


def test_a_patch_is_told_the_words_of_what_covers_most_of_it():
    marks = [Mark((0, 0, 9, 8), ("red", "circle")), Mark((9, 0, 16, 8), ("blue", "cross"))]
    words = patch_words(marks, patch=4)
    assert len(words) == 64
    assert words[:5] == [("red", "circle"), ("red", "circle"), ("blue", "cross"), ("blue", "cross"), ("none",)]
    assert words[16] == ("none",)
    assert set(patch_words([Mark((0, 0, 1, 1), ("dot",))], patch=4)) == {("none",)}  # under a quarter


def test_patch_loss_is_smallest_where_patches_are_their_words(processor):
    rng = np.random.default_rng(1)
    targets = targets_of([lesson(rng, "train", ["so"])], processor.tokenizer)
    words = torch.nn.functional.normalize(torch.randn(targets.shape[-1], 32), dim=-1)
    right, wrong = targets @ words, targets.roll(1, dims=-1) @ words
    assert patch_loss(right, words, targets) < patch_loss(wrong, words, targets) - 1
    torch.testing.assert_close(targets.sum(dim=-1), torch.ones(1, 64))


def test_all_answers_of_a_lesson_count_and_nothing_else(processor):
    rng = np.random.default_rng(2)
    lessons = [lesson(rng, "train", ["left", "top"]) for _ in range(4)]
    batch, spans = collate(lessons, processor)
    for number, (_, turns, _) in enumerate(lessons):
        counted = [token for token in batch["labels"][number].tolist() if token != -100]
        assert processor.tokenizer.decode(counted) == "".join(f" {answer}</s>" for _, _, answer in turns)
        assert [skill for skill, _, _ in spans[number]] == [skill for skill, _, _ in turns]


@pytest.mark.slow
def test_the_recipe_trains_stops_and_goes_on(tmp_path):
    spec = importlib.util.spec_from_file_location("train_tiny_llava", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    options = {"batch_size": 2, "layers": 1, "width": 32, "exam": 64, "save_minutes": 0.0}
    scores = recipe.main(out=tmp_path / "model", steps=3, **options)
    assert {"colour", "digit"} <= set(scores)
    assert json.loads((tmp_path / "model" / "skills.json").read_text())["steps"] == 3
    recipe.main(out=tmp_path / "model", steps=5, **options)
    assert json.loads((tmp_path / "model" / "skills.json").read_text())["steps"] == 5
