"""Synaptic intelligence: hold on to the weights that did the learning."""

from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount, check_strength
from lightning_fcl.callbacks.after_step import AfterStep
from lightning_fcl.callbacks.gradients import add_penalty, check_gradient_access, check_weight_access, weights_of
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.ewc import ewc_penalty_grad
from lightning_fcl.functional.si import path_integral, si_importance
from lightning_fcl.types import MethodCard, Params


class SI(AfterStep):
    r"""Quadratic pull toward the weights of earlier tasks, weighted by what each weight did for the loss.

    .. math:: L(\theta) + c \sum_i \Omega_i (\theta_i - \theta^\star_i)^2, \qquad
        \Omega_i = \sum_{tasks} \frac{-\sum_{steps} g_i \, \Delta\theta_i}{(\theta_i^{end} - \theta_i^{start})^2 + \xi}

    The gradient is read where it is whole, unscaled, unclipped and before this pull is added; the move is the one that
    the optimiser really made. Put ``SI`` before other callbacks that add to gradients, so that it reads the task's
    alone.

    In a federation the path runs inside a client's own jobs only, while start, end and anchor are the global weights
    (which the loop hands out from the second task on; in the first one a client's start is where its first job began).
    What is kept stays on the client. A client that never trained on a task keeps what it had.

    Args:
        strength: :math:`c \ge 0`, without a one half; 0 is FedAvg.
        damping: :math:`\xi > 0`, in squared units of the weights.

    Raises:
        MisconfigurationError: If an argument is out of range; at setup under DeepSpeed and FSDP, whose optimisers step
            on copies or shards of the weights.

    Source: Zenke, Poole & Ganguli, "Continual Learning Through Synaptic Intelligence", ICML 2017
    (https://arxiv.org/abs/1703.04200).

    Deviation: importances are cut off at 0, see :func:`~lightning_fcl.functional.si_importance`.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="SI",
        acts_on="gradient",
        paper="Zenke, Poole & Ganguli, ICML 2017",
        url="https://arxiv.org/abs/1703.04200",
        functions=("path_integral", "si_importance", "si_penalty"),
        needs=("task boundary",),
        smoke={"strength": 1.0},
        neutral={"strength": 0.0},
    )
    uses_task_anchor = True

    def __init__(self, strength: float = 0.1, *, damping: float = 0.1) -> None:
        super().__init__()
        check_strength(strength)
        check_amount("damping", damping)
        if damping == 0:
            raise MisconfigurationError("`damping` must be positive, got 0: a weight that did not move divides by it.")
        self.strength = strength
        self.damping = damping
        self.path: dict[str, Tensor] = {}
        """What each weight has done for the loss in this task, in units of the loss."""
        self.importance: dict[str, Tensor] = {}
        """Importance over all earlier tasks, never negative; empty before the first task ends."""
        self.anchor: dict[str, Tensor] = {}
        """Weights at the end of the previous task, or at the start of the first."""
        self._before: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self._weights: dict[str, Tensor] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(strength=self.strength, damping=self.damping)

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_gradient_access(trainer, "SI")
        check_weight_access(trainer, "SI", "EWC")

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.strength == 0:
            return
        for tree in (self.path, self.importance, self.anchor):
            tree.update({name: value.to(pl_module.device) for name, value in tree.items()})
        shared = None if isinstance(trainer, L.Trainer) else trainer.task_anchor
        known = {**self.anchor, **(shared or {})}  # what is new starts here: all in the first task, a grown head later
        own = weights_of(trainer, pl_module)
        self.anchor = {name: known[name] if name in known else weight.clone() for name, weight in own.items()}
        self.attach(trainer, self._after_step)

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.strength == 0:
            return
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._weights = {n: p for n, p in pl_module.named_parameters() if p.grad is not None and id(p) in owned}
        gradients = {name: p.grad.clone() for name, p in self._weights.items() if p.grad is not None}
        self._before = gradients, {name: p.detach().clone() for name, p in self._weights.items()}
        if self.importance:
            add_penalty(trainer, pl_module, self._pull, self.importance)

    def _pull(self, weights: Params) -> Params:
        return ewc_penalty_grad(
            weights,
            {name: self.anchor[name] for name in weights},
            {name: self.importance[name] for name in weights},
            2 * self.strength,
        )

    @torch.no_grad()
    def _after_step(self) -> None:
        gradients, before = self._before
        after = {name: p.detach() for name, p in self._weights.items()}
        for name, part in path_integral(gradients, before, after).items():
            self.path[name] = self.path[name] + part if name in self.path else part
        self._weights, self._before = {}, ({}, {})

    @override
    def on_task_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.strength == 0:
            return
        end = weights_of(trainer, pl_module)
        if self.path:
            names = self.path.keys() & end.keys() & self.anchor.keys()
            path, start, now = ({n: tree[n] for n in sorted(names)} for tree in (self.path, self.anchor, end))
            gained = si_importance(path, start, now, self.damping, self.importance)
            self.importance = {**self.importance, **gained}
        self.path, self.anchor = {}, {name: weight.clone() for name, weight in end.items()}

    @override
    def detach(self) -> None:
        super().detach()
        self._weights, self._before = {}, ({}, {})

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {"path": self.path, "importance": self.importance, "anchor": self.anchor}
        return {name: tree for name, tree in state.items() if tree}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.path = dict(state_dict.get("path", {}))
        self.importance = dict(state_dict.get("importance", {}))
        self.anchor = dict(state_dict.get("anchor", {}))
