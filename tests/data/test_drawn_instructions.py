import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from lightning_fcl.data.base_skills import lesson
from lightning_fcl.data.drawn_instructions import DRAWN_TASKS, drawn_instructions
from lightning_fcl.data.instructions import row_problem
from lightning_fcl.data.pictures import COLOURS, SHAPES, Thing, digit_images, draw_things

each_task = pytest.mark.parametrize("task", DRAWN_TASKS)


def test_twelve_tasks_in_four_groups_of_three():
    assert Counter(task.group for task in DRAWN_TASKS.values()) == dict.fromkeys(
        ("general", "math", "chart", "other"), 3
    )
    first_eight = list(DRAWN_TASKS.values())[:8]
    assert set(Counter(task.group for task in first_eight).values()) == {2}


@each_task
def test_rows_are_sound_and_follow_from_the_seed(task):
    rows = drawn_instructions(task, 5, seed=3)
    again = drawn_instructions(task, 5, seed=3)
    other = drawn_instructions(task, 5, seed=4)
    assert [row_problem(row) for row in rows] == [None] * 5
    assert all(row["image"].shape == (32, 32, 3) and row["image"].dtype == np.uint8 for row in rows)
    assert all(
        (a["image"] == b["image"]).all() and a["answer"] == b["answer"] for a, b in zip(rows, again, strict=True)
    )
    assert not all((a["image"] == b["image"]).all() for a, b in zip(rows, other, strict=True))
    assert not (rows[0]["image"] == drawn_instructions(task, 1, part="test", seed=3)[0]["image"]).all()


@each_task
def test_who_does_not_look_is_near_chance(task):
    """The best guess from the question alone, learned from training rows, against the most frequent answer."""
    train, test = drawn_instructions(task, 300), drawn_instructions(task, 300, part="test")
    guesses = defaultdict(Counter)
    for row in train:
        guesses[row["question"]][row["answer"]] += 1
    overall = Counter(row["answer"] for row in train)
    blind = [guesses.get(row["question"], overall).most_common(1)[0][0] == row["answer"] for row in test]
    chance = 1 / {"parity": 2, "relation": 2, "statement": 2, "same": 2, "larger": 2, "odd": 4, "reach": 4}.get(task, 6)
    assert np.mean(blind) < chance + 0.08


def wording(question):
    """Words of a question that are neither colours nor shapes."""
    return set(re.findall(r"[a-z]+", question.lower())) - set(COLOURS) - set(SHAPES)


def test_every_task_has_its_own_wording_and_the_base_has_seen_none():
    rng = np.random.default_rng(0)
    lessons = [turn[1] for _ in range(100) for turn in lesson(rng, "train", ["red"])[1]]
    questions = {task: [row["question"] for row in drawn_instructions(task, 20)] for task in DRAWN_TASKS}
    seen = [wording(question) for question in lessons]
    for task, asked in questions.items():
        others = [wording(q) for name, group in questions.items() if name != task for q in group]
        for question in asked:
            mine = wording(question)
            assert all(len(mine & one) / len(mine | one) < 0.5 for one in others)
            assert all(len(mine & one) / len(mine | one) < 0.3 for one in seen)


def test_handwriting_of_the_test_is_in_no_training_picture():
    train, test = ({image.tobytes() for group in digit_images(part) for image in group} for part in ("train", "test"))
    assert len(train) > 1400
    assert not train & test


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_drawn_where_they_are_said_to_be(shape):
    thing = Thing(shape, "red", x=4, y=16, side=8)
    picture = draw_things(np.random.default_rng(0), [thing]).astype(int)
    ys, xs = np.nonzero(picture[..., 0] > 200)
    assert (xs.min(), xs.max(), ys.max()) == (4, 11, 23)
    assert ys.min() - 16 in (0, 1)  # the tip of a triangle is narrower than a pixel
    assert thing.place == "middle left"


def test_answers_agree_with_the_pictures():
    for row in drawn_instructions("box", 20):
        numbers = [float(number) for number in re.findall(r"\d\.\d\d", row["answer"])]
        bright = row["image"].max(axis=2) > 150
        ys, xs = np.nonzero(bright)
        assert numbers == pytest.approx(np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) / 32, abs=0.04)
    for row in drawn_instructions("tallest", 20):
        top = row["image"].astype(int)[np.argmax(row["image"].max(axis=2).max(axis=1) > 150)]
        ink = top[top.max(axis=1).argmax()]
        assert min(COLOURS, key=lambda colour: np.abs(ink - np.array(COLOURS[colour])).sum()) == row["answer"]


def test_lessons_tell_what_is_there():
    rng = np.random.default_rng(1)
    skills = Counter(turn[0] for _ in range(200) for turn in lesson(rng, "train", ["so"])[1])
    assert set(skills) == {"colour", "shape", "place", "count", "count colour", "digit", "level", "repeat"}
    easy = [lesson(rng, "train", ["so"], level=0.0)[1] for _ in range(50)]
    assert {answer for turns in easy for skill, _, answer in turns if skill == "count"} == {"1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("smell", 1), r"`task` must be one of relation.*got 'smell'"),
        (("odd", 0), r"`size` must be at least 1, got 0"),
        (("odd", 1, "dev"), r"`part` must be 'train' or 'test', got 'dev'"),
    ],
)
def test_bad_arguments(arguments, message):
    task, size, part = (*arguments, "train")[:3]
    with pytest.raises(ValueError, match=message):
        drawn_instructions(task, size, part=part)
