"""``engine="stacked"`` with steps that do more than a loss of their batch: the same results, or in sequence."""

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fcl import TaskStream
from lightning_fcl.federated.lanes import LaneMode, NotStackable
from lightning_fcl.federated.stacked import StackedJobs
from tests.federated.test_stacked import assert_close, both
from tests.helpers.toy import ToyModule, make_toy, toy_data, toy_stream, toy_trainer


def ragged():
    data, owners = toy_data(examples=61), torch.tensor([3, 9, 10, 11, 12, 16])
    owners = torch.repeat_interleave(torch.arange(6), owners).numpy()
    return TaskStream.from_datasets([data], [data], clients=6, partition=lambda *_: owners, batch_size=4)


class GradientHook(ToyModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.net[0].weight.register_hook(lambda gradient: gradient * 0)


class LayerHook(ToyModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.net.register_full_backward_hook(lambda _, into, out: None)


class AccumulatedHook(ToyModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.net[0].weight.register_post_accumulate_grad_hook(self.clear)

    @staticmethod
    def clear(parameter):
        parameter.grad.zero_()


class OutputHook(ToyModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        logits.register_hook(lambda gradient: gradient / gradient.norm())
        return F.cross_entropy(logits, y)


class StepHook(ToyModule):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()

        def clip(optimizer, args, options):
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)

        optimizer.register_step_pre_hook(clip)
        return optimizer


class LateDraw(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * random.random() if self.trainer.round and batch_idx else loss


class LateTorchDraw(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.rand(()) if self.trainer.round else loss


class Stops(ToyModule):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = self.trainer.global_step >= 1
        return super().training_step(batch, batch_idx)


class Counts(ToyModule):
    count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        return super().training_step(batch, batch_idx) / self.count


class RunningMean(ToyModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.mean = torch.zeros(())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (GradientHook, "acts on gradients"),
        (LayerHook, "acts on gradients"),
        (AccumulatedHook, "acts on gradients"),
        (OutputHook, "register a hook"),
        (StepHook, "hook of the optimizer"),
        (LateDraw, "random numbers"),
        (LateTorchDraw, "random numbers"),
        (Stops, "stops the training"),
        (Counts, "changes `count`"),
        (RunningMean, "changes `mean`"),
    ],
)
def test_what_a_stack_would_get_wrong_is_trained_in_sequence(cls, reason, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_close(*both(lambda: make_toy(cls=cls), ragged(), tmp_path, clients_per_round=6, rounds=2))
    told = [str(w.message) for w in caught if "one after another" in str(w.message)]
    assert len(told) == 1
    assert reason in told[0]


class LogsColumns(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("column", batch[0].sum().reshape(1))
        return loss.reshape(1)


class Groups(ToyModule):
    def configure_optimizers(self):
        first = {"params": self.net[0].parameters(), "lr": 0.01, "weight_decay": 0.5}
        return torch.optim.AdamW([first, {"params": self.net[2].parameters(), "betas": (0.5, 0.9)}], lr=0.1)


class InPlace(ToyModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        F.leaky_relu(x, 0.5, True)
        return super().training_step((x, y), batch_idx)


@pytest.mark.parametrize("cls", [LogsColumns, Groups, InPlace])
def test_what_stacks_stays_stacked(cls, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one after another")
        assert_close(*both(lambda: make_toy(cls=cls), ragged(), tmp_path, clients_per_round=6, local_epochs=2))


class PerExample(ToyModule):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


def test_a_loss_per_example_is_refused_as_in_sequence(tmp_path):
    with pytest.warns(UserWarning, match="for each client"), pytest.raises(RuntimeError, match="only for scalar"):
        toy_trainer(tmp_path, engine="stacked").fit(make_toy(cls=PerExample), toy_stream(tasks=1))


class LogsMeans(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss_again", torch.stack([loss, loss]).mean())
        return loss


def test_what_is_logged_through_a_list_is_each_clients_own(monkeypatch, tmp_path):
    logged = {}
    original = StackedJobs._hand_over

    def hand_over(self, lane, state, info):
        logged[info.client] = lane.log.reduced()
        return original(self, lane, state, info)

    monkeypatch.setattr(StackedJobs, "_hand_over", hand_over)
    toy_trainer(tmp_path, engine="stacked", rounds=1).fit(make_toy(cls=LogsMeans), toy_stream(tasks=1))
    assert len({row["train_loss"] for row in logged.values()}) == len(logged) > 1
    for row in logged.values():
        assert row["loss_again"] == pytest.approx(row["train_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.stack([x, x]),
        lambda x: torch.zeros(4, 5)[:, x.long()],
        lambda x: torch.add(torch.ones(2, 3), other=x),
        lambda x: torch.add(x, other=torch.ones(3)),
        lambda x: F.leaky_relu(x, 0.1, True),
    ],
)
def test_lanes_are_seen_wherever_they_are_passed(call):
    x = torch.ones(2, 3)
    with LaneMode([x]), pytest.raises(NotStackable, match="rule"):
        call(x)
