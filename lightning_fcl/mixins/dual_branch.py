"""The client's half of FedADB: a global and a local head on one extractor."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_fcl._heads import find_head, replaced_output, silent
from lightning_fcl.callbacks.class_anchors import unpack_anchors
from lightning_fcl.data.balanced import BalancedBatches
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.class_anchors import AnchorSet
from lightning_fcl.functional.dual_branch import local_branch_weight, missing_rate
from lightning_fcl.mixins.base import LossTermsMixin
from lightning_fcl.types import MethodCard


class DualBranchMixin(LossTermsMixin):
    """Trains a classifier by two branches on one extractor; stands left of the own class.

    The module's ``training_step`` runs twice per batch: with its own head, the *global* one, on a class-balanced batch
    of local examples and anchors of the same size; and with a second, *local* head on the batch itself. The loss is
    ``global + weight * local``, with ``weight = progress ** (missing_rate * quality)``. Everything else (``forward``,
    evaluation, prediction) uses the global head; :meth:`local_branch` switches to the local one.

    In a federation anchors come from :class:`~lightning_fcl.callbacks.ClassAnchors`, and progress is the round's number
    over the task's rounds. In a stock ``Trainer`` set ``module.anchors`` (an
    :class:`~lightning_fcl.functional.AnchorSet`); progress is the epoch's number over ``max_epochs``. Without anchors
    the balanced batch has local classes alone, and their quality counts as 1.

    BatchNorm's running statistics follow the local batches only. What the module logs is what it logs for the
    balanced batch; ``loss/local`` is the weighted local term and ``local_weight`` the weight. Where ranks share a
    client, they share the balanced batch too.

    Args:
        *args: Of the own class.
        dual_local_branch: Whether there is a local branch.
        dual_balanced: Whether the global branch trains on balanced batches; ``False`` gives it the batch itself.
        dual_weight: Fixed weight of the local branch in the place of the formula.
        dual_share_local: Whether the local head travels and is averaged, as in the paper; ``False`` keeps it with each
            client, so that only the extractor and the global head reach the aggregator.
        **kwargs: Of the own class.

    Raises:
        MisconfigurationError: If the module has no linear layer (set ``feature_module``), or the weight is negative.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedADB",
        acts_on="loss",
        paper="Liu et al., FedADB: Class Anchor-Driven Dual-Branch Federated Learning, ACM MM 2026",
        url="https://arxiv.org/abs/2608.15310",
        functions=("class_anchors", "class_balanced_batch", "local_branch_weight", "missing_rate"),
        needs=("labels",),
        neutral={"dual_local_branch": False, "dual_balanced": False},
    )
    anchors: AnchorSet | None = None
    input_module: str | None = None
    """Name of the embedding whose output anchors replace; as in :class:`~lightning_fcl.callbacks.ClassAnchors`."""

    _job: "_Job | None" = None

    def __init__(
        self,
        *args: Any,
        dual_local_branch: bool = True,
        dual_balanced: bool = True,
        dual_weight: float | None = None,
        dual_share_local: bool = True,
        **kwargs: Any,
    ) -> None:
        if dual_weight is not None and not 0 <= dual_weight < float("inf"):
            raise MisconfigurationError(f"`dual_weight` must be finite and not negative, got {dual_weight}.")
        super().__init__(*args, **kwargs)
        self.dual_local_branch = dual_local_branch
        self.dual_balanced = dual_balanced
        self.dual_weight = dual_weight
        self.feature_module, head = find_head(self, self.feature_module)
        if dual_local_branch:
            self.dual_local_head = copy.deepcopy(head)  # the same first values, and no random draw
            if not dual_share_local:
                self.stays_local = (*getattr(self, "stays_local", ()), "dual_local_head.*")

    @contextmanager
    def local_branch(self) -> Iterator[None]:
        """Inside, every forward pass goes through the local head."""
        if not self.dual_local_branch:
            raise MisconfigurationError("`dual_local_branch` must be True to have a local head, got False.")
        with replaced_output(self.get_submodule(str(self.feature_module)), lambda x, _: self.dual_local_head(*x)):
            yield

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.dual_local_branch:
            self._check_optimizers()
        if self.dual_balanced or self.dual_local_branch:
            self._job = _Job(self, self.trainer)

    def _check_optimizers(self) -> None:
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        stepped = {id(p) for group in groups for p in group["params"]}
        own = {id(p) for p in self.dual_local_head.parameters() if p.requires_grad}
        if not getattr(self.trainer, "sharded", False) and not own <= stepped:
            raise MisconfigurationError(
                "`configure_optimizers` must cover the local head, `self.dual_local_head`, which no optimizer holds. "
                "Give it `self.parameters()`."
            )

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._job = None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The own class's step, once per branch."""
        step, (batch, *rest) = super().training_step, [*args, *kwargs.values()]
        if self._job is None:
            return step(batch, *rest)
        with self._global_batch(self._job, batch) as balanced:
            first = step(balanced, *rest)
        if not self.dual_local_branch:
            if self.dual_balanced and _tracking(self):
                with torch.no_grad(), silent(self):
                    step(batch, *rest)  # for the running statistics alone
            return first
        with self.local_branch(), silent(self):
            second = step(batch, *rest)
        if first is None or second is None:
            return first
        weight = self._job.weight(self)
        term = weight * _loss(second)
        self.log_dict({"loss/local": term.detach(), "local_weight": weight})
        total = _loss(first) + term
        return {**first, "loss": total} if isinstance(first, Mapping) else total

    @contextmanager
    def _global_batch(self, job: "_Job", batch: Any) -> Iterator[Any]:
        if not self.dual_balanced:
            with _frozen_statistics(self) if self.dual_local_branch else nullcontext():
                yield batch
            return
        layer = None if self.input_module is None else self.get_submodule(self.input_module)
        # Ranks that share a client draw the same balanced batch, and take of it what they have of the own one.
        share = getattr(self.trainer, "batch_share", None) or (len(self.targets_of(batch)), None)
        drawn, places = job.batches.draw(*share)
        drawn = self.on_before_batch_transfer(self.trainer.precision_plugin.convert_input(drawn), 0)
        drawn = self.on_after_batch_transfer(self.transfer_batch_to_device(drawn, self.device, 0), 0)
        with job.batches.placed(drawn, places, layer) as placed, _frozen_statistics(self):
            yield placed


