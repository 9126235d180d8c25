"""FedProx: the pull's oracle and its exactness wherever gradients are treated specially."""

import copy

import pytest
import torch

from lightning_fcl.aggregators import FedAvg
from lightning_fcl.callbacks import FedProx
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import proximal_penalty
from tests.helpers.penalty import SETTINGS, InLoss, largest_difference, loader, make_trainer
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_same_penalty_in_the_loss(setting):
    module = make_toy(cls=InLoss)
    anchor = {n: p.detach().clone() for n, p in module.named_parameters()}
    difference = largest_difference(
        module, [FedProx(0.7)], lambda params: proximal_penalty(params, anchor, 0.7), **SETTINGS[setting]
    )
    assert difference < 1e-6
    assert any(not torch.equal(anchor[n], p) for n, p in module.named_parameters())


class AlwaysWrong(FedProx):
    """The trap: the same pull where gradients are not whole yet. It must be caught by the test above."""

    def on_after_backward(self, trainer, pl_module):
        super().on_before_optimizer_step(trainer, pl_module, None)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


@pytest.mark.parametrize("setting", ["accumulate 4", "scaler"])
def test_the_other_hook_would_be_noticed(setting):
    module = make_toy(cls=InLoss)
    anchor = {n: p.detach().clone() for n, p in module.named_parameters()}
    difference = largest_difference(
        module, [AlwaysWrong(0.7)], lambda params: proximal_penalty(params, anchor, 0.7), **SETTINGS[setting]
    )
    assert difference > 1e-3


def test_one_dimensional_optimum():
    """min (w - 3)^2 / 2 + (w - 1)^2 / 2 is at 2 (baselines 3.6)."""

    class One(ToyModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(self.net.weight, 1.0)

        def training_step(self, batch, batch_idx):
            return 0.5 * (self.net.weight - 3.0).square().sum()

    module = One()
    make_trainer([FedProx(1.0)], max_epochs=40).fit(module, loader())
    assert module.net.weight.item() == pytest.approx(2.0, abs=1e-4)


def test_first_step_is_fedavgs(tmp_path):
    states = []
    for callbacks in ([], [FedProx(5.0)]):
        module = make_toy()
        options = {"local_steps": 1, "rounds": 1, "callbacks": callbacks}
        toy_trainer(tmp_path / str(len(callbacks)), **options).fit(module, toy_stream(tasks=1))
        states.append(state_of(module))
    assert_same_bits(*states)


def test_strength_zero_equals_fedavg(tmp_path):
    states = []
    for callbacks in ([], [FedProx(0.0)]):
        module = make_toy()
        toy_trainer(tmp_path / str(len(callbacks)), callbacks=callbacks).fit(module, toy_stream())
        states.append(state_of(module))
    assert_same_bits(*states)


def test_a_strong_pull_keeps_clients_near_the_broadcast(tmp_path):
    moved = []
    for strength in (0.0, 1.0, 5.0):
        module = make_toy()
        before = copy.deepcopy(module)
        options = {"rounds": 1, "local_epochs": 5, "callbacks": [FedProx(strength)]}
        toy_trainer(tmp_path / str(strength), aggregator=FedAvg(), **options).fit(module, toy_stream(tasks=1))
        pairs = zip(module.parameters(), before.parameters(), strict=True)
        moved.append(sum((a - b).square().sum().item() for a, b in pairs))
    assert moved[0] > moved[1] > moved[2] > 0


def test_frozen_parameters_take_no_part():
    module = make_toy(cls=InLoss)
    module.net[0].weight.requires_grad_(False)
    before = module.net[0].weight.clone()
    make_trainer([FedProx(0.7)]).fit(module, loader())
    assert torch.equal(before, module.net[0].weight)


def test_bad_strength():
    with pytest.raises(MisconfigurationError, match="`strength` must be finite and not negative, got -1"):
        FedProx(-1.0)
