"""The figures of a run: the score matrix as a heat map, and every task's score over the rounds."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from lightning_fcl._imports import optional_import
from lightning_fcl.reports.files import read_table
from lightning_fcl.reports.subspace_figure import activation_map, activation_matrix
from lightning_fcl.reports.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_fcl.reports.run_report import RunReport

MOST_ANNOTATED: Final = 15  # columns or tasks; beyond that numbers and labels run into each other
LONGEST_LABEL: Final = 24  # characters


def draw(report: "RunReport") -> dict[str, bytes]:
    """The figures of a run as PNG, by file name.

    Args:
        report: The run; rounds are read from its ``metrics.csv``.

    Returns:
        ``accuracy.png``, ``curves.png``, ``classes.png`` if classes were logged, and ``subspaces.png`` of a run with
        subspaces.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    from lightning_fcl.reports.analysis_figures import class_map
    from lightning_fcl.reports.rounds import class_table

    rows = read_table(report.run_dir / "metrics.csv")[1]
    found = {"accuracy.png": _png(heat_map(report)), "curves.png": _png(curves(report, rows))}
    labels, table = class_table(report)
    if labels:
        found["classes.png"] = class_map(labels, table)
    if (activations := activation_matrix(report.names, rows)) is not None:
        found["subspaces.png"] = _png(activation_map(report, activations))
    return found


def heat_map(report: "RunReport") -> "Figure":
    """The score matrix in colour, with numbers where they can be read.

    Args:
        report: The run.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    stages, columns = report.accuracy.shape
    figure, axes = _figure(2.5 + 0.6 * min(columns, 16), 1.8 + 0.5 * min(stages, 16))
    scores = (report.accuracy * report.scale).numpy()
    image: Any = axes.imshow(
        scores, cmap="GnBu", vmin=0 if report.scale > 1 else None, vmax=100 if report.scale > 1 else None
    )
    axes.set_xticks(range(columns), [_label(name) for name in report.names], rotation=40, ha="right")
    axes.set_yticks(range(stages), [f"after {stage}" for stage in range(stages)])
    axes.set_title(_title(report))
    figure.colorbar(image, label=_unit(report))
    if columns <= MOST_ANNOTATED:
        for (stage, column), score in [(at, scores[at]) for at in _cells(stages, columns)]:
            if math.isfinite(score):
                colour = "white" if image.norm(score) > 0.6 else "black"
                axes.text(column, stage, number(score / report.scale, report.scale), ha="center", va="center", c=colour)
    return figure


def curves(report: "RunReport", rows: Sequence[Mapping[str, str]]) -> "Figure":
    """Score of every task over the global rounds, with a line where a new task starts.

    Args:
        report: The run.
        rows: Rows of its ``metrics.csv``; where they hold no scores per task, the matrix is drawn over the stages.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    points, starts = _round_points(report, rows)
    if not any(points):
        points, starts = _stage_points(report), {}
    figure, axes = _figure(8, 4.2)
    colours = optional_import("matplotlib", extra="plot").colormaps["tab10" if len(points) <= 10 else "viridis"]
    for index, (name, series) in enumerate(zip(report.names, points, strict=True)):
        colour = colours(index if len(points) <= 10 else index / len(points))
        x, y = [at for at, _ in series], [score * report.scale for _, score in series]
        axes.plot(x, y, color=colour, label=_label(name), marker="o" if len(x) < 30 else "", ms=4)
    for task, start in starts.items():
        axes.axvline(start - 0.5, color="0.6", lw=0.8, ls=":")
        axes.annotate(
            _mark(task, len(starts)), (start - 0.4, 1.01), xycoords=axes.get_xaxis_transform(), size=8, color="0.4"
        )
    axes.set(xlabel="global round" if starts else "stage", ylabel=_unit(report))
    axes.set_title(_title(report), pad=18)
    axes.grid(alpha=0.25)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, ncols=1 + len(points) // 20)
    return figure


def _round_points(
    report: "RunReport", rows: Sequence[Mapping[str, str]]
) -> tuple[list[list[tuple[int, float]]], dict[str, int]]:
    key = _score_key(report, rows)
    points: list[list[tuple[int, float]]] = [[] for _ in report.names]
    starts: dict[str, int] = {}
    for row in rows:
        at = int(row["global_round"])
        starts.setdefault(row["task"], at)
        for series, name in zip(points, report.names, strict=True):
            if text := row.get(f"task/{name}/{key}"):
                series.append((at, float(text)))
    return points, starts


def _score_key(report: "RunReport", rows: Sequence[Mapping[str, str]]) -> str:
    """The score's own key if it was logged, else one that looks like an accuracy, else any."""
    prefixes = [f"task/{name}/" for name in report.names]
    found = dict.fromkeys(tag.removeprefix(p) for row in rows for tag in row for p in prefixes if tag.startswith(p))
    return min(found, key=lambda key: (key != report.score, "acc" not in key), default=report.score)


def _stage_points(report: "RunReport") -> list[list[tuple[int, float]]]:
    return [
        [(stage, score) for stage, score in enumerate(column) if math.isfinite(score)]
        for column in report.accuracy.T.tolist()
    ]


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    # a Figure of its own, not pyplot: the user's backend and open figures stay as they are
    module: Any = optional_import("matplotlib.figure", extra="plot")
    figure: Figure = module.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a name in another script shows boxes
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def _label(text: str) -> str:
    """Text that matplotlib shows as it is: no mathtext, no hidden legend entry, not too long."""
    short = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"
    return " " + short.replace("$", r"\$")


def _mark(task: str, tasks: int) -> str:
    """What stands above the start of a task: the fewer words, the more tasks there are."""
    if tasks > 2 * MOST_ANNOTATED:
        return ""
    return task if tasks > MOST_ANNOTATED // 2 else f"task {task}"


def _title(report: "RunReport") -> str:
    return f"{_label(report.method).strip()}, seed {report.seed}"


def _unit(report: "RunReport") -> str:
    return f"{_label(report.score).strip()} [%]" if report.scale > 1 else _label(report.score).strip()


def _cells(rows: int, columns: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(rows) for column in range(columns)]
