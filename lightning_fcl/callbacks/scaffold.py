"""SCAFFOLD: control variates take the drift out of local training."""

from itertools import islice
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from lightning_fcl.aggregators.base import Reducer, RoundStats, ServerStep
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.callbacks.base import ContinualCallback
from lightning_fcl.callbacks.gradients import check_federated, travelling_of
from lightning_fcl.callbacks.side_pass import as_in_training, check_side_pass, side_gradients
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional.params import zeros_like
from lightning_fcl.functional.scaffold import scaffold_server, scaffold_variate, sgd_travel
from lightning_fcl.types import MethodCard, Params

_TASK = "/task"  # no parameter's name begins so


class SCAFFOLD(ContinualCallback):
    r"""Corrects every local gradient by what the client's gradient differs from everybody's.

    .. math:: g \leftarrow g - c_i + c, \qquad c_i^+ = c_i - c + \frac{\theta^t - \theta_i}{K \eta}, \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)

    The correction is added where gradients are whole, unscaled and not yet clipped. Learning rate schedules,
    ``lr_factor`` and SGD's momentum are accounted for in :math:`K \eta`. Weight decay ends up in the variates, and so
    does clipping. If the user names no aggregator, the clients' updates are averaged plainly, as in the paper.

    Args:
        option: ``"II"`` reads a client's variate off its way, for nothing, but only with ``torch.optim.SGD``. ``"I"``
            takes the gradient of the client's loss over all its batches at the round's weights: another pass over the
            data, any optimiser.
        reset_on_task: Whether the variates start from zero in every task.

    Raises:
        MisconfigurationError: If ``option`` is another; at setup in a stock ``Trainer``; at fit start with option II
            and an optimiser whose way is not a sum of gradients.

    Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, Algorithm
    1 (https://arxiv.org/abs/1910.06378).

    Deviation: None for SGD at a constant rate.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="SCAFFOLD",
        acts_on="gradient",
        paper="Karimireddy et al., ICML 2020",
        url="https://arxiv.org/abs/1910.06378",
        functions=("scaffold_variate", "scaffold_server", "sgd_travel"),
        needs=("state per client", "a second payload, up and down"),
        smoke={},
        neutral=None,
    )
    upload_reduction = "sum"

    def __init__(self, option: Literal["I", "II"] = "II", *, reset_on_task: bool = False) -> None:
        if option not in ("I", "II"):
            raise MisconfigurationError(f'`option` must be "I" or "II", got {option!r}.')
        self.option = option
        self.reset_on_task = reset_on_task
        self.variate: dict[str, Tensor] = {}
        """The client's control variate by parameter name, in units of a gradient; empty before its first job."""
        self.server_variate: dict[str, Tensor] = {}
        """The mean of all clients' variates, as downloaded; empty in the first round."""
        self._task = 0
        self._change: dict[str, Tensor] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(option=self.option, reset_on_task=self.reset_on_task)

    @override
    def server_rules(self) -> list[Reducer | ServerStep]:
        return [FedAvg(weighting="uniform")]

    @override
    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        check_federated(trainer, "SCAFFOLD")
        if self.option == "I":
            check_side_pass(trainer, pl_module, "SCAFFOLD(option='I')")

    @override
    def on_fit_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.reset_on_task:
            self.variate = self.variate if self._task == trainer.task else {}
            served = self.server_variate.pop(_TASK, None)
            self.server_variate = self.server_variate if served is not None and served == trainer.task else {}
        self._task = trainer.task
        self._start = {name: weight.clone() for name, weight in travelling_of(trainer, pl_module).items()}
        nothing = zeros_like(self._start)
        self.variate = {**nothing, **{n: c.to(pl_module.device) for n, c in self.variate.items()}}
        self.server_variate = {**nothing, **self.server_variate}
        self._correction = {n: self.server_variate[n] - self.variate[n] for n in nothing}
        self._corrects = any(bool(c.any()) for c in self._correction.values())
        self._rates: dict[int, tuple[dict[str, Any], list[float], list[float]]] = {}
        if self.option == "I":
            mean = self._mean_gradient(trainer, pl_module)
            self._fresh = {name: mean[name] for name in nothing}
        else:
            _check_sgd(trainer.optimizers)

    def _mean_gradient(self, trainer: Any, pl_module: L.LightningModule) -> Params:
        with torch.random.fork_rng([]):  # opening a loader draws, and so may transfer hooks
            loader = islice(trainer.train_dataloader, trainer.num_training_batches)
            batches = [(as_in_training(trainer, pl_module, batch), index) for index, batch in enumerate(loader)]
        return side_gradients(trainer, pl_module, batches, scale=1.0 / len(batches))

    @override
    def on_before_optimizer_step(
        self, trainer: Any, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for group in optimizer.param_groups:
            _, rates, momenta = self._rates.setdefault(id(group), (group, [], []))
            rates.append(float(group["lr"]))
            momenta.append(float(group.get("momentum", 0.0)))
        if self._corrects:
            trainer.add_to_gradients(self._correction)

    @override
    def on_fit_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if self.option == "I":
            new = dict(self._fresh)
        else:
            travel = self._travel(pl_module)
            end = travelling_of(trainer, pl_module)
            trees = (self.variate, self.server_variate, self._start, end)
            own, server, start, there = ({name: tree[name] for name in travel} for tree in trees)
            moved = scaffold_variate(own, server, start, there, travel)
            new = {**self.variate, **moved}
        self._change = {name: new[name] - self.variate[name] for name in new}
        self.variate = new
        self._rates, self._start, self._correction = {}, {}, {}

    def _travel(self, pl_module: L.LightningModule) -> dict[str, float]:
        """How far a gradient of 1 would have moved each weight; what did not move at all keeps its variate."""
        distance: dict[int, float] = {}
        for group, rates, momenta in self._rates.values():
            travel = sgd_travel(rates, momenta, dampening=float(group["dampening"]), nesterov=bool(group["nesterov"]))
            distance |= dict.fromkeys(map(id, group["params"]), travel)
        names = {name: distance.get(id(p), 0.0) for name, p in pl_module.named_parameters() if name in self._start}
        return {name: travel for name, travel in names.items() if travel > 0}

    @override
    def upload(self, trainer: Any) -> dict[str, Tensor]:
        return self._change

    @override
    def serve(self, merged: dict[str, Tensor], previous: dict[str, Tensor], stats: RoundStats) -> dict[str, Tensor]:
        if not self.reset_on_task:
            return scaffold_server(previous, merged, stats.total_clients)
        task = previous.get(_TASK)
        known = previous if task is not None and task == stats.task else {}
        return {**scaffold_server(known, merged, stats.total_clients), _TASK: torch.tensor(float(stats.task))}

    @override
    def download(self, merged: dict[str, Tensor]) -> None:
        self.server_variate = dict(merged)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"variate": self.variate, "task": self._task} if self.variate else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.variate, self._task = dict(state_dict.get("variate", {})), state_dict.get("task", 0)
        self.server_variate, self._change = {}, {}


def _check_sgd(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if type(optimizer) is not torch.optim.SGD or any(group["maximize"] for group in optimizer.param_groups):
            raise MisconfigurationError(
                f"`SCAFFOLD(option='II')` must be used with a minimising torch.optim.SGD, got {kind}: it reads "
                "gradients off the client's way. Use option='I'."
            )
        if optimizer.state:
            raise MisconfigurationError(
                "`keep_optimizer_state` must be False with SCAFFOLD(option='II'), which reads gradients off a way that "
                "starts without momentum. Use option='I'."
            )
