"""Accuracy class by class, and how it moves over rounds."""

from typing import NamedTuple

import torch
from torch import Tensor


class PerClassSummary(NamedTuple):
    """Figures of a table of per-class accuracies over rounds; classes without test samples are left out.

    Args:
        mean: Mean over classes, shape ``(R,)``, float64.
        minimum: The worst class, shape ``(R,)``, float64.
        oscillation: Mean absolute change from one round to the next; NaN for a single round.
        zeros: How many cells are exactly 0.
    """

    mean: Tensor
    minimum: Tensor
    oscillation: float
    zeros: int


def per_class_accuracy(predictions: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Share of correct predictions within each class.

    Args:
        predictions: Predicted classes, integer of shape ``(N,)``.
        labels: True classes in ``[0, num_classes)``, integer of shape ``(N,)``.
        num_classes: Number of classes ``C``.

    Returns:
        Shape ``(C,)``, float64 in ``[0, 1]``; NaN for a class without samples.

    Raises:
        ValueError: If the shapes differ, or a label is out of range.

    Example:
        >>> per_class_accuracy(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), num_classes=3)
        tensor([0.5000, 1.0000,    nan], dtype=torch.float64)

    Source: FedADB, per-class accuracy over rounds.

    Deviation: None.
    """
    if predictions.shape != labels.shape or labels.dim() != 1:
        raise ValueError(
            "`predictions` and `labels` must both have shape (N,), "
            f"got {tuple(predictions.shape)} and {tuple(labels.shape)}. Take the argmax of the logits first."
        )
    if ((labels < 0) | (labels >= num_classes)).any():
        low, high = (bound.item() for bound in labels.aminmax())
        raise ValueError(f"`labels` must lie in [0, {num_classes}), got values from {low} to {high}.")
    count = labels.bincount(minlength=num_classes)
    correct = labels[predictions == labels].bincount(minlength=num_classes)
    return correct.double() / count


def per_class_summary(table: Tensor) -> PerClassSummary:
    """Summarise per-class accuracies over rounds.

    Args:
        table: Shape ``(R, C)``, any float dtype, NaN for a class without test samples.

    Returns:
        Mean and minimum over classes in each round, the mean absolute change between consecutive rounds over all cells
        measured in both, and the number of class-rounds at 0. All leave NaN cells out; a round of NaN alone stays NaN.

    Raises:
        ValueError: If ``table`` is not a float matrix with at least one class.

    Example:
        >>> per_class_summary(torch.tensor([[1.0, 0.0], [0.5, 0.0]]))  # changes 0.5 and 0
        PerClassSummary(mean=tensor([0.5000, 0.2500], dtype=torch.float64), \
minimum=tensor([0., 0.], dtype=torch.float64), oscillation=0.25, zeros=2)

    Source: FedADB, per-class accuracy over rounds.

    Deviation: None.
    """
    if table.dim() != 2 or not table.shape[1] or not table.is_floating_point():
        raise ValueError(f"`table` must be float of shape (R, C), got {table.dtype} of shape {tuple(table.shape)}.")
    cells = table.detach().double()
    lowest = cells.masked_fill(cells.isnan(), torch.inf).amin(1).masked_fill(cells.isnan().all(1), torch.nan)
    return PerClassSummary(
        mean=cells.nanmean(1),
        minimum=lowest,
        oscillation=cells.diff(dim=0).abs().nanmean().item(),
        zeros=int((cells == 0).sum()),
    )
