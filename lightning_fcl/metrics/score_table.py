"""The one state that all metrics here share: a table of scores, filled cell by cell."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_fcl._imports import optional_import


class ScoreTable(Metric):
    """A table of scores that were measured one after another, on any number of ranks.

    Scores of one cell are averaged, weighted by their examples: over batches, over ranks, over repeated measurements.
    NaN scores count as not measured.

    Args:
        rows: Rows ``R`` of the table.
        columns: Columns ``C`` of the table.
        kwargs: Options of :class:`torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    total: Tensor
    examples: Tensor

    def __init__(self, rows: int, columns: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if rows < 1 or columns < 1:
            raise ValueError(f"A score table must have at least one row and one column, got {rows} and {columns}.")
        for name in ("total", "examples"):
            self.add_state(name, torch.zeros(rows, columns, dtype=torch.float64), dist_reduce_fx="sum")

    def record(self, row: int, column: int | slice, score: float | Tensor, num_examples: float) -> None:
        """Add scores to one cell, or to the cells of a slice of columns."""
        rows, columns = self.total.shape
        if not 0 <= row < rows or (isinstance(column, int) and not 0 <= column < columns):
            raise ValueError(f"The cell must lie in a table of {rows} x {columns}, got row {row} and column {column}.")
        cells = self.total[row, column]
        scores = torch.as_tensor(score, dtype=torch.float64, device=cells.device).detach()
        if scores.shape != cells.shape:
            raise ValueError(f"The scores must have shape {tuple(cells.shape)}, got {tuple(scores.shape)}.")
        if not num_examples > 0:
            raise ValueError(f"`num_examples` must be positive, got {num_examples}.")
        self.total[row, column] += scores.nan_to_num(nan=0.0) * num_examples
        self.examples[row, column] += ~scores.isnan() * num_examples

    @property
    def table(self) -> Tensor:
        """The scores, shape ``(R, C)``, float64, NaN where not measured."""
        return self.total / self.examples  # 0 / 0 is NaN

    @override
    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value, or a list of values from ``forward``, and return ``(figure, axes)``.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        optional_import("matplotlib.pyplot", extra="plot")
        return self._plot(val, ax)
