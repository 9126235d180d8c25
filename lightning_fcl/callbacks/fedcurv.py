"""FedCurv: clients stay where the weights matter to the others."""

from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl._checks import check_strength
from lightning_fcl.aggregators.base import RoundStats
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.gradients import add_penalty, check_federated, travelling_of
from lightning_fcl.callbacks.side_pass import as_in_training
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.fedcurv import fedcurv_others, fedcurv_penalty_grad
from lightning_fcl.functional.fisher import fisher_diagonal
from lightning_fcl.functional.likelihood import classification_log_likelihood
from lightning_fcl.types import MethodCard, Params

_PRECISION, _PULL = "precision/", "pull/"


class FedCurv(ContinualCallback):
    r"""Quadratic pull toward the other clients' weights, weighted by their Fisher information.

    .. math:: L_i(\theta) + \lambda \sum_{j \ne i} (\theta - \theta_j)^\top F_j (\theta - \theta_j)

    At the end of every job the diagonal Fisher information is measured on the client's data at its own weights. The
    server holds two sums, of :math:`F_j` and of :math:`F_j \theta_j` over the last of every client that ever took part;
    clients upload what changed since they last did, and take their own part out of what they download. In the first
    round there is no pull.

    Args:
        strength: :math:`\lambda \ge 0`, without a one half; 0 is FedAvg and sends nothing.
        log_likelihood: ``f(module, batch) -> Tensor [B]``, log p(y|x) per example; by default for ``(x, y)`` batches of
            a classifier whose ``forward`` gives logits.
        num_samples: Measure on so many examples; ``None`` for all.

    Raises:
        MisconfigurationError: If ``strength`` is negative or not finite; at setup in a stock ``Trainer`` and where
            ranks share a client.

    Source: Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", NeurIPS 2019 workshop
    (https://arxiv.org/abs/1910.07796).

    Deviation: with partial participation the sums hold the last known part of every client, the absent ones included.
    The Fisher uses the data's labels and squares per sample.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="FedCurv",
        acts_on="gradient",
        paper="Shoham et al., NeurIPS 2019 workshop",
        url="https://arxiv.org/abs/1910.07796",
        functions=("fedcurv_penalty", "fedcurv_penalty_grad", "fedcurv_others", "fisher_diagonal"),
        needs=("state per client", "two more payloads, up and down", "a pass over the data per job"),
        smoke={"strength": 1.0},
        neutral={"strength": 0.0},
    )
    upload_reduction = "sum"

    def __init__(
        self,
        strength: float = 1.0,
        *,
        log_likelihood: Callable[[Any, Any], Tensor] = classification_log_likelihood,
        num_samples: int | None = 500,
    ) -> None:
        check_strength(strength)
        self.strength = strength
        self.log_likelihood = log_likelihood
        self.num_samples = num_samples
        self.sent: dict[str, Tensor] = {}
        """What the server holds of this client, by ``precision/<name>`` and ``pull/<name>``."""
        self._sums: dict[str, Tensor] = {}
        self._others: tuple[Params, Params] = {}, {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(strength=self.strength)

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_federated(trainer, "FedCurv")
        if trainer.world_size > 1:
            raise MisconfigurationError(
                "`FedCurv` must measure Fisher information at the end of every job, for which ranks that share a "
                "client would have to unwrap the module. Use parallel='clients'."
            )

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self.sent = {name: value.to(pl_module.device) for name, value in self.sent.items()}
        sums, own = ([_part(tree, kind) for kind in (_PRECISION, _PULL)] for tree in (self._sums, self.sent))
        self._others = fedcurv_others(*sums, *own)

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._others[0] and self.strength > 0:
            add_penalty(trainer, pl_module, self._pull, self._others[0])

    def _pull(self, weights: Params) -> Params:
        precision, pull = ({name: tree[name] for name in weights} for tree in self._others)
        return fedcurv_penalty_grad(weights, precision, pull, self.strength)

    @override
    def upload(self, trainer: Any) -> dict[str, Tensor]:
        if self.strength == 0:
            return {}
        module = trainer.lightning_module
        loader = islice(trainer.train_dataloader, trainer.num_training_batches)
        batches = (as_in_training(trainer, module, batch) for batch in loader)
        weights = travelling_of(trainer, module)
        fisher = fisher_diagonal(
            module, self.log_likelihood, batches, params=list(weights), num_samples=self.num_samples
        )
        new = {_PRECISION + name: value for name, value in fisher.items()}
        new |= {_PULL + name: value * weights[name] for name, value in fisher.items()}
        change = {name: value - self.sent[name] if name in self.sent else value for name, value in new.items()}
        self.sent = new
        return change

    @override
    def serve(self, merged: dict[str, Tensor], previous: dict[str, Tensor], stats: RoundStats) -> dict[str, Tensor]:
        return {name: previous[name] + change if name in previous else change for name, change in merged.items()}

    @override
    def download(self, merged: dict[str, Tensor]) -> None:
        self._sums = merged

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._others = {}, {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"sent": self.sent} if self.sent else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sent, self._sums = dict(state_dict.get("sent", {})), {}


def _part(tree: Params, kind: str) -> Params:
    return {name.removeprefix(kind): value for name, value in tree.items() if name.startswith(kind)}
