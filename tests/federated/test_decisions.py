"""The decisions that everyone would stumble over, each where it can be tested."""

import csv
import json

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.aggregators import FedAvg
from lightning_fcl.callbacks import EWC, ContinualCallback, RoundEarlyStopping, ServerCallback
from lightning_fcl.data import TaskStream
from lightning_fcl.exceptions import FCLError, MisconfigurationError
from lightning_fcl.federated.layout import build_layout
from lightning_fcl.federated.sampling import client_seed, sample_clients
from lightning_fcl.federated.trainer import FederatedTrainer
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_data, toy_stream, toy_trainer


def rows(run_dir, name="metrics.csv"):
    with (run_dir / name).open() as file:
        return list(csv.DictReader(file))


# -- callbacks --------------------------------------------------------------------------------------------------------


class Misspelt(L.Callback):
    def on_train_batch_ended(self, *args):
        pass


class MisspeltServer(ServerCallback):
    def on_round_ended(self, trainer, pl_module):
        pass


class Twice(ContinualCallback):
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [Misspelt()]}, "`Misspelt.on_train_batch_ended` is not a hook.*mean `on_train_batch_end`"),
        ({"server_callbacks": [MisspeltServer()]}, "on_round_ended` is not a hook.*mean `on_round_end`"),
        ({"callbacks": [Twice(), Twice()]}, "share 'Twice': their states would overwrite each other"),
        ({"callbacks": [ModelCheckpoint()]}, "must not hold `ModelCheckpoint`.*use `checkpoint_every=`"),
        ({"callbacks": [EarlyStopping("val_acc")]}, "must not hold `EarlyStopping`.*RoundEarlyStopping"),
        ({"callbacks": [RoundEarlyStopping("x")]}, "belongs in `server_callbacks="),
        ({"server_callbacks": [Twice()]}, "belongs in `callbacks="),
        ({"rounds": 0}, "`rounds` must be at least 1, got 0"),
        ({"rounds": [2, 0]}, "`rounds` must be at least 1, got 0"),
        ({"clients_per_round": 0}, "`clients_per_round` must be at least 1"),
        ({"parallel": "data"}, "`parallel` must be one of 'clients', 'model', got 'data'"),
        ({"on_client_error": "ignore"}, "`on_client_error` must be one of"),
        ({"min_completed": 1.5}, r"`min_completed` must be .* share in \(0, 1\]"),
        ({"gradient_clip_val": -1.0}, "`gradient_clip_val` must be positive or None"),
        ({"aggregator": ["fedavg"]}, "`aggregator` must be a Reducer"),
    ],
)
def test_wrong_arguments_fail_at_construction(options, message, tmp_path):
    with pytest.raises(MisconfigurationError, match=message):
        toy_trainer(tmp_path, **options)


class NoValidation(L.LightningModule):
    def training_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (nn.Linear(1, 1), {}, "`module` must be a `lightning.LightningModule`, got torch.nn.modules.linear.Linear"),
        (NoValidation(), {}, "`module` must define `validation_step`, but NoValidation does not"),
        (make_toy(), {"rounds": [1, 2, 3]}, r"`rounds` must be one number or one per task \(2\), got 3 numbers"),
        (make_toy(), {"payload": "head.*"}, r"`payload` must match.*'head\.\*'\. Names look like: net\.0\.weight"),
        (make_toy(), {"score": "val_auc"}, r"`score` must be a key.*'val_auc'; it logs \['val_acc', 'val_loss'\]"),
    ],
)
def test_wrong_combinations_fail_before_training(module, options, message, tmp_path):
    with pytest.raises(MisconfigurationError, match=message):
        toy_trainer(tmp_path, **options).fit(module, toy_stream())
    assert not (tmp_path / "checkpoints").exists()


def test_half_precision_scaling_on_cpu_is_refused(tmp_path):
    with (
        pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"),
        pytest.raises(MisconfigurationError, match="`precision='16-mixed'` needs a GPU"),
    ):
        toy_trainer(tmp_path, precision="16-mixed").fit(make_toy(), toy_stream())


# -- the trainer inside a job -----------------------------------------------------------------------------------------


class Looks(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        assert pl_module.trainer is trainer
        self.seen.append((trainer.task, trainer.round, trainer.client, trainer.global_step, trainer.current_epoch))
        assert trainer.estimated_stepping_batches == 2 * trainer.num_training_batches
        assert trainer.num_examples == len(trainer.train_dataloader.dataset)
        assert trainer.max_epochs == 2
        assert trainer.world_size == 1
        assert trainer.is_global_zero
        assert len(trainer.optimizers) == 1
        with pytest.raises(AttributeError, match=r"`trainer.fit_loop` is not available inside a client job.*client"):
            trainer.fit_loop  # noqa: B018
        with pytest.raises(AttributeError):
            trainer.global_step = 3


def test_context_tells_which_job_it_is(tmp_path):
    looks = Looks()
    toy_trainer(tmp_path, callbacks=[looks], local_epochs=2, clients_per_round=2).fit(make_toy(), toy_stream())
    expected = []
    for task in range(2):
        for round_ in range(2):
            for client in sample_clients([0, 1, 2, 3], 2, 0, task, round_):
                expected.append((task, round_, client, 0, 0))
    assert looks.seen == expected


class LogsMuch(ToyModule):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch, batch_idx):
        self.log("size", float(len(batch[1])))
        self.log("most", float(batch_idx), reduce_fx="max")
        self.log("count", 1.0, reduce_fx="sum")
        self.log_dict({"client": float(self.trainer.client), "loss/extra": 2.0})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self(x), y)
        self.log("val_acc", self.accuracy)
        self.log("val_size", float(len(y)))


