"""Reducers that a few wild or hostile clients cannot move far; each is a mean with another idea of whom to trust."""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_positive
from lightning_fcl.aggregators.base import RoundStats
from lightning_fcl.aggregators.rows import RowReducer
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.centres import clipping_shares, median_shares
from lightning_fcl.functional.distances import mix
from lightning_fcl.functional.krum import krum_select
from lightning_fcl.functional.robust import coordinate_median, trimmed_mean
from lightning_fcl.types import MethodCard


def _check_count(name: str, value: int, least: int = 0) -> None:
    if value < least:
        raise MisconfigurationError(f"`{name}` must be at least {least}, got {value!r}.")


def _trained(rows: list[Tensor], stats: RoundStats) -> list[Tensor]:
    """The parameters alone: BatchNorm statistics have other units, and have no say in who is trusted."""
    return [row[: stats.num_params] for row in rows]


class Median(RowReducer):
    """Median of each weight over the clients; of an even number, the mean of the two in the middle.

    Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018, option I
    of Algorithm 1 (https://arxiv.org/abs/1803.01498).

    Deviation: None; clients count alike, whatever their examples.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="Median",
        acts_on="server",
        paper="Yin et al., ICML 2018",
        url="https://arxiv.org/abs/1803.01498",
        functions=("coordinate_median",),
    )

    @override
    def combine(self, rows: list[Tensor], reference: Tensor, stats: RoundStats) -> Tensor:
        return coordinate_median(rows)


class TrimmedMean(RowReducer):
    """Mean of each weight over the clients, without the ``trim`` smallest and largest values.

    Args:
        trim: Values to drop at either end: as many clients as may be hostile. A round needs ``2 * trim + 1`` clients.

    Raises:
        MisconfigurationError: If ``trim`` is negative; in a round, if there are too few clients.

    Source: Yin et al., ICML 2018, option II of Algorithm 1 (https://arxiv.org/abs/1803.01498).

    Deviation: a number of clients in the place of a share.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="Trimmed Mean",
        acts_on="server",
        paper="Yin et al., ICML 2018",
        url="https://arxiv.org/abs/1803.01498",
        functions=("trimmed_mean",),
        smoke={"trim": 1},
    )

    def __init__(self, trim: int) -> None:
        _check_count("trim", trim)
        self.trim = trim

    @override
    def least_clients(self) -> int:
        return 2 * self.trim + 1

    @override
    def combine(self, rows: list[Tensor], reference: Tensor, stats: RoundStats) -> Tensor:
        return trimmed_mean(rows, self.trim)


class MultiKrum(RowReducer):
    """Plain mean of the updates with the closest neighbours.

    Distances are taken over the parameters; float buffers are merged with the same choice of clients.

    Args:
        byzantine: Clients that may be hostile. A round needs ``2 * byzantine + 3`` clients.
        keep: How many updates to average; by default all but ``byzantine``.

    Raises:
        MisconfigurationError: If an argument is out of range; in a round, if there are too few clients.

    Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017,
    sec. 5 (https://arxiv.org/abs/1703.02757).

    Deviation: None.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="MultiKrum",
        acts_on="server",
        paper="Blanchard et al., NeurIPS 2017",
        url="https://arxiv.org/abs/1703.02757",
        functions=("krum_scores", "krum_select"),
        smoke={"byzantine": 0, "keep": 2},
    )

    def __init__(self, byzantine: int, *, keep: int | None = None) -> None:
        _check_count("byzantine", byzantine)
        if keep is not None:
            _check_count("keep", keep, 1)
        self.byzantine = byzantine
        self.keep = keep

    @override
    def least_clients(self) -> int:
        return max(2 * self.byzantine + 3, self.byzantine + (self.keep or 0))

    @override
    def combine(self, rows: list[Tensor], reference: Tensor, stats: RoundStats) -> Tensor:
        chosen = krum_select(_trained(rows, stats), self.byzantine, self.keep).tolist()
        stats.logs["round/krum_kept"] = float(len(chosen))
        return mix([rows[k] for k in chosen], torch.full((len(chosen),), 1.0 / len(chosen), dtype=torch.float64))


class Krum(MultiKrum):
    """The one update with the closest neighbours, unchanged.

    Args:
        byzantine: As in :class:`MultiKrum`.

    Raises:
        MisconfigurationError: As in :class:`MultiKrum`.

    Source: Blanchard et al., NeurIPS 2017, sec. 4 (https://arxiv.org/abs/1703.02757).

    Deviation: None.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="Krum",
        acts_on="server",
        paper="Blanchard et al., NeurIPS 2017",
        url="https://arxiv.org/abs/1703.02757",
        functions=("krum_scores", "krum_select"),
        smoke={"byzantine": 0},
    )

    def __init__(self, byzantine: int) -> None:
        super().__init__(byzantine, keep=1)


