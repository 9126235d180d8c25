"""Figures of a run on events that its score matrix does not hold: how fast the last task is learned, and what moved."""

import math
from typing import TYPE_CHECKING, Final

import torch

from lightning_fcl.functional.curves import rounds_to_target
from lightning_fcl.reports.files import read_table

if TYPE_CHECKING:
    from lightning_fcl.reports.run_report import RunReport

DRIFTS: Final = ("vision", "language", "projector")


def rounds_to_score(report: "RunReport", target: float, task: int | None = None) -> int | None:
    """First round of a task after which the mean score over all evaluation sets reaches a target (R50, R75).

    Args:
        report: A run that was evaluated each round (``eval_every=1``).
        target: In the score's own unit, e.g. 0.5.
        task: The stage, by default the last.

    Returns:
        The round inside the task, counted from 1; ``None`` if the target is never reached.

    Source: FedCMM (arXiv 2607.12112), table V.

    Deviation: the paper counts to 50 in a run of three times 50 rounds without saying in which task; we read the last
    one, since its final score is that of the whole stream.
    """
    stage = str(len(report.accuracy) - 1 if task is None else task)
    keys = [f"task/{name}/{report.score}" for name in report.names]
    rows = read_table(report.run_dir / "metrics.csv")[1]
    curve = [
        sum(float(row.get(key) or math.nan) for key in keys) / len(keys)
        for row in rows
        if row["task"] == stage and row["phase"] == "train"
    ]
    return rounds_to_target(torch.tensor(curve, dtype=torch.float64), target, smoothing=1.0) if curve else None


def event_figures(report: "RunReport") -> dict[str, float]:
    """Rounds of the last task to 50 and 75 %, and how far each modality had moved from the task before at the end.

    Args:
        report: A run that was evaluated each round, with :class:`~lightning_fcl.callbacks.ModalityDrift`.

    Returns:
        ``rounds to 50``, ``rounds to 75``, and for vision, language and projector ``drift <group>`` and ``drift <group>
        weighted``; NaN for what was not reached or not measured.
    """
    figures = {f"rounds to {t}": float(rounds_to_score(report, t / 100) or math.nan) for t in (50, 75)}
    last: dict[str, str] = {}
    for row in read_table(report.run_dir / "metrics.csv")[1]:
        last |= {tag: text for tag, text in row.items() if text}
    for group in DRIFTS:
        for kind in ("", "_weighted"):
            tag = f"client/drift/{group}{kind}"
            figures[f"drift {group}{kind.replace('_', ' ')}"] = float(last.get(tag, math.nan))
    return figures
