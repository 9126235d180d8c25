"""What a module can do as it is, before any training or after it, as a run report."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
import torch

from lightning_fcl.federated.describe import describe
from lightning_fcl.federated.evaluate import pick_score
from lightning_fcl.federated.session import settings_of
from lightning_fcl.reports.run_report import RunReport

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer


def zero_shot(
    trainer: "FederatedTrainer",
    module: L.LightningModule,
    stream: "TaskStream",
    *,
    method: str | None = None,
    run_dir: Path | None = None,
) -> RunReport:
    """Evaluate ``module`` as it is on every evaluation set of ``stream``.

    Args:
        trainer: Its settings and seed are the report's.
        module: The module, with the weights to evaluate.
        stream: Its evaluation sets are used.
        method: What the report calls it; by default the trainer's ``method``.
        run_dir: Folder of the report; by default the trainer's.

    Returns:
        The report, saved: a score matrix with one row, and no figure that would need training.
    """
    started = time.perf_counter()
    metrics = trainer.validate(module, stream)
    score = pick_score(trainer.score, metrics[0])
    report = RunReport(
        run_dir=run_dir or trainer.run_dir,
        method=method or trainer.method,
        accuracy=torch.tensor([[column[score] for column in metrics]], dtype=torch.float64),
        names=stream.names,
        seed=trainer.seed,
        score=score,
        config={"trainer": settings_of(trainer), "stream": describe(stream.summary())},
        wall_seconds=time.perf_counter() - started,
    )
    report.save()
    return report
