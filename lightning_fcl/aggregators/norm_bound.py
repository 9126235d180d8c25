"""Norm bound: no client moves the mean by more than its share of a fixed length."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_positive
from lightning_fcl.aggregators.base import StepSize
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.functional.mean import delta_dot
from lightning_fcl.functional.norm_bound import bound_factor
from lightning_fcl.types import MethodCard


class NormBound(FedAvg):
    r"""FedAvg of deltas that are shortened to a length of ``bound`` where they are longer.

    .. math:: \theta \leftarrow \theta + \sum_k p_k \Delta_k \min\left(1, \frac{M}{\|\Delta_k\|}\right)

    Lengths are taken over the parameters; float buffers of a shortened update are shortened alike. Updates stream, as
    in :class:`FedAvg`, so memory does not grow with the clients.

    Args:
        bound: :math:`M > 0`, longest delta that counts in full.
        weighting: As in :class:`FedAvg`. With ``"samples"`` a client may lie about its number.
        lr: As in :class:`FedAvg`.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Sun et al., "Can You Really Backdoor Federated Learning?", 2019, norm thresholding
    (https://arxiv.org/abs/1911.07963).

    Deviation: no noise is added.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="Norm Bound",
        acts_on="server",
        paper="Sun et al., 2019",
        url="https://arxiv.org/abs/1911.07963",
        functions=("bound_factor", "delta_dot"),
        smoke={"bound": 0.01},
        neutral={"bound": 1e12, "weighting": "samples"},
    )

    def __init__(self, bound: float, weighting: Literal["samples", "uniform"] = "uniform", lr: StepSize = 1.0) -> None:
        super().__init__(weighting, lr)
        check_positive("bound", bound)
        self.bound = bound
        self._num_params: int | None = None

    @override
    def prepare(self, params: Mapping[str, slice]) -> None:
        self._num_params = max(place.stop for place in params.values())

    @override
    def start(self, reference: Tensor, size: int, owned: range) -> None:
        super().start(reference, size, owned)
        self._reference = reference
        self._shortened = False

    @override
    def add(self, position: int, row: Tensor, num_examples: float) -> None:
        trained = slice(self._num_params)
        factor = bound_factor(delta_dot(row[trained], self._reference[trained]) ** 0.5, self.bound)
        self._shortened |= factor < 1.0
        assert self._sum is not None
        self._sum.add(position, row, factor * (num_examples if self.weighting == "samples" else 1.0))

    @override
    def lone_row(self) -> Tensor | None:
        return None if self._shortened else super().lone_row()
