"""MOON: features nearer to the server's model than to the client's own last one."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import lightning as L
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount, check_positive
from lightning_fcl.callbacks.base import ContinualCallback, task_is_over
from lightning_fcl.functional.moon import model_contrastive_loss
from lightning_fcl.mixins.base import LossTermsMixin, StepOutputs, current_weights
from lightning_fcl.types import MethodCard


class PreviousModel(ContinualCallback):
    """Keeps a client's weights as they were when it last trained; :class:`MOON` brings it along.

    Attributes:
        weights: Trainable parameters and float buffers by name; empty before a client has trained.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.weights = {name: value.to(pl_module.device) for name, value in self.weights.items()}

    @override
    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer, L.Trainer) or task_is_over(trainer, self._step_at_start):
            self.weights = current_weights(pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights} if self.weights else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights = dict(state_dict.get("weights", {}))


class MOON(LossTermsMixin):
    r"""Pulls features toward those of the round's global model, away from those of the client's own last model.

    .. math:: L - \mu \log \frac{e^{s(u, u^{g}) / \tau}}{e^{s(u, u^{g}) / \tau} + e^{s(u, u^{prev}) / \tau}}

    A client that has not trained before has no last model: its term is the constant :math:`\mu \log 2`, without a
    gradient. The last model stays with the client and costs no traffic. In a stock ``Trainer`` it is the module at the
    end of the previous ``fit``, so the term acts if other weights were loaded in between.

    Args:
        moon_strength: :math:`\mu \ge 0`; 0 is FedAvg.
        moon_temperature: :math:`\tau > 0`.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: Li, He & Song, "Model-Contrastive Federated Learning", CVPR 2021 (https://arxiv.org/abs/2103.16257).

    Deviation: the paper adds a projection head of two layers before the contrast and leaves it in the classifier. Here
    the features are the head's input as your module makes them, so that methods are compared on one architecture.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="MOON",
        acts_on="loss",
        paper="Li, He & Song, CVPR 2021",
        url="https://arxiv.org/abs/2103.16257",
        functions=("model_contrastive_loss",),
        needs=("features", "two more forward passes", "a model per client"),
        smoke={"moon_strength": 1.0},
        neutral={"moon_strength": 0.0},
    )
    uses_round_anchor = True

    def __init__(self, *args: Any, moon_strength: float = 1.0, moon_temperature: float = 0.5, **kwargs: Any) -> None:
        check_amount("moon_strength", moon_strength)
        check_positive("moon_temperature", moon_temperature)
        super().__init__(*args, **kwargs)
        self.moon_strength = moon_strength
        self.moon_temperature = moon_temperature
        self._moon_previous = PreviousModel()

    @override
    def configure_callbacks(self) -> list[L.Callback]:
        others = super().configure_callbacks()
        others = list(others) if isinstance(others, Sequence) else [others]
        return [*others, self._moon_previous] if self.moon_strength > 0 else others

    @override
    def loss_terms(self, outputs: StepOutputs, batch: Any) -> dict[str, Tensor]:
        terms = super().loss_terms(outputs, batch)
        if self.moon_strength == 0:
            return terms
        term = outputs.features.new_tensor(math.log(2))
        if previous := self._moon_previous.weights:
            server, own = (self.frozen_outputs(weights, batch).features for weights in (self.round_anchor(), previous))
            term = model_contrastive_loss(outputs.features, server, own, self.moon_temperature)
        return {**terms, "moon": self.moon_strength * term}
