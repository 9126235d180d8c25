"""Metrics of continual learning for torchmetrics, each with its plot."""

from lightning_fcl.metrics.accuracy_matrix import AccuracyMatrix as AccuracyMatrix
from lightning_fcl.metrics.answers import box_hit as box_hit
from lightning_fcl.metrics.answers import caption_scores as caption_scores
from lightning_fcl.metrics.answers import contained as contained
from lightning_fcl.metrics.answers import exact_match as exact_match
from lightning_fcl.metrics.answers import rouge_l as rouge_l
from lightning_fcl.metrics.answers import score_answers as score_answers
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
from lightning_fcl.metrics.yes_no import mme_scores as mme_scores
from lightning_fcl.metrics.yes_no import pope_scores as pope_scores
