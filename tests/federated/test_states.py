"""What each client keeps, and what travels."""

import csv

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fcl.callbacks import EWC, ContinualCallback
from lightning_fcl.federated.layout import build_layout
from tests.helpers.toy import MixedTypes, ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer


def rows(run_dir, name="metrics.csv"):
    with (run_dir / name).open() as file:
        return list(csv.DictReader(file))


# -- state per client -------------------------------------------------------------------------------------------------


class Counts(ContinualCallback):
    """How many jobs its client has had, and the sum over all clients as the server merges it."""

    upload_reduction = "sum"

    def __init__(self):
        self.jobs = 0
        self.total = torch.zeros(1)
        self.history = []

    def on_fit_start(self, trainer, pl_module):
        self.jobs += 1
        self.history.append((trainer.client, self.jobs, self.total.item()))

    def upload(self, trainer):
        return {"jobs": torch.tensor([float(self.jobs)])}

    def download(self, merged):
        self.total = merged["jobs"]

    def state_dict(self):
        return {"jobs": self.jobs}

    def load_state_dict(self, state_dict):
        self.jobs = state_dict["jobs"]


@pytest.mark.parametrize("megabytes", [0, 64])
def test_each_client_has_its_own_state_and_uploads_are_merged(megabytes, tmp_path):
    counts = Counts()
    options = {"callbacks": [counts], "clients_per_round": 4, "client_state_mb": megabytes}
    toy_trainer(tmp_path, **options).fit(make_toy(), toy_stream())
    jobs = [(client, nth, total) for client, nth, total in counts.history]
    assert [j[1] for j in jobs] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert [j[2] for j in jobs] == [0.0] * 4 + [4.0] * 4 + [8.0] * 4 + [12.0] * 4


def test_the_same_callback_object_serves_two_runs(tmp_path):
    callback, states = EWC(5.0), []
    for run in ("one", "two"):
        module = make_toy()
        toy_trainer(tmp_path / run, callbacks=[callback]).fit(module, toy_stream())
        states.append(state_of(module))
        assert callback.importance == {}
    assert_same_bits(*states)


def test_optimisers_start_fresh_unless_kept(tmp_path):
    states = []
    for keep in (False, True):
        module = make_toy(momentum=0.9)
        toy_trainer(tmp_path / str(keep), keep_optimizer_state=keep, clients_per_round=4).fit(module, toy_stream())
        states.append(state_of(module))
    assert any(not torch.equal(states[0][n], states[1][n]) for n in states[0])


def test_kept_optimiser_state_equals_one_long_job(tmp_path):
    """One client, momentum kept: two rounds of one epoch move as one round of two epochs, without shuffling."""
    states = []
    for rounds, epochs in ((1, 4), (4, 1)):
        module = make_toy(momentum=0.9)
        stream = toy_stream(tasks=1, clients=1, shuffle=False)
        run = tmp_path / str(rounds)
        toy_trainer(run, rounds=rounds, local_epochs=epochs, keep_optimizer_state=True).fit(module, stream)
        states.append(state_of(module))
    assert_same_bits(*states)


def test_learning_rate_factor(tmp_path):
    states = []
    for lr, factor in ((0.1, lambda task, round_: 0.5), (0.05, None)):
        module = make_toy(lr=lr, scheduler="step")
        toy_trainer(tmp_path / str(lr), lr_factor=factor, local_epochs=2).fit(module, toy_stream())
        states.append(state_of(module))
    assert_same_bits(*states)


# -- what travels -----------------------------------------------------------------------------------------------------


class RemembersHead(L.Callback):
    def __init__(self):
        self.heads = {}

    def on_fit_start(self, trainer, pl_module):
        head = pl_module.net[-1].weight.detach().clone()
        if trainer.client in self.heads:
            assert torch.equal(head, self.heads[trainer.client]), "a personal head must come back untouched"

    def on_fit_end(self, trainer, pl_module):
        self.heads[trainer.client] = pl_module.net[-1].weight.detach().clone()