def test_client_logs_become_weighted_round_means(tmp_path):
    stream = toy_stream(
        tasks=1, clients=2, examples=30, partition=lambda e, c, rng: (torch.arange(len(e)) >= 20).int().numpy()
    )
    toy_trainer(tmp_path, rounds=1, clients_per_round=2).fit(make_toy(cls=LogsMuch), stream)
    (row,) = rows(tmp_path)
    assert [stream.num_examples(0, c) for c in (0, 1)] == [20, 10]
    sizes = [(8 * 8 + 8 * 8 + 4 * 4) / 20, (8 * 8 + 2 * 2) / 10]  # batches of 8, weighted by their size
    assert float(row["client/size"]) == pytest.approx((20 * sizes[0] + 10 * sizes[1]) / 30)
    assert float(row["client/most"]) == pytest.approx((20 * 2 + 10 * 1) / 30)
    assert float(row["client/count"]) == pytest.approx((20 * 3 + 10 * 2) / 30)
    assert float(row["client/client"]) == pytest.approx(10 / 30)
    assert float(row["loss/extra"]) == 2.0


def test_metric_objects_are_computed_over_the_whole_set(tmp_path):
    module = make_toy(cls=LogsMuch)
    report = toy_trainer(tmp_path).fit(module, toy_stream())
    x, y = toy_data(30, seed=100, shift=0.0).tensors
    with torch.no_grad():
        expected = (module(x).argmax(1) == y).float().mean().item()
    assert report.accuracy[1, 0].item() == pytest.approx(expected, abs=1e-6)
    assert float(rows(tmp_path)[-1]["task/task_0/val_size"]) == pytest.approx((3 * 8 * 8 + 6 * 6) / 30)


class LogsVector(ToyModule):
    def training_step(self, batch, batch_idx):
        self.log("vector", torch.ones(3))


def test_logging_a_vector_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"`self.log\('vector', ...\)` must be given a single number.*shape \(3,\)"):
        toy_trainer(tmp_path).fit(make_toy(cls=LogsVector), toy_stream())


def test_loggers_get_the_global_round_as_step(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="logs")
    toy_trainer(tmp_path / "run", loggers=[logger], eval_every=1).fit(make_toy(), toy_stream())
    logger.save()
    steps = [int(r["step"]) for r in rows(tmp_path / "logs")]
    assert steps == [0, 1, 2, 3]
    assert [int(r["global_round"]) for r in rows(tmp_path / "run")] == steps


class TwoAccuracies(ToyModule):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("top5_acc", 0.5)


def test_score_must_be_named_if_several_look_alike(tmp_path):
    with pytest.raises(MisconfigurationError, match=r"since \['val_acc', 'top5_acc'\] look like accuracies"):
        toy_trainer(tmp_path).fit(make_toy(cls=TwoAccuracies), toy_stream())
    report = toy_trainer(tmp_path, score="top5_acc").fit(make_toy(cls=TwoAccuracies), toy_stream())
    assert report.accuracy.tolist() == [[0.5, 0.5], [0.5, 0.5]]


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
    assert len({h.sum().item() for h in heads.heads.values()}) == 4
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


class MixedTypes(ToyModule):
    def __init__(self):
        super().__init__()
        self.net[0].to(torch.bfloat16)

    def forward(self, x):
        return self.net[2](torch.relu(self.net[0](x.to(torch.bfloat16)).float()))


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
    toy_trainer(tmp_path / "b", rounds=1, clients_per_round=1, preload_mb=0).fit(twins[1], toy_stream(tasks=1, clients=1))
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


# -- tasks, rounds, clients -------------------------------------------------------------------------------------------


def test_rounds_per_task_and_evaluation_cadence(tmp_path):
    trainer = toy_trainer(tmp_path, rounds=[1, 3], eval_every=2, measure_baseline=False)
    report = trainer.fit(make_toy(), toy_stream())
    table = rows(tmp_path)
    assert [(r["task"], r["round"]) for r in table] == [("0", "0"), ("1", "0"), ("1", "1"), ("1", "2")]
    assert [r["round/val_acc"] != "" for r in table] == [True, False, True, True]
    assert not report.accuracy.isnan().any()
    assert report.baseline is None


