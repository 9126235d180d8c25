"""Faster ways to the same weights: plain SGD without ceremony, channels last, a module watched by identity."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_fcl.federated.engines.light import clear_gradients, is_plain_sgd, plain_sgd_step
from lightning_fcl.federated.engines.memory_format import channels_last, wide_convolutions
from lightning_fcl.federated.structure import Structure
from tests.helpers.toy import assert_same_bits, state_of, toy_trainer


def net_and_loss():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return net, lambda: F.cross_entropy(net(torch.ones(4, 5)), torch.arange(4) % 3)


def test_a_plain_step_is_torchs_to_the_bit():
    (ours, our_loss), (theirs, their_loss) = net_and_loss(), net_and_loss()
    first, second = (
        torch.optim.SGD([{"params": n[0].parameters()}, {"params": n[2].parameters(), "lr": 0.3}], lr=0.1)
        for n in (ours, theirs)
    )
    ours[0].bias.requires_grad_(False)
    theirs[0].bias.requires_grad_(False)  # a parameter without a gradient stays
    for _ in range(3):
        clear_gradients(first)
        second.zero_grad()
        our_loss().backward()
        their_loss().backward()
        assert is_plain_sgd(first)
        plain_sgd_step(first)
        second.step()
    assert_same_bits(ours.state_dict(), theirs.state_dict())
    assert not torch.equal(ours[2].weight, net_and_loss()[0][2].weight)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"maximize": True},
        {"lr": torch.tensor(0.1)},
        {"foreach": False},
    ],
)
def test_other_settings_of_sgd_are_left_to_torch(options):
    assert not is_plain_sgd(torch.optim.SGD(nn.Linear(2, 2).parameters(), **{"lr": 0.1, **options}))


def test_hooks_schedulers_and_subclasses_are_left_to_torch():
    class Own(torch.optim.SGD):
        pass

    def make(cls=torch.optim.SGD):
        return cls(nn.Linear(2, 2).parameters(), lr=0.1)

    assert is_plain_sgd(make())
    assert not is_plain_sgd(make(Own))
    assert not is_plain_sgd(make(torch.optim.Adam))
    hooked = make()
    hooked.register_step_post_hook(lambda *_: None)
    scheduled = make()
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert not is_plain_sgd(hooked)
    assert not is_plain_sgd(scheduled)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert not is_plain_sgd(make())
    handle.remove()


def test_an_optimisers_own_zero_grad_is_called():
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            self.called = True

    optimizer = Own(nn.Linear(2, 2).parameters(), lr=0.1)
    clear_gradients(optimizer)
    assert optimizer.called


class ConvModule(L.LightningModule):
    def __init__(self, channels=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, channels, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 32, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4, 3),
        )
        self.formats = set()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.formats.add(x.is_contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("acc", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def image_stream():
    from torch.utils.data import TensorDataset

    from lightning_fcl import TaskStream

    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(40, 3, 8, 8, generator=generator), torch.arange(40) % 3)
    return TaskStream.from_datasets([data], [data], clients=2, batch_size=8)


@pytest.mark.parametrize("choice", [True, "auto"])
def test_channels_last_gives_the_same_weights_but_for_rounding(choice, tmp_path):
    torch.manual_seed(0)
    plain = ConvModule()
    last = copy.deepcopy(plain)
    toy_trainer(tmp_path / "plain").fit(plain, image_stream())
    toy_trainer(tmp_path / "last", channels_last=choice).fit(last, image_stream())
    assert (plain.formats, last.formats) == ({False}, {True})
    for name, value in state_of(plain).items():
        torch.testing.assert_close(state_of(last)[name], value, rtol=1e-5, atol=1e-6)
    assert f"channels_last: {str(True).lower()}" in (tmp_path / "last" / "config.yaml").read_text()


def test_the_rule_of_channels_last_looks_at_layers():
    assert wide_convolutions(ConvModule())
    assert not wide_convolutions(ConvModule(channels=16))
    assert not wide_convolutions(nn.Linear(2, 2))
    batch = {"image": torch.randn(2, 3, 4, 4), "label": torch.ones(2, 1, 1, 1, dtype=torch.long), "name": "x"}
    moved = channels_last([batch, (torch.ones(3),)])
    assert moved[0]["image"].stride() == (48, 1, 12, 3)
    assert torch.equal(moved[0]["image"], batch["image"])
    assert moved[0]["label"] is batch["label"]
    assert moved[0]["name"] == "x"
    assert type(moved[1]) is tuple


def test_structure_sees_what_is_added_replaced_frozen_or_taken_away():
    def changes(change):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        structure = Structure(net)
        assert structure.holds()
        change(net)
        return not structure.holds()

    assert changes(lambda net: net.append(nn.ReLU()))
    assert changes(lambda net: net.pop(1))
    assert changes(lambda net: net.__setitem__(0, nn.Linear(2, 2)))
    assert changes(lambda net: net[0].weight.requires_grad_(False))
    assert changes(lambda net: setattr(net[0], "bias", nn.Parameter(torch.ones(2))))
    assert changes(lambda net: net[1].register_parameter("scale", nn.Parameter(torch.ones(1))))
    assert not changes(lambda net: net[0].weight.data.zero_())