class _Job:
    """What one stretch of local training needs: balanced batches, and what the weight follows from."""

    def __init__(self, module: DualBranchMixin, trainer: Any) -> None:
        head = module.get_submodule(str(module.feature_module))
        weight = next(head.parameters())
        broadcasts = getattr(trainer, "broadcast", {}).values()
        message = next((sent for sent in broadcasts if {"inputs", "targets", "quality"} <= sent.keys()), None)
        anchors = module.anchors if message is None else unpack_anchors(message, weight.device, weight.dtype)
        # Seeded by torch's seed of this job, but drawn apart: the module's own draws stay what they were. Ranks of a
        # stock Trainer have examples of their own; those that share a client have not.
        rank = trainer.global_rank if isinstance(trainer, L.Trainer) else 0
        generator = torch.Generator().manual_seed((torch.initial_seed() + rank) % 2**63)
        num_classes = getattr(head, "out_features", None)
        if num_classes is None:
            raise MisconfigurationError("`feature_module` must name a linear layer with `out_features`.")
        self.batches = BalancedBatches(trainer.train_dataloader, anchors, num_classes, generator)
        total = num_classes if message is None else len(message["classes"])
        self.missing_rate = missing_rate(min(self.batches.present, total), total)
        self.quality = 1.0 if anchors is None else anchors.quality
        self.trainer = trainer

    def weight(self, module: DualBranchMixin) -> float:
        """Weight of the local branch."""
        if module.dual_weight is not None:
            return module.dual_weight
        trainer = self.trainer
        federated = hasattr(trainer, "rounds")
        at, of = (trainer.round, trainer.rounds) if federated else (trainer.current_epoch, trainer.max_epochs or -1)
        progress = min(1.0, (at + 1) / of) if of > 0 else 1.0
        return local_branch_weight(progress, self.missing_rate, self.quality)


def _loss(result: Any) -> Tensor:
    loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
    return loss


def _tracking(module: nn.Module) -> list[_BatchNorm]:
    return [child for child in module.modules() if isinstance(child, _BatchNorm) and child.track_running_stats]


@contextmanager
def _frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm normalises by its batch and leaves its running statistics alone."""
    layers = _tracking(module)
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
