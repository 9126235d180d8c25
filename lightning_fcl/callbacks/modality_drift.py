"""How far each modality of a model moves from where the last task left it, logged per client and round."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from lightning_fcl._match import NameRule
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.gradients import weights_of
from lightning_fcl.callbacks.modality_groups import parameter_groups
from lightning_fcl.functional.drift import group_drift


class ModalityDrift(ContinualCallback):
    """Logs, at the end of each client's job, how far groups of parameters are from the previous task's global weights.

    ``drift/<group>`` is the norm of the move. Where :class:`~lightning_fcl.EWC` or
    :class:`~lightning_fcl.ModalityEWC` runs too, ``drift/<group>_weighted`` is the move weighted by its importances,
    from its own anchor: what the move costs earlier tasks. It changes no weight; the two numbers per group leave the
    client as means over the round's clients. In a stock ``Trainer`` it logs nothing.

    Args:
        groups: As in :class:`~lightning_fcl.ModalityEWC`.

    Raises:
        MisconfigurationError: At setup, if a trainable parameter is in no group or in several.
    """

    uses_task_anchor = True
    affects_results = False

    def __init__(self, groups: Mapping[str, NameRule] | None = None) -> None:
        self.groups = groups

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        parameter_groups([name for name, p in pl_module.named_parameters() if p.requires_grad], self.groups)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        anchor = getattr(trainer, "task_anchor", None)
        if anchor is None:
            return
        weights = weights_of(trainer, pl_module)
        groups = parameter_groups(weights, self.groups)
        for group, drift in group_drift(weights, {name: anchor[name] for name in weights}, groups).items():
            pl_module.log(f"drift/{group}", drift.norm)
        memory = next((c for c in trainer.callbacks if getattr(c, "importance", None)), None)
        if memory is not None and memory.importance.keys() == weights.keys():
            for group, drift in group_drift(weights, memory.anchor, groups, memory.importance).items():
                pl_module.log(f"drift/{group}_weighted", drift.weighted)
