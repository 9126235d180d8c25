"""The doctor's figures against runs, what it finds wrong, and that it leaves all as it was."""

import gc

import pytest
import torch
from torch import nn

from lightning_fcl.aggregators import FedAvg, FedAvgM, Krum
from lightning_fcl.callbacks import EWC, SCAFFOLD, FedCurv, RoundEarlyStopping
from lightning_fcl.doctor import diagnose
from lightning_fcl.exceptions import MisconfigurationError
from tests.helpers.cli_parts import Taught
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_data, toy_stream, toy_trainer


class Wide(ToyModule):
    """The same with as many hidden units as asked for."""

    def __init__(self, width=32, **options):
        super().__init__(**options)
        self.net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


class Stray(ToyModule):
    """A layer that nothing uses, one that a zero blocks, and one whose gradient is 0 / 0."""

    def __init__(self, *, zero=False, nan=False):
        super().__init__()
        self.unused = nn.Linear(6, 4)
        self.zero, self.nan = zero, nan
        self.blocked, self.broken = nn.Linear(6, 3, bias=False), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        logits = self.net(x)
        if self.zero:
            logits = logits + 0 * self.blocked(x)
        return logits + (self.broken.square().sqrt() if self.nan else 0)


class Breaks(ToyModule):
    """Raises where it is told to."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def training_step(self, batch, batch_idx):
        if self.where == "training_step":
            raise RuntimeError("no step\nfurther lines")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.where == "validation_step":
            raise KeyError("no score")
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self):
        return None if self.where == "configure_optimizers" else super().configure_optimizers()

    def on_before_zero_grad(self, optimizer):
        if self.where == "backward":
            raise ArithmeticError("no gradient")


class Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        raise OSError(f"cannot read example {index}")


def finding(diagnosis, subject, level):
    (found,) = [f for f in diagnosis.findings if f.level == level and f.subject.startswith(subject)]
    return found.text


# -- figures against runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 300])
@pytest.mark.parametrize("callback", [None, EWC, SCAFFOLD, FedCurv])
def test_bytes_are_those_of_the_run(tmp_path, width, callback):
    options = {"rounds": [3, 2], "clients_per_round": 3, "callbacks": [callback()] if callback else []}
    if callback in (EWC, FedCurv):
        options["callbacks"] = [callback(1.0)]
    module, stream = make_toy(cls=Wide, width=width), toy_stream()
    found = diagnose(toy_trainer(tmp_path / "dry", **options), module, stream)
    report = toy_trainer(tmp_path / "run", **options).fit(module, stream)
    assert (found.numbers["bytes_down"], found.numbers["bytes_up"]) == (report.bytes_down, report.bytes_up)
    if callback is EWC:
        states = {path.parent.name: path.stat().st_size for path in (tmp_path / "run" / "clients").glob("*/*")}
        assert found.numbers["disk_clients"] == pytest.approx(sum(states.values()), rel=0.05)


class Weighing(FedAvg):
    """Counts the bytes of all tensors when the last update is in and nothing is merged yet."""

    def finish(self, partials, stats):
        self.seen = live_bytes()
        return super().finish(partials, stats)


def live_bytes():
    """Bytes of all storages that some tensor holds."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    grads = [thing.grad for thing in tensors if thing.is_leaf and thing.grad is not None]  # held by C++ alone
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*tensors, *grads]}.values())


@pytest.mark.parametrize(("width", "clients"), [(1024, 5), (8192, 20)])
def test_memory_is_that_of_the_run(tmp_path, width, clients):
    options = {"rounds": 1, "clients_per_round": clients, "preload_mb": 0, "measure_baseline": False}
    module, stream = make_toy(cls=Wide, width=width), toy_stream(tasks=1, clients=clients, examples=8 * clients)
    before = live_bytes()
    found = diagnose(toy_trainer(tmp_path / "dry", aggregator=FedAvg(), **options), module, stream)
    assert live_bytes() - before < 1000  # the doctor leaves nothing behind
    rule = Weighing()
    toy_trainer(tmp_path / "run", aggregator=rule, **options).fit(module, stream)
    expected = found.numbers["memory_vectors"] + found.numbers["memory_gradients"]
    assert rule.seen - before == pytest.approx(expected, rel=0.01)


def test_adam_holds_two_moments_and_a_count_per_tensor(tmp_path):
    found = diagnose(toy_trainer(tmp_path / "run"), make_toy(optimizer="adam"), toy_stream())
    weights = found.numbers["bytes_travels"]
    assert found.numbers["memory_optimizer"] == 2 * weights + 4 * 4
    assert found.numbers["memory_gradients"] == weights


def test_state_of_server_steps_and_rules_that_need_all_rows(tmp_path):
    found = diagnose(toy_trainer(tmp_path / "a", aggregator=FedAvgM()), make_toy(), toy_stream())
    assert found.numbers["memory_server"] >= found.numbers["bytes_travels"]
    robust = toy_trainer(tmp_path / "b", aggregator=Krum(byzantine=1), clients_per_round=5)
    assert diagnose(robust, make_toy(), toy_stream(clients=6)).ok  # Krum refuses two clients


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_dead_and_blocked_parameters_are_named(tmp_path):
    found = diagnose(toy_trainer(tmp_path / "run"), make_toy(cls=Stray, zero=True), toy_stream())
    dead, zero = [f.text for f in found.findings if f.level == "warning"]
    assert dead.startswith("3 of 8 trainable parameters got none: broken, unused.bias, unused.weight.")
    assert zero.startswith("all zero in 1 trainable parameters: blocked.weight.")
    assert found.ok  # warnings


