"""Wrong use fails early and plainly; what a job sees; what is logged."""

import csv

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fcl.callbacks import ContinualCallback, RoundEarlyStopping, ServerCallback
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.sampling import sample_clients
from tests.helpers.toy import ToyModule, make_toy, toy_data, toy_stream, toy_trainer


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
        ({"min_completed": -1}, r"`min_completed` must be a number of clients .* got -1"),
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
