"""A small frozen net with subspaces, and tasks that its inputs announce: the first four numbers are the instruction."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fcl.data import TaskStream
from lightning_fcl.mixins import SubspaceRoutingMixin
from lightning_fcl.models import add_subspaces

PROMPT, WIDTH = 4, 10


class LitNet(L.LightningModule):
    def __init__(self, rank=2, head=False, lr=0.1, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 2)
        self.lr = lr
        add_subspaces(self, "body.*", rank=rank, scaling=2.0, dropout=dropout, trainable="head.*" if head else ())

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class SubspaceNet(SubspaceRoutingMixin, LitNet):
    def identity_features(self, batch):
        return batch[0][:, :PROMPT]


def make_net(cls=SubspaceNet, **options):
    torch.manual_seed(0)
    return cls(**options)


def task_data(task, examples, seed):
    """The label is the sign of another direction in every task; tasks 0 and 1 contradict each other."""
    generator = torch.Generator().manual_seed(100 * task + seed)
    prompt = torch.eye(PROMPT)[task] + 0.1 * torch.randn(examples, PROMPT, generator=generator)
    content = torch.randn(examples, WIDTH - PROMPT, generator=generator)
    answer = content[:, task // 2] * (-1) ** task > 0
    return TensorDataset(torch.cat([prompt, content], 1), answer.long())


def subspace_stream(tasks=3, clients=4, examples=160, batch_size=10, **options):
    train = [task_data(task, examples, 0) for task in range(tasks)]
    test = [task_data(task, 60, 1) for task in range(tasks)]
    return TaskStream.from_datasets(train, test, clients=clients, batch_size=batch_size, **options)
