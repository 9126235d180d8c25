"""FLwF-2T: two teachers, the model of the last task and the server's of this round."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_positive
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.flwf2t import two_teacher_distillation
from lightning_fcl.mixins.base import LossTermsMixin, StepOutputs
from lightning_fcl.types import MethodCard


class FLwF2T(LossTermsMixin):
    r"""Shares the loss between the labels, the model at the end of the last task, and the round's global model.

    .. math:: \alpha L + \beta\,D_T(z^{old}, z) + (1 - \alpha - \beta)\,D_T(z^{g}, z)

    with :math:`D_T` the distillation loss. In the first task there is no old model, and the loss is :math:`L` alone.

    Args:
        flwf2t_label_weight: :math:`\alpha` in [0, 1], the weight of the module's own loss; 1 is FedAvg.
        flwf2t_old_weight: :math:`\beta` in [0, 1 - :math:`\alpha`], of the old model; the server's gets the rest.
        flwf2t_temperature: :math:`T > 0`.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Usmanova et al., "A distillation-based approach integrating continual learning and federated learning for
    pervasive services", 2021 (https://arxiv.org/abs/2109.04197). The default weights are those that SPECIAL (ICML 2026,
    https://arxiv.org/abs/2601.22274) compares with.

    Deviation: the old teacher is the global model at the end of the last task, one for all clients, not each client's
    own; a client that joins later has it too. No exemplars.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FLwF-2T",
        acts_on="loss",
        paper="Usmanova et al., 2021",
        url="https://arxiv.org/abs/2109.04197",
        functions=("two_teacher_distillation", "distillation_loss"),
        needs=("task boundary", "logits", "two more forward passes"),
        smoke={"flwf2t_label_weight": 0.5},
        neutral={"flwf2t_label_weight": 1.0, "flwf2t_old_weight": 0.0},
    )
    uses_round_anchor = True
    uses_task_anchor = True

    def __init__(
        self,
        *args: Any,
        flwf2t_label_weight: float = 0.5,
        flwf2t_old_weight: float = 0.25,
        flwf2t_temperature: float = 2.0,
        **kwargs: Any,
    ) -> None:
        if not (flwf2t_label_weight >= 0 and flwf2t_old_weight >= 0 and flwf2t_label_weight + flwf2t_old_weight <= 1):
            raise MisconfigurationError(
                "`flwf2t_label_weight` and `flwf2t_old_weight` must not be negative and not exceed 1 together, got "
                f"{flwf2t_label_weight} and {flwf2t_old_weight}. The server's model gets the rest."
            )
        check_positive("flwf2t_temperature", flwf2t_temperature)
        super().__init__(*args, **kwargs)
        self.flwf2t_label_weight = flwf2t_label_weight
        self.flwf2t_old_weight = flwf2t_old_weight
        self.flwf2t_temperature = flwf2t_temperature

    @override
    def own_loss_weight(self) -> float:
        weight = super().own_loss_weight()
        return weight if self.task_anchor() is None else self.flwf2t_label_weight * weight

    @override
    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        terms = super().loss_terms(outputs, batch)
        anchor = self.task_anchor()
        if anchor is None or self.flwf2t_label_weight == 1:
            return terms
        term = two_teacher_distillation(
            outputs.logits,
            self.frozen_outputs(anchor, batch).logits,
            self.frozen_outputs(self.round_anchor(), batch).logits,
            old_weight=self.flwf2t_old_weight,
            server_weight=1 - self.flwf2t_label_weight - self.flwf2t_old_weight,
            temperature=self.flwf2t_temperature,
        )
        return {**terms, "flwf2t": term}
