"""Small drawn pictures of floods, fires and quakes, made by NumPy alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.float32]
"""Height, width, RGB; from 0 to 1 while it is drawn."""


def draw_scene(scene: str, size: int, rng: np.random.Generator) -> Picture:
    """One picture of a scene, never twice the same: sky, ground, a house or a tree, and what happened.

    Args:
        scene: A key of :data:`SCENES`.
        size: Height and width in pixels.
        rng: Draws everything that differs from picture to picture.

    Returns:
        Shape ``(3, size, size)``, from -1 to 1.
    """
    picture = _land(size, rng)
    for add in rng.permutation([_house, _tree, _cloud])[: rng.integers(0, 3)]:  # type: ignore[arg-type]
        add(picture, rng)
    SCENES[scene](picture, rng)
    light = picture * rng.uniform(0.7, 1.1) + rng.normal(0, 0.06, picture.shape)
    return np.ascontiguousarray((2 * light.clip(0, 1) - 1).astype(np.float32).transpose(2, 0, 1))


def _land(size: int, rng: np.random.Generator) -> Picture:
    """Sky of any hour over ground of any kind."""
    skies = np.array([[0.5, 0.7, 0.95], [0.9, 0.6, 0.4], [0.15, 0.15, 0.3], [0.7, 0.7, 0.72]])
    grounds = np.array([[0.35, 0.5, 0.25], [0.55, 0.45, 0.3], [0.4, 0.4, 0.42]])
    picture = np.empty((size, size, 3), dtype=np.float32)
    fade = np.linspace(0.85, 1.1, size)[:, None, None]
    picture[:] = skies[rng.integers(len(skies))] * fade
    picture[int(size * rng.uniform(0.5, 0.7)) :] = grounds[rng.integers(len(grounds))]
    return picture


def _box(picture: Picture, top: float, left: float, height: float, width: float, colour: Any) -> None:
    size = len(picture)
    rows = slice(int(top * size), max(int((top + height) * size), int(top * size) + 1))
    picture[rows, int(left * size) : max(int((left + width) * size), int(left * size) + 1)] = colour


def _house(picture: Picture, rng: np.random.Generator) -> None:
    _box(picture, 0.35, rng.uniform(0, 0.7), 0.3, 0.25, rng.uniform(0.4, 0.9, 3))


def _tree(picture: Picture, rng: np.random.Generator) -> None:
    left = rng.uniform(0, 0.8)
    _box(picture, 0.3, left, 0.2, 0.18, (0.15, 0.45, 0.15))
    _box(picture, 0.5, left + 0.06, 0.15, 0.06, (0.4, 0.25, 0.1))


def _cloud(picture: Picture, rng: np.random.Generator) -> None:
    _box(picture, rng.uniform(0, 0.2), rng.uniform(0, 0.7), 0.1, 0.3, rng.uniform(0.75, 0.95))


def _water(picture: Picture, rng: np.random.Generator) -> None:
    """Waves up to a level of their own."""
    size = len(picture)
    columns = np.arange(size)
    level = size * rng.uniform(0.55, 0.75) + rng.uniform(0.5, 1.5) * np.sin(columns * rng.uniform(0.6, 1.4))
    under = np.arange(size)[:, None] >= level
    stripes = 0.1 * np.sin(np.arange(size)[:, None] * 2.0 + columns * 0.5)
    blue = np.array([0.15, 0.35, 0.6]) + rng.normal(0, 0.05, 3)
    picture[under] = (blue + stripes[..., None])[under]


def _fire(picture: Picture, rng: np.random.Generator) -> None:
    """Flames: bright triangles on the ground."""
    size = len(picture)
    for _ in range(rng.integers(2, 5)):
        foot, centre = size * rng.uniform(0.6, 0.95), size * rng.uniform(0.1, 0.9)
        height = size * rng.uniform(0.25, 0.5)
        rows, columns = np.mgrid[:size, :size]
        share = (foot - rows) / height  # 0 at the foot, 1 at the tip
        inside = (share >= 0) & (share <= 1) & (np.abs(columns - centre) <= (1 - share) * size * 0.15)
        hot = np.stack([np.full_like(share, 0.95), 0.35 + 0.5 * (1 - share), 0.1 + 0 * share], axis=-1)
        picture[inside] = hot[inside]


def _rubble(picture: Picture, rng: np.random.Generator) -> None:
    """Broken blocks, light and dark."""
    for _ in range(rng.integers(8, 14)):
        shade = rng.choice([0.2, 0.55, 0.75]) + rng.normal(0, 0.03, 3)
        place = rng.uniform(0.5, 0.9), rng.uniform(0, 0.9)
        _box(picture, *place, rng.uniform(0.05, 0.15), rng.uniform(0.08, 0.2), shade)


SCENES: dict[str, Callable[[Picture, np.random.Generator], None]] = {"water": _water, "fire": _fire, "rubble": _rubble}
"""What happened, by name; each draws over the picture in place."""
