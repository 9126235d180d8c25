"""The mean of LoRA updates: of the factors, as is usual, or of the products, which is what a model feels."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl.aggregators.base import Gather, Node, Reducer, RoundStats
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.subspace_lora import merge_lora

_DOWN, _UP = "lora_A", "lora_B"


class LoRAMean(Reducer):
    r"""Averages clients' LoRA pairs by training examples, and logs how far the two ways of doing so lie apart.

    .. math::
        \text{factors: } \Big(\sum_k p_k B_k\Big) \Big(\sum_k p_k A_k\Big), \qquad
        \text{products: best rank-}r\text{ pair for } \sum_k p_k B_k A_k

    The log holds ``round/factor_gap``: the distance between the products of the mean factors and the mean products,
    over the length of the latter, all pairs taken together (Frobenius norms; no dense matrix is formed). Tensors that
    are no LoRA pair are averaged as in :class:`FedAvg`. A rank keeps the pairs that it receives until the round ends.

    Args:
        rank: Rank of a pair: parameters named ``...lora_A...`` have shape ``[rank, in]``, and those named alike but for
            ``lora_B`` have ``[out, rank]``.
        merge: ``"products"`` (truncated SVD), or ``"factors"``, which is FedAvg with the gap logged.

    Raises:
        MisconfigurationError: If an argument is out of range; before the first round, if no pair of that rank travels.

    Source: factors: Guo et al., "Federated Continual Instruction Tuning", ICCV 2025 (https://arxiv.org/abs/2503.12897);
    products: the Eckart-Young theorem.
    """

    def __init__(self, rank: int, merge: Literal["products", "factors"] = "products") -> None:
        if rank < 1:
            raise MisconfigurationError(f"`rank` must be at least 1, got {rank}.")
        if merge not in ("products", "factors"):
            raise MisconfigurationError(f'`merge` must be "products" or "factors", got {merge!r}.')
        self.rank = rank
        self.merge_by = merge
        self._mean = FedAvg()
        self._pairs: list[tuple[slice, slice]] = []

    @override
    def prepare(self, params: Mapping[str, slice]) -> None:
        downs = {name: name.replace(_DOWN, _UP) for name in params if _DOWN in name}
        self._pairs = [(params[down], params[up]) for down, up in downs.items() if up in params]
        sizes = [place.stop - place.start for pair in self._pairs for place in pair]
        if not sizes or any(size % self.rank for size in sizes):
            raise MisconfigurationError(
                f"`rank` must be that of the LoRA pairs that travel, got {self.rank} for {len(self._pairs)} pairs "
                f"named {list(downs)[:2]}."
            )

    @override
    def start(self, reference: Tensor, size: int, owned: range) -> None:
        self._reference = reference
        self._rows: dict[int, Tensor] = {}
        self._mean.start(reference, size, owned)

    @override
    def add(self, position: int, row: Tensor, num_examples: float) -> None:
        self._rows[position] = torch.cat([row[place] for pair in self._pairs for place in pair])
        self._mean.add(position, row, num_examples)

    @override
    def partials(self) -> dict[Node, Tensor]:
        return self._mean.partials()

    @override
    def finish(self, partials: Mapping[Node, Tensor], stats: RoundStats) -> Tensor:
        return self._finish(partials, {(0, place): row.double() for place, row in self._rows.items()}, stats)

    @override
    def merge(self, gather: Gather, stats: RoundStats) -> Tensor:
        size = sum(place.stop - place.start for pair in self._pairs for place in pair)
        own = {(0, place): row.double() for place, row in self._rows.items()}
        rows = gather(own, self._reference.new_empty(size))
        return self._finish(gather(self.partials()), rows, stats)

    def _finish(self, partials: Mapping[Node, Tensor], rows: Mapping[Node, Tensor], stats: RoundStats) -> Tensor:
        delta = self._mean.finish(partials, stats)
        weights = torch.tensor(stats.num_examples, dtype=torch.float64)
        weights = (weights / weights.sum()).to(delta.device)
        clients = torch.stack([rows[node] for node in sorted(rows)])  # [K, all pairs]
        gap, length, start = 0.0, 0.0, 0
        for down, up in self._pairs:
            middle = start + down.stop - down.start
            a = clients[:, start:middle].reshape(len(clients), self.rank, -1)
            start = middle + up.stop - up.start
            b = clients[:, middle:start].reshape(len(clients), -1, self.rank)
            mean_a, mean_b = merge_lora(a, b, weights, "factors")
            left = torch.cat([mean_b[None], -weights[:, None, None] * b])
            right = torch.cat([mean_a[None], a])
            gap += _squared_length(left, right)
            length += _squared_length(left[1:], right[1:])
            if self.merge_by == "products" and len(clients) > 1:
                for place, new in zip((down, up), merge_lora(a, b, weights, "products"), strict=True):
                    delta[place] = new.flatten() - self._reference[place].double()
        stats.logs["round/factor_gap"] = (max(gap, 0.0) / length) ** 0.5 if length else 0.0
        self._rows = {}
        return delta

    @override
    def lone_row(self) -> Tensor | None:
        return self._mean.lone_row()


def _squared_length(left: Tensor, right: Tensor) -> float:
    """Squared Frobenius norm of ``sum_k left_k right_k``, from products of the thin factors alone."""
    tall, wide = left.transpose(0, 1).flatten(1), right.flatten(0, 1)
    return float(((tall.T @ tall) * (wide @ wide.T)).sum())
