"""What callbacks send beside the weights: merged while it arrives, along the tree that the weights use."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fcl.aggregators.base import RoundStats
from lightning_fcl.aggregators.tree import TreeSum, merge_nodes
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.exceptions import FCLError
from lightning_fcl.federated.comm import Ranks
from lightning_fcl.serialize import tree_bytes

Head = list[tuple[str, list[int], str]]
"""Names, shapes and dtypes of an upload, in its order; plain values, so that ranks can compare them."""


class Uploads:
    """One exact sum per callback that uploads; memory is one slab of what is sent and a few nodes.

    Args:
        callbacks: Client callbacks.
        ranks: The ranks that share the clients.
        device: Where sums are formed.
    """

    def __init__(self, callbacks: Sequence[Any], ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        own = [c for c in callbacks if isinstance(c, ContinualCallback)]
        self.channels = {c.state_key: _Channel(c, device) for c in own if _uploads(c)}
        self.sent_bytes = 0

    def start(self, size: int, owned: range) -> None:
        """Begin a round of ``size`` clients, of which this rank trains the positions ``owned``."""
        self.sent_bytes = 0
        for channel in self.channels.values():
            channel.start(size, owned)

    def add(self, position: int, client: int, extra: Mapping[str, Any], num_examples: float) -> None:
        """Take what one client's callbacks sent, by ``state_key``; copied. Positions ascend."""
        for key, tensors in extra.items():
            if key in self.channels:  # what `on_upload` adds under another key is nobody's to merge
                self.channels[key].add(position, client, tensors, num_examples)
                self.sent_bytes += tree_bytes(tensors)

    def total_bytes(self) -> int:
        """Bytes sent in this round, on all ranks."""
        return sum(self.ranks.gather_json(self.sent_bytes)) if self.channels else 0

    def merge(self, handed_out: dict[str, dict[str, Any]], stats: RoundStats) -> dict[str, dict[str, Any]]:
        """Merge the round's uploads and let each callback make of them what clients download next.

        Args:
            handed_out: What clients downloaded in this round, by ``state_key``.
            stats: The round.

        Returns:
            What they download in the next one. A callback of which nobody sent anything keeps what it had.

        Raises:
            FCLError: If two clients sent different names, shapes or dtypes.
        """
        following = dict(handed_out)
        for key, channel in self.channels.items():
            merged = channel.merge(key, self.ranks)
            if merged is not None:
                served = channel.callback.serve(merged, handed_out.get(key, {}), stats)
                following[key] = {name: _rounded(value, channel.dtypes.get(name)) for name, value in served.items()}
        return following


class _Channel:
    """The uploads of one callback in one round."""

    def __init__(self, callback: ContinualCallback, device: torch.device) -> None:
        self.callback = callback
        self.device = device
        self.dtypes: dict[str, torch.dtype] = {}
        self._sum: TreeSum | None = None

    def start(self, size: int, owned: range) -> None:
        self._place = size, owned
        self._heads: list[tuple[int, Head]] = []  # of the first sender, and of the first that differs from it
        self._senders: list[float] = []
        self._begun = False

    def add(self, position: int, client: int, tensors: Mapping[str, Tensor], num_examples: float) -> None:
        head = _head(tensors)
        if not self._heads or (head != self._heads[0][1] and len(self._heads) == 1):
            self._heads.append((client, head))
        if head != self._heads[0][1]:
            return  # told by `merge`, on all ranks at once
        row = torch.cat([tensor.detach().reshape(-1).to(self.device) for tensor in tensors.values()])
        weight = num_examples if self.callback.upload_reduction == "mean" else 1.0
        self._begin(row).add(position, row, weight)
        self._senders.append(weight)

    def _begin(self, like: Tensor) -> TreeSum:
        """The round's sum; rows are their own deltas, so the reference is zero and takes no memory."""
        if not self._begun:
            zero = torch.zeros(1, dtype=like.dtype, device=self.device).expand(like.shape)
            if self._sum is None:
                self._sum = TreeSum(zero, *self._place)
            else:
                self._sum.restart(zero, *self._place)
            self._begun = True
        assert self._sum is not None
        return self._sum

    def merge(self, key: str, ranks: Ranks) -> dict[str, Tensor] | None:
        parts = ranks.gather_json({"heads": self._heads, "senders": self._senders})
        heads = [(client, head) for part in parts for client, head in part["heads"]]
        if not heads:
            return None
        head = [(name, list(shape), dtype) for name, shape, dtype in heads[0][1]]
        for client, other in heads[1:]:
            if [(name, list(shape), dtype) for name, shape, dtype in other] != head:
                raise FCLError(
                    f"`upload` of {key!r} must give the same names, shapes and dtypes on every client, got {head} from "
                    f"client {heads[0][0]} and {other} from client {client}."
                )
        sizes = [int(torch.Size(shape).numel()) for _, shape, _ in head]
        own = self._sum.partials() if self._begun and self._sum is not None else {}
        total = merge_nodes(ranks.gather_nodes(own, like=torch.empty(sum(sizes), device=self.device)))
        if self.callback.upload_reduction == "mean":
            total.div_(sum(weight for part in parts for weight in part["senders"]))
        self.dtypes = {name: getattr(torch, dtype) for name, _, dtype in head}
        return {name: part.view(shape) for (name, shape, _), part in zip(head, torch.split(total, sizes), strict=True)}


def check_upload(callback: ContinualCallback, extra: Mapping[str, Any]) -> None:
    """Raise unless a callback sends float tensors that are finite."""
    for name, value in extra.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"`{type(callback).__name__}.upload` must return float tensors, got {found} for {name!r}.")
        if not torch.isfinite(value).all():
            raise FloatingPointError(f"`{type(callback).__name__}.upload` returned NaN or infinite values for {name!r}")


def _head(tensors: Mapping[str, Tensor]) -> Head:
    return [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]


def _rounded(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Sums are float64 and rounded once; a view of a sum must not keep all of it alive."""
    return value.to(dtype, copy=True) if dtype is not None else value.clone()


def _uploads(callback: ContinualCallback) -> bool:
    return type(callback).upload is not ContinualCallback.upload or "upload" in vars(callback)
