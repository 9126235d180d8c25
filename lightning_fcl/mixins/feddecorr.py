"""FedDecorr: features should not repeat each other."""

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount
from lightning_fcl.functional.feddecorr import decorrelation_loss
from lightning_fcl.mixins.base import LossTermsMixin, StepOutputs
from lightning_fcl.types import MethodCard


class FedDecorr(LossTermsMixin):
    r"""Penalises correlation between the features of a batch, which skewed local data would make collapse.

    .. math:: L + \beta\,\frac{1}{B\,d\,(d - 1)} \sum_{a \ne b} R_{ab}^2

    with :math:`R` as in :func:`~lightning_fcl.functional.decorrelation_loss`. The value grows with the batch size
    :math:`B`, which gradient accumulation does not change: what counts is the micro-batch.

    Args:
        decorr_strength: :math:`\beta \ge 0`; 0 is FedAvg.

    Raises:
        MisconfigurationError: If ``decorr_strength`` is negative or not finite.

    Source: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning",
    ICLR 2023 (https://arxiv.org/abs/2210.00226).

    Deviation: scaled as in the authors' code (see :func:`~lightning_fcl.functional.decorrelation_loss`).
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedDecorr",
        acts_on="loss",
        paper="Shi et al., ICLR 2023",
        url="https://arxiv.org/abs/2210.00226",
        functions=("decorrelation_loss",),
        needs=("features",),
        smoke={"decorr_strength": 0.1},
        neutral={"decorr_strength": 0.0},
    )

    def __init__(self, *args: Any, decorr_strength: float = 0.1, **kwargs: Any) -> None:
        check_amount("decorr_strength", decorr_strength)
        super().__init__(*args, **kwargs)
        self.decorr_strength = decorr_strength

    @override
    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        terms = super().loss_terms(outputs, batch)
        if self.decorr_strength == 0:
            return terms
        return {**terms, "decorr": self.decorr_strength * decorrelation_loss(outputs.features)}
