"""FedAvg: the weighted mean of the clients' updates."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from lightning_fcl.aggregators.base import Node, Reducer, RoundStats, StepSize, check_step_size, step_size
from lightning_fcl.aggregators.tree import TreeSum, merge_nodes
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.types import MethodCard


class FedAvg(Reducer):
    r"""Mean of the clients' deltas, by training examples or plain.

    .. math:: \theta \leftarrow \theta + \eta_g \frac{\sum_k w_k (\theta_k - \theta)}{\sum_k w_k}

    The sum is formed in float64 along a fixed tree and rounded once, so it depends neither on the clients' order nor on
    the number of ranks. With one client and ``lr=1`` its weights are copied bit for bit.

    Args:
        weighting: ``"samples"`` weighs a client by its training examples, ``"uniform"`` all alike.
        lr: Server step size: a number, ``"inverse_task"`` (1/i in task i, counted from 1), or a function of the task
            (from 0). Float buffers (BatchNorm statistics) take the same step.

    Raises:
        MisconfigurationError: If an argument has another value.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    Algorithm 1 (https://arxiv.org/abs/1602.05629).

    Deviation: None for ``weighting="samples", lr=1``.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedAvg",
        acts_on="server",
        paper="McMahan et al., AISTATS 2017",
        url="https://arxiv.org/abs/1602.05629",
        functions=("weighted_mean",),
        neutral={},
    )

    def __init__(self, weighting: Literal["samples", "uniform"] = "samples", lr: StepSize = 1.0) -> None:
        if weighting not in ("samples", "uniform"):
            raise MisconfigurationError(f'`weighting` must be "samples" or "uniform", got {weighting!r}.')
        check_step_size(lr)
        self.weighting = weighting
        self.lr = lr
        self._sum: TreeSum | None = None

    @override
    def start(self, reference: Tensor, size: int, owned: range) -> None:
        if self._sum is None:
            self._sum = TreeSum(reference, size, owned)
        else:
            self._sum.restart(reference, size, owned)

    @override
    def add(self, position: int, row: Tensor, num_examples: float) -> None:
        assert self._sum is not None
        self._sum.add(position, row, num_examples if self.weighting == "samples" else 1.0)

    @override
    def partials(self) -> dict[Node, Tensor]:
        assert self._sum is not None
        return self._sum.partials()

    @override
    def finish(self, partials: Mapping[Node, Tensor], stats: RoundStats) -> Tensor:
        delta = merge_nodes(partials).div_(sum(self.weights(stats.num_examples)))
        lr = step_size(self.lr, stats.task)
        return delta if lr == 1.0 else delta.mul_(lr)

    @override
    def weights(self, num_examples: tuple[float, ...]) -> tuple[float, ...]:
        return num_examples if self.weighting == "samples" else super().weights(num_examples)

    @override
    def lone_row(self) -> Tensor | None:
        return self._sum.last_row if self._sum is not None and self.lr == 1.0 else None
