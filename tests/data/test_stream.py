"""The stream: what it says of itself, how it is rebuilt from a plan, what it refuses."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from lightning_fcl.data import LabelDirichlet, PartitionPlan, TaskStream
from lightning_fcl.exceptions import DatasetError
from tests.helpers.numbered import numbered, one_task
from tests.helpers.toy import toy_data, toy_stream

# --- what a stream is ------------------------------------------------------------------------------------------------


def test_attributes():
    stream = TaskStream.domains(
        {"dawn": (numbered(10), numbered(4)), "dusk": (numbered(6), numbered(3))}, clients=3, seed=5
    )
    assert (len(stream), stream.num_clients, stream.names) == (2, 3, ("dawn", "dusk"))
    assert [stream.clients(task) for task in range(2)] == [[0, 1, 2]] * 2
    assert [stream.num_examples(0, client) for client in range(3)] == [4, 3, 3]
    assert repr(stream) == "TaskStream(2 stages, 3 clients, names=('dawn', 'dusk'), partition='IID(min_examples=1)')"
    assert stream.summary() == {
        "stages": 2,
        "clients": 3,
        "names": ["dawn", "dusk"],
        "partition": "IID(min_examples=1)",
        "seed": 5,
        "train_examples": [10, 6],
        "eval_examples": [4, 3],
        "batch_size": [32, 32],
        "drop_last": [False, False],
        "shuffle": True,
        "deviation": 0.0,
        "plan": stream.plan.hash,
    }


def test_clients_without_data_sit_out():
    stream = one_task([0, 3, 3])
    assert stream.clients(0) == [0, 3]
    assert [stream.num_examples(0, client) for client in range(4)] == [1, 0, 0, 2]


def test_a_client_sees_its_own_examples_and_nobody_elses():
    stream = toy_stream(tasks=2, clients=4, partition=LabelDirichlet(0.3))
    for task in range(2):
        seen = [x for client in stream.clients(task) for x, _ in stream.train_loader(task, client)]
        everything = torch.cat([x for x, _ in stream.train_loader(task, 0).dataset.dataset], dim=0)
        assert sum(map(len, seen)) == 60
        assert sorted(torch.cat(seen).flatten().tolist()) == sorted(everything.flatten().tolist())


class Counted(Dataset):
    """Says its labels, and counts how often an example is read."""

    def __init__(self, labels, stored):
        self.labels_ = labels
        self.reads = 0
        if stored:
            self.targets = labels

    def __len__(self):
        return len(self.labels_)

    def __getitem__(self, index):
        self.reads += 1
        return torch.zeros(1), self.labels_[index]


@pytest.mark.parametrize("stored", [True, False])
def test_labels_of_a_client_are_looked_up_once(stored):
    tasks = [Counted([0, 1, 1, 0, 3], stored), Counted([2, 2, 0], stored)]
    stream = TaskStream.from_datasets(tasks, tasks, clients=2)
    for _ in range(2):
        for task, client in ((0, 0), (0, 1), (1, 0)):
            expected = [tasks[task].labels_[i] for i in stream.train_loader(task, client).dataset.indices]
            assert stream.train_labels(task, client).tolist() == expected
    assert stream.classes(0) == (0, 1, 3)
    assert stream.classes(1) == (0, 1, 2, 3)
    assert [task.reads for task in tasks] == ([0, 0] if stored else [5, 3])


def test_labels_that_were_given_win():
    task = Counted([0, 1, 1], stored=True)
    stream = TaskStream.from_datasets([task], [task], clients=1, labels=[[4, 5, 6]])
    assert stream.train_labels(0, 0).tolist() == [4, 5, 6]


def test_a_client_that_sits_out_has_no_labels():
    assert one_task([0, 2]).train_labels(0, 1).tolist() == []


# --- rebuilt from a plan ---------------------------------------------------------------------------------------------


def test_rebuilt_from_a_saved_plan(tmp_path):
    stream = toy_stream(tasks=2, clients=4, partition=LabelDirichlet(0.3), seed=3).stages("het", lag=0.25)
    plan = PartitionPlan.load(stream.plan.save(tmp_path / "plan.json"))
    train = [source.dataset for source in stream._train]
    test = [source.dataset for source in stream._test]
    for again in (
        TaskStream(train, test, plan=plan, batch_size=8),
        TaskStream.from_datasets(train, test, plan=plan, batch_size=8),
        TaskStream.domains(dict(zip(plan.names, zip(train, test, strict=True), strict=True)), plan=plan, batch_size=8),
    ):
        assert again.summary() == stream.summary()
        for task in range(2):
            for client in stream.clients(task):
                torch.manual_seed(0)
                first = [x for x, _ in stream.train_loader(task, client)]
                torch.manual_seed(0)
                second = [x for x, _ in again.train_loader(task, client)]
                assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


PLAN = toy_stream(tasks=2, clients=4).plan
SETS = [toy_data(60), toy_data(60)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TaskStream.from_datasets(SETS, SETS, plan=PLAN, clients=3), "`clients` must .* the plan's 4, got 3"),
        (
            lambda: TaskStream.domains({"b": SETS, "a": SETS}, plan=PLAN),
            r"names of the tasks must be the plan's, \['task_0', 'task_1'\], got \['b', 'a'\]",
        ),
        (lambda: TaskStream([numbered(9)] * 2, SETS, plan=PLAN), r"`train` of sizes \[9, 9\], got \[60, 60\]"),
        (lambda: TaskStream(SETS, SETS[:1], plan=PLAN), r"`test` must hold one set per training set \(2\), got 1"),
    ],
)
def test_plans_that_do_not_fit(make, message):
    with pytest.raises(DatasetError, match=message):
        make()


# --- errors ----------------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        yield 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": numbered(9)}, "`train` must be a list with one dataset per task, got TensorDataset"),
        ({"train": []}, "`train` must be a list with one dataset per task, got list"),
        ({"train": [Endless()]}, r"`train\[0\]` must be a map-style dataset .* got Endless.*read an iterable into a"),
        ({"train": [3]}, r"`train\[0\]` must be a map-style dataset .* got int"),
        ({"test": [[]]}, r"`test\[0\]` must hold at least one example, got an empty list"),
        ({"test": [DataLoader(Endless())]}, r"`test\[0\]` must be a map-style dataset"),
        ({"train": [DataLoader(numbered(9), batch_size=None)]}, "no sampler of its own, got batch_size=None"),
        (
            {"train": [DataLoader(numbered(9), sampler=WeightedRandomSampler([1.0] * 9, 9))]},
            "no sampler of its own, got batch_size=1 and WeightedRandomSampler. .*give the dataset instead",
        ),
        ({"test": [numbered(9)] * 2}, r"`test` must hold one set per training set \(1\), got 2"),
        ({"clients": None}, "`clients` must be given, got neither `clients` nor `plan`"),
        ({"names": ["a", "b"]}, r"`names` must hold one name per task \(1\), .* got \['a', 'b'\]"),
        ({"names": ["a/b"]}, r"all different and without '/', got \['a/b'\]"),
        ({"names": [""]}, "one name per task"),
    ],
)
def test_what_is_no_stream(options, message):
    with pytest.raises(DatasetError, match=message):
        TaskStream.from_datasets(**{"train": [numbered(9)], "test": [numbered(9)], "clients": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"eval_batch_size": 0}, "`eval_batch_size` must be at least 1, got 0"),
        ({"num_workers": -1}, "`num_workers` must be at least 0, got -1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        one_task([0, 0], **options)


@pytest.mark.parametrize("domains", [{}, [(numbered(3), numbered(3))]])
def test_domains_are_named(domains):
    with pytest.raises(DatasetError, match=r"`domains` must map names to \(train, test\), got "):
        TaskStream.domains(domains, clients=2)


def test_names_must_differ():
    with pytest.raises(DatasetError, match="all different"):
        TaskStream.from_datasets([numbered(3)] * 2, [numbered(3)] * 2, clients=2, names=["a", "a"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.clients(2), "`task` must be from 0 to 1, got 2"),
        (lambda s: s.seen(-1), "`task` must be from 0 to 1, got -1"),
        (lambda s: s.num_examples(0, 4), "`client` must be from 0 to 3, got 4"),
        (lambda s: s.train_loader(0, -1), "`client` must be from 0 to 3, got -1"),
        (lambda s: s.eval_loader(2), "`column` must be from 0 to 1, got 2"),
    ],
)
def test_numbers_out_of_range(call, message):
    with pytest.raises(IndexError, match=message):
        call(toy_stream(tasks=2, clients=4))


def test_a_client_without_data_has_no_loader():
    with pytest.raises(DatasetError, match="`client` must have data in stage 0, got 1, which has none"):
        one_task([0, 2]).train_loader(0, 1)


def test_sets_trained_on_together_must_be_batched_alike():
    train = [DataLoader(numbered(4), batch_size=2), numbered(4)]
    stream = TaskStream.from_datasets(train, train, clients=2).stages([[(0, 1), 0]])
    with pytest.raises(DatasetError, match=r"`train` sets \[0, 1\] must be batched alike, since client 0 .* stage 0"):
        stream.train_loader(0, 0)
    assert stream.train_loader(0, 1).batch_size == 2
