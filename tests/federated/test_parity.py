"""One client, one round, FedAvg is ``Trainer.fit``, bit for bit."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fcl.federated.sampling import client_seed
from tests.helpers.toy import ManualModule, ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CASES = {
    "plain": ({}, {}, {}),
    "two epochs": ({}, {"local_epochs": 2}, {"max_epochs": 2}),
    "accumulation": ({}, {"accumulate_grad_batches": 3}, {"accumulate_grad_batches": 3}),
    "clip norm": ({}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1}),
    "clip value": (
        {},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "cosine per step": ({"scheduler": "cosine"}, {"local_epochs": 2}, {"max_epochs": 2}),
    "step per epoch": ({"scheduler": "step"}, {"local_epochs": 3}, {"max_epochs": 3}),
    "plateau": ({"scheduler": "plateau", "lr": 1.0}, {"local_epochs": 3}, {"max_epochs": 3}),
    "momentum": ({"momentum": 0.9}, {"local_epochs": 2}, {"max_epochs": 2}),
    "adam": ({"optimizer": "adam"}, {"local_epochs": 2}, {"max_epochs": 2}),
    "dropout": ({"dropout": 0.5}, {"local_epochs": 2}, {"max_epochs": 2}),
    "batch norm": ({"batch_norm": True}, {"local_epochs": 2}, {"max_epochs": 2}),
    "conv": ({"conv": True}, {}, {}),
    "steps": ({}, {"local_steps": 5}, {"max_steps": 5, "max_epochs": -1}),
    "all": (
        {"dropout": 0.3, "batch_norm": True, "momentum": 0.9, "scheduler": "cosine"},
        {"local_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}, {"precision": "bf16-mixed"}),
    "bf16-true": ({}, {"precision": "bf16-true"}, {"precision": "bf16-true"}),
    "64-true": ({}, {"precision": "64-true"}, {"precision": "64-true"}),
}


def stock_trainer(**options):
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "num_sanity_val_steps": 0}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**settings | options)


def fit_stock(module, stream, seed=0, callbacks=(), **options):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        L.seed_everything(client_seed(seed, 0, 0, 0), verbose=False)
        trainer = stock_trainer(callbacks=list(callbacks), limit_val_batches=0, **options)
        trainer.fit(module, stream.train_loader(0, 0))
    finally:
        torch.set_num_threads(threads)
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_one_client_equals_trainer_fit(case, tmp_path):
    module_options, ours, theirs = CASES[case]
    first = make_toy(**module_options)
    second = copy.deepcopy(first)
    before = state_of(first)
    stream = toy_stream(tasks=1, clients=1)
    toy_trainer(tmp_path, rounds=1, clients_per_round=1, **ours).fit(first, stream)
    fit_stock(second, stream, **theirs)
    assert any(not torch.equal(before[n].double(), t.double()) for n, t in first.state_dict().items())
    assert_same_bits(first.state_dict(), second.state_dict())


def test_manual_optimisation_equals_trainer_fit(tmp_path):
    first = make_toy(cls=ManualModule)
    second = copy.deepcopy(first)
    stream = toy_stream(tasks=1, clients=1)
    toy_trainer(tmp_path, rounds=1, clients_per_round=1, local_epochs=2).fit(first, stream)
    fit_stock(second, stream, max_epochs=2)
    assert_same_bits(first.state_dict(), second.state_dict())


class LossInDict(ToyModule):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "extra": 1}


class SkipsSteps(ToyModule):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class OwnOptimizerStep(ToyModule):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StopsEpochEarly(ToyModule):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class ClosureTwice(ToyModule):
    """A sharpness-aware optimiser: its step calls the closure twice."""

    def configure_optimizers(self):
        class Twice(torch.optim.SGD):
            def step(self, closure=None):
                loss = closure()
                with torch.no_grad():
                    for group in self.param_groups:
                        for p in group["params"]:
                            p.add_(p.grad, alpha=0.05)
                closure()
                super().step()
                return loss

        return Twice(self.parameters(), lr=0.05)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("cls", [LossInDict, SkipsSteps, OwnOptimizerStep, StopsEpochEarly, ClosureTwice])
def test_unusual_modules_equal_trainer_fit(cls, tmp_path):
    first = make_toy(cls=cls)
    second = copy.deepcopy(first)
    stream = toy_stream(tasks=1, clients=1)
    toy_trainer(tmp_path, rounds=1, clients_per_round=1, local_epochs=2).fit(first, stream)
    fit_stock(second, stream, max_epochs=2)
    assert_same_bits(first.state_dict(), second.state_dict())


class Recorder(Callback):
    """Writes down which hook was called when, with the counters a hook can see."""

    def __init__(self):
        self.calls = []

    def _note(self, name, trainer):
        self.calls.append((name, trainer.current_epoch, trainer.global_step))

    state_key = "recorder"


def _recording(name):
    def hook(self, trainer, pl_module, *args, **kwargs):
        self._note(name, trainer)

    return hook


NOT_IN_A_JOB = ("validation", "test", "predict", "sanity", "checkpoint", "exception", "state_dict")
for _name in [n for n in dir(Callback) if n.startswith("on_") and not any(word in n for word in NOT_IN_A_JOB)]:
    setattr(Recorder, _name, _recording(_name))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}])
def test_callbacks_see_the_hooks_of_trainer_fit_in_the_same_order(options, tmp_path):
    first, ours, theirs = make_toy(), Recorder(), Recorder()
    second = copy.deepcopy(first)
    stream = toy_stream(tasks=1, clients=1, examples=40)
    trainer = toy_trainer(tmp_path, rounds=1, clients_per_round=1, local_epochs=2, callbacks=[ours], **options)
    trainer.fit(first, stream)
    fit_stock(second, stream, callbacks=[theirs], max_epochs=2, **options)
    assert ours.calls == theirs.calls
    assert len(ours.calls) > 40


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_preloading_changes_no_bit(shuffle, drop_last, tmp_path):
    results = []
    for megabytes in (0, 64):
        module = make_toy(dropout=0.5)
        stream = toy_stream(examples=75, shuffle=shuffle, drop_last=drop_last)  # last batches of two or three
        toy_trainer(tmp_path / str(megabytes), preload_mb=megabytes).fit(module, stream)
        results.append(state_of(module))
    assert_same_bits(*results)
