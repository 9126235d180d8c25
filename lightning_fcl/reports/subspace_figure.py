"""Which subspace answers which task: a heat map of a routed run."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fcl.reports.run_report import RunReport

_COLUMN = re.compile(r"task/(.*)/slot/(\d+)")


def activation_matrix(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Tensor | None:
    """Mean activation factor of each subspace on each evaluation set, as the last evaluation logged it.

    Args:
        names: Names of the evaluation sets.
        rows: Rows of ``metrics.csv``.

    Returns:
        Shape ``[len(names), T]``; ``None`` for a run without subspaces.
    """
    for row in reversed(rows):
        found = {m.groups(): float(x) for column, x in row.items() if x and (m := _COLUMN.fullmatch(column))}
        if found:
            slots = 1 + max(int(slot) for _, slot in found)
            return torch.tensor([[found.get((name, str(slot)), 0.0) for slot in range(slots)] for name in names])
    return None


def activation_map(report: "RunReport", matrix: Tensor) -> "Figure":
    """The matrix in colour: tasks down, subspaces across.

    Args:
        report: The run.
        matrix: What :func:`activation_matrix` found.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    from lightning_fcl.reports.figures import MOST_ANNOTATED, _figure, _label, _title

    tasks, slots = matrix.shape
    figure, axes = _figure(3.0 + 0.6 * min(slots, 16), 1.8 + 0.5 * min(tasks, 16))
    image: Any = axes.imshow(matrix.numpy(), cmap="GnBu", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(slots))
    axes.set_yticks(range(tasks), [_label(name) for name in report.names])
    axes.set_xlabel("subspace")
    axes.set_title(_title(report))
    figure.colorbar(image, label="mean activation")
    if max(tasks, slots) <= MOST_ANNOTATED:
        for (task, slot), factor in [((t, s), float(matrix[t, s])) for t in range(tasks) for s in range(slots)]:
            axes.text(slot, task, f"{factor:.2f}", ha="center", va="center", c="white" if factor > 0.6 else "black")
    return figure
