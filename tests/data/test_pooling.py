"""The bounds as streams: joint, pooled, cumulative; and joint training is a plain fit on all data, bit for bit."""

import lightning as L
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from lightning_fcl import functional as F
from lightning_fcl.data import LabelDirichlet, PartitionPlan, TaskStream
from lightning_fcl.exceptions import DatasetError
from lightning_fcl.federated.sampling import client_seed
from lightning_fcl.federated.session import one_thread_per_client
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_data, toy_stream, toy_trainer

QUIET = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)


def rows_of(stream, task, client):
    """Sorted inputs that a client trains on."""
    return sorted(torch.cat([x for x, _ in stream.train_loader(task, client)]).tolist())


def test_joint_holds_everything_in_one_stage():
    stream = toy_stream(tasks=3, clients=4, partition=LabelDirichlet(0.3))
    joint = stream.joint()
    assert (len(joint), joint.num_clients, joint.names) == (1, 1, stream.names)
    assert joint.num_examples(0, 0) == 180
    assert joint.seen(0) == (0, 1, 2)
    assert rows_of(joint, 0, 0) == sorted(torch.cat([toy_data(60, t, 1.5 * t).tensors[0] for t in range(3)]).tolist())
    assert len(stream) == 3  # the stream itself is as it was


def test_pooled_holds_a_task_at_a_time():
    stream = toy_stream(tasks=2, clients=4, partition=LabelDirichlet(0.3))
    pooled = stream.pooled()
    assert [pooled.clients(task) for task in range(2)] == [[0], [0]]
    for task in range(2):
        whole = [row for client in stream.clients(task) for row in rows_of(stream, task, client)]
        assert rows_of(pooled, task, 0) == sorted(whole)


def test_cumulative_keeps_what_clients_had():
    stream = toy_stream(tasks=3, clients=2)
    kept = stream.cumulative()
    assert [kept.num_examples(task, 1) for task in range(3)] == [30, 60, 90]
    assert rows_of(kept, 1, 1) == sorted(rows_of(stream, 0, 1) + rows_of(stream, 1, 1))
    assert kept.cumulative().plan.hash == kept.plan.hash
    assert kept.pooled().num_examples(2, 0) == 180


def test_bounds_survive_a_file(tmp_path):
    for stream in (toy_stream().joint(), toy_stream().pooled(), toy_stream().cumulative()):
        assert PartitionPlan.load(stream.plan.save(tmp_path / "plan.json")).hash == stream.plan.hash


def test_pooling_a_mixed_order_is_refused():
    stream = toy_stream(tasks=2, clients=4).stages("het")
    with pytest.raises(DatasetError, match="`pooled` must find every training set whole in a stage, but in stage 0"):
        stream.pooled()
    assert stream.joint().num_examples(0, 0) == 120


def test_joint_training_is_a_fit_on_the_concatenation(tmp_path):
    stream = toy_stream(tasks=3, clients=4)
    federated, stock = make_toy(dropout=0.2, momentum=0.9), make_toy(dropout=0.2, momentum=0.9)
    trainer = toy_trainer(tmp_path, rounds=1, clients_per_round=1, local_epochs=2)
    report = trainer.fit(federated, stream.joint())
    data = ConcatDataset([toy_data(60, seed=t, shift=1.5 * t) for t in range(3)])
    L.seed_everything(client_seed(0, task=0, round=0, client=0), verbose=False)
    with one_thread_per_client(trainer):
        plain = L.Trainer(max_epochs=2, accelerator="cpu", limit_val_batches=0, num_sanity_val_steps=0, **QUIET)
        plain.fit(stock, DataLoader(data, batch_size=8, shuffle=True), stream.eval_loader(0))
    assert_same_bits(state_of(federated), state_of(stock))
    assert report.accuracy.shape == (1, 3)
    assert report.summary["acc"] == pytest.approx(report.accuracy.mean().item())
    assert report.summary["avg"] == report.summary["acc"]
    assert report.summary["bwt"] != report.summary["bwt"]  # one stage forgets nothing


def test_pooled_training_is_the_federation_of_one_client(tmp_path):
    alone = TaskStream.from_datasets(
        [toy_data(60, t, 1.5 * t) for t in range(2)], [toy_data(30, 100 + t, 1.5 * t) for t in range(2)],
        clients=1, batch_size=8,
    )  # fmt: skip
    ends = []
    for name, stream in (("a", toy_stream(clients=4).pooled()), ("b", alone)):
        module = make_toy()
        report = toy_trainer(tmp_path / name, clients_per_round=1).fit(module, stream)
        ends.append((state_of(module), report.accuracy))
    assert_same_bits(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert F.backward_transfer(ends[0][1]) < 1.0
