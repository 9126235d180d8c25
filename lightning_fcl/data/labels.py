"""Where a dataset keeps its labels and its domains."""

import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_fcl.exceptions import DatasetError

IntArray: TypeAlias = NDArray[np.int64]

_KEYS = ("label", "labels", "target", "targets")


def find_labels(dataset: Any) -> IntArray:
    """Class number of each example of a map-style dataset.

    Stored labels come first (see :func:`stored_labels`); else one pass over the dataset takes the last entry of each
    tuple, or the entry ``"label"``, ``"labels"``, ``"target"`` or ``"targets"`` of each dict.

    Args:
        dataset: Any object with ``__len__`` and ``__getitem__``.

    Returns:
        Labels, shape ``(N,)``, int64.

    Raises:
        DatasetError: If an example holds no single integer label.

    Example:
        >>> find_labels([("a", 1), ("b", 0)])
        array([1, 0])
    """
    stored = stored_labels(dataset)
    if stored is not None:
        return stored
    return np.fromiter((_label_of(dataset[i], i) for i in range(len(dataset))), dtype=np.int64, count=len(dataset))


def stored_labels(dataset: Any) -> IntArray | None:
    """Labels that can be had without reading the examples, or ``None``.

    Looks at ``.targets`` and ``.labels``, at the last tensor of a ``TensorDataset``, through ``Subset`` and
    ``ConcatDataset``, and at a label column of a Hugging Face dataset.

    Args:
        dataset: Any object with ``__len__`` and ``__getitem__``.

    Returns:
        Labels, shape ``(N,)``, int64; ``None`` if none are stored as one integer per example.
    """
    for name in ("targets", "labels"):
        labels = as_labels(getattr(dataset, name, None), len(dataset))
        if labels is not None:
            return labels
    if isinstance(dataset, TensorDataset):
        return as_labels(dataset.tensors[-1], len(dataset))
    if isinstance(dataset, Subset):
        inner = stored_labels(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [stored_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate([p for p in parts if p is not None])
    columns = getattr(dataset, "column_names", None) or ()
    return next((as_labels(dataset[key][:], len(dataset)) for key in _KEYS if key in columns), None)


def matched(wanted: IntArray, labels: IntArray) -> IntArray:
    """Positions in ``labels`` of as many examples as there are in the class shares of ``wanted``; the first of each.

    A class that ``wanted`` holds gets one example at least, if there is one.

    Example:
        >>> matched(np.array([0, 0, 1]), np.array([1, 0, 0, 0, 1, 2, 0]))  # two of class 0 for each of class 1
        array([0, 1, 2, 3, 4, 6])
    """
    classes, counts = np.unique(wanted[np.isin(wanted, labels)], return_counts=True)
    places = [np.flatnonzero(labels == label) for label in classes]
    scale = min((len(place) / count for place, count in zip(places, counts, strict=True)), default=0.0)
    kept = [place[: max(1, round(count * scale))] for place, count in zip(places, counts, strict=True)]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *kept]))


def find_domains(dataset: Any) -> IntArray:
    """Domain number of each example: ``.domains``, or which member of a ``ConcatDataset`` it comes from.

    Args:
        dataset: A map-style dataset, also behind ``Subset``.

    Returns:
        Domains, shape ``(N,)``, int64.

    Raises:
        DatasetError: If the dataset does not say which domain an example is from.
    """
    domains = as_labels(getattr(dataset, "domains", None), len(dataset))
    if domains is not None:
        return domains
    if isinstance(dataset, Subset):
        return find_domains(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.repeat(np.arange(len(dataset.datasets)), [len(part) for part in dataset.datasets])  # type: ignore[arg-type]
    raise DatasetError(
        f"`partition='by_domain'` must know each example's domain, got a {type(dataset).__name__} without `.domains`. "
        "Give a `ConcatDataset` with one member per domain, or `ByDomain(domain_of=[...])`."
    )


def as_labels(values: Any, size: int) -> IntArray | None:
    """``values`` as int64 of shape ``(size,)``, or ``None`` if they are not one integer per example."""
    if values is None or callable(values):
        return None
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    except (TypeError, ValueError):  # ragged, or a dtype that NumPy does not know
        return None
    if array.shape != (size,) or array.dtype.kind not in "iub":
        return None
    return array.astype(np.int64)


def _label_of(item: Any, index: int) -> int:
    label: Any = None
    if isinstance(item, Mapping):
        label = next((item[key] for key in _KEYS if key in item), None)
    elif isinstance(item, tuple | list) and item:
        label = item[-1]
    try:
        number: Any = label.item() if isinstance(label, torch.Tensor | np.ndarray) else label
        return operator.index(number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatasetError(
            f"The dataset must give one integer label per example, got {type(label).__name__} from example {index}. "
            "Pass `labels=`, or choose a partition that needs no labels ('iid', 'quantity_dirichlet')."
        ) from error
