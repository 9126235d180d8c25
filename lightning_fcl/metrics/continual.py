"""One metric per figure of the score matrix; the maths is in :mod:`lightning_fcl.functional`."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl import functional
from lightning_fcl.metrics.score_table import ScoreTable


class MatrixFigure(ScoreTable):
    """A number read off the score matrix, which arrives row by row.

    Args:
        num_tasks: Number of tasks ``T``.
        num_columns: Number of evaluation sets ``C``; by default one per task.
        kwargs: Options of :class:`torchmetrics.Metric`.
    """

    def __init__(self, num_tasks: int, num_columns: int | None = None, **kwargs: Any) -> None:
        super().__init__(num_tasks, num_tasks if num_columns is None else num_columns, **kwargs)

    @override
    def update(self, task: int, row: Tensor, num_examples: float = 1.0) -> None:
        """Add the scores measured after a task.

        Args:
            task: Row, counted from 0.
            row: Scores on all evaluation sets, shape ``(C,)``, in any unit; NaN where not measured.
            num_examples: Their weight against other scores of the same cells.
        """
        self.record(task, slice(None), row, num_examples)

    @override
    def compute(self) -> Tensor:
        """The figure, a float64 scalar; NaN until all scores that it needs were measured."""
        return torch.tensor(self.figure(self.table), dtype=torch.float64, device=self.total.device)

    @abstractmethod
    def figure(self, matrix: Tensor) -> float:
        """The figure of one matrix, shape ``(T, C)``."""


class AverageAccuracy(MatrixFigure):
    """Mean score over all tasks at the end (:func:`~lightning_fcl.functional.average_accuracy`).

    Example:
        >>> metric = AverageAccuracy(num_tasks=2)
        >>> metric.update(task=0, row=torch.tensor([80.0, 5.0]))
        >>> metric.update(task=1, row=torch.tensor([60.0, 85.0]))
        >>> metric.compute()
        tensor(72.5000, dtype=torch.float64)
    """

    @override
    def figure(self, matrix: Tensor) -> float:
        return functional.average_accuracy(matrix)


class LastScore(MatrixFigure):
    """Mean score after the last stage (:func:`~lightning_fcl.functional.last_score`)."""

    @override
    def figure(self, matrix: Tensor) -> float:
        return functional.last_score(matrix)


class AverageScore(MatrixFigure):
    """Mean over stages of the mean score on what was seen by then (:func:`~lightning_fcl.functional.average_score`).

    Args:
        num_tasks: Number of tasks ``T``.
        num_columns: Number of evaluation sets ``C``; by default one per task.
        seen: Bool of shape ``(T, C)``: which sets had been trained on by each stage; by default the lower triangle.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = AverageScore(num_tasks=2)
        >>> metric.update(task=0, row=torch.tensor([80.0, 5.0]))
        >>> metric.update(task=1, row=torch.tensor([60.0, 85.0]))
        >>> metric.compute()  # (80 + 72.5) / 2
        tensor(76.2500, dtype=torch.float64)
    """

    seen: Tensor | None

    def __init__(
        self, num_tasks: int, num_columns: int | None = None, *, seen: Tensor | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_tasks, num_columns, **kwargs)
        self.register_buffer("seen", seen, persistent=False)

    @override
    def figure(self, matrix: Tensor) -> float:
        return functional.average_score(matrix, self.seen)


class BackwardTransfer(MatrixFigure):
    """What later training did to earlier tasks (:func:`~lightning_fcl.functional.backward_transfer`)."""

    @override
    def figure(self, matrix: Tensor) -> float:
        return functional.backward_transfer(matrix)


class ForwardTransfer(MatrixFigure):
    """How well tasks went before they were trained (:func:`~lightning_fcl.functional.forward_transfer`).

    Args:
        num_tasks: Number of tasks ``T``.
        baseline: Scores of the untrained model, shape ``(T,)``; zero if left out.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = ForwardTransfer(num_tasks=2, baseline=torch.tensor([1.0, 2.0]))
        >>> metric.update(task=0, row=torch.tensor([80.0, 5.0]))
        >>> metric.compute()  # 5 - 2: the last row is not needed
        tensor(3., dtype=torch.float64)
    """

    baseline: Tensor | None

    def __init__(self, num_tasks: int, *, baseline: Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(num_tasks, **kwargs)
        self.register_buffer("baseline", baseline, persistent=False)

    @override
    def figure(self, matrix: Tensor) -> float:
        return functional.forward_transfer(matrix, self.baseline)


class Forgetting(MatrixFigure):
    """How far earlier tasks ended below their best (:func:`~lightning_fcl.functional.forgetting`)."""

    higher_is_better = False

    @override
    def figure(self, matrix: Tensor) -> float:
        return functional.forgetting(matrix)


class WorstDrop(MatrixFigure):
    """The largest loss on one earlier task, a negative number (:func:`~lightning_fcl.functional.worst_drop`)."""

    @override
    def figure(self, matrix: Tensor) -> float:
        return functional.worst_drop(matrix)
