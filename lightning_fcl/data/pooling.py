"""Plans of the bounds that federated continual learning is measured against: who owns what if nobody is apart."""

from dataclasses import replace

import numpy as np

from lightning_fcl.data.plan import PartitionPlan
from lightning_fcl.exceptions import DatasetError


def pooled(plan: PartitionPlan) -> PartitionPlan:
    """One client owns everything and trains on what all clients together train on in a stage.

    Raises:
        DatasetError: If some client sits out or is on another set in a stage: the union would hold the other clients'
            examples too early.
    """
    for stage, row in enumerate(plan.schedule):
        owners = [{c for c, part in enumerate(plan.parts[source]) if len(part)} for source in range(len(plan.names))]
        torn = [s for s in {s for entry in row for s in entry} if any(s not in row[c] for c in owners[s])]
        if torn:
            raise DatasetError(
                f"`pooled` must find every training set whole in a stage, but in stage {stage} not all owners of "
                f"{plan.names[torn[0]]!r} train on it. Pool before `stages(...)`."
            )
    return _alone(plan, tuple((tuple(sorted({s for entry in row for s in entry})),) for row in plan.schedule))


def joint(plan: PartitionPlan) -> PartitionPlan:
    """One client owns everything and trains on all of it in a single stage."""
    return _alone(plan, ((tuple(range(len(plan.names))),),))


def cumulative(plan: PartitionPlan) -> PartitionPlan:
    """Every client trains on all that it has had so far, in each stage."""
    rows = []
    for stage in range(len(plan.schedule)):
        past = [{s for row in plan.schedule[: stage + 1] for s in row[client]} for client in range(plan.clients)]
        rows.append(tuple(tuple(sorted(sources)) for sources in past))
    return replace(plan, schedule=tuple(rows))


def _alone(plan: PartitionPlan, schedule: tuple[tuple[tuple[int, ...], ...], ...]) -> PartitionPlan:
    counts = None
    if plan.counts is not None:
        counts = tuple((tuple(int(n) for n in np.sum(task, axis=0)),) for task in plan.counts)
    everything = tuple((np.arange(size, dtype=np.int64),) for size in plan.sizes)
    return replace(plan, parts=everything, schedule=schedule, partition="pooled", moved=(), counts=counts)
