"""One LoRA subspace per task, where the task is told: what O-LoRA, M-LoRA and their like build on."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._match import NameRule
from lightning_fcl.aggregators.router import Probe, Route, Router
from lightning_fcl.aggregators.subspace_router import check_subspaces
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.subspace_lora import merge_lora
from lightning_fcl.models.subspace_lora import subspace_layers
from lightning_fcl.types import MethodCard, Params


class TaskSubspaces(Router):
    """Every task trains a fresh LoRA subspace; at evaluation all of them speak at full strength.

    Args:
        shared: Trainable tensors beside the subspaces, which all tasks share.

    Source: none; O-LoRA's and M-LoRA's common frame.
    """

    def __init__(self, *, shared: NameRule = ()) -> None:
        self.shared = shared

    @override
    def setup(self, pl_module: L.LightningModule, travelling: Collection[str]) -> None:
        check_subspaces(pl_module, travelling, self.shared, type(self).__name__)

    @override
    def init(self) -> list[int]:
        return []

    @override
    def route(self, probes: Sequence[Probe], num_slots: int, state: Any, *, task: int) -> dict[int, Route]:
        slot = state.index(task) if task in state else num_slots
        return {probe.client: Route(slot) for probe in probes}

    @override
    def reset(self, pl_module: L.LightningModule) -> None:
        for layer in subspace_layers(pl_module).values():
            layer.reset_parameters()

    @override
    def update(
        self, members: Mapping[int, Sequence[Probe]], state: Any, logs: dict[str, float], *, task: int
    ) -> list[int]:
        return state if task in state else [*state, task]

    @override
    def install(self, pl_module: L.LightningModule, slots: Sequence[Params], state: Any) -> None:
        install_subspaces(pl_module, self.evaluated(slots), tasks=state)

    def evaluated(self, slots: Sequence[Params]) -> Sequence[Params]:
        """What is evaluated of the slots: by default all of them, as they are."""
        return slots


class MLoRA(TaskSubspaces):
    r"""Trains one LoRA per task and merges all of them for the test.

    .. math::
        \text{products: } \Delta W = c \sum_s B_s A_s, \qquad
        \text{factors: } \Delta W = \Big(c \sum_s B_s\Big) \Big(c \sum_s A_s\Big)

    Args:
        merge: ``"products"``, or ``"factors"``, whose cross terms :math:`B_s A_{s'}` vanish only between orthogonal
            tasks.
        coefficient: :math:`c > 0`; by default one over the number of tasks for products and .6 for factors.
        shared: As in :class:`TaskSubspaces`.

    Raises:
        MisconfigurationError: If an argument is out of range.

    Source: a baseline of Guo et al., "Federated Continual Instruction Tuning", ICCV 2025, which does not define it
    (https://arxiv.org/abs/2503.12897).

    Deviation: the authors' repository holds, commented out, a merge of factors with .6: ``merge="factors"``. The mean
    of the products is the default, since it has no cross terms.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="M-LoRA",
        acts_on="structure",
        paper="baseline of Guo et al., Federated Continual Instruction Tuning, ICCV 2025",
        url="https://arxiv.org/abs/2503.12897",
        functions=("merge_lora", "subspace_lora"),
        needs=("task boundary", "subspace layers"),
    )

    def __init__(
        self,
        merge: Literal["products", "factors"] = "products",
        coefficient: float | None = None,
        *,
        shared: NameRule = (),
    ) -> None:
        if merge not in ("products", "factors"):
            raise MisconfigurationError(f'`merge` must be "products" or "factors", got {merge!r}.')
        if coefficient is not None and not 0 < coefficient < float("inf"):
            raise MisconfigurationError(f"`coefficient` must be positive or None, got {coefficient}.")
        super().__init__(shared=shared)
        self.merge = merge
        self.coefficient = coefficient

    @override
    def evaluated(self, slots: Sequence[Params]) -> Sequence[Params]:
        if not slots:
            return slots
        downs = [name for name in slots[0] if name.endswith(".lora_A")]
        ups = [f"{name[:-1]}B" for name in downs]
        if self.merge == "products":
            share = 1 / len(slots) if self.coefficient is None else self.coefficient
            return [
                {name: slot[name] * share if name in ups else slot[name] for name in (*downs, *ups)} for slot in slots
            ]
        weights = torch.full((len(slots),), 0.6 if self.coefficient is None else self.coefficient, dtype=torch.float64)
        merged: dict[str, Tensor] = {}
        for down, up in zip(downs, ups, strict=True):
            a, b = (torch.stack([slot[name] for slot in slots]) for name in (down, up))
            merged[down], merged[up] = merge_lora(a, b, weights, "factors")
        return [merged]


def install_subspaces(pl_module: L.LightningModule, slots: Sequence[Params], **options: Any) -> None:
    """Call the mixin's method of this name."""
    pl_module.install_subspaces(slots, **options)  # type: ignore[operator]
