"""SPECIAL: after averaging, the server pulls the model toward the end of the previous task."""

from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl.aggregators.base import Reducer, RoundStats, ServerStep, StepSize, check_step_size, step_size
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.proximal import proximal_blend
from lightning_fcl.types import MethodCard


class ServerProximal(ServerStep):
    r"""SPECIAL's server step: a per-task step size, then a closed-form blend with the previous task's last model.

    .. math:: \bar\theta = \theta + \gamma_G \bar\Delta, \qquad
              \theta' = \frac{\bar\theta + \lambda\, \theta_{i-1}}{1 + \lambda} \quad (i \ge 2)

    In the first task there is no blend. Behind a router every slot has an anchor of its own, the weights it ended its
    last task with, and no blend in its first one. In a round without accepted updates there is none either, since the
    loop then leaves the model alone (otherwise drop-outs would roll the model back silently). The pull's stiffness is
    :math:`\lambda/\gamma_G`, so the falling step size by itself tightens the anchor in later tasks.

    Args:
        strength: :math:`\lambda \ge 0`; 0 is the plain step. The paper uses .25 (Digit-10), .40 (VLCS), .05 (PACS),
            .10 (DN4IL), .45 (language).
        lr: :math:`\gamma_G`: a number, ``"inverse_task"`` (1/i in task i, the paper's), or a function of the task.
            Tasks are the stream's, also behind a router, where 1 suits subspaces that start late.
        bn_stats: ``"blend"`` treats float buffers like weights (the paper's parameter vector); ``"current"`` lets
            BatchNorm statistics follow the current task's clients alone.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: SPECIAL, "server-side proximal anchor", Algorithm 1 and closed form (https://arxiv.org/abs/2601.22274).

    Deviation: None with the default reducer, the plain mean over sampled clients, that the paper's analysis needs;
    ``Chain(FedAvg(), ServerProximal(...))`` weighs by examples instead.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="SPECIAL",
        acts_on="server",
        paper="SPECIAL, ICML 2026",
        url="https://arxiv.org/abs/2601.22274",
        functions=("proximal_blend",),
        needs=("task boundary",),
        smoke={"strength": 0.25},
        neutral={"strength": 0.0, "lr": 1.0},
    )

    def __init__(
        self,
        strength: float = 0.25,
        *,
        lr: StepSize = "inverse_task",
        bn_stats: Literal["blend", "current"] = "blend",
    ) -> None:
        check_strength(strength)
        if bn_stats not in ("blend", "current"):
            raise MisconfigurationError(f'`bn_stats` must be "blend" or "current", got {bn_stats!r}.')
        check_step_size(lr)
        self.strength = strength
        self.lr = lr
        self.bn_stats = bn_stats

    @override
    def default_reducer(self) -> Reducer:
        return FedAvg(weighting="uniform")

    @override
    def init(self, params: Tensor) -> dict[str, Any]:
        return {"task": None, "anchor": None}

    @override
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        anchor: Tensor | None = state["anchor"]
        if state["task"] not in (None, stats.task):  # these are still the weights the last task ended with
            anchor = params.clone()
        lr = step_size(self.lr, stats.task)
        if lr != 1.0:
            delta.mul_(lr)
        if anchor is not None and self.strength > 0:
            stop = len(delta) if self.bn_stats == "blend" else stats.num_params
            before = params[:stop].double()
            delta[:stop] = proximal_blend(before + delta[:stop], anchor[:stop], self.strength) - before
        return delta, {"task": stats.task, "anchor": anchor}
