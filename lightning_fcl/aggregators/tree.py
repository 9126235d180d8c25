"""The exact sum of weighted deltas along one fixed binary tree, streaming, on any number of ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fcl.aggregators.base import Node
from lightning_fcl.functional.mean import weighted_delta_sum

SLAB_LEVEL = 3
SLAB_ROWS = 1 << SLAB_LEVEL


class TreeSum:
    """Adds ``weight * (row - reference)`` over positions of a binary tree whose shape depends on nothing else.

    Rows are collected in a slab of 8; a full slab becomes one float64 node, and sibling nodes merge at once. So memory
    is one slab plus at most one node per tree level. A missing position counts as zero. Since every addition belongs to
    a node of the tree, the result has the same bits on one rank and on many.

    Args:
        reference: Weights that the deltas start from, shape ``[P]``.
        size: Number of positions in the whole round.
        owned: Positions that this rank adds; contiguous.
    """

    def __init__(self, reference: Tensor, size: int, owned: range) -> None:
        self.reference = reference
        # Beyond the last position there are only missing ones, so the last rank owns the rest of the tree.
        whole = 1 << max(size - 1, 0).bit_length()
        self._owned = range(owned.start, whole if owned.stop == size else owned.stop)
        self._slab: Tensor | None = None
        self._weights = [0.0] * SLAB_ROWS
        self._block = -1
        self._nodes: dict[Node, Tensor] = {}
        self.last_row: Tensor | None = None

    def restart(self, reference: Tensor, size: int, owned: range) -> None:
        """Begin a new sum; the slab's memory is kept."""
        slab = self._slab
        self.__init__(reference, size, owned)  # type: ignore[misc]
        if slab is not None and slab.shape[1:] == reference.shape and slab.dtype == reference.dtype:
            self._slab = slab

    def add(self, position: int, row: Tensor, weight: float) -> None:
        """Add one row; positions must ascend within this rank.

        Args:
            position: Place in the tree.
            row: New weights, shape ``[P]``; copied.
            weight: Its weight, not negative.
        """
        if position not in self._owned:
            raise ValueError(f"`position` must be one of {self._owned}, got {position}. Another rank owns it.")
        if position // SLAB_ROWS != self._block:
            self._flush()
            self._block = position // SLAB_ROWS
        if self._slab is None:
            self._slab = self.reference.new_empty((SLAB_ROWS, *self.reference.shape))
        place = position % SLAB_ROWS
        self._slab[place].copy_(row)
        self._weights[place] = weight
        self.last_row = self._slab[place]

    def partials(self) -> dict[Node, Tensor]:
        """The nodes of this rank: float64, shape ``[P]``, as few as its positions allow."""
        self._flush()
        return self._nodes

    def _flush(self) -> None:
        if self._block < 0:
            return
        assert self._slab is not None
        start = self._block * SLAB_ROWS
        for level, index in _cover(max(self._owned.start, start), min(self._owned.stop, start + SLAB_ROWS)):
            low, high = (index << level) - start, ((index + 1) << level) - start
            while high > low and not self._weights[high - 1]:  # missing at the end: the tree of the rest is the same
                high -= 1
            if high == low:
                continue
            for place in range(low, high):
                if not self._weights[place]:  # zero delta, whatever an earlier round left in the slab
                    self._slab[place].copy_(self.reference)
            weights = torch.tensor(self._weights[low:high], dtype=torch.float64)
            node = weighted_delta_sum(self._slab[low:high], self.reference, weights)
            _insert(self._nodes, (level, index), node)
        self._weights = [0.0] * SLAB_ROWS
        self._block = -1


def merge_nodes(partials: Mapping[Node, Tensor]) -> Tensor:
    """Sum the nodes of all ranks along the tree.

    Args:
        partials: Float64 tensors of shape ``[P]`` by node; at least one; added in place.

    Returns:
        The root, shape ``[P]``, float64.
    """
    nodes: dict[Node, Tensor] = {}
    for node in sorted(partials):
        _insert(nodes, node, partials[node])
    while len(nodes) > 1:
        level, index = min(nodes)  # the lowest node has no sibling: it is its parent
        _insert(nodes, (level + 1, index >> 1), nodes.pop((level, index)))
    return next(iter(nodes.values()))


def _insert(nodes: dict[Node, Tensor], node: Node, value: Tensor) -> None:
    level, index = node
    while (sibling := (level, index ^ 1)) in nodes:
        other = nodes.pop(sibling)
        left, right = (value, other) if index % 2 == 0 else (other, value)
        value = left.add_(right)
        level, index = level + 1, index >> 1
    nodes[level, index] = value


def _cover(start: int, stop: int) -> list[Node]:
    """The fewest tree nodes that cover ``[start, stop)``, none above the slab level."""
    nodes: list[Node] = []
    while start < stop:
        level = min((start & -start).bit_length() - 1 if start else SLAB_LEVEL, SLAB_LEVEL)
        while start + (1 << level) > stop:
            level -= 1
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes
