"""Twelve small visual instruction tasks in four capability groups, drawn as you ask for them: no files, no network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from lightning_fcl.data.partition import check_at_least
from lightning_fcl.data.pictures import (
    COLOURS,
    SHAPES,
    SIZE,
    UNIT,
    Part,
    Picture,
    Thing,
    draw_bars,
    draw_digits,
    draw_things,
    thing_in_cell,
)

Group: TypeAlias = Literal["general", "math", "chart", "other"]
Answered: TypeAlias = tuple[Picture, str, str]
"""Picture, question with its format hint, answer."""

_YES_NO = ("yes", "no")
_TRUE_FALSE = ("true", "false")
_NUMBERS = ("none", "one", "two", "three")
_CORNERS = "ABCD"


@dataclass(frozen=True)
class DrawnTask:
    """A task of the stream.

    Args:
        name: What tables call it.
        group: The capability that it asks for.
        draw: Makes one example.
        metric: How answers are scored: a name of :mod:`lightning_fcl.metrics.answers`.
    """

    name: str
    group: Group
    draw: Callable[[np.random.Generator, Part], Answered]
    metric: str = "exact"


def drawn_instructions(task: str, size: int, *, part: Part = "train", seed: int = 0) -> list[dict[str, Any]]:
    r"""Examples of one task, in LLaVA's form.

    Answers are drawn first and pictures to fit them, so that a question alone tells nothing about its answer. Every
    task has its own wording and way of answering, and none is among the lessons of the shipped tiny model
    (:mod:`lightning_fcl.data.base_skills`).

    Args:
        task: A name of ``DRAWN_TASKS``.
        size: Number of examples.
        part: ``"test"`` draws from another stream of random numbers, and shows handwritten digits that no training
            picture shows.
        seed: Seeds the examples.

    Returns:
        Rows with ``id``, ``image`` (uint8, ``(32, 32, 3)``), ``task``, ``metric``, ``question``, ``answer`` and
        ``conversations``.

    Raises:
        ValueError: If the task is unknown or a number is out of range.
        MissingExtraError: If the task shows digits and scikit-learn is not installed (extra ``recipes``).

    Example:
        >>> row = drawn_instructions("odd", 1)[0]
        >>> row["question"]
        'Three of four figures are alike. Which corner is not?\nReply A, B, C or D.'
        >>> row["conversations"][1]
        {'from': 'gpt', 'value': 'C'}
    """
    if task not in DRAWN_TASKS:
        raise ValueError(f"`task` must be one of {', '.join(DRAWN_TASKS)}, got {task!r}.")
    if part not in ("train", "test"):
        raise ValueError(f"`part` must be 'train' or 'test', got {part!r}.")
    check_at_least("size", size, 1)
    spec = DRAWN_TASKS[task]
    rng = np.random.default_rng([seed, part == "test", *task.encode()])
    rows = []
    for number in range(size):
        picture, question, answer = spec.draw(rng, part)
        rows.append(
            {
                "id": f"{task}-{part}-{number:05d}",
                "image": picture,
                "task": task,
                "metric": spec.metric,
                "question": question,
                "answer": answer,
                "conversations": [
                    {"from": "human", "value": f"<image>\n{question}"},
                    {"from": "gpt", "value": answer},
                ],
            }
        )
    return rows


def _relation(rng: np.random.Generator, part: Part) -> Answered:
    first, second = _two_things(rng, apart=True)
    relation, true = _relations(first, second)[int(rng.integers(2))]
    answer = _pick(rng, _YES_NO)
    if true != (answer == "yes"):
        first, second = second, first
    question = f"Is the {first.name} {relation} the {second.name}?\nAnswer yes or no."
    return draw_things(rng, [first, second]), question, answer


def _odd(rng: np.random.Generator, part: Part) -> Answered:
    shapes, colours = rng.permutation(SHAPES), rng.permutation(list(COLOURS))
    answer = int(rng.integers(4))
    by_shape = rng.random() < 0.5
    kinds = [(0, 0)] * 4
    kinds[answer] = (1, 0) if by_shape else (0, 1)
    things = [thing_in_cell(rng, str(shapes[s]), str(colours[c]), i, span=15) for i, (s, c) in enumerate(kinds)]
    question = "Three of four figures are alike. Which corner is not?\nReply A, B, C or D."
    return draw_things(rng, things), question, _CORNERS[answer]


def _same(rng: np.random.Generator, part: Part) -> Answered:
    first, second = _two_things(rng, apart=False)
    answer = _pick(rng, ("same", "different"))
    if answer == "same":
        second = Thing(second.shape, first.colour, second.x, second.y, second.side)
    return draw_things(rng, [first, second]), "Do both things share one paint?\nSay same or different.", answer


def _parity(rng: np.random.Generator, part: Part) -> Answered:
    digit = int(rng.integers(10))
    question = "Can this be split into two equal halves?\nWrite even or odd."
    return draw_digits(rng, [digit], part)[0], question, ("even", "odd")[digit % 2]


def _successor(rng: np.random.Generator, part: Part) -> Answered:
    digit = int(rng.integers(10))
    return draw_digits(rng, [digit], part)[0], "Add one to what is written.\nGive the sum.", str(digit + 1)


def _larger(rng: np.random.Generator, part: Part) -> Answered:
    digits = [int(digit) for digit in rng.permutation(10)[:2]]
    question = "Compare both numerals. On which side is more?\nOnly the side."
    return draw_digits(rng, digits, part)[0], question, "left" if digits[0] > digits[1] else "right"


def _tallest(rng: np.random.Generator, part: Part) -> Answered:
    heights = _heights(rng)
    question = "Which bar of this chart is the tallest?\nIts colour only."
    return draw_bars(rng, heights)[0], question, max(heights, key=lambda colour: heights[colour])


def _statement(rng: np.random.Generator, part: Part) -> Answered:
    heights = _heights(rng)
    low, high = sorted((str(c) for c in rng.permutation(list(heights))[:2]), key=lambda colour: heights[colour])
    answer = _pick(rng, _TRUE_FALSE)
    first, second = (high, low) if answer == "true" else (low, high)
    return draw_bars(rng, heights)[0], f"The chart shows that {first} exceeds {second}.\nTrue or false?", answer


def _reach(rng: np.random.Generator, part: Part) -> Answered:
    colours = rng.permutation(list(COLOURS))[:3]
    reaching = int(rng.integers(4))
    line = 2 * int(rng.integers(2, 6)) + 1
    over = rng.permutation([True] * reaching + [False] * (3 - reaching))
    bounds = ((line // 2 + 1, 8), (1, line // 2 + 1))
    heights = {str(c): int(rng.integers(*bounds[0 if above else 1])) for c, above in zip(colours, over, strict=True)}
    question = "How many columns reach the dotted line?\nSpell the number."
    return draw_bars(rng, heights, line)[0], question, _NUMBERS[reaching]


def _box(rng: np.random.Generator, part: Part) -> Answered:
    side = int(rng.choice([8, 12, 16]))
    x, y = (UNIT * int(rng.integers(0, (SIZE - side) // UNIT + 1)) for _ in range(2))
    thing = Thing(_pick(rng, SHAPES), _pick(rng, tuple(COLOURS)), x, y, side)
    corners = ",".join(f"{value / SIZE:.2f}" for value in (x, y, x + side, y + side))
    question = "Locate the object in this image.\nBox as [x1,y1,x2,y2]."
    return draw_things(rng, [thing]), question, f"[{corners}]"


def _caption(rng: np.random.Generator, part: Part) -> Answered:
    first, second = _two_things(rng, apart=True)
    relation, true = _relations(first, second)[0]
    if not true:
        first, second = second, first
    return (
        draw_things(rng, [first, second]),
        "Describe the scene briefly.",
        f"a {first.name} {relation} a {second.name}",
    )


def _reading(rng: np.random.Generator, part: Part) -> Answered:
    digits = [int(digit) for digit in rng.integers(0, 10, size=2)]
    return draw_digits(rng, digits, part)[0], "Read out the code on the label.", "".join(map(str, digits))


def _two_things(rng: np.random.Generator, *, apart: bool) -> tuple[Thing, Thing]:
    """Two shapes that differ in shape and colour; ``apart`` also in row and column."""
    shapes, colours = rng.permutation(SHAPES), rng.permutation(list(COLOURS))
    cells = rng.permutation(3)[:2] * 3 + rng.permutation(3)[:2] if apart else rng.permutation(9)[:2]
    first, second = (thing_in_cell(rng, str(shapes[i]), str(colours[i]), int(cells[i])) for i in range(2))
    return first, second


def _relations(first: Thing, second: Thing) -> list[tuple[str, bool]]:
    return [("left of", first.x < second.x), ("above", first.y < second.y)]


def _heights(rng: np.random.Generator) -> dict[str, int]:
    """Three colours with distinct heights."""
    colours, heights = rng.permutation(list(COLOURS))[:3], rng.permutation(7)[:3] + 1
    return {str(colour): int(height) for colour, height in zip(colours, heights, strict=True)}


def _pick(rng: np.random.Generator, choices: tuple[str, ...]) -> str:
    return str(rng.choice(choices))


_ALL = (
    DrawnTask("relation", "general", _relation),
    DrawnTask("tallest", "chart", _tallest),
    DrawnTask("parity", "math", _parity),
    DrawnTask("caption", "other", _caption, metric="rouge"),
    DrawnTask("odd", "general", _odd),
    DrawnTask("statement", "chart", _statement),
    DrawnTask("successor", "math", _successor),
    DrawnTask("box", "other", _box, metric="iou"),
    DrawnTask("same", "general", _same),
    DrawnTask("larger", "math", _larger),
    DrawnTask("reach", "chart", _reach),
    DrawnTask("reading", "other", _reading),
)
DRAWN_TASKS: dict[str, DrawnTask] = {task.name: task for task in _ALL}
"""By name; the first eight are the stages of the task-related setting, all twelve those of the capability-related."""
