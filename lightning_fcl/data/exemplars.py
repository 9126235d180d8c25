"""Raw training examples that stay where they are: what replay and gradient projection look back at."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_fcl.exceptions import MisconfigurationError


class Exemplars:
    """Examples of earlier tasks, one batch per task, on the CPU.

    Batches may be tensors, dicts, lists and tuples of them; plain values in them are kept whole. What is kept is raw:
    the module's transfer hooks have not seen it.

    Example:
        >>> memory = Exemplars()
        >>> batches = [(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])), (torch.tensor([[3.0]]), torch.tensor([2]))]
        >>> memory.keep(batches, 3)
        >>> memory.tasks[0]
        (tensor([[1.],
                [2.],
                [3.]]), tensor([0, 1, 2]))
        >>> memory.draw(1, torch.Generator().manual_seed(0))[1].shape
        torch.Size([1])
    """

    def __init__(self, tasks: Iterable[Any] = ()) -> None:
        self.tasks: list[Any] = list(tasks)
        """One batch per task, in the form of the training batches."""

    def __len__(self) -> int:
        return sum(count(task) for task in self.tasks)

    def keep(self, batches: Iterable[Any], size: int) -> None:
        """Keep the first ``size`` examples of a task; a shuffling loader makes them a random sample.

        Args:
            batches: Training batches of the task; no more are read than needed.
            size: At most so many examples; nothing happens for 0.

        Raises:
            MisconfigurationError: If the batches are no trees of tensors, or their examples differ in shape.
        """
        parts: list[Any] = []
        left = size
        source = iter(batches)
        while left > 0 and (batch := next(source, None)) is not None:
            part = _select(batch, slice(0, left))
            left -= count(part)
            parts.append(part)
        if parts:
            self.tasks.append(_join(parts))

    def draw(self, size: int, generator: torch.Generator) -> Any:
        """A batch of ``size`` examples of all tasks, without repetition; all there are if they are fewer.

        Args:
            size: Number of examples.
            generator: Source of the draw, on the CPU.

        Returns:
            A batch in the form of the training batches.
        """
        chosen = torch.randperm(len(self), generator=generator)[:size].sort().values
        parts, start = [], 0
        for task in self.tasks:
            stop = start + count(task)
            own = chosen[(chosen >= start) & (chosen < stop)] - start
            if len(own):
                parts.append(_select(task, own))
            start = stop
        return _join(parts)


def count(batch: Any) -> int:
    """Examples in a batch: the first dimension of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    children = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for child in children if (found := count(child))), 0)


def _select(batch: Any, index: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach()[index].cpu().clone() if batch.dim() else batch.detach().cpu()
    if isinstance(batch, Mapping):
        return {key: _select(value, index) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(_select(value, index) for value in batch)
    if batch is None or isinstance(batch, bool | int | float | str):
        return batch
    raise MisconfigurationError(
        f"`batch` must hold tensors in dicts, lists and tuples to be kept as exemplars, got {type(batch).__name__}. "
        "Return such a batch from your collate function."
    )


def _join(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        if not first.dim():
            return first
        if {part.shape[1:] for part in parts} != {first.shape[1:]}:
            raise MisconfigurationError(
                f"`batch` must hold examples of one shape to be kept as exemplars, got {tuple(first.shape[1:])} and "
                "others. Pad to one length."
            )
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _join([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_join(list(values)) for values in zip(*parts, strict=True))
    return first
