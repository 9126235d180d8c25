"""How far each modality of a model moves from where the last task left it, logged per client and round."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_fcl._match import NameRule
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.ewc import task_fisher
from lightning_fcl.callbacks.gradients import weights_of
from lightning_fcl.callbacks.modality_groups import parameter_groups
from lightning_fcl.functional.drift import group_drift
from lightning_fcl.functional.likelihood import LogLikelihood


class ModalityDrift(ContinualCallback):
    """Logs, at the end of each client's job, how far groups of parameters are from the previous task's global weights.

    ``drift/<group>`` is the norm of the move. With a ``log_likelihood``, ``drift/<group>_weighted`` is the move
    weighted by the Fisher information of the client's last task, whose half square is about what the move costs that
    task in nats. It is measured here, at each task's end, for every method alike: neither the importances that a
    method holds nor how it scales them play a part. It changes no weight; the numbers leave the client as means over
    the round's clients, and a client that has had no earlier task logs none that is weighted. In a stock ``Trainer``
    nothing is logged.

    Args:
        groups: As in :class:`~lightning_fcl.ModalityEWC`.
        log_likelihood: ``f(module, batch) -> Tensor [B]``, log p(y|x) per example, for the weighted drift. It costs a
            pass over the data when a task ends, and two copies of the trainable weights per client.
        num_samples: Measure the Fisher information on so many examples; ``None`` for all.

    Raises:
        MisconfigurationError: At setup, if a trainable parameter is in no group or in several.
    """

    uses_task_anchor = True
    affects_results = False

    def __init__(
        self,
        groups: Mapping[str, NameRule] | None = None,
        *,
        log_likelihood: LogLikelihood | None = None,
        num_samples: int | None = None,
    ) -> None:
        self.groups = groups
        self.log_likelihood = log_likelihood
        self.num_samples = num_samples
        self.fisher: dict[str, Tensor] = {}
        """Fisher diagonal of the client's last task by parameter name, as measured; empty before it ends."""
        self.anchor: dict[str, Tensor] = {}
        """Global weights at the end of that task, by parameter name."""

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
            pl_module.log(f"drift/{group}", drift.norm, batch_size=1)
        if self.fisher:
            then, fisher = (
                {n: v.to(weights[n].device) for n, v in tree.items()} for tree in (self.anchor, self.fisher)
            )
            for group, drift in group_drift(weights, then, groups, fisher).items():
                pl_module.log(f"drift/{group}_weighted", drift.weighted, batch_size=1)

    @override
    def on_task_end(self, trainer: Any, pl_module: Any) -> None:
        if self.log_likelihood is not None:
            self.fisher = task_fisher(trainer, pl_module, self.log_likelihood, self.num_samples)
            self.anchor = {name: weight.clone() for name, weight in weights_of(trainer, pl_module).items()}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"fisher": self.fisher, "anchor": self.anchor} if self.fisher else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fisher = dict(state_dict.get("fisher", {}))
        self.anchor = dict(state_dict.get("anchor", {}))
