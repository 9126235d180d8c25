"""FedLMD: what the server's model says of the classes that a client has few examples of."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount, check_positive
from lightning_fcl.functional.fedlmd import label_masked_distillation, majority_classes
from lightning_fcl.mixins.base import LossTermsMixin, StepOutputs
from lightning_fcl.mixins.class_counts import count_classes, widened
from lightning_fcl.types import MethodCard


class FedLMD(LossTermsMixin):
    r"""Distils the round's global model, silenced on the true class and on the client's majority classes.

    .. math:: L + \beta\,\tau^2\,\mathrm{KL}\bigl(\sigma_\tau(z^{g}_{\setminus y \setminus M}) \,\|\,
        \sigma_\tau(z_{\setminus y})\bigr)

    Local data teach the majority classes :math:`M` well enough; the teacher speaks of those that would be forgotten.
    The labels of the client's examples in the current task are counted before training, without reading the inputs
    where the dataset stores its labels. In a stock ``Trainer`` they are those of the training set.

    Args:
        lmd_strength: :math:`\beta \ge 0`; 0 is FedAvg.
        lmd_temperature: :math:`\tau > 0`.

    Raises:
        MisconfigurationError: If an argument is out of range; before the first batch, if there are no labels to count.

    Source: Lu et al., "Federated Learning with Label-Masking Distillation", ACM MM 2023
    (https://arxiv.org/abs/2409.13136).

    Deviation: where masking leaves no class, the example has no term (see
    :func:`~lightning_fcl.functional.label_masked_distillation`). The paper's variant without a teacher is left out.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedLMD",
        acts_on="loss",
        paper="Lu et al., ACM MM 2023",
        url="https://arxiv.org/abs/2409.13136",
        functions=("label_masked_distillation", "majority_classes"),
        needs=("logits", "a second forward pass", "counts of the client's labels"),
        smoke={"lmd_strength": 1.0},
        neutral={"lmd_strength": 0.0},
    )
    uses_round_anchor = True

    def __init__(self, *args: Any, lmd_strength: float = 1.0, lmd_temperature: float = 1.0, **kwargs: Any) -> None:
        check_amount("lmd_strength", lmd_strength)
        check_positive("lmd_temperature", lmd_temperature)
        super().__init__(*args, **kwargs)
        self.lmd_strength = lmd_strength
        self.lmd_temperature = lmd_temperature

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.lmd_strength > 0:
            self._lmd_counts = count_classes(self.trainer).to(self.device)

    @override
    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        terms = super().loss_terms(outputs, batch)
        if self.lmd_strength == 0:
            return terms
        teacher = self.frozen_outputs(self.round_anchor(), batch).logits
        majority = majority_classes(widened(self._lmd_counts, outputs.logits.shape[1]))
        targets = self.targets_of(batch)
        term = label_masked_distillation(outputs.logits, teacher, targets, majority, self.lmd_temperature)
        return {**terms, "lmd": self.lmd_strength * term}
