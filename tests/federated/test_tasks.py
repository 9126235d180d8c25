"""Tasks, rounds, clients, and what a run leaves behind."""

import csv
import json

import lightning as L
import pytest
import torch

from lightning_fcl.aggregators import FedAvg
from lightning_fcl.callbacks import RoundEarlyStopping
from lightning_fcl.data import TaskStream
from lightning_fcl.exceptions import FCLError, MisconfigurationError
from lightning_fcl.federated.sampling import client_seed, sample_clients
from lightning_fcl.federated.trainer import FederatedTrainer
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_data, toy_stream, toy_trainer


def rows(run_dir, name="metrics.csv"):
    with (run_dir / name).open() as file:
        return list(csv.DictReader(file))


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