class GeometricMedian(RowReducer):
    """The point with the least sum of distances to the updates (RFA).

    Distances are taken over the parameters; float buffers are mixed with the same shares.

    Args:
        weighting: ``"uniform"``, or ``"samples"`` to weigh distances by training examples, as the paper does: a client
            may then lie about their number.
        smoothing: Distances below it count as it.
        iterations: Weiszfeld steps; they cost next to nothing.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Pillutla, Kakade & Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2
    (https://arxiv.org/abs/1912.13445).

    Deviation: clients count alike by default.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="Geometric Median",
        acts_on="server",
        paper="Pillutla, Kakade & Harchaoui, IEEE TSP 2022",
        url="https://arxiv.org/abs/1912.13445",
        functions=("geometric_median", "median_shares"),
    )

    def __init__(
        self,
        weighting: Literal["uniform", "samples"] = "uniform",
        *,
        smoothing: float = 1e-6,
        iterations: int = 100,
    ) -> None:
        if weighting not in ("uniform", "samples"):
            raise MisconfigurationError(f'`weighting` must be "uniform" or "samples", got {weighting!r}.')
        check_positive("smoothing", smoothing)
        _check_count("iterations", iterations, 1)
        self.weighting = weighting
        self.smoothing = smoothing
        self.iterations = iterations

    @override
    def weights(self, num_examples: tuple[float, ...]) -> tuple[float, ...]:
        return num_examples if self.weighting == "samples" else super().weights(num_examples)

    @override
    def combine(self, rows: list[Tensor], reference: Tensor, stats: RoundStats) -> Tensor:
        masses = torch.tensor(self.weights(stats.num_examples), dtype=torch.float64)
        trained = _trained(rows, stats)
        return mix(rows, median_shares(trained, masses, smoothing=self.smoothing, iterations=self.iterations))


class CentredClipping(RowReducer):
    """Moves the global weights by the mean of the deltas, each cut to a length of ``radius`` around a moving centre.

    Lengths are taken over the parameters; float buffers are mixed with the same shares.

    Args:
        radius: Longest delta that counts in full.
        iterations: Steps of the centre.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Karimireddy, He & Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021, Algorithm 2
    (https://arxiv.org/abs/2012.10333).

    Deviation: the centre starts at the global weights in every round; the paper's starts at the last round's aggregate
    of the clients' momenta, which this loop's clients do not send.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="Centred Clipping",
        acts_on="server",
        paper="Karimireddy, He & Jaggi, ICML 2021",
        url="https://arxiv.org/abs/2012.10333",
        functions=("centred_clipping", "clipping_shares"),
        smoke={"radius": 0.01},
    )

    def __init__(self, radius: float, *, iterations: int = 3) -> None:
        check_positive("radius", radius)
        _check_count("iterations", iterations, 1)
        self.radius = radius
        self.iterations = iterations

    @override
    def combine(self, rows: list[Tensor], reference: Tensor, stats: RoundStats) -> Tensor:
        points = [reference, *rows]
        return mix(points, clipping_shares(_trained(points, stats), self.radius, iterations=self.iterations))
