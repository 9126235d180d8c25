"""One dataset cut into tasks by its classes."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl.data import NaturalClients, PartitionPlan, TaskStream
from lightning_fcl.exceptions import DatasetError
from tests.helpers.partition import ten_classes


def numbered(size, seed=0):
    """Examples that carry their own number, with ten classes in random order."""
    return TensorDataset(torch.arange(size).float().unsqueeze(1), torch.from_numpy(ten_classes(size, seed)))


TRAIN, TEST = numbered(200), numbered(50, seed=1)


def classes_of(stream, task):
    """Classes of the task's training examples and of its evaluation examples."""
    clients = [stream.train_loader(task, client) for client in stream.clients(task)]
    labels = torch.cat([batch[1] for loader in clients for batch in loader])
    return sorted(set(labels.tolist())), sorted({y for batch in stream.eval_loader(task) for y in batch[1].tolist()})


@pytest.mark.parametrize(
    ("tasks", "order", "groups"),
    [
        (2, "sorted", [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (4, "sorted", [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        ([2, 7, 1], "sorted", [[0, 1], [2, 3, 4, 5, 6, 7, 8], [9]]),
        (5, [9, 0, 8, 1, 7, 2, 6, 3, 5, 4], [[0, 9], [1, 8], [2, 7], [3, 6], [4, 5]]),
    ],
)
def test_each_task_holds_its_classes_in_training_and_evaluation(tasks, order, groups):
    stream = TaskStream.split_classes(TRAIN, TEST, tasks=tasks, class_order=order, clients=3, batch_size=16)
    assert [classes_of(stream, task) for task in range(len(stream))] == [(group, group) for group in groups]
    assert sum(stream.plan.sizes) == 200
    assert sum(len(stream.eval_loader(task).dataset) for task in range(len(stream))) == 50


def test_random_order_follows_the_seed():
    def groups(seed):
        stream = TaskStream.split_classes(TRAIN, TEST, tasks=5, class_order="random", clients=3, seed=seed)
        return [classes_of(stream, task)[0] for task in range(5)]

    assert groups(1) == groups(1)
    assert sorted(chain(*groups(1))) == list(range(10))
    assert groups(1) != groups(2)


def test_rebuilt_from_its_plan(tmp_path):
    options = {"tasks": 5, "class_order": "random", "batch_size": 16}
    stream = TaskStream.split_classes(TRAIN, TEST, clients=3, seed=4, names=list("abcde"), **options)
    plan = PartitionPlan.load(stream.plan.save(tmp_path / "plan.json"))
    again = TaskStream.split_classes(TRAIN, TEST, plan=plan, **options)  # the plan's seed orders the classes too
    assert again.names == tuple("abcde")
    for task in range(5):
        assert classes_of(again, task) == classes_of(stream, task)


def test_loaders_and_labels_may_be_given():
    shuffled = DataLoader(TRAIN, batch_size=25, shuffle=True)
    parity = [np.arange(200) % 2, np.arange(50) % 2]
    stream = TaskStream.split_classes(shuffled, TEST, tasks=2, labels=parity, clients=2)
    assert stream.train_loader(0, 0).batch_size == 25
    assert all((batch[0] % 2 == task).all() for task in range(2) for batch in stream.eval_loader(task))
    assert all((batch[0] % 2 == task).all() for task in range(2) for batch in stream.train_loader(task, 1))


def test_natural_clients_are_numbered_as_in_the_whole_dataset():
    ids = np.arange(200) % 7
    stream = TaskStream.split_classes(TRAIN, TEST, tasks=5, clients=7, partition=NaturalClients(ids))
    for task in range(5):
        for client in stream.clients(task):
            numbers = torch.cat([batch[0] for batch in stream.train_loader(task, client)]).long()
            assert set((numbers % 7).flatten().tolist()) == {client}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 11}, r"`tasks` must be from 1 to the number of classes \(10\), got 11"),
        ({"tasks": 0}, "`tasks` must be from 1"),
        ({"tasks": [5, 4]}, r"`tasks` must hold the number of classes of each task, 10 in all, got \[5, 4\]"),
        ({"tasks": [10, 0]}, r"10 in all, got \[10, 0\]"),
        ({"tasks": []}, r"10 in all, got \[\]"),
        (
            {"tasks": 2, "class_order": [0, 1, 2]},
            r"`class_order` must name each of the 10 classes once, got \[0, 1, 2\]",
        ),
        ({"tasks": 2, "class_order": "reversed"}, "`class_order` must be 'sorted', 'random' or a list of classes"),
        ({"tasks": 2, "labels": (None, [0] * 50)}, r"got none for task 1 \(classes \[5, 6, 7, 8, 9\]\)"),
        ({"tasks": 2, "labels": (None, [0, 5] * 24 + [77, 78])}, "`test` must hold .* of no others, got class 77"),
        ({"tasks": 2, "labels": ([0] * 3, None)}, r"`labels\[0\]` must hold one integer for each of 200 examples"),
    ],
)
def test_classes_that_cannot_be_cut_so(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        TaskStream.split_classes(TRAIN, TEST, clients=2, **options)
    assert isinstance(caught.value, DatasetError) or options.get("class_order") == "reversed"
