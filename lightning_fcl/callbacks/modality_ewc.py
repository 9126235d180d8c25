"""MA-EWC: EWC with a scale and a strength for each modality of a model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl._match import NameRule
from lightning_fcl.callbacks.ewc import QuadraticMemory, task_fisher
from lightning_fcl.callbacks.modality_groups import MODALITIES, parameter_groups
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.likelihood import classification_log_likelihood
from lightning_fcl.functional.modality_ewc import (
    balanced_strengths,
    grouped_ewc_penalty_grad,
    normalise_importance,
)
from lightning_fcl.types import MethodCard, Params


class ModalityEWC(QuadraticMemory):
    r"""EWC on groups of parameters: vision, language and what joins them, or any named groups.

    .. math:: L(\theta) + \tfrac12 \sum_M \lambda_M \sum_{i \in M} F_i (\theta_i - \theta^\star_i)^2

    The Fisher is measured, the pull added and the memory kept as in :class:`EWC`. Gradients of one modality may be
    orders of magnitude smaller than another's; its importances are too, and plain EWC then protects the other alone.
    ``normalise`` brings them to one scale, ``strength`` weighs them against each other. With neither this is EWC.

    Args:
        strength: :math:`\lambda_M \ge 0`: one for all groups, or one for each by name. 500 is the paper's; with
            ``normalise`` importances have a mean of 1, and strengths of 0.01 to 10 are the ones to try. ``"auto"``
            measures the Fisher of a new task's data before the client first trains on it, and chooses each group's
            strength so that the pull of each earlier task is on average as stiff as the new loss
            (:func:`~lightning_fcl.functional.balanced_strengths`).
        groups: Rules that tell the group of a parameter by its name, see :func:`parameter_groups`; by default
            ``vision``, ``language`` and ``projector``, which are found for LLaVA-like models. Every trainable parameter
            must be in one group.
        normalise: ``"none"`` (the paper's formula), ``"global"`` divides each task's importances by their mean,
            ``"per_group"`` each group's by its own.
        memory: ``"all"`` protects all earlier tasks, ``"last"`` only the one before (the paper's formula).
        log_likelihood: ``f(module, batch) -> Tensor [B]``, log p(y|x) per example; by default for ``(x, y)`` batches of
            a classifier whose ``forward`` gives logits.
        num_samples: Measure on so many examples; ``None`` for all.

    Raises:
        MisconfigurationError: If an argument is out of range; at setup, if a trainable parameter is in no group or in
            several, or if the strategy hides whole gradients.

    Source: FedCMM, "Modality-aware elastic weight consolidation" (https://arxiv.org/abs/2607.12112).

    Deviation: the paper's formula is EWC's, for one strength and a sum over disjoint groups are one sum; its ablation
    tells them apart all the same. ``normalise`` and a strength per group are our reading. ``memory="all"`` by default:
    with ``"last"`` nothing protects the first task in the third.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="MA-EWC",
        acts_on="gradient",
        paper="FedCMM, 2026",
        url="https://arxiv.org/abs/2607.12112",
        functions=(
            "grouped_ewc_penalty",
            "grouped_ewc_penalty_grad",
            "normalise_importance",
            "balanced_strengths",
            "group_drift",
            "fisher_diagonal",
        ),
        needs=("task boundary", "a pass over the task's data"),
        smoke={"strength": 0.1, "normalise": "per_group", "groups": {"vision": "vision*", "rest": "re:^(?!vision)"}},
        neutral={"strength": 0.0, "groups": {"all": "*"}},
    )

    def __init__(
        self,
        strength: float | Mapping[str, float] | Literal["auto"] = 500.0,
        *,
        groups: Mapping[str, NameRule] | None = None,
        normalise: Literal["none", "global", "per_group"] = "none",
        memory: Literal["all", "last"] = "all",
        log_likelihood: Callable[[Any, Any], Tensor] = classification_log_likelihood,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(memory=memory, log_likelihood=log_likelihood, num_samples=num_samples)
        known = sorted(MODALITIES if groups is None else groups)
        if isinstance(strength, str) and strength != "auto":
            raise MisconfigurationError(
                f'`strength` must be a number, one for each group, or "auto", got {strength!r}.'
            )
        self.auto = strength == "auto"
        self.strengths: dict[str, float] = {}
        """Strength by group; with ``"auto"`` those of the present task, empty before it starts."""
        if not isinstance(strength, str):
            self.strengths = dict(strength) if isinstance(strength, Mapping) else dict.fromkeys(known, strength)
            if sorted(self.strengths) != known:
                raise MisconfigurationError(f"`strength` must name the groups {known}, got {sorted(self.strengths)}.")
        for value in self.strengths.values():
            check_strength(value)
        if normalise not in ("none", "global", "per_group"):
            raise MisconfigurationError(f'`normalise` must be "none", "global" or "per_group", got {normalise!r}.')
        self.strength = strength
        self.groups = groups
        self.normalise = normalise
        self._members: dict[str, list[str]] = {}
        self._tasks = 0

    @property
    @override
    def state_key(self) -> str:
        strengths = self.strength if self.auto else self.strengths
        return self._generate_state_key(strengths=strengths, normalise=self.normalise, memory=self.memory)

    @property
    @override
    def is_on(self) -> bool:
        return self.auto or any(self.strengths.values())

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.members(name for name, p in pl_module.named_parameters() if p.requires_grad)
        if self.auto and getattr(trainer, "sharded", False):
            raise MisconfigurationError(
                "`strength` must be numbers where ranks hold parts of the weights, got 'auto': the new task's Fisher "
                "cannot be measured there before training."
            )

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.auto or not self.importance:
            return
        if not self.strengths:
            new = task_fisher(trainer, pl_module, self.log_likelihood, self.num_samples)
            found = balanced_strengths(self.importance, new, self.members(new), self._tasks)
            shares = torch.tensor(list(found.values()), dtype=torch.float64, device=pl_module.device)
            shares = trainer.strategy.all_gather(shares).reshape(-1, len(found)).mean(0)  # ranks saw a part each
            self.strengths = dict(zip(found, shares.tolist(), strict=True))
        for group, value in self.strengths.items():
            pl_module.log(f"ewc/{group}", value, batch_size=1)

    @override
    def on_task_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        super().on_task_end(trainer, pl_module)
        if self.auto:
            self.strengths, self._tasks = {}, self._tasks + 1 if self.memory == "all" else 1

    def members(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The given parameters by group.

        Args:
            names: Dotted names, as in the module.

        Returns:
            Names by group, without empty groups.

        Raises:
            MisconfigurationError: If a name is in no group or in several.
        """
        wanted = set(names)
        if not wanted <= {name for group in self._members.values() for name in group}:
            self._members = parameter_groups(sorted(wanted), self.groups)
        found = {group: [name for name in own if name in wanted] for group, own in self._members.items()}
        return {group: own for group, own in found.items() if own}

    @override
    def weigh(self, importance: dict[str, Tensor]) -> dict[str, Tensor]:
        return normalise_importance(importance, self.members(importance), self.normalise)

    @override
    def pull(self, weights: Params, anchor: Params, importance: Params) -> dict[str, Tensor]:
        return grouped_ewc_penalty_grad(weights, anchor, importance, self.members(weights), self.strengths)

    @override
    def state_dict(self) -> dict[str, Any]:
        own = super().state_dict()
        return {**own, "strengths": self.strengths, "tasks": self._tasks} if own and self.auto else own

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.auto:
            self.strengths = dict(state_dict.get("strengths", {}))
            self._tasks = state_dict.get("tasks", 0)
