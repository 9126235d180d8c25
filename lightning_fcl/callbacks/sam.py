"""FedSAM and FedASAM: clients take their gradient where the loss is worst nearby."""

from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_amount
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.side_pass import (
    Batch,
    check_side_pass,
    check_stands_first,
    moved,
    side_gradients,
    write_gradients,
)
from lightning_fcl.functional.sam import asam_offset, sam_offset
from lightning_fcl.types import MethodCard, Params


class GradientElsewhere(ContinualCallback):
    """Replaces the gradient of every step by the one at moved weights; subclasses say where.

    It acts in ``on_before_optimizer_step``: the gradient of the whole step is known there, the batches of the step run
    once more at the moved weights, the weights go back bit for bit, and then come the user's clipping and the user's
    optimiser. So it is exact under accumulation (one move per step, not per micro-batch) and clipping, with any
    optimiser. BatchNorm statistics and other buffers see the first pass only.

    Raises:
        MisconfigurationError: At setup, with manual optimisation, a gradient scaler (16-mixed), shards, or ranks that
            share a client; or behind a callback that changes gradients, whose change would be lost.
    """

    radius: float

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_side_pass(trainer, pl_module, type(self).__name__)
        if self.radius > 0:
            check_stands_first(trainer, self)
        self._window: list[Batch] = []

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._window = []
        self._window.append((batch, batch_idx))

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self.radius == 0:
            return
        offsets = self._offsets(trainer, pl_module)
        if not any(bool(offset.any()) for offset in offsets.values()):
            return  # the gradient is there already, with the same dropout
        scale = 1.0 / trainer.accumulate_grad_batches
        with moved(pl_module, offsets):
            gradients = side_gradients(trainer, pl_module, self._window, scale=scale)
        write_gradients(pl_module, gradients)

    def _offsets(self, trainer: Any, pl_module: L.LightningModule) -> Params:
        """Where to move, by parameter name."""
        raise NotImplementedError

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._window = []


class FedSAM(GradientElsewhere):
    r"""Steps with the gradient at the worst point of a small ball around the weights, so that minima become flat.

    .. math:: \theta \leftarrow \theta - \eta \, \nabla L(\theta + \epsilon), \qquad \epsilon = \rho \, g / \|g\|

    Works in a stock ``Trainer`` too, where it is plain SAM. Every step costs a second forward and backward pass.

    Args:
        radius: :math:`\rho \ge 0`, in units of the weights; 0 is FedAvg.

    Raises:
        MisconfigurationError: If ``radius`` is negative or not finite; at setup as
            :class:`~lightning_fcl.callbacks.sam.GradientElsewhere` says.

    Source: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022
    (https://arxiv.org/abs/2206.02618); Foret et al., ICLR 2021.

    Deviation: None.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedSAM",
        acts_on="gradient",
        paper="Qu et al., ICML 2022",
        url="https://arxiv.org/abs/2206.02618",
        functions=("sam_offset",),
        needs=("a second pass per step",),
        smoke={"radius": 0.1},
        neutral={"radius": 0.0},
    )

    def __init__(self, radius: float = 0.1) -> None:
        check_amount("radius", radius)
        self.radius = radius

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(radius=self.radius)

    @override
    def _offsets(self, trainer: Any, pl_module: L.LightningModule) -> Params:
        return sam_offset(_gradients(pl_module), self.radius)


class FedASAM(GradientElsewhere):
    r"""FedSAM with a ball that is measured relative to each weight's own size.

    .. math:: \epsilon = \rho \, T^2 g / \|T g\|, \qquad T = |\theta| + \eta \text{ (1 for what is no weight)}

    Works in a stock ``Trainer`` too, where it is plain ASAM. Every step costs a second forward and backward pass.

    Args:
        radius: :math:`\rho \ge 0`, unitless; 0 is FedAvg. The authors use .7 on CIFAR-10.
        offset: :math:`\eta \ge 0`; the authors use .2.

    Raises:
        MisconfigurationError: If an argument is negative or not finite; at setup as
            :class:`~lightning_fcl.callbacks.sam.GradientElsewhere` says.

    Source: Caldarola, Caputo & Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV
    2022 (https://arxiv.org/abs/2203.11834); Kwon et al., ICML 2021.

    Deviation: the mean of late server weights that the paper combines it with is a rule of its own and not part of it.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedASAM",
        acts_on="gradient",
        paper="Caldarola, Caputo & Ciccone, ECCV 2022",
        url="https://arxiv.org/abs/2203.11834",
        functions=("asam_offset",),
        needs=("a second pass per step",),
        smoke={"radius": 0.7, "offset": 0.2},
        neutral={"radius": 0.0},
    )

    def __init__(self, radius: float = 0.7, offset: float = 0.2) -> None:
        check_amount("radius", radius)
        check_amount("offset", offset)
        self.radius = radius
        self.offset = offset

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(radius=self.radius, offset=self.offset)

    @override
    def _offsets(self, trainer: Any, pl_module: L.LightningModule) -> Params:
        gradients = _gradients(pl_module)
        weights = {name: p.detach() for name, p in pl_module.named_parameters() if name in gradients}
        return asam_offset(weights, gradients, self.radius, self.offset)


def _gradients(pl_module: L.LightningModule) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
