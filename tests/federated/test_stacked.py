"""``engine="stacked"``: the weights, the logs and the failures of jobs that are trained one after another."""

import csv
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fcl import TaskStream
from lightning_fcl.callbacks import EWC
from lightning_fcl.federated import session
from lightning_fcl.federated.lanes import LaneMode, NotStackable
from tests.helpers.toy import ToyModule, make_toy, state_of, toy_data, toy_stream, toy_trainer

ENGINES = ("sequential", "stacked")


@pytest.fixture
def stacks(monkeypatch):
    """The stacks of the runs that a test makes."""
    made = []
    original = session.stack
    monkeypatch.setattr(session, "stack", lambda run: made.append(original(run)) or made[-1])
    return made


def both(make, stream, tmp_path, **options):
    """Weights and tables of the two engines."""
    found = []
    for engine in ENGINES:
        module = make()
        toy_trainer(tmp_path / engine, engine=engine, **options).fit(module, stream)
        with (tmp_path / engine / "metrics.csv").open() as table:
            found.append((state_of(module), list(csv.DictReader(table))))
    return found


def assert_close(first, second):
    (weights, rows), (others, other_rows) = first, second
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-5, atol=1e-6)
    assert [row.keys() for row in rows] == [row.keys() for row in other_rows]
    for row, other in zip(rows, other_rows, strict=True):
        for name, value in row.items():
            assert other[name] == value or float(other[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6)


class WithoutRules(ToyModule):
    """A step that only ``torch.func.vmap`` knows how to stack."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = torch.einsum("bi,oi->bo", x, self.net[0].weight) + self.net[0].bias
        loss = F.cross_entropy(self.net[2](logits.relu()), y)
        self.log("train_loss", loss)
        self.log("batch_idx", batch_idx, batch_size=1, reduce_fx="sum")
        return {"loss": loss}


CASES = {
    "sgd": ({}, {}),
    "momentum": ({"momentum": 0.9}, {}),
    "adam": ({"optimizer": "adam"}, {"local_epochs": 3}),
    "steps": ({}, {"local_steps": 5}),
    "limit": ({}, {"limit_train_batches": 1}),
    "lr factor": ({}, {"lr_factor": lambda task, round: 0.5}),
    "one client a round": ({}, {"clients_per_round": 1}),
    "64-true": ({}, {"precision": "64-true"}),
}


@pytest.mark.parametrize(
    ("case", "cls"), [*((case, ToyModule) for case in CASES), ("momentum", WithoutRules), ("steps", WithoutRules)]
)
def test_a_stack_equals_jobs_one_after_another(case, cls, stacks, tmp_path):
    module_options, options = CASES[case]
    settings = {"clients_per_round": 3, "local_epochs": 2} | options
    if "local_steps" in options:
        settings.pop("local_epochs")
    assert_close(
        *both(lambda: make_toy(cls=cls, **module_options), toy_stream(clients=3, examples=60), tmp_path, **settings)
    )
    assert [s if s is None else (s.reason, s.by_rules) for s in stacks] == [None, (None, cls is ToyModule)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_ragged_clients_share_stacks_by_their_batches(shuffle, drop_last, stacks, tmp_path):
    data = toy_data(examples=61)
    owners = torch.repeat_interleave(torch.arange(6), torch.tensor([3, 9, 10, 11, 12, 16]))
    stream = TaskStream.from_datasets(
        [data],
        [data],
        clients=6,
        partition=lambda *_: owners.numpy(),
        batch_size=4,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    assert_close(*both(make_toy, stream, tmp_path, clients_per_round=6, local_epochs=2))
    assert stacks[1].reason is None


class Skips(ToyModule):
    def training_step(self, batch, batch_idx):
        return None if batch_idx else super().training_step(batch, batch_idx)


class ReadsClient(ToyModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.trainer.client)


class Draws(ToyModule):
    def training_step(self, batch, batch_idx):
        import random

        return super().training_step(batch, batch_idx) * random.random()


class Branches(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss > 1 else loss


class Unused(ToyModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.spare = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda: make_toy(batch_norm=True), {}, "buffers"),
        (lambda: make_toy(dropout=0.5), {}, "dropout"),
        (lambda: make_toy(scheduler="step"), {}, "without a scheduler"),
        (lambda: make_toy(cls=Skips), {}, "returns no loss"),
        (lambda: make_toy(cls=ReadsClient), {}, "trainer.client"),
        (lambda: make_toy(cls=Draws), {}, "random numbers"),
        (lambda: make_toy(cls=Branches), {}, "data-dependent control flow"),
        (lambda: make_toy(cls=Unused), {}, "does not use all"),
        (make_toy, {"callbacks": [EWC(1.0)]}, "EWC"),
        (make_toy, {"gradient_clip_val": 0.1}, "gradient_clip_val"),
        (make_toy, {"preload_mb": 0}, "preloaded"),
    ],
)
def test_what_does_not_stack_is_trained_in_sequence_and_says_so_once(make, options, reason, tmp_path):
    found = []
    for engine in ENGINES:
        module = make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            toy_trainer(tmp_path / engine, engine=engine, rounds=2, **options).fit(module, toy_stream(tasks=1))
        told = [str(w.message) for w in caught if "one after another" in str(w.message)]
        found.append(state_of(module))
        assert len(told) == (engine == "stacked")
        assert all(reason in line for line in told)
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


def test_a_client_that_diverges_is_dropped_alone(stacks, tmp_path):
    data = toy_data(examples=40)
    data.tensors[0][:10] = torch.inf
    owners = torch.arange(40) // 10
    stream = TaskStream.from_datasets(
        [data], [toy_data()], clients=4, partition=lambda *_: owners.numpy(), batch_size=5
    )
    options = {"clients_per_round": 4, "on_client_error": "skip", "rounds": 1}
    with pytest.warns(UserWarning, match="client 0 dropped \\(diverged\\)"):
        first, second = both(make_toy, stream, tmp_path, **options)
    assert_close(first, second)
    assert stacks[1].reason is None
    assert first[1][0]["round/clients"] == "3.0"


def test_auto_goes_by_layers_and_shapes(stacks, tmp_path):
    for place, make in enumerate([make_toy, lambda: make_toy(conv=True)]):
        toy_trainer(tmp_path / str(place), engine="auto").fit(make(), toy_stream())
    assert [stack is not None for stack in stacks] == [True, False]
    assert "jobs: stacked" in (tmp_path / "0" / "config.yaml").read_text()
    assert "jobs: sequential" in (tmp_path / "1" / "config.yaml").read_text()


class Frozen(ToyModule):
    def __init__(self, **options):
        super().__init__(**options)
        self.net[0].requires_grad_(False)


def test_frozen_layers_are_shared_by_all_lanes(stacks, tmp_path):
    assert_close(*both(lambda: make_toy(cls=Frozen), toy_stream(), tmp_path))
    assert stacks[1].reason is None


def test_rules_act_on_each_lane():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 5, 2, 4, generator=generator), torch.randint(0, 6, (3, 5), generator=generator)
    y[1, 2] = -100
    weight, bias = torch.randn(3, 6, 8, generator=generator), torch.randn(3, 6, generator=generator)

    def step(x, y, weight, bias):
        logits = F.linear(torch.flatten(F.gelu(x), 1), weight, bias)
        right = (logits.argmax(dim=1) == y).float().mean()
        return F.cross_entropy(logits, y, label_smoothing=0.1) * len(x) + x.shape[1] + x.size(-1) + 0 * right, right

    with LaneMode([x, y, weight, bias]):
        found = step(x, y, weight, bias)
    expected = [step(*parts) for parts in zip(x, y, weight, bias, strict=True)]
    for got, wanted in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(wanted))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: x.sum(),
        lambda x, w: x.add_(1),
        lambda x, w: x + torch.ones(4),
        lambda x, w: x + w,
        lambda x, w: F.cross_entropy(x, torch.zeros(2, 3, dtype=torch.long), reduction="sum"),
        lambda x, w: F.linear(x, torch.ones(2, 4)),
        lambda x, w: x.argmax(),
    ],
)
def test_what_has_no_rule_is_refused(call):
    x, w = torch.ones(2, 3, 4), torch.ones(2, 5, 4, 4)
    with LaneMode([x, w]), pytest.raises(NotStackable, match="rule"):
        call(x, w)
