"""The score matrix of continual learning, and its picture."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._imports import optional_import
from lightning_fcl.metrics.score_table import ScoreTable


class AccuracyMatrix(ScoreTable):
    """Scores on every evaluation set after every task: ``A[i, j]`` is the score on set ``j`` after task ``i``.

    Args:
        num_tasks: Number of tasks ``T``, the rows.
        num_columns: Number of evaluation sets ``C``; by default one per task.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Example:
        >>> matrix = AccuracyMatrix(num_tasks=2)
        >>> matrix.update(task=0, column=0, score=0.9)
        >>> matrix.update(task=1, column=0, score=0.6)
        >>> matrix.compute()
        tensor([[0.9000,    nan],
                [0.6000,    nan]], dtype=torch.float64)
    """

    def __init__(self, num_tasks: int, num_columns: int | None = None, **kwargs: Any) -> None:
        super().__init__(num_tasks, num_tasks if num_columns is None else num_columns, **kwargs)

    @override
    def update(self, task: int, column: int, score: float | Tensor, num_examples: float = 1.0) -> None:
        """Add one score.

        Args:
            task: Row, counted from 0: the task that was trained last.
            column: Evaluation set, counted from 0.
            score: A scalar in any unit; NaN counts as not measured.
            num_examples: Its weight against other scores of the same cell.
        """
        self.record(task, column, score, num_examples)

    @override
    def compute(self) -> Tensor:
        """The matrix, shape ``(T, C)``, float64, NaN where not measured."""
        return self.table

    @override
    def plot(self, val: Tensor | None = None, ax: Any = None, names: Sequence[str] | None = None) -> Any:
        """Draw the matrix as a heat map; cells not measured stay blank.

        Args:
            val: Matrix to draw; by default the computed one.
            ax: Matplotlib axes to draw into; by default a new figure's.
            names: Names of the evaluation sets, for the columns; by default their numbers.

        Returns:
            ``(figure, axes)``.

        Raises:
            MissingExtraError: If matplotlib is not installed.
            ValueError: If ``names`` has another length than the matrix has columns.
        """
        figure_module = optional_import("matplotlib.figure", extra="plot")
        scores = (self.compute() if val is None else val).detach().cpu()
        tasks, columns = scores.shape
        labels = list(names) if names is not None else [str(column) for column in range(columns)]
        if len(labels) != columns:
            raise ValueError(f"`names` must name {columns} evaluation sets, got {len(labels)}.")
        if ax is None:
            ax = figure_module.Figure(figsize=(1.6 + 0.7 * columns, 1.2 + 0.6 * tasks), layout="constrained").subplots()
        image = ax.imshow(scores.numpy(), cmap="viridis", aspect="auto")
        middle = (scores.nan_to_num(nan=torch.inf).min() + scores.nan_to_num(nan=-torch.inf).max()) / 2
        for i, j in (~scores.isnan()).nonzero().tolist():
            ink = "white" if scores[i, j] < middle else "black"
            ax.text(j, i, f"{scores[i, j]:.3g}", ha="center", va="center", color=ink)
        ax.set(xlabel="evaluated on", ylabel="after task", xticks=range(columns), yticks=range(tasks))
        ax.set_xticklabels(labels)
        ax.figure.colorbar(image, ax=ax, label="score")
        return ax.figure, ax
