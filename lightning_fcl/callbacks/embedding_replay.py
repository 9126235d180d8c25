"""EmbeddingReplay: rehearse earlier tasks by embeddings that a small generator on the client draws (PPFR)."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl._heads import modes_kept
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.side_pass import as_in_training
from lightning_fcl.callbacks.task_embeddings import TaskEmbeddings
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.embedding_replay import Rehearsal, balanced_counts, soft_labels
from lightning_fcl.types import MethodCard

if TYPE_CHECKING:
    from lightning_fcl.mixins.embedding_forward import EmbeddingForwardMixin
    from lightning_fcl.models.embedding_generator import EmbeddingGenerator


class EmbeddingReplay(ContinualCallback):
    r"""Beside each batch of new data, a batch of embeddings of earlier tasks, drawn by a generator of the client's own.

    .. math:: L(\theta) + \gamma \, \mathbb{E}_{(\hat h, \hat y)} \left[ CE(f_{emb}(\hat h; \theta), \hat y) \right]

    At the end of a task the client fits a small generator to the embeddings of its own data under the final global
    model (:class:`~lightning_fcl.models.EmbeddingGenerator`). In later tasks each job draws ``budget`` embeddings with
    soft labels anew, evenly over tasks and events, and adds their loss, which enters the module behind its encoders
    (:class:`~lightning_fcl.mixins.EmbeddingForwardMixin`): what stands before the embeddings gets no gradient from it.

    Generators and what they draw stay on the client; nothing but the weights is sent. That is no formal privacy: a
    prototype of an event with one example is that example's embedding. A client without data of a task keeps the
    generators it has; in its first task there is nothing to rehearse, and the loss is untouched.

    Args:
        strength: :math:`\gamma \ge 0`; 0 switches it off.
        budget: Embeddings drawn per job.
        memory: ``"all"`` keeps a generator of every task, ``"last"`` that of the newest.
        batch_size: Embeddings beside each batch; by default as many as the batch has examples. Where ranks share a
            client, each of them rehearses so many, the same ones.
        mode: ``"cvae"`` or ``"literal"``, as in :func:`~lightning_fcl.models.fit_generator`.
        epochs: Passes over the task's embeddings when a generator is fitted.
        fit_batch_size: Examples per step of that.
        lr: Learning rate of that.
        num_samples: Fit to at most so many of the task's examples, drawn at random; ``None`` for all. Of each of them a
            vector per modality is held; token sequences are only summed up by event, those of all examples.
        smoothing: Share of the teacher's belief in a soft label, in [0, 1].
        latent: Numbers in a Gaussian code.
        weights: Of the four losses of the generator: reconstruction, alignment, teacher, label.

    Raises:
        MisconfigurationError: If an argument is out of range; at setup, if the module has no way in for embeddings.

    Source: FedCMM (arXiv 2607.12112), sec. IV-C, eqs. 6 and 12, alg. 2.

    Deviation: the paper gives no weight of the rehearsal, no weights of the four losses and no smoothing: 1, 1 and 0.1.
    Its generator has a reconstruction loss and no encoder, so that it falls together to each event's mean:
    ``mode="literal"``; by default an encoder is added while fitting. It rehearses the last task only:
    ``memory="last"``. The teacher's belief is stored as a mean per event.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="EmbeddingReplay",
        acts_on="loss",
        paper="FedCMM: modality-aware EWC, private replay and similarity-filtered aggregation, 2026",
        url="https://arxiv.org/abs/2607.12112",
        functions=("soft_labels", "soft_cross_entropy", "balanced_counts", "generator_losses"),
        needs=("task boundary", "a pass over the task's data", "a way in for embeddings"),
        smoke={"strength": 1.0},
        neutral={"strength": 0.0},
    )

    def __init__(
        self,
        strength: float = 1.0,
        *,
        budget: int = 100,
        memory: str = "all",
        batch_size: int | None = None,
        mode: Literal["cvae", "literal"] = "cvae",
        epochs: int = 5,
        fit_batch_size: int = 32,
        lr: float = 1e-3,
        num_samples: int | None = 10_000,
        smoothing: float = 0.1,
        latent: int = 64,
        weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
    ) -> None:
        check_strength(strength)
        if memory not in ("all", "last"):
            raise MisconfigurationError(f'`memory` must be "all" or "last", got {memory!r}.')
        if mode not in ("cvae", "literal"):
            raise MisconfigurationError(f'`mode` must be "cvae" or "literal", got {mode!r}.')
        counts = {"budget": budget, "epochs": epochs, "fit_batch_size": fit_batch_size, "latent": latent}
        for name, count in {**counts, "batch_size": batch_size, "num_samples": num_samples}.items():
            if count is not None and count < 1:
                raise MisconfigurationError(f"`{name}` must be at least 1, got {count}.")
        if not 0 <= smoothing <= 1 or not 0 < lr < math.inf:
            raise MisconfigurationError(f"`smoothing` must lie in [0, 1] and `lr` above 0, got {smoothing} and {lr}.")
        if len(weights) != 4 or not all(0 <= one < math.inf for one in weights):
            raise MisconfigurationError(f"`weights` must be four finite numbers, none negative, got {list(weights)}.")
        self.strength = strength
        self.budget = budget
        self.memory = memory
        self.batch_size = batch_size
        self.mode = mode
        self.epochs = epochs
        self.fit_batch_size = fit_batch_size
        self.lr = lr
        self.num_samples = num_samples
        self.smoothing = smoothing
        self.latent = latent
        self.weights = tuple(weights)
        self.generators: list[dict[str, Tensor]] = []
        """``state_dict`` of an :class:`~lightning_fcl.models.EmbeddingGenerator` per task kept, oldest first."""
        self._buffer: tuple[tuple[Tensor, ...], Tensor] | None = None
        self._rng: torch.Generator | None = None
        self._queue = torch.empty(0, dtype=torch.int64)

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(strength=self.strength, memory=self.memory, mode=self.mode)

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        if not hasattr(pl_module, "forward_embeddings"):
            raise MisconfigurationError(
                f"`EmbeddingReplay` must have a way into the module behind its encoders, got a "
                f"{type(pl_module).__name__} without one. Write `class Net(EmbeddingForwardMixin, "
                f"{type(pl_module).__name__})`, and override its two methods if the module has several modalities."
            )

    # -- rehearsal -----------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        pl_module.rehearsal = self._buffer = None
        self._queue = self._queue[:0]
        if self.strength > 0 and self.generators:
            # A generator of its own: shuffles and dropout draw what they would without rehearsal.
            self._rng = torch.Generator().manual_seed(torch.initial_seed())
            self._buffer = self._draw(pl_module, self._rng)

    def _draw(self, pl_module: Any, rng: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        from lightning_fcl.models.embedding_generator import EmbeddingGenerator  # late: models import mixins, those us

        dtype = next(p.dtype for p in pl_module.parameters() if p.is_floating_point())
        drawn, targets = [], []
        for state, count in zip(self.generators, balanced_counts(len(self.generators), self.budget), strict=True):
            made, soft = EmbeddingGenerator.from_state(state).sample(balanced_counts(len(state["labels"]), count), rng)
            drawn.append([one.to(pl_module.device, dtype) for one in made])
            targets.append(soft.to(pl_module.device))
        classes = max(soft.shape[1] for soft in targets)  # a head may have grown between two tasks
        padded = [torch.nn.functional.pad(soft, (0, classes - soft.shape[1])) for soft in targets]
        return tuple(torch.cat(one) for one in zip(*drawn, strict=True)), torch.cat(padded)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._buffer is None:
            return
        size = min(self.batch_size or len(pl_module.targets_of(batch)), self.budget)
        while len(self._queue) < size:  # pass after pass over the buffer, each in a new order
            self._queue = torch.cat([self._queue, torch.randperm(self.budget, generator=self._rng)])
        rows, self._queue = self._queue[:size], self._queue[size:]
        embeddings, targets = self._buffer
        rows = rows.to(targets.device)
        pl_module.rehearsal = Rehearsal(tuple(one[rows] for one in embeddings), targets[rows], self.strength)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._buffer is not None:
            pl_module.rehearsal = None

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._buffer = self._rng = None
        super().on_train_end(trainer, pl_module)

    # -- the end of a task ---------------------------------------------------------------------------------------------

    @override
    def on_task_end(self, trainer: Any, pl_module: Any) -> None:
        if self.strength == 0:
            return
        rng = torch.Generator().manual_seed(torch.initial_seed())
        with modes_kept(pl_module, training=False):
            generator = self._fitted(pl_module, self._examples(trainer, pl_module, rng), rng)
        state = {name: value.detach() for name, value in generator.state_dict().items()}
        self.generators = [*(self.generators if self.memory == "all" else ()), state]

    def _examples(self, trainer: Any, pl_module: "EmbeddingForwardMixin", rng: torch.Generator) -> TaskEmbeddings:
        limit = trainer.num_training_batches
        found = TaskEmbeddings(self.num_samples, rng)
        with torch.no_grad():
            for batch in islice(trainer.train_dataloader, None if math.isinf(limit) else int(limit)):
                batch = as_in_training(trainer, pl_module, batch)
                embeddings = pl_module.embeddings_of(batch)
                teacher = pl_module.forward_embeddings(*embeddings).float().softmax(dim=1)
                found.add(pl_module.targets_of(batch), teacher, [one.float() for one in embeddings])
        return found

    def _fitted(
        self, pl_module: "EmbeddingForwardMixin", found: TaskEmbeddings, rng: torch.Generator
    ) -> "EmbeddingGenerator":
        from lightning_fcl.models.embedding_generator import EmbeddingGenerator, fit_generator, pooled

        known, (belief, *means) = found.means()
        events, teacher, *real = found.kept()
        spread = [_spread(one, one - pooled(middle)[events]) for one, middle in zip(real, means, strict=True)]
        dtype = next(p.dtype for p in pl_module.parameters() if p.is_floating_point())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng)))
            generator = EmbeddingGenerator(
                means,
                spread,
                known,
                soft_labels(known, belief, self.smoothing),
                latent=self.latent,
            ).to(teacher.device)
            fit_generator(
                generator,
                real,
                events,
                teacher,
                lambda *embeddings: pl_module.forward_embeddings(*(one.to(dtype) for one in embeddings)).float(),
                rng,
                mode=self.mode,
                epochs=self.epochs,
                batch_size=self.fit_batch_size,
                lr=self.lr,
                weights=self.weights,
            )
        return generator

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"generators": self.generators} if self.generators else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generators = list(state_dict.get("generators", []))


def _spread(values: Tensor, deviations: Tensor) -> Tensor:
    """Standard deviation per dimension; at least a twentieth of the usual size, since one example has no deviation."""
    return deviations.square().mean(0).sqrt().clamp_min(0.05 * float(values.square().mean().sqrt()) + 1e-6)
