"""FedProx: local training is pulled toward the weights that the round started from."""

from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.gradients import add_penalty, check_gradient_access, weights_of
from lightning_fcl.functional.proximal import proximal_penalty_grad
from lightning_fcl.types import MethodCard, Params


class FedProx(ContinualCallback):
    r"""Adds the gradient of a quadratic pull toward the broadcast weights to every local step.

    .. math:: L_k(\theta) + \tfrac{\mu}{2} \|\theta - \theta^t\|^2

    The pull is added where gradients are whole, unscaled and not yet clipped, so it is exact under accumulation,
    mixed precision, clipping and DDP. In a stock ``Trainer`` the anchor is the weights at the start of ``fit``.

    Args:
        strength: :math:`\mu \ge 0`. The authors tune it over {.001, .01, .1, .5, 1}; 0 is FedAvg.

    Raises:
        MisconfigurationError: If ``strength`` is negative or not finite; at setup, if the strategy of a stock
            ``Trainer`` hides whole gradients.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2
    (https://arxiv.org/abs/1812.06127).

    Deviation: the local problem is solved by the user's optimiser and number of epochs, not to an inexactness
    :math:`\gamma`, as in the authors' own code. The norm is squared.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedProx",
        acts_on="gradient",
        paper="Li et al., MLSys 2020",
        url="https://arxiv.org/abs/1812.06127",
        functions=("proximal_penalty", "proximal_penalty_grad"),
        smoke={"strength": 0.1},
        neutral={"strength": 0.0},
    )

    def __init__(self, strength: float = 0.01) -> None:
        check_strength(strength)
        self.strength = strength
        self._anchor: dict[str, Tensor] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(strength=self.strength)

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_gradient_access(trainer, "FedProx")

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.strength > 0:
            self._anchor = {name: weight.clone() for name, weight in weights_of(trainer, pl_module).items()}

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._anchor:
            add_penalty(trainer, pl_module, self._pull, self._anchor)

    def _pull(self, weights: Params) -> Params:
        return proximal_penalty_grad(weights, {name: self._anchor[name] for name in weights}, self.strength)

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._anchor = {}
