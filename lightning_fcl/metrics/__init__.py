"""Metrics of continual learning for torchmetrics, each with its plot."""

from lightning_fcl.metrics.accuracy_matrix import AccuracyMatrix as AccuracyMatrix
from lightning_fcl.metrics.continual import AverageAccuracy as AverageAccuracy
from lightning_fcl.metrics.continual import AverageScore as AverageScore
from lightning_fcl.metrics.continual import BackwardTransfer as BackwardTransfer
from lightning_fcl.metrics.continual import Forgetting as Forgetting
from lightning_fcl.metrics.continual import ForwardTransfer as ForwardTransfer
from lightning_fcl.metrics.continual import LastScore as LastScore
from lightning_fcl.metrics.continual import WorstDrop as WorstDrop
from lightning_fcl.metrics.curves import RoundsToTarget as RoundsToTarget
from lightning_fcl.metrics.curves import TopKMean as TopKMean
from lightning_fcl.metrics.score_table import ScoreTable as ScoreTable
