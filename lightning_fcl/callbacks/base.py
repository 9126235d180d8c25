"""Base classes: what a client-side method and a server-side callback may override."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
from torch import Tensor
from typing_extensions import override

from lightning_fcl.serialize import load_tree, save_tree
from lightning_fcl.types import ClientUpdate

if TYPE_CHECKING:
    from lightning_fcl.aggregators.base import RoundStats
    from lightning_fcl.aggregators.chain import Rule
    from lightning_fcl.federated.trainer import FederatedTrainer


class ServerCallback:
    """Acts between rounds, on the server; every hook does nothing by default.

    Hooks get the :class:`~lightning_fcl.FederatedTrainer` (``trainer.state`` holds task, round, sampled clients and
    metrics) and the user's module. Hooks run on every rank in the same order; write files only if
    ``trainer.is_global_zero``. In all hooks but ``on_client_end``, ``on_before_aggregate`` and ``on_exception`` the
    module holds a copy of the global weights to look at: what a hook changes in it is not kept. To change the global
    weights, write a :class:`~lightning_fcl.aggregators.ServerStep`.

    Attributes:
        needs_weights: Set to ``False`` on a subclass that never looks at the module; it saves a copy per hook.
    """

    needs_weights: bool = True

    @property
    def state_key(self) -> str:
        """Name of the state in a checkpoint; unique among the callbacks of one run."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """State to keep in the round's checkpoint: tensors and plain types only."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    def broadcast(self, trainer: "FederatedTrainer") -> dict[str, Tensor]:
        """What every client of a training round gets beside the weights; nothing by default.

        Asked once per round, after :meth:`on_round_start`, on every rank. Modules and callbacks find it in client jobs
        as ``trainer.broadcast[state_key]``, not to be changed in place; it counts in ``bytes_down``. It must follow
        from the run's state (global weights, :meth:`state_dict`, round), so that a resumed run sends the same.

        Args:
            trainer: The trainer.

        Returns:
            Tensors of any dtype by name.
        """
        return {}

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


class ContinualCallback(L.Callback):
    """A client-side method that knows where a task ends; works in ``lightning.Trainer`` and in ours.

    In a federation, :meth:`on_task_end` runs in the boundary pass of every client that has data of the task, with the
    final global weights in the module. In a stock ``Trainer`` each ``fit`` is one task, and it runs at its end unless
    no step was taken or the fit was a ``fast_dev_run``; a tuner's trial fits do not call callbacks at all.

    Attributes:
        uses_task_anchor: Set to ``True`` on a subclass to find the global weights of the previous task's end as
            ``trainer.task_anchor`` (by parameter name) in a federation.
        affects_results: Whether a run may not be resumed with other arguments of this callback.
    """

    uses_task_anchor: bool = False
    affects_results: bool = True
    upload_reduction: Literal["mean", "sum"] = "mean"
    """How the server merges what clients :meth:`upload`: a mean weighted by examples, or a sum."""
    upload_phase: Literal["train", "boundary"] = "train"
    """Which jobs :meth:`upload`: those of every round, or those of the boundary pass at a task's end."""

    def upload(self, trainer: Any) -> dict[str, Tensor]:
        """Extra tensors to send to the server at a job's end, beside the weights; none by default.

        Args:
            trainer: The job's context.

        Returns:
            Float tensors by name, the same names, shapes and dtypes from every client.
        """
        return {}

    def serve(self, merged: dict[str, Tensor], previous: dict[str, Tensor], stats: "RoundStats") -> dict[str, Tensor]:
        """On the server: make of a round's uploads what clients download next. By default that is the merged uploads.

        What a method accumulates on the server is what it returns here and finds as ``previous`` in the next round; the
        loop keeps it in the commits. It runs on every rank and must not look at this object's per-client state.

        Args:
            merged: The uploads of the accepted clients by name, reduced as ``upload_reduction`` says, in float64.
            previous: What was handed out in this round; empty before the first upload.
            stats: The round: accepted clients, their examples, the number of clients in all.

        Returns:
            Tensors by name. Those with the name of an upload are rounded to its dtype.
        """
        return merged

    def download(self, merged: dict[str, Tensor]) -> None:
        """Before a job: what the server made of the last uploads of this callback, see :meth:`serve`.

        Args:
            merged: Tensors by name; not to be changed in place.
        """

    def server_rules(self) -> "Sequence[Rule]":
        """The method's part on the server, if it has one; none by default.

        Returns:
            New steps, which join the end of the aggregator's chain. A reducer in first place serves only if the user
            names no aggregator, a router only if the aggregator has none.
        """
        return []

    def on_task_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """When a task is over: measure or store what protects it.

        Args:
            trainer: A ``lightning.Trainer`` or a :class:`~lightning_fcl.federated.context.ClientContext`;
                ``trainer.train_dataloader`` holds the task's training data.
            pl_module: The module, with the weights at the end of the task.
        """

    def on_upload(self, trainer: Any, pl_module: L.LightningModule, update: ClientUpdate) -> Any:
        """In a federation, just before an update leaves the client.

        Args:
            trainer: The job's context.
            pl_module: The trained module.
            update: What the client is about to send.

        Returns:
            The update to send instead, a list of updates, or ``None`` to send nothing.
        """
        return update

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._step_at_start = trainer.global_step

    @override
    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Ends the task of a stock ``Trainer``; in a federation the boundary pass does."""
        if task_is_over(trainer, self._step_at_start):
            self.on_task_end(trainer, pl_module)

    def save(self, directory: str | Path) -> Path:
        """Write this callback's state to ``directory`` as safetensors.

        Args:
            directory: Folder; made if it does not exist.

        Returns:
            The file written.
        """
        path = Path(directory) / f"{type(self).__name__}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tree(self.state_dict(), path)
        return path

    def load(self, directory: str | Path) -> None:
        """Restore what :meth:`save` wrote.

        Args:
            directory: The folder given to :meth:`save`.

        Raises:
            FileNotFoundError: If this callback was never saved there.
        """
        self.load_state_dict(load_tree(Path(directory) / f"{type(self).__name__}.safetensors"))


def task_is_over(trainer: Any, step_at_start: int) -> bool:
    """Whether the end of training is the end of a task: in a stock ``Trainer`` each ``fit`` that trained is one.

    Args:
        trainer: A ``lightning.Trainer``, or a client job's context, where a boundary pass ends the task instead.
        step_at_start: ``trainer.global_step`` in ``on_train_start``.

    Returns:
        ``False`` for an interrupted fit, a ``fast_dev_run``, and a second ``fit`` on the same Trainer, which trains
        nothing.
    """
    if not isinstance(trainer, L.Trainer) or getattr(trainer, "fast_dev_run", False) or trainer.interrupted:
        return False
    return trainer.global_step > step_at_start
