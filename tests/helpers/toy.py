"""Small modules, streams and trainers that the loop's tests share."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fcl.data import TaskStream
from lightning_fcl.federated.trainer import FederatedTrainer


class ToyModule(L.LightningModule):
    """A classifier with whatever the test wants in it; an ordinary LightningModule."""

    def __init__(
        self, *, dropout=0.0, batch_norm=False, momentum=0.0, scheduler=None, lr=0.1, optimizer="sgd", conv=False
    ):
        super().__init__()
        first = (
            [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(4, 8)]
            if conv
            else [nn.Linear(6, 8)]
        )
        layers = [*first, *([nn.BatchNorm1d(8)] if batch_norm else []), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))
        self.momentum, self.scheduler, self.lr, self.optimizer_name = momentum, scheduler, lr, optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x).float(), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits.float(), y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        if self.optimizer_name == "adam":
            optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        if self.scheduler is None:
            return optimizer
        if self.scheduler == "cosine":
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.scheduler == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"}}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class MixedTypes(ToyModule):
    """A bfloat16 layer beside float32 ones."""

    def __init__(self):
        super().__init__()
        self.net[0].to(torch.bfloat16)

    def forward(self, x):
        return self.net[2](torch.relu(self.net[0](x.to(torch.bfloat16)).float()))


class ManualModule(ToyModule):
    """The same with manual optimisation and two optimisers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        first, last = self.net[0].parameters(), self.net[-1].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.Adam(last, lr=0.01)]


def toy_data(examples=60, seed=0, shift=0.0, dtype=torch.float32):
    """Three Gaussian blobs in six dimensions."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 6, generator=torch.Generator().manual_seed(99)) * 2
    labels = torch.randint(0, 3, (examples,), generator=generator)
    return TensorDataset((centres[labels] + shift + torch.randn(examples, 6, generator=generator)).to(dtype), labels)


def toy_stream(*, tasks=2, clients=4, examples=60, batch_size=8, **options):
    train = [toy_data(examples, seed=t, shift=1.5 * t) for t in range(tasks)]
    test = [toy_data(30, seed=100 + t, shift=1.5 * t) for t in range(tasks)]
    return TaskStream.from_datasets(train, test, clients=clients, batch_size=batch_size, **options)


def toy_trainer(run_dir, **options):
    settings = {"rounds": 2, "clients_per_round": 3, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False}
    return FederatedTrainer(run_dir=run_dir, **{**settings, **options})


def make_toy(seed=0, cls=ToyModule, **options):
    torch.manual_seed(seed)
    return cls(**options)


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), f"{name} differs by {(first[name] - second[name]).abs().max()}"
