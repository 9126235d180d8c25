"""The ordinary LightningModule: what it logs, how it steps, and that it learns in both trainers."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_fcl.data import TaskStream, digit_domains
from lightning_fcl.federated.trainer import FederatedTrainer
from lightning_fcl.models import ImageClassifier, SmallConvNet

QUIET = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False}


@pytest.fixture(scope="module")
def digits():
    return digit_domains()


def stock_trainer(**options):
    return L.Trainer(**QUIET, logger=False, enable_checkpointing=False, enable_model_summary=False, **options)


def accuracy(module, dataset):
    images, labels = dataset.tensors
    with torch.no_grad():
        return (module.eval()(images).argmax(dim=1) == labels).float().mean().item()


def test_learns_in_a_stock_trainer(digits):
    train, test = digits["clean"]
    module = ImageClassifier(SmallConvNet(), lr=0.05, momentum=0.9)
    trainer = stock_trainer(max_epochs=4, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=100))
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert set(logged) == {"train_loss", "val_loss", "val_acc"}
    assert logged["val_acc"] > 0.9
    # Averaged over examples, not over batches: the last one holds 59.
    assert logged["val_acc"] == pytest.approx(accuracy(module, test), abs=1e-6)
    with torch.no_grad():
        assert logged["val_loss"] == pytest.approx(
            F.cross_entropy(module(test.tensors[0]), test.tensors[1]).item(), rel=1e-5
        )


def test_learns_in_a_federation(digits, tmp_path):
    stream = TaskStream.domains({"clean": digits["clean"]}, clients=4, partition="label_dirichlet", drop_last=True)
    module = ImageClassifier(SmallConvNet(), lr=0.05, momentum=0.9)
    trainer = FederatedTrainer(rounds=4, clients_per_round=4, local_epochs=2, run_dir=tmp_path / "run", **QUIET)
    report = trainer.fit(module, stream)
    assert report.accuracy.shape == (1, 1)
    assert report.accuracy[0, 0].item() > 0.8
    assert report.accuracy[0, 0].item() == pytest.approx(accuracy(module, digits["clean"][1]), abs=1e-6)


def test_batchnorm_needs_drop_last_where_a_batch_of_one_is_left(digits, tmp_path):
    class Tiny(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Flatten(), nn.Linear(256, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))

    train, test = digits["clean"]
    few = torch.utils.data.Subset(train, range(66))  # two clients of 33 examples: batches of 32 and 1

    def fit(**options):
        stream = TaskStream.from_datasets([few], [test], clients=2, **options)
        settings = {"rounds": 1, "clients_per_round": 2}
        FederatedTrainer(run_dir=tmp_path / str(len(options)), **settings, **QUIET).fit(ImageClassifier(Tiny()), stream)
        return [len(stream.train_loader(0, client)) for client in range(2)]

    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fit()
    assert fit(drop_last=True) == [1, 1]


@pytest.mark.parametrize(
    ("options", "kind", "settings"),
    [
        ({}, torch.optim.SGD, {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}),
        ({"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-4}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4}),
        ({"optimizer": "adam", "lr": 1e-3}, torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.0}),
        ({"optimizer": "adamw", "weight_decay": 0.1}, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ],
)
def test_optimizers(options, kind, settings):
    module = ImageClassifier(nn.Linear(2, 3), **options)
    optimizer = module.configure_optimizers()
    assert type(optimizer) is kind
    assert settings.items() <= optimizer.defaults.items()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module.parameters()]


def test_hyperparameters_are_saved_without_the_network():
    module = ImageClassifier(nn.Linear(2, 3), lr=0.3)
    assert dict(module.hparams) == {"lr": 0.3, "momentum": 0.0, "weight_decay": 0.0, "optimizer": "sgd"}


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="`optimizer` must be 'sgd', 'adam' or 'adamw', got 'lion'"):
        ImageClassifier(nn.Linear(2, 3), optimizer="lion")
