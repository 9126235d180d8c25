"""Figures of :mod:`lightning_fcl.reports.analysis`, and the map of classes over rounds."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_fcl import functional as F
from lightning_fcl.reports.figures import _figure, _png


def class_map(labels: Sequence[int], table: Tensor) -> bytes:
    """Accuracy of each class over the evaluated rounds.

    Args:
        labels: Classes.
        table: Shape ``(R, C)``, fractions, NaN where not measured.

    Returns:
        A PNG.
    """
    summary = F.per_class_summary(table)
    figure, axes = _figure(8, 1.5 + 0.25 * min(len(labels), 24))
    image: Any = axes.imshow(
        100 * table.T.numpy(), cmap="GnBu", vmin=0, vmax=100, aspect="auto", interpolation="nearest"
    )
    if len(labels) <= 30:
        axes.set_yticks(range(len(labels)), [str(label) for label in labels])
    axes.set(xlabel="evaluation", ylabel="class")
    per_round = summary.zeros / max(1, len(table))
    axes.set_title(f"oscillation {100 * summary.oscillation:.1f} points, {per_round:.1f} classes at zero", fontsize=10)
    figure.colorbar(image, label="accuracy [%]")
    return _png(figure)


def bars(values: Sequence[float], title: str) -> bytes:
    """Bars of numbers, as a PNG."""
    figure, axes = _figure(4.5, 3)
    axes.bar([str(number + 1) for number in range(len(values))], values, color="#1b7f5c")
    axes.set(xlabel="eigenvalue", ylabel="value")
    axes.set_title(title, fontsize=10)
    return _png(figure)


def plane(points: Tensor, labels: Tensor, anchors: Tensor, targets: Tensor | None, title: str) -> bytes:
    """Points of the plane coloured by class, and anchors as stars.

    Args:
        points: Shape ``(N, 2)``.
        labels: Shape ``(N,)``.
        anchors: Shape ``(A, 2)``.
        targets: Shape ``(A,)``, or ``None`` without anchors.
        title: Above the figure.

    Returns:
        A PNG.
    """
    figure, axes = _figure(6, 5)
    shades: dict[str, Any] = {"cmap": "nipy_spectral", "vmin": 0, "vmax": max(1, int(labels.max()))}
    x, y = points.T.numpy()
    dots: Any = axes.scatter(x, y, c=labels.numpy(), s=6, alpha=0.5, **shades)
    if targets is not None and len(anchors):
        x, y = anchors.T.numpy()
        axes.scatter(x, y, c=targets.numpy(), marker="*", s=220, edgecolors="black", **shades)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])
    figure.colorbar(dots, label="class")
    return _png(figure)


def matrix(table: Tensor, rows: Sequence[int], columns: Sequence[int], title: str) -> bytes:
    """A table from -1 to 1 in colour, as a PNG."""
    figure, axes = _figure(5.5, 4.5)
    image: Any = axes.imshow(table.numpy(), cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    if len(columns) <= 30:
        axes.set_xticks(range(len(columns)), [str(label) for label in columns])
    if len(rows) <= 30:
        axes.set_yticks(range(len(rows)), [str(label) for label in rows])
    axes.set(xlabel="class mean", ylabel="anchor of class")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image)
    return _png(figure)


def sheet(images: Sequence[Sequence[Tensor]], rows: Sequence[Mapping[str, float]]) -> bytes:
    """Anchors beside the training image they are closest to and the mean of their class, with decibels.

    Args:
        images: By anchor, three images ``(C, H, W)`` in [0, 1]; the first ten are shown.
        rows: By anchor, ``class``, ``closest`` and ``mean`` in dB.

    Returns:
        A PNG.
    """
    from lightning_fcl._imports import optional_import

    shown = min(10, len(images))
    module: Any = optional_import("matplotlib.figure", extra="plot")
    figure = module.Figure(figsize=(1.2 * shown + 1, 4.4), layout="constrained")
    axes = figure.subplots(3, shown, squeeze=False)
    for column in range(shown):
        row = rows[column]
        titles = (f"class {row['class']:g}", f"{row['closest']:.1f} dB", f"{row['mean']:.1f} dB")
        for place, (image, title) in enumerate(zip(images[column], titles, strict=True)):
            axes[place, column].imshow(image.permute(1, 2, 0).squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1)
            axes[place, column].set_title(title, fontsize=9)
            axes[place, column].set_xticks([])
            axes[place, column].set_yticks([])
    for place, name in enumerate(("anchor", "closest\ntraining image", "class mean")):
        axes[place, 0].set_ylabel(name, fontsize=9)
    return _png(figure)
