"""How well a client's own model does on the client's own share of classes."""

from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from lightning_fcl._heads import call, find_head, inputs_and_targets, modes_kept, outputs_of
from lightning_fcl.exceptions import MisconfigurationError


class PersonalEvaluation(L.Callback):
    """Evaluates every client's model after local training, on evaluation data in the client's own shares of classes.

    Logs ``personal_global`` (share of right answers by the model's ordinary head) and, for modules with a local branch
    (:class:`~lightning_fcl.mixins.DualBranchMixin`), ``personal_local``; the round's log has their means over clients,
    as ``client/personal_global``. One pass over the data of
    :meth:`TaskStream.client_eval_loader <lightning_fcl.TaskStream.client_eval_loader>` per head and job. Results of the
    run do not change. It works in a federation only.
    """

    affects_results = False

    @override
    def on_train_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        stream = getattr(trainer, "stream", None)
        if stream is None:
            raise MisconfigurationError(
                "`PersonalEvaluation` must be used with FederatedTrainer: a stock Trainer has no clients. Use "
                "`trainer.validate` inside `module.local_branch()`."
            )
        branches = {"personal_global": nullcontext}
        if getattr(pl_module, "dual_local_branch", False):
            branches["personal_local"] = pl_module.local_branch  # type: ignore[assignment]
        with modes_kept(pl_module, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for name, branch in branches.items():
                with branch():
                    share, count = _accuracy(
                        trainer, pl_module, stream.client_eval_loader(trainer.task, trainer.client)
                    )
                if count:
                    pl_module.log(name, share, batch_size=1)


def _accuracy(trainer: Any, module: L.LightningModule, loader: Any) -> tuple[float, int]:
    _, head = find_head(module, getattr(module, "feature_module", None))
    right = count = 0
    with outputs_of(head) as seen:
        for batch in loader:
            batch = trainer.precision_plugin.convert_input(batch)
            inputs, targets = inputs_and_targets(module.transfer_batch_to_device(batch, module.device, 0))
            call(module, inputs)
            right += int((seen[-1].argmax(dim=1) == targets).sum())
            count += len(targets)
            seen.clear()
    return right / max(count, 1), count
