"""How many examples of each class a client trains on, for the mixins that ask."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fcl.data.labels import find_labels
from lightning_fcl.exceptions import DatasetError, MisconfigurationError


def count_classes(trainer: Any) -> Tensor:
    """Examples per class in the training data of a client's task, or of a stock ``Trainer``.

    Args:
        trainer: A client job's context, or a ``lightning.Trainer`` that has its data.

    Returns:
        Shape ``(largest label + 1,)``, int64.

    Raises:
        MisconfigurationError: If the labels cannot be found in the dataset, or one is negative.
    """
    try:
        if isinstance(trainer, L.Trainer):
            labels = torch.from_numpy(find_labels(getattr(trainer.train_dataloader, "dataset", None)))
        else:
            labels = torch.from_numpy(trainer.stream.train_labels(trainer.task, trainer.client))
    except (DatasetError, TypeError) as error:
        raise MisconfigurationError(
            f"the training data must be a dataset with one integer label per example, to count the classes: {error}"
        ) from error
    if (labels < 0).any():
        raise MisconfigurationError(f"labels must not be negative to be counted, got {int(labels.min())}.")
    return torch.bincount(labels)


def widened(counts: Tensor, num_classes: int) -> Tensor:
    """``counts`` with zeros for the classes up to ``num_classes`` that did not occur.

    Raises:
        MisconfigurationError: If a class beyond the head's outputs occurs.
    """
    if len(counts) > num_classes:
        raise MisconfigurationError(
            f"the head must have an output for each label, got {num_classes} outputs and label {len(counts) - 1}."
        )
    return F.pad(counts, (0, num_classes - len(counts)))
