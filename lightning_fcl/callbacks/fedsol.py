"""FedSOL: the task's gradient, taken where the global model's predictions are hardest to keep."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount
from lightning_fcl._heads import modes_kept
from lightning_fcl.callbacks.gradients import weights_of
from lightning_fcl.callbacks.sam import GradientElsewhere
from lightning_fcl.callbacks.side_pass import side_gradients
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.fedsol import distillation_pull, fedsol_offset
from lightning_fcl.types import MethodCard, Params


def logits_of_first(module: Any, batch: Any) -> Tensor:
    """Logits of a classifier whose batches are ``(x, y)`` and whose ``forward`` gives logits."""
    logits: Tensor = module(batch[0])
    return logits


class FedSOL(GradientElsewhere):
    r"""Steps with the task's gradient at weights that are moved against the global model's knowledge.

    .. math:: \theta \leftarrow \theta - \eta \, \nabla L(\theta + \epsilon), \qquad
        \epsilon = \rho \, \Lambda \odot g_p / \|g_p\|, \qquad
        g_p = \nabla \mathrm{KL}(\sigma_\tau(z^t) \,\|\, \sigma_\tau(z))

    The first step of a job is FedAvg's, since model and teacher agree there. In a stock ``Trainer`` the teacher is the
    module at the start of ``fit``. Both sides of the divergence are taken in eval mode, so dropout makes no difference
    between equal weights and BatchNorm statistics stay as they are. Every step costs two more forward and backward
    passes and one forward pass of the teacher.

    Args:
        radius: :math:`\rho \ge 0`, in units of the weights; 0 is FedAvg.
        temperature: :math:`\tau > 0`.
        adaptive: Move weights the more, the farther they are from the round's start (:math:`\Lambda = |\theta -
            \theta^t|`, scaled along the first dimension); otherwise all alike.
        logits_of: ``f(module, batch) -> Tensor [B, C]``; by default ``module(batch[0])``.

    Raises:
        MisconfigurationError: If an argument is out of range; at setup as
            :class:`~lightning_fcl.callbacks.sam.GradientElsewhere` says.

    Source: Lee et al., "FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning", CVPR
    2024 (https://arxiv.org/abs/2308.12532).

    Deviation: under gradient accumulation there is one move per optimiser step. The divergence is taken in eval mode.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedSOL",
        acts_on="gradient",
        paper="Lee et al., CVPR 2024",
        url="https://arxiv.org/abs/2308.12532",
        functions=("distillation_pull", "fedsol_offset"),
        needs=("two more passes per step",),
        smoke={"radius": 1.0},
        neutral={"radius": 0.0},
    )

    def __init__(
        self,
        radius: float = 1.0,
        *,
        temperature: float = 3.0,
        adaptive: bool = True,
        logits_of: Callable[[Any, Any], Tensor] = logits_of_first,
    ) -> None:
        check_amount("radius", radius)
        check_amount("temperature", temperature)
        if temperature == 0:
            raise MisconfigurationError("`temperature` must be positive, got 0. Use 1 for the plain divergence.")
        self.radius = radius
        self.temperature = temperature
        self.adaptive = adaptive
        self.logits_of = logits_of
        self._anchor: dict[str, Tensor] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(radius=self.radius, temperature=self.temperature, adaptive=self.adaptive)

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.radius > 0:
            self._anchor = {name: weight.clone() for name, weight in weights_of(trainer, pl_module).items()}

    @override
    def _offsets(self, trainer: Any, pl_module: L.LightningModule) -> Params:
        scale = 1.0 / len(self._window)
        loss_of = partial(self._pull, pl_module)
        with modes_kept(pl_module, training=False):
            gradients = side_gradients(trainer, pl_module, self._window, scale=scale, loss_of=loss_of)
        if not self.adaptive:
            return fedsol_offset(gradients, self.radius)
        weights = {name: p.detach() for name, p in pl_module.named_parameters() if name in gradients}
        return fedsol_offset(gradients, self.radius, weights, self._anchor)

    def _pull(self, pl_module: L.LightningModule, batch: Any) -> Tensor:
        with torch.no_grad():
            teacher = torch.func.functional_call(_Logits(pl_module, self.logits_of), self._prefixed(), (batch,))
        return distillation_pull(self.logits_of(pl_module, batch).float(), teacher.float(), self.temperature)

    def _prefixed(self) -> dict[str, Tensor]:
        return {f"module.{name}": weight for name, weight in self._anchor.items()}

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        self._anchor = {}


class _Logits(torch.nn.Module):
    """``logits_of(module, batch)`` as a module, so that ``functional_call`` can swap the weights inside."""

    def __init__(self, module: torch.nn.Module, logits_of: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.logits_of = logits_of

    def forward(self, batch: Any) -> Tensor:
        return self.logits_of(self.module, batch)
