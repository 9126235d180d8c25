"""What ``self.log`` does inside a client job or an evaluation."""

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lightning_fcl.types import Metrics

_REDUCERS: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "max": max, "min": min}
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


def never_distributed() -> bool:
    """Stands in for torchmetrics' look for other ranks: a client's figures are its own, every evaluation is whole."""
    return False


class _Series:
    """All values logged under one name, each with its weight."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self.values: list[Any] = []
        self.weights: list[int] = []

    def reduce(self, start: int = 0) -> float:
        values = [float(v) for v in self.values[start:]]  # one synchronisation point, not one per step
        if not values:
            return math.nan
        if self.reduction == "mean":
            weights = self.weights[start:]
            return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
        return _REDUCERS[self.reduction](values)


class MetricLog:
    """Collects what a module logs and reduces it when asked; stands in for ``LightningModule.log``.

    Means are weighted by batch size, as in ``Trainer``. A ``torchmetrics.Metric`` is computed once at the end and
    reset. Names that start with ``loss/`` name a term that a method added.

    Args:
        on_epoch: The default of ``on_epoch``: ``False`` while training, ``True`` while evaluating, as in ``Trainer``.
    """

    def __init__(self, *, on_epoch: bool) -> None:
        self.default_on_epoch = on_epoch
        self.batch: Any = None
        self._series: dict[str, _Series] = {}
        self._metrics: dict[str, Metric] = {}
        self._on_epoch: dict[str, bool] = {}
        self._epoch_start: dict[str, int] = {}

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Same signature as ``LightningModule.log``; display and synchronisation options have no meaning here."""
        if not isinstance(name, str):
            raise TypeError(f"`self.log` must be given a name of type str, got {type(name).__name__}.")
        if isinstance(value, Metric):
            value.distributed_available_fn = never_distributed  # one that is no submodule would look for other ranks
            self._metrics[name] = value
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"`self.log({name!r}, ...)` must be given a single number, got a tensor of shape "
                    f"{tuple(value.shape)}. Reduce it first, for example with `.mean()`."
                )
            value = value.detach()
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Series(_reduction(name, reduce_fx))
            self._on_epoch[name] = self.default_on_epoch if on_epoch is None else on_epoch
        weight = 1
        if series.reduction == "mean":
            weight = batch_size if batch_size is not None else self._batch_size()
        series.values.append(value)
        series.weights.append(weight)

    def next_epoch(self) -> None:
        """Start of a new local epoch: epoch means of ``callback_metrics`` begin anew."""
        self._epoch_start = {name: len(series.values) for name, series in self._series.items()}

    def latest(self) -> dict[str, Tensor]:
        """What ``trainer.callback_metrics`` holds: epoch means of what is logged per epoch, else the last value."""
        found: dict[str, Tensor] = {}
        for name, series in self._series.items():
            if self._on_epoch[name] and len(series.values) > (start := self._epoch_start.get(name, 0)):
                found[name] = torch.tensor(series.reduce(start))
            else:
                found[name] = torch.as_tensor(series.values[-1])
        return found

    def reduced(self) -> Metrics:
        """All numbers reduced over everything logged so far; Metric objects are computed and reset."""
        result = {name: series.reduce() for name, series in self._series.items()}
        for name, metric in self._metrics.items():
            value = metric.compute()
            metric.reset()
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"The Metric logged as {name!r} must compute to a single number, got shape {tuple(value.shape)}."
                )
            result[name] = float(value)
        return result

    def _batch_size(self) -> int:
        if self.batch is None:
            return 1
        if not isinstance(self.batch, int):  # found once a batch, however many names are logged
            self.batch = _size_of(self.batch)
        return self.batch


def _size_of(batch: Any) -> int:
    """Examples in a batch; the usual pair of tensors does not need Lightning's search through nested collections."""
    if isinstance(batch, list | tuple) and batch and all(isinstance(field, Tensor) and field.dim() for field in batch):
        sizes = {len(field) for field in batch}
        if len(sizes) == 1:
            return sizes.pop()
    return int(extract_batch_size(batch))


def _reduction(name: str, reduce_fx: str | Callable[..., Any]) -> str:
    key = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if key not in _REDUCTIONS:
        raise ValueError(
            f"`self.log({name!r}, reduce_fx=...)` must be one of {sorted(_REDUCTIONS)}, got {reduce_fx!r}."
        )
    return _REDUCTIONS[key]
