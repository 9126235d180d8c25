"""TSGA: leave out clients whose update points away from the round's mean direction."""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._match import NameRule, name_matcher
from lightning_fcl.aggregators.base import Gather, Node, Reducer, RoundStats
from lightning_fcl.aggregators.tree import TreeSum, merge_nodes
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.mean import delta_dot
from lightning_fcl.functional.tsga import (
    TSGAResult,
    accept_similar,
    resolve_threshold,
    similarity_scores,
    tsga_weights,
    unit_weight,
)
from lightning_fcl.types import MethodCard

_LOGGED_CLIENTS = 100


class TSGA(Reducer):
    r"""Mean of the updates that point the way most of them do.

    .. math::
        \bar g = \frac1K \sum_k \frac{\Delta_k}{\lVert\Delta_k\rVert}, \quad s_k = \cos(\Delta_k, \bar g), \quad
        \theta \leftarrow \theta + \frac{\sum_{s_k \ge \tau} n_k \Delta_k}{\sum_{s_k \ge \tau} n_k}

    Only trainable parameters are compared; what is merged is the whole update, float buffers too. Directions are summed
    as updates arrive, and the accepted ones along the fixed tree of all reducers, so neither the clients' order nor the
    number of ranks changes a bit. The round's log holds ``tsga/score/<client>`` (in federations of up to 100 clients),
    ``tsga/kept``, ``tsga/threshold`` and ``tsga/fallback`` (1 if nobody passed, and so all were kept).

    A rank keeps the updates that it receives, since the filter needs a second look at them.

    Args:
        threshold: :math:`\tau`, the least cosine to the mean direction; -1 accepts everybody. What 0.5 demands depends
            on the number of clients, see the card; ``"auto"`` demands of any number what 0.5 demands of five.
        weighting: ``"samples"`` by training examples; ``"uniform"`` all accepted alike; ``"soft"`` by examples times
            score.
        only: Compare these parameters alone: a glob, ``"re:<regex>"``, or a list of them. E.g. extractor and global
            head of a net whose other head is meant to differ between clients.

    Attributes:
        result: The last round's :class:`~lightning_fcl.functional.TSGAResult` in the order of its clients; its
            ``delta`` is empty.

    Raises:
        MisconfigurationError: If an argument is out of range; before the first round, if ``only`` matches nothing.

    Source: FedCMM, "Task-similarity-aware gradient aggregation" (https://arxiv.org/abs/2607.12112).

    Deviation: as :func:`~lightning_fcl.functional.tsga`; the paper's clients send LoRA factors and nothing else.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="TSGA",
        acts_on="server",
        paper="FedCMM, 2026",
        url="https://arxiv.org/abs/2607.12112",
        functions=("tsga", "similarity_scores", "similarity_threshold"),
        smoke={"threshold": 0.7},
        neutral={"threshold": -1.0},
    )

    def __init__(
        self,
        threshold: float | Literal["auto"] = 0.5,
        *,
        weighting: Literal["samples", "uniform", "soft"] = "samples",
        only: NameRule = "*",
    ) -> None:
        if threshold != "auto" and (isinstance(threshold, str) or not -1 <= threshold <= 1):
            raise MisconfigurationError(f'`threshold` must be "auto" or a cosine in [-1, 1], got {threshold!r}.')
        if weighting not in ("samples", "uniform", "soft"):
            raise MisconfigurationError(f'`weighting` must be "samples", "uniform" or "soft", got {weighting!r}.')
        self.threshold = threshold
        self.weighting = weighting
        self.only = only
        self.result: TSGAResult | None = None
        self._compared: list[slice] | None = None
        self._tree = TreeSum(torch.empty(0), 0, range(0))
        self._kept = torch.empty(0)  # the rows' memory, used again in every round

    @override
    def prepare(self, params: Mapping[str, slice]) -> None:
        match = name_matcher(self.only)
        chosen = [place for name, place in params.items() if match(name)]
        if not chosen:
            raise MisconfigurationError(
                f"`only` must match a parameter that travels, got {self.only!r}. Names look like: {list(params)[:3]}."
            )
        whole = len(chosen) == len(params)  # then one slice: what lies between parameters is zero padding
        self._compared = [slice(chosen[0].start, chosen[-1].stop)] if whole else chosen

    @override
    def start(self, reference: Tensor, size: int, owned: range) -> None:
        self._reference, self._size, self._owned = reference, size, owned
        self._origin = self._part(reference)
        self._rows: dict[int, Tensor] = {}
        fits = self._kept.shape == (len(owned), len(reference)) and self._kept.dtype == reference.dtype
        if not fits or self._kept.device != reference.device:  # another run may be elsewhere
            self._kept = reference.new_empty(len(owned), len(reference))
        self._norms: dict[int, float] = {}
        self._tree.restart(self._origin, size, owned)

    @override
    def add(self, position: int, row: Tensor, num_examples: float) -> None:
        self._rows[position] = self._kept[position - self._owned.start].copy_(row)
        part = self._part(row)
        self._norms[position] = math.sqrt(delta_dot(part, self._origin))
        self._tree.add(position, part, unit_weight(self._norms[position]))

    @override
    def partials(self) -> dict[Node, Tensor]:
        return self._tree.partials()

    @override
    def finish(self, partials: Mapping[Node, Tensor], stats: RoundStats) -> Tensor:
        return self._finish(partials, stats, _alone)

    @override
    def merge(self, gather: Gather, stats: RoundStats) -> Tensor:
        return self._finish(gather(self.partials(), self._origin), stats, gather)

    def _finish(self, partials: Mapping[Node, Tensor], stats: RoundStats, gather: Gather) -> Tensor:
        found = gather(self._score(partials), self._origin.new_empty(()))
        places = sorted(place for _, place in found)
        scores = torch.stack([found[0, place] for place in places]).cpu()
        threshold = resolve_threshold(self.threshold, len(scores))
        accepted, fallback = accept_similar(scores, threshold)
        weights = tsga_weights(scores, accepted, torch.tensor(stats.num_examples, dtype=torch.float64), self.weighting)
        self._tree.restart(self._reference, self._size, self._owned)
        for place, weight in zip(places, weights.tolist(), strict=True):
            if weight and place in self._rows:
                self._tree.add(place, self._rows[place], weight)
        total = sum(weights.tolist())
        delta = merge_nodes(gather(self._tree.partials())).div_(total)
        self._rows = {}
        self.result = TSGAResult(delta.new_empty(0), scores, accepted, weights / total)
        self._log(stats, scores, {"kept": float(accepted.sum()), "threshold": threshold, "fallback": float(fallback)})
        return delta

    def _score(self, partials: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """The scores of this rank's clients, by position."""
        direction = merge_nodes(partials) if partials else torch.zeros_like(self._origin, dtype=torch.float64)
        length = math.sqrt(delta_dot(direction))
        dots = [delta_dot(self._part(row), self._origin, direction) for row in self._rows.values()]
        scores = similarity_scores(dots, list(self._norms.values()), length)
        return {(0, place): score.to(direction.device) for place, score in zip(self._rows, scores, strict=True)}

    @override
    def lone_row(self) -> Tensor | None:
        return next(reversed(self._rows.values()), None)

    def _part(self, vector: Tensor) -> Tensor:
        if self._compared is None:
            return vector
        parts = [vector[place] for place in self._compared]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _log(self, stats: RoundStats, scores: Tensor, facts: dict[str, float]) -> None:
        stats.logs.update({f"tsga/{name}": value for name, value in facts.items()})
        if stats.total_clients <= _LOGGED_CLIENTS:
            pairs = zip(stats.clients, scores.tolist(), strict=True)
            stats.logs.update({f"tsga/score/{client}": score for client, score in pairs})


def _alone(nodes: Mapping[Node, Tensor], like: Tensor | None = None) -> dict[Node, Tensor]:
    return dict(nodes)
