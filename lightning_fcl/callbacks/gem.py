"""GEM and A-GEM: no step may raise the loss on what was stored of earlier tasks."""

import math
from itertools import islice
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.side_pass import as_in_training, check_side_pass, side_gradients, write_gradients
from lightning_fcl.data.exemplars import Exemplars, count
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.gem import agem_project, gem_project
from lightning_fcl.types import MethodCard


class EpisodicMemory(ContinualCallback):
    """Keeps raw examples of every finished task on the client, and lets subclasses project gradients by them.

    The module's own ``training_step`` runs on the stored examples, in its present mode, without logging and without
    traces in buffers, Metric objects or torch's random state. The examples are part of the client's own state: they are
    written to its folder and to nothing that travels.
    """

    memory_size: int

    def __init__(self, memory_size: int) -> None:
        if memory_size < 0:
            raise MisconfigurationError(f"`memory_size` must be at least 0 examples per task, got {memory_size}.")
        self.memory_size = memory_size
        self.exemplars = Exemplars()
        """Raw examples by task."""

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_side_pass(trainer, pl_module, type(self).__name__)

    @override
    def on_task_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        limit = trainer.num_training_batches
        with torch.random.fork_rng([]):  # opening a loader draws
            batches = islice(trainer.train_dataloader, None if math.isinf(limit) else int(limit))
            self.exemplars.keep(batches, self.memory_size)

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self.exemplars.tasks:
            return
        weights = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        own = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in weights.values()])
        parts = torch.split(self._project(trainer, pl_module, own), [p.numel() for p in weights.values()])
        write_gradients(pl_module, {n: part.view_as(p) for (n, p), part in zip(weights.items(), parts, strict=True)})

    def _project(self, trainer: Any, pl_module: L.LightningModule, gradient: Tensor) -> Tensor:
        """The gradient to step with, shape ``[P]``."""
        raise NotImplementedError

    def _gradient_on(self, trainer: Any, pl_module: L.LightningModule, batch: Any) -> Tensor:
        with torch.random.fork_rng([]):  # transfer hooks may augment
            batch = as_in_training(trainer, pl_module, batch)
        return torch.cat([g.reshape(-1) for g in side_gradients(trainer, pl_module, [(batch, 0)]).values()])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tasks": self.exemplars.tasks} if self.exemplars.tasks else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.exemplars = Exemplars(state_dict.get("tasks", ()))


class GEM(EpisodicMemory):
    r"""Projects every step's gradient so that, to first order, the loss on no stored task rises.

    .. math:: \tilde g = \arg\min_z \tfrac12 \|z - g\|^2 \quad \text{with} \quad
        \langle z, g_k \rangle \ge 0 \text{ for every earlier task } k

    **Raw examples are stored**, on the client and nowhere else. Each step costs one more forward and backward pass per
    earlier task. In a federation each client projects by its own memory; the mean of the clients' steps need not
    satisfy anybody's constraint.

    Args:
        memory_size: Examples kept per task; 0 is FedAvg.
        margin: :math:`\gamma \ge 0`; once a constraint is violated, it pushes along all memories. The authors use .5.

    Raises:
        MisconfigurationError: If an argument is negative; at setup, with manual optimisation, a gradient scaler
            (16-mixed), shards, or ranks that share a client.

    Source: Lopez-Paz & Ranzato, "Gradient Episodic Memory for Continual Learning", NeurIPS 2017
    (https://arxiv.org/abs/1706.08840).

    Deviation: the memory is a sample of each finished task, not its last examples, and holds no examples of the task
    being learned; the quadratic program has no ridge; outputs are not masked by task.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="GEM",
        acts_on="gradient",
        paper="Lopez-Paz & Ranzato, NeurIPS 2017",
        url="https://arxiv.org/abs/1706.08840",
        functions=("gem_project", "nonnegative_minimum"),
        needs=("task boundary", "raw exemplars, kept on the client", "a further pass per step and earlier task"),
        smoke={"memory_size": 2, "margin": 0.5},
        neutral={"memory_size": 0},
    )

    def __init__(self, memory_size: int = 256, margin: float = 0.5) -> None:
        super().__init__(memory_size)
        check_amount("margin", margin)
        self.margin = margin

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(memory_size=self.memory_size, margin=self.margin)

    @override
    def _project(self, trainer: Any, pl_module: L.LightningModule, gradient: Tensor) -> Tensor:
        rows = [self._gradient_on(trainer, pl_module, task) for task in self.exemplars.tasks]
        return gem_project(gradient, torch.stack(rows), self.margin)


class AGEM(EpisodicMemory):
    r"""Projects every step's gradient so that the mean loss of a random memory batch does not rise.

    .. math:: \tilde g = g - \frac{\langle g, r \rangle}{\langle r, r \rangle} r \quad \text{if } \langle g, r \rangle <
    0

    **Raw examples are stored**, on the client and nowhere else. Each step costs one more forward and backward pass,
    however many tasks there were.

    Args:
        memory_size: Examples kept per task; 0 is FedAvg.
        batch_size: Examples drawn from the memory for a step; by default as many as the training batch has.

    Raises:
        MisconfigurationError: If an argument is out of range; at setup as :class:`~lightning_fcl.GEM`.

    Source: Chaudhry et al., "Efficient Lifelong Learning with A-GEM", ICLR 2019 (https://arxiv.org/abs/1812.00420).

    Deviation: the memory is a sample of each finished task; outputs are not masked by task.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="A-GEM",
        acts_on="gradient",
        paper="Chaudhry et al., ICLR 2019",
        url="https://arxiv.org/abs/1812.00420",
        functions=("agem_project",),
        needs=("task boundary", "raw exemplars, kept on the client", "a further pass per step"),
        smoke={"memory_size": 16},
        neutral={"memory_size": 0},
    )

    def __init__(self, memory_size: int = 256, batch_size: int | None = None) -> None:
        super().__init__(memory_size)
        if batch_size is not None and batch_size < 1:
            raise MisconfigurationError(f"`batch_size` must be at least 1, got {batch_size}. Use None for the batch's.")
        self.batch_size = batch_size

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(memory_size=self.memory_size, batch_size=self.batch_size)

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._generator = torch.Generator().manual_seed(torch.initial_seed())  # of the job; draws nothing from it

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._drawn = self.batch_size or max(1, count(batch))

    @override
    def _project(self, trainer: Any, pl_module: L.LightningModule, gradient: Tensor) -> Tensor:
        batch = self.exemplars.draw(self._drawn, self._generator)
        return agem_project(gradient, self._gradient_on(trainer, pl_module, batch))
