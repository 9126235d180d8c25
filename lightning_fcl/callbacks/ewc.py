"""EWC: slow down the weights that mattered for earlier tasks."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import lightning as L
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl.aggregators.base import RoundStats
from lightning_fcl.callbacks.gradients import check_federated
from lightning_fcl.callbacks.quadratic_memory import QuadraticMemory, Tree
from lightning_fcl.functional.ewc import ewc_penalty_grad
from lightning_fcl.functional.likelihood import classification_log_likelihood
from lightning_fcl.types import MethodCard, Params


class EWC(QuadraticMemory):
    r"""Quadratic pull toward the weights of earlier tasks, weighted by their diagonal Fisher information.

    .. math:: L(\theta) + \tfrac{\lambda}{2} \sum_i F_i (\theta_i - \theta^\star_i)^2

    At the end of a task the empirical Fisher is measured on its training data (per-sample squared gradients of the
    log-likelihood, mean over samples, in eval mode). During later tasks the pull's gradient is added where gradients
    are whole, unscaled and not yet clipped. Several quadratics add up to one, so ``memory="all"`` needs no more memory
    than ``"last"``: one importance and one anchor per weight.

    In a federation (EWC-FL) the anchor is the global model at the task's end and the Fisher is the client's own; both
    stay on the client, and a client without data of a task keeps what it had. With ``shared=True`` clients send their
    Fisher once per task, and the server hands its mean, weighted by examples, to everybody: the Fisher of all data.

    Args:
        strength: :math:`\lambda \ge 0`, with the one half. The step is stable only while learning rate times
            ``strength`` times the largest importance stays below 2.
        memory: ``"all"`` protects all earlier tasks, ``"last"`` only the one before.
        decay: With ``memory="all"``, what the importance of earlier tasks is multiplied by at each task's end, in
            [0, 1] (online EWC's :math:`\gamma`).
        shared: In a federation, whether all clients protect the mean of their importances in the place of their own.
        log_likelihood: ``f(module, batch) -> Tensor [B]``, log p(y|x) per example; by default for ``(x, y)`` batches of
            a classifier whose ``forward`` gives logits.
        num_samples: Measure on so many examples; ``None`` for all.

    Raises:
        MisconfigurationError: If an argument is out of range; at setup, if the strategy hides whole gradients.

    Source: Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017, eq. 3
    (https://arxiv.org/abs/1612.00796).

    Deviation: the Fisher uses the true labels (empirical Fisher), as most published code does; the definition averages
    over the model's own.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="EWC",
        acts_on="gradient",
        paper="Kirkpatrick et al., PNAS 2017",
        url="https://arxiv.org/abs/1612.00796",
        functions=("ewc_penalty", "ewc_penalty_grad", "fisher_diagonal", "merge_quadratics"),
        needs=("task boundary", "a pass over the task's data"),
        smoke={"strength": 10.0},
        neutral={"strength": 0.0},
    )

    upload_phase = "boundary"

    def __init__(
        self,
        strength: float = 10.0,
        *,
        memory: Literal["all", "last"] = "all",
        decay: float = 1.0,
        shared: bool = False,
        log_likelihood: Callable[[Any, Any], Tensor] = classification_log_likelihood,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(memory=memory, decay=decay, log_likelihood=log_likelihood, num_samples=num_samples)
        check_strength(strength)
        self.strength = strength
        self.shared = shared
        self._measured: Tree = {}

    @property
    @override
    def state_key(self) -> str:
        settings = {"strength": self.strength, "memory": self.memory, "decay": self.decay, "shared": self.shared}
        return self._generate_state_key(**settings)

    @property
    @override
    def is_on(self) -> bool:
        return self.strength > 0

    @override
    def pull(self, weights: Params, anchor: Params, importance: Params) -> dict[str, Tensor]:
        return ewc_penalty_grad(weights, anchor, importance, self.strength)

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.shared:
            check_federated(trainer, "EWC(shared=True)")

    @override
    def on_task_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if not self.shared:
            super().on_task_end(trainer, pl_module)
        elif self.is_on:
            trees = self.measure(trainer, pl_module)
            self._measured = _joined(*({n: tree[n] for n in tree if n in trainer.travelling} for tree in trees))

    @override
    def upload(self, trainer: Any) -> dict[str, Tensor]:
        return self._measured

    @override
    def serve(self, merged: dict[str, Tensor], previous: dict[str, Tensor], stats: RoundStats) -> dict[str, Tensor]:
        return _joined(*self.remember(_parted(previous), _parted(merged)))

    @override
    def download(self, merged: dict[str, Tensor]) -> None:
        self.importance, self.anchor = _parted(merged)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.shared else super().state_dict()  # what all share is the server's

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._measured = {}


def _joined(importance: Params, anchor: Params) -> dict[str, Tensor]:
    """Both trees as one, so that they can travel."""
    parts = {"importance/": importance, "anchor/": anchor}
    return {kind + name: value for kind, tree in parts.items() for name, value in tree.items()}


def _parted(tree: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inverse of :func:`_joined`."""
    importance, anchor = (
        {name.removeprefix(kind): value for name, value in tree.items() if name.startswith(kind)}
        for kind in ("importance/", "anchor/")
    )
    return importance, anchor
