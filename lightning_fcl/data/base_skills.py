"""What the shipped tiny LLaVA has been taught: to name what is in a picture, and to repeat words."""

from collections.abc import Callable, Sequence

import numpy as np

from lightning_fcl.data.pictures import (
    COLOURS,
    SHAPES,
    SIZE,
    Mark,
    Part,
    Picture,
    Thing,
    draw_bars,
    draw_digits,
    draw_things,
    thing_in_cell,
)

Turn = tuple[str, str, str]
"""Skill, question, answer."""
Lesson = tuple[Picture, list[Turn], list[Mark]]
TURNS = 4


def lesson(rng: np.random.Generator, part: Part, words: Sequence[str], level: float = 1.0) -> Lesson:
    """A picture, up to five questions on it, none worded or answered as a task of the stream, and what is where.

    Args:
        rng: The source of randomness.
        part: Which handwritten digits may be shown.
        words: Words to repeat; with them, the model learns to say every word that it may need later.
        level: How crowded pictures are, from 0 (one shape, one digit, one bar) to 1.
    """
    draw = _SCENES[int(rng.choice(len(_SCENES), p=_SHARES))]
    picture, turns, marks = draw(rng, part, level)
    turns = [turns[i] for i in rng.permutation(len(turns))[:TURNS]]
    if rng.random() < 0.2:
        text = " ".join(rng.choice(words, size=int(rng.integers(1, 3))))
        turns.insert(int(rng.integers(len(turns) + 1)), ("repeat", f"Repeat: {text}", text))
    return picture, turns, marks


def patch_words(marks: Sequence[Mark], patch: int) -> list[tuple[str, ...]]:
    """Words for each square patch of a picture, row by row: of the mark that covers most of it, or ``("none",)``.

    Args:
        marks: What is where.
        patch: Side of a patch in pixels.
    """
    words: list[tuple[str, ...]] = []
    for y in range(0, SIZE, patch):
        for x in range(0, SIZE, patch):
            shares = [_shared(mark.box, x, y, patch) for mark in marks]
            best = int(np.argmax(shares))
            words.append(marks[best].words if shares[best] >= 0.25 * patch**2 else ("none",))
    return words


def _shared(box: tuple[int, int, int, int], x: int, y: int, patch: int) -> int:
    """Pixels of a patch inside a box."""
    width, height = min(box[2], x + patch) - max(box[0], x), min(box[3], y + patch) - max(box[1], y)
    return max(width, 0) * max(height, 0)


def _attributes(rng: np.random.Generator, part: Part, level: float) -> Lesson:
    count = _up_to(rng, 4, level)
    kinds = zip(rng.permutation(SHAPES)[:count], rng.permutation(list(COLOURS))[:count], strict=True)
    cells = rng.permutation(9)
    things = [thing_in_cell(rng, str(s), str(c), int(cells[i])) for i, (s, c) in enumerate(kinds)]
    turns = [turn for thing in things for turn in _about(thing)]
    return draw_things(rng, things), turns, [thing.mark for thing in things]


def _about(thing: Thing) -> list[Turn]:
    return [
        ("colour", f"Name the colour of the {thing.shape}.", thing.colour),
        ("shape", f"Name the shape in {thing.colour}.", thing.shape),
        ("place", f"Name the place of the {thing.name}.", thing.place),
    ]


def _crowd(rng: np.random.Generator, part: Part, level: float) -> Lesson:
    count = _up_to(rng, 9, level)
    few = rng.permutation(list(COLOURS))[:2]
    cells = rng.permutation(9)[:count]
    things = [thing_in_cell(rng, str(rng.choice(SHAPES)), str(rng.choice(few)), int(cell)) for cell in cells]
    turns = [("count", "Name the number of shapes.", str(count))]
    for colour in few:
        held = sum(thing.colour == colour for thing in things)
        turns.append(("count colour", f"Name the number of {colour} shapes.", str(held)))
    return draw_things(rng, things), turns, [thing.mark for thing in things]


def _digits(rng: np.random.Generator, part: Part, level: float) -> Lesson:
    digits = [int(digit) for digit in rng.integers(0, 10, size=_up_to(rng, 2, level))]
    sides = ("",) if len(digits) == 1 else ("left ", "right ")
    turns = [("digit", f"Name the {side}digit.", str(digit)) for side, digit in zip(sides, digits, strict=True)]
    picture, marks = draw_digits(rng, digits, part)
    return picture, turns, marks


def _bars(rng: np.random.Generator, part: Part, level: float) -> Lesson:
    colours = rng.permutation(list(COLOURS))[: _up_to(rng, 3, level)]
    heights = {str(colour): int(rng.integers(1, 8)) for colour in colours}
    turns = [("level", f"Name the level of {colour}.", str(height)) for colour, height in heights.items()]
    picture, marks = draw_bars(rng, heights)
    return picture, turns, marks


def _up_to(rng: np.random.Generator, most: int, level: float) -> int:
    """From 1 to ``most`` at level 1, fewer below it."""
    return int(rng.integers(1, 2 + round(level * (most - 1))))


_SCENES: tuple[Callable[[np.random.Generator, Part, float], Lesson], ...] = (_attributes, _crowd, _digits, _bars)
_SHARES = (0.3, 0.15, 0.4, 0.15)