def test_nan_gradients_are_named(tmp_path):
    found = diagnose(toy_trainer(tmp_path / "run"), make_toy(cls=Stray, nan=True), toy_stream())
    assert not found.ok
    assert finding(found, "gradients", "error").startswith("NaN or infinite in 1 parameters: broken.")
    assert isinstance(found.error, FloatingPointError)


def test_what_travels_and_what_stays(tmp_path):
    trainer = toy_trainer(tmp_path / "run", payload="net.0.*")
    module = make_toy(batch_norm=True)
    module.net[3].bias.requires_grad_(False)
    found = diagnose(trainer, module, toy_stream())
    fates = {row[0]: row[-1] for row in found.tables[0].rows}
    assert fates["net.*.weight"] == "stays with the client"  # the last group of that name
    assert found.numbers["bytes_travels"] == 4 * (6 * 8 + 8) == found.numbers["round_up"]
    assert found.numbers["bytes_frozen"] == 4 * 3
    assert found.numbers["disk_client"] > found.numbers["bytes_stays_with_the_client"] > 0


@pytest.mark.parametrize(
    ("where", "phase", "text"),
    [
        ("training_step", "training_step, client 0", "RuntimeError: no step (test_diagnose.py, line"),
        ("validation_step", "validation_step", "KeyError: 'no score' (test_diagnose.py"),
        ("configure_optimizers", "configure_optimizers, client 0", "`configure_optimizers` must return an optimizer"),
        ("backward", "training_step, client 0", "ArithmeticError: no gradient"),
    ],
)
def test_the_error_names_the_phase(tmp_path, where, phase, text):
    found = diagnose(toy_trainer(tmp_path / "run"), Breaks(where), toy_stream())
    (error,) = [f for f in found.findings if f.level == "error"]
    assert error.subject == f"dry run, {phase}"
    assert text in error.text
    assert "further lines" not in str(found)
    assert found.error is not None
    assert not (tmp_path / "run").exists()


def test_data_that_cannot_be_read(tmp_path):
    stream = toy_stream(tasks=1)
    stream = type(stream).from_datasets([Unreadable()], [toy_data(9)], clients=2)
    found = diagnose(toy_trainer(tmp_path / "run"), make_toy(), stream)
    (error,) = [f for f in found.findings if f.level == "error"]
    assert "cannot read example" in error.text
    assert not found.ok


def test_a_module_that_is_none_and_speeds_that_are_none(tmp_path):
    found = diagnose(toy_trainer(tmp_path / "run"), nn.Linear(2, 2), toy_stream())
    assert "`module` must be a `lightning.LightningModule`" in found.findings[0].text
    with pytest.raises(MisconfigurationError, match="`link_mbit` must hold positive speeds, got -1"):
        diagnose(toy_trainer(tmp_path / "run"), make_toy(), toy_stream(), link_mbit=[-1])


def test_what_cannot_be_copied_is_said(tmp_path):
    module = make_toy()
    module.lock = (number for number in range(3))
    found = diagnose(toy_trainer(tmp_path / "run"), module, toy_stream())
    assert found.findings[0].subject == "dry run, copying the module"


# -- nothing is touched ------------------------------------------------------------------------------------------------


def test_a_run_after_the_doctor_has_the_same_bits(tmp_path):
    def make():
        stop = RoundEarlyStopping(monitor="round/val_acc", patience=1)
        return {"callbacks": [EWC(1.0)], "server_callbacks": [stop], "aggregator": FedAvgM(), "eval_every": 1}

    states = []
    for name in ("plain", "examined"):
        trainer, module = toy_trainer(tmp_path / name, **make()), make_toy(cls=Taught, batch_norm=True)
        module.net[0].weight.requires_grad_(False)
        before = state_of(module)
        if name == "examined":
            assert diagnose(trainer, module, toy_stream()).ok
            assert_same_bits(before, state_of(module))
            assert not (tmp_path / name).exists()
        trainer.fit(module, toy_stream())
        states.append(state_of(module))
    assert_same_bits(*states)
    assert (tmp_path / "plain" / "metrics.csv").read_bytes() == (tmp_path / "examined" / "metrics.csv").read_bytes()


def test_frozen_weights_get_their_dtype_back(tmp_path):
    module = make_toy()
    module.net[0].requires_grad_(False)
    before = state_of(module)
    trainer = toy_trainer(tmp_path / "run", precision="64-true")
    found = diagnose(trainer, module, toy_stream())
    assert found.ok, found
    assert_same_bits(before, state_of(module))
    assert module.net[0].weight.dtype == torch.float32


def test_a_run_that_stacks_clients_is_examined_in_sequence(tmp_path):
    trainer = toy_trainer(tmp_path / "run", engine="stacked")
    found = diagnose(trainer, make_toy(), toy_stream())
    (note,) = [finding.text for finding in found.findings if finding.subject == "engine"]
    assert "engine='stacked' was examined in sequence" in note
    assert trainer.engine == "stacked"
