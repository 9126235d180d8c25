"""One metric per figure of a curve; the maths is in :mod:`lightning_fcl.functional`."""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl import functional
from lightning_fcl.metrics.score_table import ScoreTable


class CurveFigure(ScoreTable):
    """A number read off a curve, which arrives round by round.

    Args:
        num_rounds: Length ``R`` of the curve.
        kwargs: Options of :class:`torchmetrics.Metric`.
    """

    def __init__(self, num_rounds: int, **kwargs: Any) -> None:
        super().__init__(num_rounds, 1, **kwargs)

    @override
    def update(self, round: int, score: float | Tensor, num_examples: float = 1.0) -> None:
        """Add one round's score.

        Args:
            round: Counted from 0, as the trainer does.
            score: A scalar in any unit; NaN counts as not measured.
            num_examples: Its weight against other scores of the same round.
        """
        self.record(round, 0, score, num_examples)

    @override
    def compute(self) -> Tensor:
        """The figure, a float64 scalar; NaN if it is undefined."""
        return torch.tensor(self.figure(self.table[:, 0]), dtype=torch.float64, device=self.total.device)

    @abstractmethod
    def figure(self, curve: Tensor) -> float:
        """The figure of one curve, shape ``(R,)``."""


class TopKMean(CurveFigure):
    """Mean of the ``k`` best rounds (:func:`~lightning_fcl.functional.top_k_mean`).

    Args:
        num_rounds: Length ``R`` of the curve.
        k: How many rounds, at least 1.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = TopKMean(num_rounds=3, k=2)
        >>> for index, score in enumerate([0.5, 0.7, 0.9]):
        ...     metric.update(index, score)
        >>> metric.compute()
        tensor(0.8000, dtype=torch.float64)
    """

    def __init__(self, num_rounds: int, k: int = 5, **kwargs: Any) -> None:
        super().__init__(num_rounds, **kwargs)
        self.k = k

    @override
    def figure(self, curve: Tensor) -> float:
        return functional.top_k_mean(curve, self.k)


class RoundsToTarget(CurveFigure):
    """First round, counted from 1, that reaches a target (:func:`~lightning_fcl.functional.rounds_to_target`).

    Args:
        num_rounds: Length ``R`` of the curve.
        target: Score to reach.
        smoothing: Weight of the newest score in the moving average, in ``(0, 1]``; ``1`` does not smooth.
        kwargs: Options of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = RoundsToTarget(num_rounds=3, target=0.6, smoothing=1.0)
        >>> for index, score in enumerate([0.5, 0.7, 0.9]):
        ...     metric.update(index, score)
        >>> metric.compute()  # NaN if it is never reached
        tensor(2., dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(self, num_rounds: int, target: float, smoothing: float = 0.2, **kwargs: Any) -> None:
        super().__init__(num_rounds, **kwargs)
        self.target, self.smoothing = target, smoothing

    @override
    def figure(self, curve: Tensor) -> float:
        rounds = functional.rounds_to_target(curve, self.target, self.smoothing)
        return math.nan if rounds is None else float(rounds)
