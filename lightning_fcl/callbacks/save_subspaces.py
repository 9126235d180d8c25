"""Writes the subspaces of a run as PEFT adapters."""

from typing import TYPE_CHECKING

import lightning as L
from typing_extensions import override

from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.models.subspace_files import save_subspaces

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer


class SaveSubspaces(ServerCallback):
    """After each task, writes ``adapters/task_<i>/subspace_<j>/`` into the run folder.

    Each is a folder that ``PeftModel.from_pretrained`` opens; :func:`~lightning_fcl.models.load_subspaces` opens all of
    a task's together, with their router.
    """

    @override
    def on_task_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and getattr(pl_module, "num_subspaces", None):
            save_subspaces(pl_module, trainer.run_dir / "adapters" / f"task_{trainer.state.task:02d}")
