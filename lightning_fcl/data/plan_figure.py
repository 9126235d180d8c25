"""The figure behind :meth:`PartitionPlan.plot`."""

from typing import TYPE_CHECKING

import numpy as np

from lightning_fcl._imports import optional_import

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fcl.data.plan import PartitionPlan

_MAX_LABELS = 20


def plan_figure(plan: "PartitionPlan") -> "Figure":
    """One heat map per training set: clients from top to bottom, classes from left to right, examples as colour.

    Args:
        plan: The plan to draw.

    Returns:
        A Figure of its own, not known to pyplot.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    optional_import("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    tables = _tables(plan)
    classes = ["examples"] if plan.classes is None else list(map(str, plan.classes))
    width = min(3 + 0.35 * len(classes), 8)
    height = min(1.6 + 0.3 * plan.clients, 8)
    figure = Figure(figsize=(min(width * len(tables) + 1, 40), height), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
    top = max(int(table.max()) for table in tables)
    for axis, name, table in zip(axes, plan.names, tables, strict=True):
        image = axis.imshow(table, cmap="Blues", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        axis.set(title=name, xlabel="" if plan.classes is None else "class")
        if len(classes) <= _MAX_LABELS:
            axis.set_xticks(range(len(classes)), classes)
        if plan.clients <= _MAX_LABELS:
            axis.set_yticks(range(plan.clients))
        if table.size <= _MAX_LABELS**2:
            for (row, column), value in np.ndenumerate(table):
                colour = "white" if value > top / 2 else "black"
                axis.text(column, row, str(value), ha="center", va="center", fontsize=7, color=colour)
    axes[0].set_ylabel("client")
    figure.colorbar(image, ax=list(axes), label="examples")
    figure.suptitle(f"{plan.partition}, deviation {plan.deviation:.2%}", fontsize=10)
    return figure


def _tables(plan: "PartitionPlan") -> list[np.ndarray]:
    """Examples by client and class of each training set; one column if the classes are not known."""
    if plan.counts is not None:
        return [np.array(task) for task in plan.counts]
    return [np.array([[len(part)] for part in task]) for task in plan.parts]
