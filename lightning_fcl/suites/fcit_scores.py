"""What FCIT asks of a finished run beside its stream: unseen tasks, general ability, and the activation's ablation."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final

from lightning_fcl.data import InstructionDataset, TaskStream, as_list, general_rows, unseen_sets
from lightning_fcl.federated.zero_shot import zero_shot
from lightning_fcl.functional.subspace_lora import ACTIVATIONS
from lightning_fcl.reports import RunReport, save_figures
from lightning_fcl.reports.rounds import FIGURES
from lightning_fcl.reports.tables import number, text_table

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer

GENERAL: Final = "general"


class HeldOut:
    """Questions that a stream does not ask, for the model as it starts and as each run leaves it.

    The unseen tasks are those of the same source that the stream leaves out: zero-shot transfer is the mean score on
    them. The general ones are what the shipped model had been taught before (:func:`~lightning_fcl.data.general_rows`).
    DISCO answers with its routing, as on every other question.

    Args:
        names: Tasks of the stream; none of the unseen ones has such a name.
        start: Makes the module as every method finds it; called once, and only if a run has no figures yet.
        data_dir: As in :func:`~lightning_fcl.data.fcit_stream`.
        size: Questions of each unseen task, and general ones.
        batch_size: Questions that are answered at a time.
        seed: Seeds the questions.

    Raises:
        DatasetError: If data is missing or malformed.
    """

    def __init__(
        self,
        names: Sequence[str],
        start: Callable[[], Any],
        *,
        data_dir: str | Path | None = None,
        size: int = 100,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        unseen = unseen_sets(names, data_dir, test_size=size, seed=seed)
        data = [*unseen.values(), InstructionDataset(general_rows(size, seed=seed))]
        self.names = tuple(unseen)
        self.stream = TaskStream.from_datasets(data, data, clients=1, batch_size=batch_size, collate_fn=as_list)
        self._start = start
        self._before: dict[str, float] | None = None

    def figures(self, report: RunReport, trainer: "FederatedTrainer", module: Any) -> dict[str, float]:
        """The figures of a finished run, saved beside its report; what was saved before is read, not measured anew.

        Args:
            report: The run.
            trainer: What made it.
            module: With the run's final weights.

        Returns:
            ``unseen``, ``general``, each of the tasks as ``unseen <name>``, and ``unseen before`` and ``general
            before`` of the model without any training; nothing on unseen tasks if the stream leaves out none.
        """
        path = report.run_dir / FIGURES
        if path.is_file():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return {name: math.nan if value is None else value for name, value in saved.items()}
        if self._before is None:
            before = self.scores(trainer, self._start())
            self._before = {f"{name} before": before[name] for name in ("unseen", GENERAL) if name in before}
        found = {**self.scores(trainer, module), **self._before}
        save_figures(report, found)
        return found

    def scores(self, trainer: "FederatedTrainer", module: Any) -> dict[str, float]:
        """Mean score of a module on the unseen tasks, on each of them, and on the general questions."""
        *unseen, general = [metrics["val_acc"] for metrics in trainer.validate(module, self.stream)]
        tasks = {f"unseen {name}": score for name, score in zip(self.names, unseen, strict=True)}
        return {**({"unseen": fmean(unseen), **tasks} if unseen else {}), GENERAL: general}


def ablate_activation(trainer: "FederatedTrainer", module: Any, stream: TaskStream) -> list[RunReport]:
    """Score a finished DISCO run under every way of weighing its subspaces. Training knows none of them.

    Args:
        trainer: What made the run.
        module: With the run's final weights and subspaces; its own activation is put back.
        stream: As in training.

    Returns:
        Saved reports with one row each, in run folders named ``<run_dir>-<activation>``.
    """
    own, reports = module.routing_activation, []
    try:
        for activation in ACTIVATIONS:
            module.routing_activation = activation
            folder = trainer.run_dir.with_name(f"{trainer.run_dir.name}-{activation}")
            reports.append(zero_shot(trainer, module, stream, method=f"DISCO, {activation}", run_dir=folder))
    finally:
        module.routing_activation = own
    return reports


def fcit_table(reports: Sequence[RunReport], figures: Mapping[Path, Mapping[str, float]]) -> str:
    """FCIT's figures as text: Last and Avg, and what :class:`HeldOut` found, in percent.

    Args:
        reports: Runs; those of one method are its seeds.
        figures: What :meth:`HeldOut.figures` gave, by run folder; runs without are told by their summary.

    Returns:
        A row per method, mean ± standard deviation over seeds.
    """
    rows: dict[str, list[dict[str, float]]] = {}
    for report in reports:
        rows.setdefault(report.method, []).append({**report.summary, **figures.get(report.run_dir, {})})
    keys = ("last", "avg", "unseen", "unseen before", GENERAL, f"{GENERAL} before")
    shown = [key for key in keys if any(key in row for several in rows.values() for row in several)]
    cells = [
        [method, *(_spread([row.get(k, math.nan) for row in several]) for k in shown)]
        for method, several in rows.items()
    ]
    return text_table(["in %", *(key.capitalize() if key in ("last", "avg") else key for key in shown)], cells)


def _spread(values: Sequence[float]) -> str:
    mean = number(fmean(values), 100)
    return f"{mean} ± {number(stdev(values), 100)}" if len(values) > 1 and math.isfinite(fmean(values)) else mean
