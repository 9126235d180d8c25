"""What a hostile reviewer tried: silent wrong results that must stay fixed."""

import dataclasses
from typing import NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import Dataset, Subset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.aggregators import Chain, FedAvg, ServerStep
from lightning_fcl.callbacks import EWC, ContinualCallback, FaultInjector, ServerCallback
from lightning_fcl.data import TaskStream
from lightning_fcl.exceptions import CheckpointError, FCLError, MisconfigurationError, ResumeMismatchError
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.toy import (
    MixedTypes,
    ToyModule,
    assert_same_bits,
    make_toy,
    state_of,
    toy_data,
    toy_stream,
    toy_trainer,
)


class WithMetric(ToyModule):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch, batch_idx):
        self.accuracy(self(batch[0]), batch[1])
        self.log("val_acc", self.accuracy)


def fit_metric(run_dir: str, devices: int, seed: int = 0):
    module = make_toy(seed=seed, cls=WithMetric)
    report = toy_trainer(run_dir, devices=devices).fit(module, toy_stream(tasks=3))
    return state_of(module), report.accuracy


@pytest.mark.distributed
def test_metric_objects_do_not_mix_the_columns_of_two_processes(ranks, tmp_path):
    state, accuracy = fit_metric(str(tmp_path / "one"), 1)
    for other, matrix in ranks.run(fit_metric, str(tmp_path / "two"), 2):
        assert_same_bits(state, other)
        assert torch.equal(accuracy, matrix)


def fit_unseeded(run_dir: str):
    module = make_toy(seed=torch.distributed.get_rank())
    toy_trainer(run_dir, devices=2).fit(module, toy_stream())
    return state_of(module)


@pytest.mark.distributed
def test_ranks_start_from_the_first_ranks_module(ranks, tmp_path):
    first, second = ranks.run(fit_unseeded, str(tmp_path))
    assert_same_bits(first, second)


def ewc_under_ddp():
    callback, module = EWC(1.0), make_toy()
    make_trainer([callback], max_epochs=1, strategy="ddp", devices=2).fit(module, loader())
    make_trainer([callback], max_epochs=1, strategy="ddp", devices=2).fit(module, loader(shift=1.0))
    return callback.importance, state_of(module)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_stock_ddp_ranks_agree_on_the_importance(ranks):
    (first, one), (second, two) = ranks.run(ewc_under_ddp)
    assert_same_bits(first, second)
    assert_same_bits(one, two)


class Scaled(Subset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * 100, y

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class OwnGenerator(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.labels = [i % 3 for i in range(24)]

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.from_numpy(self.rng.normal(size=6).astype(np.float32)), self.labels[i]


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


class Named(Dataset):
    labels = (0, 1, 2) * 4

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return Pair(torch.ones(6), self.labels[i])


class Sees(ToyModule):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x = batch.x if isinstance(batch, Pair) else batch[0]
        self.seen.append(x.abs().mean().item())
        x.mul_(2.0)  # in place: the dataset must not change
        return nn.functional.cross_entropy(self(x), batch[1])


@pytest.mark.parametrize("make", [lambda: Scaled(toy_data(24), range(24)), Named, lambda: toy_data(24)])
def test_preloading_never_changes_what_a_step_sees(make, tmp_path):
    seen = []
    for megabytes in (0, 64):
        module = make_toy(cls=Sees)
        stream = TaskStream.from_datasets([make()], [toy_data(9)], clients=1, shuffle=False, batch_size=8)
        toy_trainer(tmp_path / str(megabytes), preload_mb=megabytes, local_epochs=2).fit(module, stream)
        seen.append(module.seen)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 2


@pytest.mark.parametrize("megabytes", [0, 64])
def test_datasets_with_a_generator_of_their_own_stay_random(megabytes, tmp_path):
    module = make_toy(cls=Sees)
    stream = TaskStream.from_datasets([OwnGenerator()], [toy_data(9)], clients=1, shuffle=False, batch_size=8)
    toy_trainer(tmp_path, preload_mb=megabytes, local_epochs=2, rounds=1).fit(module, stream)
    assert len(set(module.seen)) == 6  # three batches, two epochs


class SendsZeros(ContinualCallback):
    def on_upload(self, trainer, pl_module, update):
        return dataclasses.replace(update, tensors={n: torch.zeros_like(t) for n, t in update.tensors.items()})


def test_a_replaced_update_is_what_travels(tmp_path):
    module = make_toy()
    toy_trainer(tmp_path, callbacks=[SendsZeros()]).fit(module, toy_stream())
    assert all(not p.any() for p in module.parameters())


class Momentum(ServerStep):
    """Returns its state as the delta."""

    def init(self, params):
        return torch.zeros_like(params, dtype=torch.float64)

    def apply(self, params, delta, stats, state):
        velocity = 0.9 * state + delta
        return velocity, velocity


def test_a_server_step_may_return_its_state_as_the_delta():
    chain, params = Chain(FedAvg(), Momentum()), torch.zeros(1)
    states = chain.init(params)
    for expected in (1.0, 2.9, 5.61):
        params, states = chain.apply(params, torch.ones(1, dtype=torch.float64), None, states)
        assert params.item() == pytest.approx(expected)


class WrongStep(ServerStep):
    def __init__(self, result):
        self.result = result

    def apply(self, params, delta, stats, state):
        return self.result(delta, state)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda d, s: d, r"must return \(delta, state\), got Tensor"),
        (lambda d, s: (d.float(), s), r"must return a float64 delta .* got torch.float32"),
        (lambda d, s: (d[:1], s), r"of shape \(1,\)"),
    ],
)
def test_wrong_server_steps_are_named(result, message, tmp_path):
    with pytest.raises(FCLError, match=message):
        toy_trainer(tmp_path, aggregator=WrongStep(result)).fit(make_toy(), toy_stream())