def test_local_steps(tmp_path):
    class Steps(L.Callback):
        def on_train_end(self, trainer, pl_module):
            taken.append((trainer.global_step, trainer.current_epoch))

    taken = []
    toy_trainer(tmp_path, local_steps=5, rounds=1, callbacks=[Steps()]).fit(make_toy(), toy_stream(tasks=1))
    assert taken == [(5, 3)] * 3  # clients have two batches an epoch


def test_early_stopping_goes_to_the_next_task(tmp_path):
    stopper = RoundEarlyStopping("round/val_acc", patience=1, min_delta=2.0)  # nothing improves by 2
    options = {"rounds": 9, "eval_every": 1, "server_callbacks": [stopper]}
    toy_trainer(tmp_path, **options).fit(make_toy(), toy_stream())
    assert [(r["task"], r["round"]) for r in rows(tmp_path)] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]


def test_fast_dev_run(tmp_path):
    trainer = toy_trainer(tmp_path, rounds=50, local_epochs=50, clients_per_round=4, fast_dev_run=True)
    report = trainer.fit(make_toy(), toy_stream())
    assert len(rows(tmp_path)) == 1
    assert report.accuracy[1].isnan().all()


def test_sampling_is_uniform_repeatable_and_sorted():
    draws = [sample_clients(list(range(10)), 3, 5, 0, r) for r in range(3000)]
    assert draws[:5] == [sample_clients(list(range(10)), 3, 5, 0, r) for r in range(5)]
    assert all(d == sorted(set(d)) and len(d) == 3 for d in draws)
    counts = torch.bincount(torch.tensor(draws).flatten(), minlength=10)
    assert (counts - 900).abs().max() < 5 * (3000 * 0.3 * 0.7) ** 0.5
    assert sample_clients([4, 2], 9, 0, 0, 0) == [2, 4]


def test_seeds_differ_by_every_coordinate():
    seeds = {client_seed(s, t, r, c) for s in range(3) for t in range(4) for r in range(5) for c in range(6)}
    assert len(seeds) == 3 * 4 * 5 * 6


def test_heterogeneous_stages_and_lagging_clients(tmp_path):
    trained = []

    class Notes(L.Callback):
        def on_train_start(self, trainer, pl_module):
            trained.append((trainer.task, trainer.client, trainer.num_examples))

    for name, stream in {
        "het": toy_stream(tasks=2).stages("het"),
        "lag": toy_stream(tasks=2).stages(lag=0.5),
    }.items():
        report = toy_trainer(tmp_path / name, clients_per_round=4, callbacks=[Notes()]).fit(make_toy(), stream)
        assert not report.accuracy.isnan().any()
        config = json.loads((tmp_path / name / "report.json").read_text())
        assert torch.tensor(config["seen"])[0].any()
    assert len(trained) == 2 * 2 * 2 * 4


def test_module_holds_the_final_global_weights(tmp_path):
    module = make_toy()
    toy_trainer(tmp_path).fit(module, toy_stream())
    from safetensors.torch import load_file

    assert_same_bits(
        state_of(module), load_file(sorted((tmp_path / "checkpoints").glob("*"))[-1] / "model.safetensors")
    )
    torch.save(module.state_dict(), tmp_path / "plain.pt")
    assert (tmp_path / "plain.pt").stat().st_size < 10_000


def test_validate_and_predict(tmp_path):
    module, stream = make_toy(), toy_stream()
    trainer = toy_trainer(tmp_path)
    report = trainer.fit(module, stream)
    scores = [metrics["val_acc"] for metrics in trainer.validate(module, stream)]
    assert scores == report.accuracy[-1].tolist()
    outputs = trainer.predict(Predicts(module), stream.eval_loader(0))
    assert torch.cat(outputs).shape == (30, 3)


class Predicts(L.LightningModule):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def predict_step(self, batch, batch_idx):
        return self.inner(batch[0])


def test_the_users_random_stream_is_not_disturbed(tmp_path):
    module, stream = make_toy(), toy_stream()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    toy_trainer(tmp_path).fit(module, stream)
    assert torch.equal(torch.rand(3), expected)


def test_state_outside_of_fit_is_a_clear_error(tmp_path):
    with pytest.raises(RuntimeError, match="exists only while `fit` runs"):
        toy_trainer(tmp_path).state  # noqa: B018


def test_default_run_dir_is_new_and_named_by_time():
    trainer = FederatedTrainer(rounds=1, clients_per_round=1)
    assert trainer.run_dir.parent.name == "runs"


def test_map_style_datasets_that_draw_are_not_preloaded(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.labels = [i % 3 for i in range(24)]

        def __len__(self):
            return 24

        def __getitem__(self, i):
            return torch.randn(6), self.labels[i]

    states = []
    for megabytes in (0, 64):
        module = make_toy()
        stream = TaskStream.from_datasets([Noisy()], [toy_data(9)], clients=2, batch_size=4)
        toy_trainer(tmp_path / str(megabytes), preload_mb=megabytes, aggregator=FedAvg()).fit(module, stream)
        states.append(state_of(module))
    assert_same_bits(*states)


def test_library_errors_share_a_parent():
    assert issubclass(MisconfigurationError, FCLError)
    assert issubclass(MisconfigurationError, ValueError)
