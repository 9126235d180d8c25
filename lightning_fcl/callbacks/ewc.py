"""EWC: slow down the weights that mattered for earlier tasks."""

import math
from abc import abstractmethod
from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar, Literal, TypeAlias

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl.aggregators.base import RoundStats
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.gradients import add_penalty, check_federated, check_gradient_access, weights_of
from lightning_fcl.callbacks.side_pass import as_in_training
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.ewc import ewc_penalty_grad, merge_quadratics
from lightning_fcl.functional.fisher import fisher_diagonal
from lightning_fcl.functional.likelihood import LogLikelihood, classification_log_likelihood
from lightning_fcl.types import MethodCard, Params

Tree: TypeAlias = dict[str, Tensor]


class QuadraticMemory(ContinualCallback):
    """What EWC and its kin share: importances measured when a task ends, and one quadratic for all of them.

    Args:
        memory: ``"all"`` protects all earlier tasks, ``"last"`` only the one before.
        log_likelihood: ``f(module, batch) -> Tensor [B]``, log p(y|x) per example.
        num_samples: Measure on so many examples; ``None`` for all.
        decay: With ``memory="all"``, what earlier importances are multiplied by at each task's end, in [0, 1].
        shared: In a federation, whether all clients protect the mean of their importances in the place of their own.

    Raises:
        MisconfigurationError: If ``memory`` is another word or ``decay`` out of range; at setup, if the strategy hides
            whole gradients, or with ``shared`` in a stock ``Trainer``.
    """

    upload_phase = "boundary"

    def __init__(
        self,
        *,
        memory: Literal["all", "last"],
        log_likelihood: Callable[[Any, Any], Tensor],
        num_samples: int | None,
        decay: float = 1.0,
        shared: bool = False,
    ) -> None:
        if memory not in ("all", "last"):
            raise MisconfigurationError(f'`memory` must be "all" or "last", got {memory!r}.')
        if not 0 <= decay <= 1:
            raise MisconfigurationError(f"`decay` must be between 0 and 1, got {decay}. 1 forgets nothing.")
        self.memory = memory
        self.decay = decay
        self.shared = shared
        self.log_likelihood = log_likelihood
        self.num_samples = num_samples
        self.importance: dict[str, Tensor] = {}
        """Fisher diagonal by parameter name, mean over samples; empty before the first task ends."""
        self.anchor: dict[str, Tensor] = {}
        """Where the quadratic has its minimum, by parameter name."""
        self._measured: Tree = {}

    @property
    @abstractmethod
    def is_on(self) -> bool:
        """Whether there is any pull; without one nothing is measured."""

    @abstractmethod
    def pull(self, weights: Params, anchor: Params, importance: Params) -> dict[str, Tensor]:
        """Gradient of the penalty, by parameter name; all three trees have the same names."""

    def weigh(self, importance: dict[str, Tensor]) -> dict[str, Tensor]:
        """The importance of one task as it enters the memory; by default as measured."""
        return importance

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_gradient_access(trainer, type(self).__name__)
        if self.shared:
            check_federated(trainer, f"{type(self).__name__}(shared=True)")

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        device = pl_module.device
        self.importance = {name: value.to(device) for name, value in self.importance.items()}
        self.anchor = {name: value.to(device) for name, value in self.anchor.items()}

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.importance and self.is_on:
            add_penalty(trainer, pl_module, self._pull, self.importance)

    def _pull(self, weights: Params) -> Params:
        anchor, importance = ({name: tree[name] for name in weights} for tree in (self.anchor, self.importance))
        return self.pull(weights, anchor, importance)

    @override
    def on_task_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if not self.is_on:
            return
        importance = self.weigh(task_fisher(trainer, pl_module, self.log_likelihood, self.num_samples))
        anchor = {name: weight.clone() for name, weight in weights_of(trainer, pl_module).items()}
        if self.shared:
            travelling = trainer.travelling
            self._measured = _joined(*({n: tree[n] for n in tree if n in travelling} for tree in (importance, anchor)))
        else:
            self.importance, self.anchor = self._remember((self.importance, self.anchor), (importance, anchor))

    def _remember(self, old: tuple[Tree, Tree], new: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Importance and anchor after a task, from those before it and those that it alone would leave."""
        if self.memory == "last":
            return new
        faded = {name: self.decay * value for name, value in old[0].items()}
        names = faded.keys() & new[0].keys()
        both = (faded, old[1]), new
        before, after = (({n: f[n] for n in names}, {n: a[n] for n in names}) for f, a in both)
        importance, anchor, _ = merge_quadratics(before, after)
        return {**faded, **new[0], **importance}, {**old[1], **new[1], **anchor}

    @override
    def upload(self, trainer: Any) -> Tree:
        return self._measured

    @override
    def serve(self, merged: Tree, previous: Tree, stats: RoundStats) -> Tree:
        return _joined(*self._remember(_parted(previous), _parted(merged)))

    @override
    def download(self, merged: Tree) -> None:
        self.importance, self.anchor = _parted(merged)

    @override
    def state_dict(self) -> dict[str, Any]:
        own = self.importance and not self.shared  # what all share is the server's
        return {"importance": self.importance, "anchor": self.anchor} if own else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.importance = dict(state_dict.get("importance", {}))
        self.anchor = dict(state_dict.get("anchor", {}))
        self._measured = {}


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
        super().__init__(
            memory=memory, log_likelihood=log_likelihood, num_samples=num_samples, decay=decay, shared=shared
        )
        check_strength(strength)
        self.strength = strength

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


def task_fisher(
    trainer: Any, pl_module: L.LightningModule, log_likelihood: LogLikelihood, num_samples: int | None
) -> Tree:
    """Fisher diagonal on the training data of the task that has ended, by parameter name.

    Args:
        trainer: A ``lightning.Trainer`` or a client job's context, in ``on_task_end``.
        pl_module: The module.
        log_likelihood: ``f(module, batch) -> Tensor [B]``, log p(y|x) per example.
        num_samples: Measure on so many examples; ``None`` for all.
    """
    limit = trainer.num_training_batches
    loader = islice(trainer.train_dataloader, None if math.isinf(limit) else int(limit))
    batches = (as_in_training(trainer, pl_module, batch) for batch in loader)
    fisher = fisher_diagonal(pl_module, log_likelihood, batches, num_samples=num_samples)
    if isinstance(trainer, L.Trainer) and trainer.world_size > 1:
        # Each rank measured its own share; DistributedSampler makes the shares equal.
        fisher = {name: trainer.strategy.reduce(value, reduce_op="mean") for name, value in fisher.items()}
    return fisher


def _joined(importance: Tree, anchor: Tree) -> Tree:
    """Both trees as one, so that they can travel."""
    parts = {"importance/": importance, "anchor/": anchor}
    return {kind + name: value for kind, tree in parts.items() for name, value in tree.items()}


def _parted(tree: Tree) -> tuple[Tree, Tree]:
    """Inverse of :func:`_joined`."""
    importance, anchor = (
        {name.removeprefix(kind): value for name, value in tree.items() if name.startswith(kind)}
        for kind in ("importance/", "anchor/")
    )
    return importance, anchor