class HoldsModule(ContinualCallback):
    """Hands out live tensors as its state, and uploads a live tensor."""

    def __init__(self):
        self.counter = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.counter.weight)
        self.seen, self.merged = [], []

    def on_fit_start(self, trainer, pl_module):
        with torch.no_grad():
            self.counter.weight += 1
        self.seen.append(self.counter.weight.item())

    def state_dict(self):
        return dict(self.counter.state_dict())

    def load_state_dict(self, state_dict):
        self.counter.load_state_dict(state_dict)

    def upload(self, trainer):
        with torch.no_grad():
            self.counter.weight.mul_(1.0)
        return {"weight": self.counter.weight.detach()}

    def download(self, merged):
        self.merged.append(merged["weight"].item())


def test_live_tensors_do_not_leak_from_client_to_client(tmp_path):
    callback = HoldsModule()
    toy_trainer(tmp_path, callbacks=[callback], clients_per_round=4, rounds=3).fit(make_toy(), toy_stream(tasks=1))
    assert callback.seen == [1.0] * 4 + [2.0] * 4 + [3.0] * 4
    assert callback.merged == [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize(
    ("value", "error"),
    [(torch.tensor([float("nan")]), FloatingPointError), (torch.tensor([1]), TypeError), (1.0, TypeError)],
)
def test_bad_uploads_are_refused(value, error, tmp_path):
    class Uploads(ContinualCallback):
        def upload(self, trainer):
            return {"x": value}

    with pytest.raises(error, match="upload"):
        toy_trainer(tmp_path, callbacks=[Uploads()]).fit(make_toy(), toy_stream())


class Looks(ServerCallback):
    def __init__(self):
        self.same = []

    def on_round_end(self, trainer, pl_module):
        views = trainer._run.engine.layout.views(trainer.state.params)
        self.same.append(all(torch.equal(p, views[n]) for n, p in pl_module.named_parameters()))


def test_the_module_holds_the_global_weights_in_server_hooks(tmp_path):
    looks = Looks()
    toy_trainer(tmp_path, server_callbacks=[looks]).fit(make_toy(), toy_stream())
    assert looks.same == [True] * 4


class OneCycle(ToyModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("keep", [False, True])
def test_learning_rate_factors_hold_under_absolute_schedules(keep, tmp_path):
    module = make_toy(cls=OneCycle)
    before = state_of(module)
    options = {"lr_factor": lambda task, round_: 0.0, "keep_optimizer_state": keep, "local_epochs": 2}
    toy_trainer(tmp_path, **options).fit(module, toy_stream())
    assert_same_bits(before, state_of(module))


class OwnClipping(ToyModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.0)


def test_the_modules_own_clipping_runs_without_a_limit(tmp_path):
    module = make_toy(cls=OwnClipping)
    before = state_of(module)
    toy_trainer(tmp_path).fit(module, toy_stream())
    assert_same_bits(before, state_of(module))


def test_mixed_types_resume_to_the_same_bits(tmp_path):
    states = []
    for run, faults in (("whole", []), ("broken", [FaultInjector("exception", task=1, round=0)])):
        options = {"aggregator": FedAvg(lr=0.3)}
        module = make_toy(cls=MixedTypes)
        if faults:
            with pytest.raises(RuntimeError, match="injected"):
                toy_trainer(tmp_path / run, callbacks=faults, **options).fit(module, toy_stream())
            module = make_toy(cls=MixedTypes)
        toy_trainer(tmp_path / run, **options).fit(module, toy_stream(), "auto")
        states.append(state_of(module))
    assert_same_bits(*states)


def test_another_frozen_base_is_refused_on_resume(tmp_path):
    def frozen(seed):
        module = make_toy(seed=seed)
        module.net[0].requires_grad_(False)
        return module

    with pytest.raises(RuntimeError, match="injected"):
        toy_trainer(tmp_path, callbacks=[FaultInjector("exception", task=1)]).fit(frozen(0), toy_stream())
    with pytest.raises(ResumeMismatchError, match="untrained"):
        toy_trainer(tmp_path).fit(frozen(1), toy_stream(), "last")


class Unfreezes(L.Callback):
    def on_train_start(self, trainer, pl_module):
        pl_module.net[0].requires_grad_(True)


def test_layers_that_are_unfrozen_in_a_job_are_an_error(tmp_path):
    module = make_toy()
    module.net[0].requires_grad_(False)
    with pytest.raises(FCLError, match=r"trainable parameters changed .*net\.0\.weight"):
        toy_trainer(tmp_path, callbacks=[Unfreezes()]).fit(module, toy_stream())


def test_a_finished_run_without_commits_is_not_overwritten(tmp_path):
    toy_trainer(tmp_path, checkpoint_every=0).fit(make_toy(), toy_stream())
    with pytest.raises(CheckpointError, match="already holds a run"):
        toy_trainer(tmp_path, checkpoint_every=0).fit(make_toy(), toy_stream())


def test_commits_of_another_run_are_refused(tmp_path):
    toy_trainer(tmp_path / "a").fit(make_toy(), toy_stream())
    commit = sorted((tmp_path / "a" / "checkpoints").glob("round_*"))[-1]
    with pytest.raises(CheckpointError, match="must be a commit of this run"):
        toy_trainer(tmp_path / "b").fit(make_toy(), toy_stream(), commit)


def test_a_dry_run_leaves_the_folder_free_for_the_real_one(tmp_path):
    toy_trainer(tmp_path, fast_dev_run=True).fit(make_toy(), toy_stream())
    assert not (tmp_path / "checkpoints").exists()


def test_short_runs_reach_the_loggers(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="logs")
    toy_trainer(tmp_path / "run", loggers=[logger]).fit(make_toy(), toy_stream())
    assert "val_acc" in (tmp_path / "logs" / "metrics.csv").read_text()


def test_numpy_scalars_are_plain_settings(tmp_path):
    report = toy_trainer(tmp_path, aggregator=FedAvg(lr=np.float64(0.5))).fit(
        make_toy(lr=np.float64(0.1)), toy_stream()
    )
    assert "lr: 0.5" in (report.run_dir / "config.yaml").read_text()


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_ewc_measures_in_the_runs_precision(precision, tmp_path):
    module = make_toy()
    toy_trainer(tmp_path, precision=precision, callbacks=[EWC(1.0)]).fit(module, toy_stream())
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_stages_without_clients_are_refused_before_training(tmp_path):
    stream = toy_stream(clients=2).stages([[0, 0], [(), ()]])
    with pytest.raises(MisconfigurationError, match=r"in every stage, but stages \[1\] have none"):
        toy_trainer(tmp_path).fit(make_toy(), stream)


def test_inference_mode_is_refused(tmp_path):
    with torch.inference_mode(), pytest.raises(MisconfigurationError, match=r"outside of `torch.inference_mode\(\)`"):
        toy_trainer(tmp_path).fit(make_toy(), toy_stream())
