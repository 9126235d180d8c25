"""SPECIAL-C: after each local step the client is pulled toward the end of the previous task."""

from functools import partial
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl.callbacks.after_step import AfterStep
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.proximal import proximal_blend
from lightning_fcl.types import MethodCard


class ClientProximal(AfterStep):
    r"""The client-side twin of :class:`~lightning_fcl.ServerProximal`.

    .. math:: \theta^{e+1} = \frac{\theta^e - \gamma_L g^e + \lambda\, \theta_{i-1}}{1 + \lambda} \quad (i \ge 2)

    In a federation the anchor is the global model at the end of the previous task, which the loop hands out; in a stock
    ``Trainer`` it is the module at the end of the last ``fit``. The blend acts after the optimiser's own step, whatever
    the optimiser. With plain SGD the steady offset from the anchor is :math:`\gamma_L g / \lambda`: for small learning
    rates the client hardly moves.

    Args:
        strength: :math:`\lambda \ge 0`; the paper uses .1 (PACS) and .2 elsewhere. 0 is FedAvg.
        every: Blend after each optimiser ``"step"`` (the paper) or at the end of each local ``"epoch"``, which is far
            milder.

    Raises:
        MisconfigurationError: If an argument is out of range; at fit start under DeepSpeed, whose optimiser steps on
            copies of the weights.

    Source: SPECIAL, client variant (https://arxiv.org/abs/2601.22274).

    Deviation: None with ``every="step"`` and SGD.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="SPECIAL-C",
        acts_on="weights",
        paper="SPECIAL, ICML 2026",
        url="https://arxiv.org/abs/2601.22274",
        functions=("proximal_blend",),
        needs=("task boundary",),
        smoke={"strength": 0.2},
        neutral={"strength": 0.0},
    )
    uses_task_anchor = True

    def __init__(self, strength: float = 0.2, *, every: Literal["step", "epoch"] = "step") -> None:
        super().__init__()
        check_strength(strength)
        if every not in ("step", "epoch"):
            raise MisconfigurationError(f'`every` must be "step" or "epoch", got {every!r}.')
        self.strength = strength
        self.every = every
        self._own_anchor: dict[str, Tensor] | None = None  # stock Trainer only; the loop hands out its own
        self._anchor: dict[str, Tensor] | None = None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(strength=self.strength, every=self.every)

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._anchor = self._own_anchor if isinstance(trainer, L.Trainer) else trainer.task_anchor
        if self._anchor is None or self.strength == 0:
            return
        if type(trainer.strategy).__name__.startswith("DeepSpeed") or getattr(trainer, "sharded", False):
            raise MisconfigurationError(
                "`ClientProximal` must change weights after each optimiser step, which sharded optimisers (DeepSpeed, "
                "FSDP) keep copies of. Use ServerProximal, which needs no client hook."
            )
        if self.every == "step":
            self.attach(trainer, partial(self._blend, pl_module))

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.every == "epoch" and self._anchor is not None and self.strength > 0:
            self._blend(pl_module)

    @torch.no_grad()
    def _blend(self, pl_module: L.LightningModule) -> None:
        assert self._anchor is not None
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad and name in self._anchor:
                parameter.copy_(proximal_blend(parameter, self._anchor[name].to(parameter.device), self.strength))

    @override
    def detach(self) -> None:
        super().detach()
        self._anchor = None

    @override
    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if isinstance(trainer, L.Trainer) and trainer.global_step > self._step_at_start:
            self._own_anchor = {name: p.detach().clone() for name, p in pl_module.named_parameters() if p.requires_grad}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._own_anchor is None else {"anchor": self._own_anchor}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._own_anchor = state_dict.get("anchor")
