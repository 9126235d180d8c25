"""``FederatedTrainer(parallel="model")`` on two ranks, against data parallel by hand and against one process."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fcl.callbacks import EWC, ClientProximal, FaultInjector, FedProx
from lightning_fcl.data.stream import TaskStream
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.fsdp2 import fsdp2
from lightning_fcl.federated.sampling import client_seed
from lightning_fcl.federated.trainer import FederatedTrainer
from lightning_fcl.testing import CPUDeepSpeedStrategy

pytestmark = pytest.mark.distributed

ALL = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
ROUNDS, EPOCHS = 2, 2


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.ReLU())
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class PlainNet(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ManualNet(PlainNet):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def new_net(kind=Net):
    torch.manual_seed(1)
    return kind()


def new_stream(tasks, clients):
    draws = torch.Generator().manual_seed(0)

    def dataset(n):
        x = torch.randn(n, 5, generator=draws)
        return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0))

    train = [dataset(23) for _ in range(tasks)]
    return TaskStream.from_datasets(train=train, test=[dataset(9) for _ in range(tasks)], clients=clients, batch_size=8)


def fit(name, run_dir, tasks=1, clients=1, kind=Net, options=None):
    """Train in this process or on these ranks; returns weights, score matrix and whether the module is plain again."""
    parallel = {} if name == "alone" else {"parallel": "model", "devices": 2, "strategy": strategy(name)}
    trainer = FederatedTrainer(
        rounds=ROUNDS,
        clients_per_round=2,
        local_epochs=EPOCHS,
        accelerator="cpu",
        run_dir=run_dir,
        enable_progress_bar=False,
        **{"devices": 1, **parallel, **(options or {})},
    )
    net = new_net(kind)
    report = trainer.fit(net, new_stream(tasks, clients))
    weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    return weights, report.accuracy, {type(t) for t in [net, *net.parameters()]} == {kind, nn.Parameter}


def strategy(name):
    if name.startswith("zero"):
        return CPUDeepSpeedStrategy(stage=int(name[4:]))
    return fsdp2() if name == "fsdp2" else name


def by_hand():
    """One client: its rounds follow each other, as FedAvg of a lone client is a copy."""
    net, loader = new_net(), new_stream(1, 1).train_loader(0, 0)
    rank, world = dist.get_rank(), dist.get_world_size()
    for round_ in range(ROUNDS):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(client_seed(0, 0, round_, 0))
        for epoch in range(EPOCHS):
            for x, y in loader:
                part = slice(len(x) * rank // world, len(x) * (rank + 1) // world)
                x_part = x[part].clone()  # a product's last bits may depend on where in memory its factors begin
                loss = nn.functional.cross_entropy(net(x_part), y[part])
                weight = len(x_part) * world / len(x)
                optimizer.zero_grad()
                (loss if weight == 1 else loss * weight).backward()
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
                optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * 0.5 ** (epoch + 1)
    return {n: p.detach() for n, p in net.named_parameters()}


def bits(one, two):
    assert one.keys() == two.keys()
    assert not [n for n in one if not torch.equal(one[n], two[n])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process, whole batches."""
    return fit("alone", tmp_path_factory.mktemp("alone"), tasks=2, clients=3)


@pytest.mark.parametrize("name", ALL)
def test_one_client_equals_hand_made_data_parallel_bit_for_bit(ranks, name, tmp_path):
    hand = ranks.run(by_hand)[0]
    for weights, _, is_plain_again in ranks.run(fit, name, tmp_path / name):
        bits(weights, hand)
        assert is_plain_again


@pytest.mark.parametrize("name", ALL)
def test_a_federation_of_two_tasks_equals_one_process(ranks, alone, name, tmp_path):
    (one, accuracy, _), (two, _, _) = ranks.run(fit, name, tmp_path / name, 2, 3)
    bits(one, two)
    torch.testing.assert_close(one, alone[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(accuracy, alone[1])


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_a_callback_on_the_gradients_equals_one_process(ranks, name, tmp_path):
    options = {"callbacks": [FedProx(1.0)], "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    alone = fit("alone", tmp_path / "alone", 1, 2, Net, options)[0]
    one, two = (answer[0] for answer in ranks.run(fit, name, tmp_path / name, 1, 2, Net, options))
    bits(one, two)
    torch.testing.assert_close(one, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_ewc_with_its_boundary_pass_equals_one_process(ranks, name, tmp_path):
    options = {"callbacks": [EWC(5.0)]}
    alone = fit("alone", tmp_path / "alone", 2, 2, Net, options)[0]
    without = fit("alone", tmp_path / "without", 2, 2, Net)[0]
    one, two = (answer[0] for answer in ranks.run(fit, name, tmp_path / name, 2, 2, Net, options))
    bits(one, two)
    torch.testing.assert_close(one, alone, rtol=0, atol=1e-6)
    assert max((alone[n] - without[n]).abs().max().item() for n in alone) > 1e-3


@pytest.mark.parametrize("name", ["fsdp2", "zero2"])
def test_what_sharded_weights_cannot_do_is_refused(ranks, name, tmp_path):
    assert all("`ClientProximal` must change weights" in m for m in ranks.run(refused, name, tmp_path / "a", "anchor"))
    assert all("`keep_optimizer_state` must be False" in m for m in ranks.run(refused, name, tmp_path / "b", "keep"))


def test_time_limits_are_refused_where_ranks_share_a_client(ranks, tmp_path):
    assert all("`client_timeout` must be None" in m for m in ranks.run(refused, "ddp", tmp_path, "timeout"))


def refused(name, run_dir, what):
    """The message of the error that ``what`` raises."""
    options = {
        "anchor": {"callbacks": [ClientProximal(0.1)]},
        "keep": {"keep_optimizer_state": True},
        "timeout": {"client_timeout": 5.0},
    }[what]
    with pytest.raises(MisconfigurationError) as caught:
        fit(name, run_dir, 2, 2, Net, options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_a_client_that_fails_on_all_ranks_is_skipped(ranks, name, tmp_path):
    options = {"callbacks": [FaultInjector("exception", clients=[1])], "on_client_error": "skip"}
    with pytest.warns(UserWarning, match="client 1 dropped"):
        alone = fit("alone", tmp_path / "alone", 1, 2, Net, options)[0]
    one, two = (answer[0] for answer in ranks.run(fit, name, tmp_path / name, 1, 2, Net, options))
    bits(one, two)
    torch.testing.assert_close(one, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_manual_optimization_equals_automatic(ranks, name, tmp_path):
    automatic = ranks.run(fit, name, tmp_path / "automatic", 1, 1, PlainNet)[0]
    manual = ranks.run(fit, name, tmp_path / "manual", 1, 1, ManualNet)[1]
    bits(automatic[0], manual[0])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ALL)
def test_half_precision(ranks, alone, name, precision, tmp_path):
    """Near full precision, alike on both ranks, and the module returns in the type it came in, or was cast to."""
    options = {"precision": precision}
    (one, accuracy, _), (two, _, _) = ranks.run(fit, name, tmp_path / name, 2, 3, Net, options)
    bits(one, two)
    assert {t.dtype for t in one.values()} == {torch.bfloat16 if precision == "bf16-true" else torch.float32}
    torch.testing.assert_close({n: t.float() for n, t in one.items()}, alone[0], rtol=0.02, atol=0.02)
    assert torch.isfinite(accuracy[-1]).all()
