"""How fast runs get somewhere: their curves over the rounds, rounds to a target, and speed-ups."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from lightning_fcl import functional as F
from lightning_fcl.reports.files import read_table, write_text
from lightning_fcl.reports.tables import text_table

if TYPE_CHECKING:
    from lightning_fcl.reports.run_report import RunReport

FIGURES: Final = "figures.json"
TOP: Final = 5


def round_scores(report: "RunReport") -> Tensor:
    """Mean score of the tasks seen, after each training round, shape ``(R,)``; NaN where it was not evaluated."""
    rows = read_table(report.run_dir / "metrics.csv")[1]
    key = f"round/{report.score}"
    values = [float(row[key]) if row.get(key) else math.nan for row in rows if row["phase"] == "train"]
    return torch.tensor(values, dtype=torch.float64)


def class_table(report: "RunReport") -> tuple[list[int], Tensor]:
    """Accuracy of each class after each evaluated round, as :class:`~lightning_fcl.callbacks.PerClassAccuracy` logs it.

    Args:
        report: The run.

    Returns:
        The labels, and shape ``(R, C)``, NaN where a class was not measured; a class that several evaluation sets hold
        is their mean.
    """
    rows = read_table(report.run_dir / "metrics.csv")[1]
    cells: list[dict[int, list[float]]] = []
    for row in rows:
        found: dict[int, list[float]] = {}
        for tag, value in row.items():
            _, mark, label = tag.rpartition("/class_")
            if mark and label.isdecimal() and value:
                found.setdefault(int(label), []).append(float(value))
        if found:
            cells.append(found)
    labels = sorted({label for row_cells in cells for label in row_cells})
    table = [[sum(c[label]) / len(c[label]) if label in c else math.nan for label in labels] for c in cells]
    return labels, torch.tensor(table, dtype=torch.float64).reshape(len(cells), len(labels))


def curve_figures(report: "RunReport", targets: Sequence[float] = (), smoothing: float = 0.2) -> dict[str, float]:
    """Figures of a run's curve.

    Args:
        report: The run.
        targets: Scores to reach.
        smoothing: Weight of the newest score in the moving average that has to reach them.

    Returns:
        ``top5`` (mean of the five best rounds), ``final``, ``rounds to <target>`` for each target (NaN: never), and,
        if classes were logged, ``oscillation`` and ``classes at zero`` (mean number per evaluation).
    """
    curve = round_scores(report)
    measured = curve[~curve.isnan()]
    figures = {"top5": F.top_k_mean(curve, TOP), "final": float(measured[-1]) if len(measured) else math.nan}
    for target in targets:
        rounds = F.rounds_to_target(curve, target, smoothing)
        figures[f"rounds to {target:g}"] = math.nan if rounds is None else float(rounds)
    _, table = class_table(report)
    if table.numel():
        summary = F.per_class_summary(table)
        figures |= {"oscillation": summary.oscillation, "classes at zero": summary.zeros / len(table)}
    return figures


def save_figures(report: "RunReport", figures: Mapping[str, float]) -> Path:
    """Write figures beside the report, from where ``docs/make_tables.py --collect`` takes them."""
    path = report.run_dir / FIGURES
    plain = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    write_text(path, json.dumps(plain, indent=1) + "\n")
    return path


def speed_up(reports: Sequence["RunReport"], targets: Sequence[float] = (), smoothing: float = 0.2) -> str:
    """Rounds to targets, by method, and how many times more than the last method that each needs.

    Args:
        reports: Runs; those of one method are averaged over their seeds that reach the target.
        targets: Scores to reach; by default 45, 65 and 85 % of the best score of any run.
        smoothing: Weight of the newest score in the moving average that has to reach them.

    Returns:
        A text table; "-" where no run of the method reaches the target.

    Source: Liu et al., "FedADB", ACM MM 2026, table 2.
    """
    curves: dict[str, list[Tensor]] = {}
    for report in reports:
        curves.setdefault(report.method, []).append(round_scores(report))
    best = max(float(c.nan_to_num(nan=-math.inf).max()) for several in curves.values() for c in several)
    targets = targets or [share * best for share in (0.45, 0.65, 0.85)]
    rounds = {name: [_mean_rounds(several, t, smoothing) for t in targets] for name, several in curves.items()}
    reference = list(rounds.values())[-1]
    rows = []
    for name, found in rounds.items():
        factors = [r / ref if r and ref else None for r, ref in zip(found, reference, strict=True)]
        cells = [_cell(r, f) for r, f in zip(found, factors, strict=True)]
        known = [f for f in factors if f]
        rows.append([name, *cells, f"{sum(known) / len(known):.1f}x" if known else "-"])
    return text_table(["rounds to", *(f"{target:.3g}" for target in targets), "mean factor"], rows)


def _cell(rounds: float | None, factor: float | None) -> str:
    return "-" if rounds is None else f"{rounds:.3g}" + (f" ({factor:.1f}x)" if factor else "")


def _mean_rounds(curves: Sequence[Tensor], target: float, smoothing: float) -> float | None:
    found = [rounds for curve in curves if (rounds := F.rounds_to_target(curve, target, smoothing)) is not None]
    return sum(found) / len(found) if found else None