@pytest.mark.parametrize(
    "payload", ["net.0.*", "re:net\\.0", ["net.0.weight", "net.0.bias"], lambda n, t: "net.0" in n]
)
def test_what_does_not_travel_stays_with_the_client(payload, tmp_path):
    module, heads = make_toy(), RemembersHead()
    before = state_of(module)
    trainer = toy_trainer(tmp_path, payload=payload, callbacks=[heads], clients_per_round=4)
    report = trainer.fit(module, toy_stream())
    assert torch.equal(module.net[-1].weight, before["net.2.weight"])  # the server's own head was never trained
    assert not torch.equal(module.net[0].weight, before["net.0.weight"])
    assert len({h[0].sum().item() for h in heads.heads.values()}) == 4  # over classes they sum to the same
    assert report.bytes_up == report.bytes_down == 4 * 4 * 4 * (6 * 8 + 8)  # rounds x clients x float32 x elements


def test_batch_norm_statistics_travel_unless_switched_off(tmp_path):
    for share in (True, False):
        module = make_toy(batch_norm=True)
        before = module.net[1].running_mean.clone()
        toy_trainer(tmp_path / str(share), share_buffers=share).fit(module, toy_stream(examples=64))
        assert torch.equal(before, module.net[1].running_mean) != share


def test_counters_are_copied_from_the_client_with_the_lowest_id(tmp_path):
    module = make_toy(batch_norm=True)
    stream = toy_stream(
        tasks=1, clients=2, examples=48, partition=lambda e, c, rng: (torch.arange(48) >= 32).int().numpy()
    )
    toy_trainer(tmp_path, rounds=1).fit(module, stream)
    assert module.net[1].num_batches_tracked.item() == 4  # 32 examples in batches of 8


def test_frozen_tensors_neither_travel_nor_move(tmp_path):
    module = make_toy()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.data_ptr()
    report = toy_trainer(tmp_path).fit(module, toy_stream())
    assert module.net[0].weight.data_ptr() == before
    assert report.bytes_up == 2 * 2 * 3 * 4 * (8 * 3 + 3)


def test_mixed_dtypes_and_tied_weights(tmp_path):
    module = make_toy(cls=MixedTypes)
    layout = build_layout(module)
    assert not layout.uniform
    assert layout.dtype == torch.float32
    toy_trainer(tmp_path).fit(module, toy_stream())
    assert module.net[0].weight.dtype == torch.bfloat16


class MovingAverage(ToyModule):
    """Re-assigns a buffer instead of writing into it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        self.mean = 0.5 * self.mean + 0.5 * batch[0].mean(0)
        return super().training_step(batch, batch_idx)


def test_buffers_that_the_module_re_assigns_travel_too(tmp_path):
    twins = [make_toy(cls=MovingAverage) for _ in range(2)]
    toy_trainer(tmp_path / "a", rounds=1, clients_per_round=1).fit(twins[0], toy_stream(tasks=1, clients=1))
    toy_trainer(tmp_path / "b", rounds=1, clients_per_round=1, preload_mb=0).fit(
        twins[1], toy_stream(tasks=1, clients=1)
    )
    assert twins[0].mean.abs().sum() > 0
    assert_same_bits(state_of(twins[0]), state_of(twins[1]))
    module = make_toy(cls=MovingAverage)
    toy_trainer(tmp_path / "c", rounds=1, clients_per_round=4).fit(module, toy_stream(tasks=1))
    x = toy_stream(tasks=1, clients=1).train_loader(0, 0).dataset.dataset.tensors[0]
    assert (module.mean - x.mean(0)).abs().max() < 1.0  # an average over all clients, not the last one's


class Tied(ToyModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
        self.net[2].weight = self.net[0].weight


def test_tied_weights_stay_tied(tmp_path):
    module = make_toy(cls=Tied)
    toy_trainer(tmp_path).fit(module, toy_stream())
    assert module.net[2].weight is module.net[0].weight
