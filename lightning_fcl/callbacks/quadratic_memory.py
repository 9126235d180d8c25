"""What EWC and its kin share: the memory of earlier tasks as one quadratic."""

import math
from abc import abstractmethod
from collections.abc import Callable
from itertools import islice
from typing import Any, Literal, TypeAlias

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.gradients import add_penalty, check_gradient_access, weights_of
from lightning_fcl.callbacks.side_pass import as_in_training
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.ewc import merge_quadratics
from lightning_fcl.functional.fisher import fisher_diagonal
from lightning_fcl.types import Params

Tree: TypeAlias = dict[str, Tensor]


class QuadraticMemory(ContinualCallback):
    """What EWC and its kin share: importances measured when a task ends, and one quadratic for all of them.

    Args:
        memory: ``"all"`` protects all earlier tasks, ``"last"`` only the one before.
        decay: With ``memory="all"``, what the importance of earlier tasks is multiplied by at each task's end.
        log_likelihood: ``f(module, batch) -> Tensor [B]``, log p(y|x) per example.
        num_samples: Measure on so many examples; ``None`` for all.

    Raises:
        MisconfigurationError: If an argument is out of range; at setup, if the strategy hides whole gradients.
    """

    def __init__(
        self,
        *,
        memory: Literal["all", "last"],
        decay: float = 1.0,
        log_likelihood: Callable[[Any, Any], Tensor],
        num_samples: int | None,
    ) -> None:
        if memory not in ("all", "last"):
            raise MisconfigurationError(f'`memory` must be "all" or "last", got {memory!r}.')
        if not 0 <= decay <= 1:
            raise MisconfigurationError(f"`decay` must be between 0 and 1, got {decay}. 1 forgets nothing.")
        self.memory = memory
        self.decay = decay
        self.log_likelihood = log_likelihood
        self.num_samples = num_samples
        self.importance: Tree = {}
        """Fisher diagonal by parameter name, mean over samples; empty before the first task ends."""
        self.anchor: Tree = {}
        """Where the quadratic has its minimum, by parameter name."""

    @property
    @abstractmethod
    def is_on(self) -> bool:
        """Whether there is any pull; without one nothing is measured."""

    @abstractmethod
    def pull(self, weights: Params, anchor: Params, importance: Params) -> dict[str, Tensor]:
        """Gradient of the penalty, by parameter name; all three trees have the same names."""

    def weigh(self, importance: Tree) -> Tree:
        """The importance of one task as it enters the memory; by default as measured."""
        return importance

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_gradient_access(trainer, type(self).__name__)

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
        if self.is_on:
            self.importance, self.anchor = self.remember(
                (self.importance, self.anchor), self.measure(trainer, pl_module)
            )

    def measure(self, trainer: Any, pl_module: L.LightningModule) -> tuple[Tree, Tree]:
        """Importance of the task that ends, and the weights at its end."""
        limit = trainer.num_training_batches
        loader = islice(trainer.train_dataloader, None if math.isinf(limit) else int(limit))
        batches = (as_in_training(trainer, pl_module, batch) for batch in loader)
        importance = fisher_diagonal(pl_module, self.log_likelihood, batches, num_samples=self.num_samples)
        if isinstance(trainer, L.Trainer) and trainer.world_size > 1:
            # Each rank measured its own share; DistributedSampler makes the shares equal.
            importance = {name: trainer.strategy.reduce(value, reduce_op="mean") for name, value in importance.items()}
        anchor = {name: weight.clone() for name, weight in weights_of(trainer, pl_module).items()}
        return self.weigh(importance), anchor

    def remember(self, old: tuple[Tree, Tree], new: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
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
    def state_dict(self) -> dict[str, Any]:
        return {"importance": self.importance, "anchor": self.anchor} if self.importance else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.importance = dict(state_dict.get("importance", {}))
        self.anchor = dict(state_dict.get("anchor", {}))
