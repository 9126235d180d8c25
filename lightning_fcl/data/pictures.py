"""Pictures of 32 x 32 pixels, drawn with numpy alone: coloured shapes, real digits, bar charts."""

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_fcl._imports import optional_import

Picture: TypeAlias = NDArray[np.uint8]
"""RGB, shape ``(32, 32, 3)``."""
Part: TypeAlias = Literal["train", "test"]

SIZE = 32
CELL = 10  # a scene has three rows and columns of such cells, one pixel from the edge
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (60, 90, 255),
    "yellow": (240, 220, 50),
    "purple": (190, 60, 220),
    "cyan": (50, 220, 230),
}
SHAPES = ("circle", "square", "triangle", "cross")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
UNIT = 4  # pixels per unit of a bar's height


@dataclass(frozen=True)
class Mark:
    """Words that tell what is inside a box: left, top, right and bottom in pixels."""

    box: tuple[int, int, int, int]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Thing:
    """A coloured shape: corner and side in pixels."""

    shape: str
    colour: str
    x: int
    y: int
    side: int

    @property
    def name(self) -> str:
        """As in "red circle"."""
        return f"{self.colour} {self.shape}"

    @property
    def mark(self) -> Mark:
        """Where it is, and what."""
        return Mark(
            (self.x, self.y, self.x + self.side, self.y + self.side), (self.colour, self.shape, *self.place.split())
        )

    @property
    def place(self) -> str:
        """Which of nine places its middle is in, as in "top left"."""
        column, row = (int(3 * (start + self.side / 2) / SIZE) for start in (self.x, self.y))
        return f"{ROWS[row]} {COLUMNS[column]}"


def thing_in_cell(rng: np.random.Generator, shape: str, colour: str, cell: int, span: int = CELL) -> Thing:
    """A shape of random size at a random position inside a cell.

    Args:
        rng: The source of randomness.
        shape: One of ``SHAPES``.
        colour: One of ``COLOURS``.
        cell: Number of the cell, row by row.
        span: Side of the cells in pixels; as many as fit make a row.
    """
    side = int(rng.integers(span - 2, span + 1))
    row, column = divmod(cell, SIZE // span)
    free = span - side
    x, y = (1 + span * place + int(rng.integers(0, free + 1)) for place in (column, row))
    return Thing(shape, colour, x, y, side)


def paper(rng: np.random.Generator) -> Picture:
    """An empty sheet: dark grey of a random level, slightly grained."""
    grain = rng.normal(rng.uniform(0, 70), 6, size=(SIZE, SIZE, 1))
    return np.repeat(np.clip(grain, 0, 255), 3, axis=2).astype(np.uint8)


def draw_things(rng: np.random.Generator, things: list[Thing]) -> Picture:
    """A scene with these shapes."""
    picture = paper(rng)
    for thing in things:
        window = picture[thing.y : thing.y + thing.side, thing.x : thing.x + thing.side]
        window[_mask(thing.shape, thing.side)] = _ink(rng, thing.colour)
    return picture


def draw_digits(rng: np.random.Generator, digits: list[int], part: Part) -> tuple[Picture, list[Mark]]:
    """One large or two small handwritten digits, in one ink, and where they are.

    Args:
        rng: The source of randomness.
        digits: One or two numbers from 0 to 9, from left to right.
        part: Which of scikit-learn's images to draw from; no image is in both parts.

    Raises:
        MissingExtraError: If scikit-learn is not installed (extra ``recipes``).
    """
    picture, marks = paper(rng).astype(np.float64), []
    ink = np.asarray(_ink(rng, str(rng.choice(list(COLOURS)))), dtype=np.float64)
    factor, width = (3, SIZE) if len(digits) == 1 else (2, SIZE // 2)
    for position, digit in enumerate(digits):
        images = digit_images(part)[digit]
        strength = np.kron(images[rng.integers(len(images))], np.ones((factor, factor)))[..., None]
        side = len(strength)
        x = position * width + int(rng.integers(0, width - side + 1))
        y = int(rng.integers(0, SIZE - side + 1))
        window = picture[y : y + side, x : x + side]
        window += strength * (ink - window)
        side_words = () if len(digits) == 1 else (("left", "right")[position],)
        marks.append(Mark((x, y, x + side, y + side), (str(digit), *side_words)))
    return picture.astype(np.uint8), marks


def draw_bars(rng: np.random.Generator, heights: dict[str, int], line: int | None = None) -> tuple[Picture, list[Mark]]:
    """A bar chart, and where its bars are.

    Args:
        rng: The source of randomness.
        heights: Up to three heights by colour, from left to right, in units from 1 to 7.
        line: Height of a dotted line in half units, or none.
    """
    picture, marks = paper(rng), []
    for position, (colour, height) in enumerate(heights.items()):
        x = 2 + CELL * position + int(rng.integers(0, 3))
        picture[SIZE - UNIT * height :, x : x + 6] = _ink(rng, colour)
        marks.append(Mark((x, SIZE - UNIT * height, x + 6, SIZE), (colour, str(height))))
    if line is not None:
        picture[SIZE - UNIT * line // 2, ::2] = 255
    return picture, marks


@cache
def digit_images(part: Part) -> list[NDArray[np.float64]]:
    """By digit, real handwritten images (UCI optdigits, inside scikit-learn): ``(N, 8, 8)``, from 0 to 1.

    Raises:
        MissingExtraError: If scikit-learn is not installed (extra ``recipes``).
    """
    digits = optional_import("sklearn.datasets", extra="recipes").load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    held_out = len(order) // 5
    chosen = order[:held_out] if part == "test" else order[held_out:]
    return [digits.images[chosen][digits.target[chosen] == digit] / 16 for digit in range(10)]


def _ink(rng: np.random.Generator, colour: str) -> tuple[int, ...]:
    return tuple(min(255, max(0, level + int(rng.integers(-15, 16)))) for level in COLOURS[colour])


@cache
def _mask(shape: str, side: int) -> NDArray[np.bool_]:
    y, x = np.mgrid[:side, :side] + 0.5
    middle = side / 2
    if shape == "circle":
        mask = (x - middle) ** 2 + (y - middle) ** 2 <= middle**2
    elif shape == "triangle":
        mask = np.abs(x - middle) <= y / 2
    elif shape == "cross":
        mask = np.minimum(np.abs(x - middle), np.abs(y - middle)) <= side / 6
    else:
        mask = np.ones((side, side), dtype=bool)
    return np.asarray(mask, dtype=bool)
