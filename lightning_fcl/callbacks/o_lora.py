"""O-LoRA: each task trains a LoRA of its own, kept orthogonal to the frozen ones before it."""

from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl.callbacks.base import ContinualCallback, task_is_over
from lightning_fcl.callbacks.gradients import add_penalty, check_gradient_access
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.orthogonal_lora import orthogonality_penalty_grad
from lightning_fcl.models.subspace_lora import SubspaceLinear, subspace_layers
from lightning_fcl.types import MethodCard, Params

if TYPE_CHECKING:
    from lightning_fcl.aggregators.chain import Rule


class OLoRA(ContinualCallback):
    r"""Freezes the LoRA of each finished task, and keeps the rows of the next one orthogonal to theirs.

    .. math::
        y = W x + \varsigma \sum_{s < k} B_s A_s x + \varsigma B_k A_k x, \qquad
        L + \lambda \sum_{s < k} \sum_{ij} | A_s A_k^\top |_{ij}

    In a federation it brings its router, :class:`~lightning_fcl.aggregators.TaskSubspaces`: clients get all frozen
    subspaces and send the new one alone. In a stock ``Trainer`` a ``fit`` is a task, and ends by freezing what it
    trained.

    Args:
        strength: :math:`\lambda \ge 0`; .5 in the paper's code.

    Raises:
        MisconfigurationError: If ``strength`` is out of range; at set-up, if the module has no subspace layers.

    Source: Wang et al., "Orthogonal Subspace Learning for Language Model Continual Learning", Findings of EMNLP 2023
    (https://arxiv.org/abs/2310.14152).

    Deviation: the federated form is Guo et al.'s (ICCV 2025): the mean of clients is as orthogonal as they are. The
    second, weight-decay term of the authors' code is left to the optimiser.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="O-LoRA",
        acts_on="gradient",
        paper="Wang et al., Findings of EMNLP 2023",
        url="https://arxiv.org/abs/2310.14152",
        functions=("orthogonality_penalty", "orthogonality_penalty_grad"),
        needs=("task boundary", "subspace layers"),
        smoke={"strength": 0.5},
    )

    def __init__(self, strength: float = 0.5) -> None:
        check_strength(strength)
        self.strength = strength
        self._frozen: dict[str, Tensor] = {}

    @override
    def server_rules(self) -> "list[Rule]":
        from lightning_fcl.aggregators.task_subspaces import TaskSubspaces

        return [TaskSubspaces()]

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_gradient_access(trainer, "OLoRA")
        if not subspace_layers(pl_module):
            raise MisconfigurationError(
                f"`OLoRA` needs subspace layers, and {type(pl_module).__name__} has none. Call `add_subspaces(model, "
                "targets)` in its constructor."
            )

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        own = None if isinstance(trainer, L.Trainer) else trainer.task
        tasks = getattr(pl_module, "subspace_tasks", ())
        for name, layer in subspace_layers(pl_module).items():
            if layer.bank is None:
                continue
            keep = torch.tensor([not tasks or tasks[slot] != own for slot in range(len(layer.bank[0]))])
            layer.activate(keep[None].to(layer.lora_A), active=True)
            self._frozen[f"{name}.lora_A"] = layer.bank[0][keep]

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._frozen and self.strength:
            add_penalty(trainer, pl_module, self._overlap, known=self._frozen)

    def _overlap(self, weights: Params) -> Params:
        return {
            name: orthogonality_penalty_grad(weight, self._frozen[name].to(weight), self.strength)
            for name, weight in weights.items()
        }

    @override
    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._frozen = {}
        for layer in subspace_layers(pl_module).values():
            if task_is_over(trainer, self._step_at_start):
                _freeze(layer)
            elif not isinstance(trainer, L.Trainer):
                layer.activate(None, active=True)


@torch.no_grad()
def _freeze(layer: SubspaceLinear) -> None:
    """Move what was trained into the bank, where it goes on to speak, and start anew."""
    down, up = layer.bank if layer.bank is not None else ((), ())
    layer.set_bank([*down, layer.lora_A.clone()], [*up, layer.lora_B.clone()])
    layer.activate(torch.ones(1, len(down) + 1, device=layer.lora_A.device), active=True)
    layer.reset_parameters()
