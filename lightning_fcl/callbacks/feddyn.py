"""FedDyn: every client's stationary point is moved until all agree."""

from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount
from lightning_fcl.aggregators.base import Reducer, RoundStats, ServerStep
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.gradients import add_penalty, check_federated, travelling_of
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.feddyn import feddyn_dual, feddyn_grad, feddyn_server
from lightning_fcl.functional.params import zeros_like
from lightning_fcl.types import MethodCard, Params


class FedDyn(ContinualCallback):
    r"""Adds a linear and a quadratic term to a client's loss, and corrects the server's mean.

    .. math:: L_i(\theta) - \langle g_i, \theta \rangle + \tfrac{\alpha}{2} \|\theta - \theta^t\|^2, \qquad
        g_i \leftarrow g_i - \alpha (\theta_i - \theta^t), \qquad
        h \leftarrow h - \frac{\alpha}{N} \sum_{i \in S} (\theta_i - \theta^t), \qquad
        \theta^{t+1} = \frac{1}{|S|} \sum_{i \in S} \theta_i - h / \alpha

    The one object is both halves: the callback adds the gradient of the terms where gradients are whole, unscaled and
    not yet clipped; the server's half joins the end of the aggregator's chain by itself. If the user names no
    aggregator, the mean is the plain one, without which the formula does not hold. Float buffers are averaged only.

    Args:
        strength: :math:`\alpha > 0`, unitless. Published settings lie between .01 and .1; small ones diverge with a
            large learning rate.
        reset_on_task: Whether :math:`g_i` and :math:`h` start from zero in every task.

    Raises:
        MisconfigurationError: If ``strength`` is not positive and finite; at setup in a stock ``Trainer``.

    Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1
    (https://arxiv.org/abs/2111.04263).

    Deviation: the local problem is solved by the user's optimiser and number of epochs.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedDyn",
        acts_on="gradient",
        paper="Acar et al., ICLR 2021",
        url="https://arxiv.org/abs/2111.04263",
        functions=("feddyn_grad", "feddyn_dual", "feddyn_server"),
        needs=("state per client", "state on the server"),
        smoke={"strength": 0.1},
        neutral=None,
    )

    def __init__(self, strength: float = 0.1, *, reset_on_task: bool = False) -> None:
        check_amount("strength", strength)
        if strength == 0:
            raise MisconfigurationError(
                "`strength` must be positive, got 0: the server divides by it. Leave FedDyn out."
            )
        self.strength = strength
        self.reset_on_task = reset_on_task
        self.dual: dict[str, Tensor] = {}
        """The client's :math:`g_i` by parameter name, in units of a gradient; empty before its first job."""
        self._task = 0
        self._anchor: dict[str, Tensor] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(strength=self.strength, reset_on_task=self.reset_on_task)

    @override
    def server_rules(self) -> list[Reducer | ServerStep]:
        return [FedDynStep(self.strength, reset_on_task=self.reset_on_task)]

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_federated(trainer, "FedDyn")

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.reset_on_task and self._task != trainer.task:
            self.dual = {}
        self._task = trainer.task
        self._anchor = {name: weight.clone() for name, weight in travelling_of(trainer, pl_module).items()}
        known = {name: value.to(pl_module.device) for name, value in self.dual.items()}
        self.dual = {**zeros_like(self._anchor), **known}

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        add_penalty(trainer, pl_module, self._pull, self._anchor)

    def _pull(self, weights: Params) -> Params:
        anchor, dual = ({name: tree[name] for name in weights} for tree in (self._anchor, self.dual))
        return feddyn_grad(weights, anchor, dual, self.strength)

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.dual = feddyn_dual(travelling_of(trainer, pl_module), self._anchor, self.dual, self.strength)
        self._anchor = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"dual": self.dual, "task": self._task} if self.dual else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dual, self._task = dict(state_dict.get("dual", {})), state_dict.get("task", 0)


class FedDynStep(ServerStep):
    """The server's half of :class:`FedDyn`, which adds it to the chain by itself.

    Args:
        strength: As in :class:`FedDyn`.
        reset_on_task: As in :class:`FedDyn`.

    Source: Acar et al., ICLR 2021, Algorithm 1 (https://arxiv.org/abs/2111.04263).

    Deviation: None.
    """

    def __init__(self, strength: float, *, reset_on_task: bool = False) -> None:
        self.strength = strength
        self.reset_on_task = reset_on_task

    @override
    def default_reducer(self) -> Reducer:
        return FedAvg(weighting="uniform")

    @override
    def init(self, params: Tensor) -> dict[str, Any]:
        return {"task": 0, "dual": torch.zeros_like(params, dtype=torch.float64)}

    @override
    def apply(self, params: Tensor, delta: Tensor, stats: RoundStats, state: Any) -> tuple[Tensor, Any]:
        stop, dual = stats.num_params, state["dual"].clone()
        if self.reset_on_task and state["task"] != stats.task:
            dual.zero_()
        share = len(stats.clients) / stats.total_clients
        delta[:stop], dual[:stop] = feddyn_server(delta[:stop], dual[:stop], self.strength, share)
        return delta, {"task": stats.task, "dual": dual}
