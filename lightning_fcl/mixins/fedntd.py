"""FedNTD: what the server's model says of the classes that an example does not belong to."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount, check_positive
from lightning_fcl.functional.fedntd import not_true_distillation
from lightning_fcl.mixins.base import LossTermsMixin, StepOutputs
from lightning_fcl.types import MethodCard


class FedNTD(LossTermsMixin):
    r"""Distils the round's global model on the classes other than the true one, so that local training keeps them.

    .. math:: L + \beta\,\tau^2\,\mathrm{KL}\bigl(\sigma_\tau(z^{g}_{\setminus y}) \,\|\,
        \sigma_\tau(z_{\setminus y})\bigr)

    The teacher is the module with the weights at the start of local training, in eval mode. In a stock ``Trainer``
    these are the weights at the start of ``fit``.

    Args:
        ntd_strength: :math:`\beta \ge 0`; 0 is FedAvg.
        ntd_temperature: :math:`\tau > 0`.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
    NeurIPS 2022 (https://arxiv.org/abs/2106.03097).

    Deviation: the authors' code leaves the teacher in whatever mode the copied model is in; here it is in eval mode.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedNTD",
        acts_on="loss",
        paper="Lee et al., NeurIPS 2022",
        url="https://arxiv.org/abs/2106.03097",
        functions=("not_true_distillation",),
        needs=("logits", "a second forward pass"),
        smoke={"ntd_strength": 1.0},
        neutral={"ntd_strength": 0.0},
    )
    uses_round_anchor = True

    def __init__(self, *args: Any, ntd_strength: float = 1.0, ntd_temperature: float = 1.0, **kwargs: Any) -> None:
        check_amount("ntd_strength", ntd_strength)
        check_positive("ntd_temperature", ntd_temperature)
        super().__init__(*args, **kwargs)
        self.ntd_strength = ntd_strength
        self.ntd_temperature = ntd_temperature

    @override
    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        terms = super().loss_terms(outputs, batch)
        if self.ntd_strength == 0:
            return terms
        teacher = self.frozen_outputs(self.round_anchor(), batch).logits
        term = not_true_distillation(outputs.logits, teacher, self.targets_of(batch), self.ntd_temperature)
        return {**terms, "ntd": self.ntd_strength * term}
