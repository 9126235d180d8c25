"""Reducers that must see all updates of a round at once."""

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl.aggregators.base import Node, Reducer, RoundStats
from lightning_fcl.exceptions import MisconfigurationError


class RowReducer(Reducer):
    """Keeps the round's rows until all are there, then combines them; ranks exchange rows as they are.

    Memory is one row per accepted client, on every rank. A subclass writes :meth:`combine` and, if it cannot work with
    few clients, :meth:`least_clients`.
    """

    @override
    def start(self, reference: Tensor, size: int, owned: range) -> None:
        self._check_enough(size, "sampled")
        self._reference = reference
        self._rows: dict[Node, Tensor] = {}

    @override
    def add(self, position: int, row: Tensor, num_examples: float) -> None:
        self._rows[0, position] = row.clone()

    @override
    def partials(self) -> dict[Node, Tensor]:
        rows, self._rows = self._rows, {}
        return rows

    @override
    def finish(self, partials: Mapping[Node, Tensor], stats: RoundStats) -> Tensor:
        self._check_enough(len(partials), "accepted")
        rows = [partials[node] for node in sorted(partials)]
        with torch.no_grad():
            return self.combine(rows, self._reference, stats).sub_(self._reference)

    def least_clients(self) -> int:
        """Fewest clients that it can work with."""
        return 1

    @abstractmethod
    def combine(self, rows: list[Tensor], reference: Tensor, stats: RoundStats) -> Tensor:
        """The merged weights of one round.

        Args:
            rows: New weights of the accepted clients, in the order of ``stats.clients``, each of shape ``[P]``.
            reference: Weights that they started from, shape ``[P]``.
            stats: The round.

        Returns:
            Merged weights (not a delta), shape ``[P]``, float64, in memory of their own.
        """

    def _check_enough(self, clients: int, what: str) -> None:
        if clients < (least := self.least_clients()):
            raise MisconfigurationError(
                f"`{type(self).__name__}` must have at least {least} {what} clients in a round, got {clients}. Raise "
                f"`clients_per_round`, set `min_completed={least}`, or lower what it should withstand."
            )
