"""Labels and domains: found where datasets keep them, declared by the user, or missing."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_fcl.data import TaskStream
from lightning_fcl.data.labels import find_domains, find_labels, stored_labels
from lightning_fcl.exceptions import DatasetError

LABELS = [3, 1, 0, 1]


class Pairs(Dataset):
    """Examples with labels, and whatever attributes the test gives; counts how often it is read."""

    def __init__(self, items=None, **attributes):
        self.items = [(torch.zeros(2), label) for label in LABELS] if items is None else items
        self.reads = 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


class Table:
    """A map dataset as Hugging Face's: columns by name, rows as dicts; a column is read lazily and by slices only."""

    class Column:
        def __init__(self, values):
            self.values = values

        def __getitem__(self, rows):
            return self.values[rows]

    def __init__(self, **columns):
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.Column(self.columns[key])
        return {name: values[key] for name, values in self.columns.items()}


FIVE = Pairs([0] * 5, targets=[9, 1, 3, 0, 1])
STORED = {
    "targets": Pairs(targets=LABELS),
    "labels": Pairs(labels=np.array(LABELS, dtype=np.uint8)),
    "tensor": Pairs(targets=torch.tensor(LABELS)),
    "TensorDataset": TensorDataset(torch.zeros(4, 2), torch.tensor(LABELS)),
    "Subset": Subset(FIVE, [2, 1, 3, 4]),
    "ConcatDataset": ConcatDataset([Pairs([0, 0], targets=[3, 1]), TensorDataset(torch.tensor([0, 1]))]),
    "Subset of Subset": Subset(Subset(FIVE, [4, 3, 2, 1]), torch.tensor([2, 3, 1, 0])),
    "Hugging Face": Table(image=[0.0] * 4, label=LABELS),
    "Hugging Face, plural": Table(labels=LABELS, text=list("abcd")),
}
READ = {
    "tuples": Pairs(),
    "lists": [[0.0, label] for label in LABELS],
    "tensors": Pairs([(0.0, torch.tensor(label)) for label in LABELS]),
    "arrays of one": Pairs([(0.0, np.array([label])) for label in LABELS]),
    "booleans": Pairs([(0.0, label == 1) for label in LABELS]),
    "dicts": Pairs([{"label": label, "x": 0.0} for label in LABELS]),
    "one-hot targets, class numbers in the examples": Pairs(targets=np.eye(4, dtype=int)),
    "ragged targets": Pairs(targets=[[1], [1, 2], [], [3]]),
    "targets of another length": Pairs(targets=[0, 1]),
    "a method called labels": Pairs(labels=lambda: LABELS),
    "a member that stores none": ConcatDataset(
        [Pairs([(0.0, 3)]), Pairs([(0.0, y) for y in (1, 0, 1)], targets=[7] * 3)]
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_labels_are_found_without_reading_an_example(name):
    assert stored_labels(STORED[name]).tolist() == LABELS
    assert find_labels(STORED[name]).tolist() == LABELS
    assert getattr(STORED[name], "reads", 0) == FIVE.reads == 0


@pytest.mark.parametrize("name", READ)
def test_other_labels_are_read_from_the_examples(name):
    assert stored_labels(READ[name]) is None
    assert find_labels(READ[name]).tolist() == ([0, 1, 0, 1] if name == "booleans" else LABELS)


def test_half_precision_targets_are_no_labels():
    halves = TensorDataset(torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16))
    assert stored_labels(halves) is None
    with pytest.raises(DatasetError, match="must give one integer label per example, got Tensor from example 0"):
        find_labels(halves)


@pytest.mark.parametrize("items", [[(0.0, 0.5)], [(0.0, None)], [(0.0, torch.zeros(3))], [{"y": 1}], [0.0], [()]])
def test_missing_labels_say_what_to_do(items):
    message = r"must give one integer label per example, got \w+ from example 0\. Pass `labels=`, or choose a partition"
    with pytest.raises(DatasetError, match=message):
        find_labels(Pairs(items))
    with pytest.raises(DatasetError, match=message):
        TaskStream.from_datasets([Pairs(items)], [Pairs(items)], clients=1, partition="label_dirichlet")
    unlabelled = TaskStream.from_datasets([Pairs(items)], [Pairs(items)], clients=1)
    assert unlabelled.plan.counts is None


def test_declared_labels_replace_what_the_data_says():
    data = Pairs(targets=LABELS)
    stream = TaskStream.from_datasets([data], [data], clients=2, partition="shards", labels=[[0, 0, 1, 1]])
    assert stream.plan.classes == (0, 1)
    assert np.sum(stream.plan.counts[0], axis=0).tolist() == [2, 2]
    assert data.reads == 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0] * 4] * 2, r"`labels` must hold one list per task \(1\), got 2"),
        ([[0] * 3], r"`labels\[0\]` must hold one integer for each of 4 examples, got a list that does not"),
        ([["a"] * 4], r"`labels\[0\]` must hold one integer"),
        ([[[0], [1, 2], [], []]], r"`labels\[0\]` must hold one integer"),
    ],
)
def test_declared_labels_must_fit(labels, message):
    with pytest.raises(DatasetError, match=message):
        TaskStream.from_datasets([Pairs()], [Pairs()], clients=2, labels=labels)


def test_domains():
    sites = ConcatDataset([Pairs(), Pairs([1, 2])])
    assert find_domains(sites).tolist() == [0, 0, 0, 0, 1, 1]
    assert find_domains(Subset(sites, [5, 0, 4])).tolist() == [1, 0, 1]
    assert find_domains(Pairs(domains=[2, 2, 0, 1])).tolist() == [2, 2, 0, 1]
    with pytest.raises(DatasetError, match=r"got a Pairs without `\.domains`\. Give a `ConcatDataset`"):
        find_domains(Pairs())
