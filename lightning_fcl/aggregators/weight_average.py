"""Stochastic weight averaging over rounds: evaluate the mean of a task's last global weights."""

from math import ceil
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fcl.aggregators.base import RoundStats, ServerStep
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.weight_average import running_mean
from lightning_fcl.types import MethodCard


class WeightAverage(ServerStep):
    r"""Keeps the mean of the global weights over the last rounds of each task; training does not see it.

    .. math:: \theta_\text{SWA} \leftarrow \frac{n\, \theta_\text{SWA} + \theta}{n + 1}

    What is evaluated, shown to server callbacks and left in the module after ``fit`` is the mean, from the first
    averaged round of a task on; the next task starts from the last weights, not from the mean, and averages anew. It
    changes no delta and stands last in a chain: ``Chain(FedAvg(), ServerProximal(0.1), WeightAverage())``. For FedASAM
    with SWA let the clients' learning rate cycle, too:
    ``lr_factor=partial(functional.cyclic_factor, start=15, every=5, low=0.01)``.

    Args:
        start: Share of a task's rounds, in [0, 1), after which averaging begins; .75 is the paper's.
        every: Average every so many rounds: the last one of each cycle. A task needs rounds enough after ``start`` to
            average at least two, else the method does nothing.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Caldarola, Caputo & Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV
    2022, Algorithm 1 (https://arxiv.org/abs/2203.11834), after Izmailov et al., UAI 2018.

    Deviation: the paper has one task; here the mean is over each task's own rounds. BatchNorm statistics are averaged
    like weights; the paper's nets have none.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="SWA",
        acts_on="server",
        paper="Caldarola, Caputo & Ciccone, ECCV 2022",
        url="https://arxiv.org/abs/2203.11834",
        functions=("running_mean", "cyclic_factor"),
        needs=("task boundary",),
        smoke={"start": 0.0},
    )
    closes_chain = True

    def __init__(self, start: float = 0.75, *, every: int = 1) -> None:
        if not 0 <= start < 1:
            raise MisconfigurationError(f"`start` must be a share of a task's rounds in [0, 1), got {start!r}.")
        if every < 1:
            raise MisconfigurationError(f"`every` must be at least 1, got {every!r}.")
        self.start = start
        self.every = every

    @override
    def init(self, params: Tensor) -> dict[str, Any]:
        return {"task": 0, "count": 0, "mean": None}

    @override
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        count, mean = (state["count"], state["mean"]) if stats.task == state["task"] else (0, None)
        first = ceil(self.start * stats.rounds)
        if stats.round >= first and (stats.round - first + 1) % self.every == 0:
            count, mean = count + 1, running_mean(mean, params.double() + delta, count)
        return delta, {"task": stats.task, "count": count, "mean": mean}

    @override
    def output(self, params: Tensor, state: Any) -> Tensor:
        mean: Tensor | None = state["mean"]
        return params if mean is None else mean
