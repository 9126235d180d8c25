"""The few exchanges between ranks; plain tensors and JSON only, nothing is pickled."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fcl.aggregators.base import Node
from lightning_fcl.serialize import tensor_from_bytes


class Ranks:
    """The ranks that share the clients of a round.

    With ``parallel="model"`` all ranks train the same client and hold the same numbers, so there is nothing to
    exchange: the group then counts as one rank.

    Args:
        fabric: A launched Fabric.
        split_clients: Whether ranks train different clients.
    """

    def __init__(self, fabric: Fabric, *, split_clients: bool) -> None:
        self.fabric = fabric
        self.rank = fabric.global_rank if split_clients else 0
        self.world = fabric.world_size if split_clients else 1

    def share(self, count: int) -> range:
        """This rank's contiguous part of ``range(count)``."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank passed, in rank order, on every rank."""
        if self.world == 1:
            return [data]
        device = self.fabric.device
        own = tensor_from_bytes(data).to(device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.world)]
        torch.distributed.all_gather(sizes, torch.tensor([len(data)], device=device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(data)] = own
        parts = [torch.zeros_like(padded) for _ in range(self.world)]
        torch.distributed.all_gather(parts, padded)
        return [bytes(p[: int(n)].cpu().numpy()) for p, n in zip(parts, sizes, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """JSON values of all ranks; floats survive to the last bit."""
        if self.world == 1:
            return [value]
        return [json.loads(part) for part in self.gather_bytes(json.dumps(value).encode())]

    def gather_nodes(self, nodes: Mapping[Node, Tensor], like: Tensor) -> dict[Node, Tensor]:
        """The nodes of all ranks.

        Args:
            nodes: This rank's float tensors.
            like: A tensor of their shape.

        Returns:
            All nodes, on every rank.
        """
        if self.world == 1:
            return dict(nodes)
        merged: dict[Node, Tensor] = {}
        names = [[*node, str(nodes[node].dtype).removeprefix("torch.")] for node in sorted(nodes)]
        for source, found in enumerate(self.gather_json(names)):
            for level, index, dtype in found:
                key = (level, index)
                own = nodes.get(key) if source == self.rank else None
                value = own if own is not None else torch.empty_like(like, dtype=getattr(torch, dtype))
                torch.distributed.broadcast(value, src=source)
                merged[key] = value
        return merged

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Fill ``tensor`` on all ranks with what rank ``source`` holds."""
        if self.world > 1:
            torch.distributed.broadcast(tensor, src=source)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.fabric.world_size > 1:
            self.fabric.barrier()
