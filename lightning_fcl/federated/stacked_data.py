"""Batches of several clients side by side, each in the order that it would have alone."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_fcl.federated.client import LocalBudget
from lightning_fcl.federated.client_data import PreloadedLoader
from lightning_fcl.federated.lanes import NotStackable
from lightning_fcl.federated.sampling import seed_generators

Group = tuple[Tensor | None, list[Tensor]]
"""Lanes of one batch size (``None``: all of them) and their batch, one tensor ``[K, B, ...]`` per field."""


class LaneData:
    """The steps of clients that have equally many batches an epoch.

    Args:
        loaders: Their loaders.
        seeds: Seeds of their jobs; each client's order is drawn as in its own job.
        budget: How much each trains.
    """

    def __init__(self, loaders: Sequence[PreloadedLoader], seeds: Sequence[int], budget: LocalBudget) -> None:
        self.loaders = loaders
        batches = {len(loader) for loader in loaders}
        sizes = {loader.batch_size for loader in loaders}
        if len(batches) > 1 or len(sizes) > 1:
            raise NotStackable("clients have batches of unlike size")
        self.batches = min(batches.pop(), budget.limit_batches or len(loaders[0]))
        self.batch_size: int = sizes.pop()
        self.max_steps = budget.steps
        self.epochs = budget.epochs if budget.steps is None else -(-budget.steps // self.batches)
        self.lengths = [min(len(loader.dataset), self.batches * self.batch_size) for loader in loaders]
        self.orders: list[list[Tensor | None]] = []
        for loader, seed in zip(loaders, seeds, strict=True):
            if any(loader._shuffles for loader in loaders):
                seed_generators(seed)
            self.orders.append([loader.draw_order() for _ in range(self.epochs)])

    def steps(self, convert: Callable[[list[Tensor]], list[Tensor]]) -> Iterator[tuple[int, int, list[Group]]]:
        """Epoch, index in the epoch, and the groups of each step.

        Args:
            convert: Applied to each epoch's fields.
        """
        taken = 0
        for epoch in range(self.epochs):
            columns = convert(self._columns(epoch))
            for index in range(self.batches):
                if taken == self.max_steps:
                    return
                yield epoch, index, self._groups(columns, index)
                taken += 1

    def _columns(self, epoch: int) -> list[Tensor]:
        """Every field of all lanes in this epoch's order, ``[K, n, ...]``; shorter lanes are padded, never read."""
        longest = max(self.lengths)
        columns = []
        for field in range(len(self.loaders[0].dataset.columns)):
            parts = [loader.dataset.columns[field] for loader in self.loaders]
            if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
                raise NotStackable("examples of clients differ in shape or dtype")
            column = parts[0].new_empty((len(parts), longest, *parts[0].shape[1:]))
            for place, (part, length) in enumerate(zip(parts, self.lengths, strict=True)):
                order = self.orders[place][epoch]
                if order is None:
                    column[place, :length].copy_(part[:length])
                else:
                    torch.index_select(part, 0, order[:length], out=column[place, :length])
            columns.append(column)
        return columns

    def _groups(self, columns: list[Tensor], index: int) -> list[Group]:
        start = index * self.batch_size
        members: dict[int, list[int]] = defaultdict(list)
        for place, length in enumerate(self.lengths):
            members[min(length, start + self.batch_size)].append(place)
        if len(members) == 1:
            return [(None, [column[:, start : next(iter(members))] for column in columns])]
        return [
            (places := torch.tensor(lanes), [column[places, start:stop] for column in columns])
            for stop, lanes in members.items()
        ]
