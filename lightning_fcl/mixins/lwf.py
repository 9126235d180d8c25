"""LwF: the model of the last task teaches the new one, on the new data."""

from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount, check_positive
from lightning_fcl.callbacks.base import task_is_over
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.distillation import distillation_loss
from lightning_fcl.mixins.base import LossTermsMixin, StepOutputs
from lightning_fcl.mixins.class_counts import count_classes
from lightning_fcl.types import MethodCard

_CHECKPOINT_KEY = "lightning_fcl_lwf_seen"


class LwF(LossTermsMixin):
    r"""Distils the model at the end of the last task; it sees no old example.

    .. math:: L + \lambda\,T^2\,\mathrm{KL}\bigl(\sigma_T(z^{old}_{C_{old}}) \,\|\, \sigma_T(z_{C_{old}})\bigr)

    In a federation ("LwF-FL") the teacher is the global model at the end of the last task, the same for all rounds of
    the new one; in a stock ``Trainer`` the module at the end of the last ``fit``. In the first task it does nothing.

    Args:
        lwf_strength: :math:`\lambda \ge 0`; 0 is FedAvg.
        lwf_temperature: :math:`T > 0`.
        lwf_classes: :math:`C_{old}`: ``"seen"`` for the classes of earlier tasks, which are looked up in the training
            sets (of all clients), or ``"all"`` that the old head has an output for. Where the first task has every
            class, they are the same.

    Raises:
        MisconfigurationError: If an argument is out of range; with ``"seen"``, if there are no labels to be found.

    Source: Li & Hoiem, "Learning without Forgetting", ECCV 2016 (https://arxiv.org/abs/1606.09282).

    Deviation: the divergence in the place of the cross-entropy, and the factor :math:`T^2` (see
    :func:`~lightning_fcl.functional.distillation_loss`); no warm-up of a new head.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="LwF",
        acts_on="loss",
        paper="Li & Hoiem, ECCV 2016",
        url="https://arxiv.org/abs/1606.09282",
        functions=("distillation_loss",),
        needs=("task boundary", "logits", "a second forward pass", "the classes of earlier tasks"),
        smoke={"lwf_strength": 1.0},
        neutral={"lwf_strength": 0.0},
    )
    uses_task_anchor = True

    def __init__(
        self,
        *args: Any,
        lwf_strength: float = 1.0,
        lwf_temperature: float = 2.0,
        lwf_classes: Literal["seen", "all"] = "seen",
        **kwargs: Any,
    ) -> None:
        check_amount("lwf_strength", lwf_strength)
        check_positive("lwf_temperature", lwf_temperature)
        if lwf_classes not in ("seen", "all"):
            raise MisconfigurationError(f'`lwf_classes` must be "seen" or "all", got {lwf_classes!r}.')
        super().__init__(*args, **kwargs)
        self.lwf_strength = lwf_strength
        self.lwf_temperature = lwf_temperature
        self.lwf_classes = lwf_classes
        self._lwf_seen: list[int] = []  # in earlier fits of a stock Trainer; a federation's stream knows
        self._lwf_old: Tensor | None = None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._lwf_old = None
        if self.lwf_strength == 0 or self.lwf_classes == "all":
            return
        trainer: Any = self.trainer
        if isinstance(trainer, L.Trainer):
            old = self._lwf_seen
            self._lwf_new = count_classes(trainer).nonzero().flatten().tolist()
        else:
            old = list(trainer.stream.classes(max(trainer.task - 1, 0)))
        self._lwf_old = torch.tensor(old, device=self.device)

    @override
    def on_train_end(self) -> None:
        if self._lwf_old is not None and task_is_over(self.trainer, self._step_at_start):
            self._lwf_seen = sorted({*self._lwf_seen, *self._lwf_new})
        super().on_train_end()

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[_CHECKPOINT_KEY] = self._lwf_seen

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._lwf_seen = checkpoint.get(_CHECKPOINT_KEY, [])

    @override
    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        terms = super().loss_terms(outputs, batch)
        anchor = self.task_anchor()
        if anchor is None or self.lwf_strength == 0:
            return terms
        teacher = self.frozen_outputs(anchor, batch).logits
        logits = outputs.logits[:, : teacher.shape[1]]  # the old head may be narrower
        if self._lwf_old is not None:
            logits, teacher = logits[:, self._lwf_old], teacher[:, self._lwf_old]
        return {**terms, "lwf": self.lwf_strength * distillation_loss(logits, teacher, self.lwf_temperature)}
