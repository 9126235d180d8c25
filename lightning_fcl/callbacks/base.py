"""Base classes: what a client-side method and a server-side callback may override."""

from typing import TYPE_CHECKING, Any

import lightning as L

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer


class ServerCallback:
    """Acts between rounds, on the server; every hook does nothing by default.

    Hooks get the :class:`~lightning_fcl.FederatedTrainer` (``trainer.state`` holds task, round, sampled clients and
    metrics) and the user's module. Hooks run on every rank in the same order; write files only if
    ``trainer.is_global_zero``. From ``on_after_aggregate`` on, the module holds the new global weights.
    """

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint; unique among the callbacks of one run."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """State to keep in the round's checkpoint: tensors and plain types only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def on_fit_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """Once, before the first round; after a resume too."""

    def on_task_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """Before the first round of a task."""

    def on_round_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """After the clients of the round are sampled, before they start."""

    def on_client_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """After each client job on this rank."""

    def on_before_aggregate(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """After the last client job of the round, before the updates are merged across ranks and applied."""

    def on_after_aggregate(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """After the server step; the module holds the new global weights."""

    def on_round_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """After evaluation, before the row is logged; may add to ``trainer.state.metrics``."""

    def on_task_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """After the last round of a task and its boundary pass, before the score row is measured."""

    def on_fit_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        """Once, after the last task."""

    def on_exception(self, trainer: "FederatedTrainer", pl_module: L.LightningModule, exception: BaseException) -> None:
        """When the run stops with an error."""
