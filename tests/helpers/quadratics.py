"""Clients whose losses are parabolas: every method's fixed point is known, and a loop of ten lines is its oracle."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fcl.callbacks import ServerCallback
from lightning_fcl.data import TaskStream
from lightning_fcl.federated.checkpoint import CheckpointFolder
from lightning_fcl.serialize import load_tree
from tests.helpers.toy import toy_trainer

CURVES, TARGETS = (1.0, 4.0), (0.0, 1.0)
"""Two clients, half a (w - b)^2; their mean has its minimum at (1 * 0 + 4 * 1) / 5 = .8."""


class Parabola(L.LightningModule):
    """One weight, from 0; the loss of an example (a, b) is half a (w - b)^2."""

    def __init__(self, lr=0.1, momentum=0.0, optimizer=torch.optim.SGD):
        super().__init__()
        self.lr, self.momentum, self.optimizer = lr, momentum, optimizer
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)

    @property
    def weight(self):
        return self.net.weight.item()

    def loss(self, batch):
        curve, target = batch
        return 0.5 * curve * (self.net.weight[0, 0] - target) ** 2

    def training_step(self, batch, batch_idx):
        return self.loss(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", -self.loss(batch).mean())

    def configure_optimizers(self):
        if self.optimizer is torch.optim.SGD:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        return self.optimizer(self.parameters(), lr=self.lr)


class Records(ServerCallback):
    """Sampled clients and the global weight of every round."""

    def __init__(self):
        self.sampled, self.weights = [], []

    def on_after_aggregate(self, trainer, pl_module):
        self.sampled.append(list(trainer.state.sampled))
        self.weights.append(pl_module.net.weight.item())


def parabolas(curves=CURVES, targets=TARGETS, tasks=1):
    """Client i holds the one example (a_i, b_i)."""
    data = TensorDataset(torch.tensor(curves, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64))
    each = lambda examples, clients, rng: range(len(curves))  # noqa: E731
    return TaskStream.from_datasets([data] * tasks, [data] * tasks, clients=len(curves), partition=each, batch_size=1)


def fit(run_dir, *callbacks, curves=CURVES, targets=TARGETS, tasks=1, module=None, **options):
    """Train in float64; returns the records and the module."""
    records, module = Records(), module or Parabola()
    settings = {
        "precision": "64-true",
        "clients_per_round": len(curves),
        "local_steps": 10,
        "measure_baseline": False,
        "checkpoint_every": 99,
    }
    trainer = toy_trainer(run_dir, callbacks=list(callbacks), server_callbacks=[records], **{**settings, **options})
    trainer.fit(module, parabolas(curves, targets, tasks))
    return records, module


def client_states(run_dir):
    """The newest state of each client's one callback, by client id."""
    newest = {int(path.parent.name[-6:]): path for path in sorted((run_dir / "clients").glob("*/*"))}
    trees = {client: load_tree(path).get("callbacks", {}) for client, path in newest.items()}
    return {client: next(iter(tree.values())) for client, tree in trees.items() if tree}


def server_tree(run_dir):
    """What the newest commit holds of the server."""
    return CheckpointFolder(run_dir / "checkpoints", keep=2).newest().server
