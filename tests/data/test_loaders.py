"""Batches: shuffled as by a plain DataLoader, nothing lost but by ``drop_last``, and what a DataLoader lends."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lightning_fcl.data import TaskStream
from lightning_fcl.data.sources import as_sources
from tests.helpers.numbered import numbered, one_task


def numbers(loader):
    """The examples of each batch."""
    return [batch[0].flatten().long().tolist() for batch in loader]


def stack_doubled(examples, factor):
    return torch.stack([x for x, _ in examples]) * factor, torch.tensor([int(y) for _, y in examples])


# --- training loaders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_shuffling_is_that_of_a_plain_dataloader(seed):
    ids = [i % 3 for i in range(30)]
    loader = one_task(ids, batch_size=4).train_loader(0, 1)
    plain = DataLoader(Subset(numbered(30), list(range(1, 30, 3))), batch_size=4, shuffle=True)
    torch.manual_seed(seed)
    got = [numbers(loader), numbers(loader), torch.rand(3).tolist()]  # two epochs, and what is drawn after them
    torch.manual_seed(seed)
    assert got == [numbers(plain), numbers(plain), torch.rand(3).tolist()]
    assert got[0] != got[1]


def test_without_shuffling_examples_keep_their_order():
    stream = one_task([0, 1, 0, 1, 0], batch_size=2, shuffle=False)
    assert numbers(stream.train_loader(0, 0)) == [[0, 2], [4]]


def test_subsets_are_flattened():
    inner = Subset(numbered(20), list(range(19, -1, -1)))
    loader = one_task([0, 1] * 10, data=inner, shuffle=False).train_loader(0, 1)
    assert isinstance(loader.dataset, Subset)
    assert isinstance(loader.dataset.dataset, TensorDataset)
    assert numbers(loader) == [list(range(18, -1, -2))]


def test_taking_twice_keeps_labels_and_positions():
    (source,) = as_sources([numbered(10)], "train")
    source = source.with_labels(list(range(10, 20)), "labels")
    twice = source.take(np.array([8, 6, 4, 2])).take(np.array([3, 0]))
    examples = twice.examples()
    assert twice.dataset.indices == examples.positions.tolist() == [2, 8]
    assert examples.labels.tolist() == [12, 18]


def test_a_subset_of_another_kind_is_asked():
    class Doubled(Subset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return 2 * x, y

        __getitems__ = None

    loader = one_task([0, 1, 0], data=Doubled(numbered(5), [4, 3, 2]), shuffle=False).train_loader(0, 0)
    assert numbers(loader) == [[8, 4]]


def test_several_sets_in_one_stage():
    data = [numbered(4), numbered(4, start=10)]
    stream = TaskStream.from_datasets(data, data, clients=2, batch_size=3, shuffle=False)
    both = stream.stages([[(0, 1), 0]])
    assert both.num_examples(0, 0) == 4
    assert isinstance(both.train_loader(0, 0).dataset, ConcatDataset)
    mine = [stream.plan.parts[0][0].tolist(), (stream.plan.parts[1][0] + 10).tolist()]
    assert list(chain(*numbers(both.train_loader(0, 0)))) == list(chain(*mine))


@pytest.mark.parametrize(
    ("examples", "sizes"), [(1, [1]), (3, [3]), (4, [4]), (5, [4]), (8, [4, 4]), (9, [4, 4]), (11, [4, 4])]
)
@pytest.mark.parametrize("lent", [False, True])
def test_drop_last_keeps_an_only_batch(examples, sizes, lent):
    data = numbered(examples)
    if lent:
        stream = one_task([0] * examples, data=DataLoader(data, batch_size=4, drop_last=True))
    else:
        stream = one_task([0] * examples, batch_size=4, drop_last=True)
    loader = stream.train_loader(0, 0)
    assert [len(batch) for batch in numbers(loader)] == sizes
    assert len(loader) == len(sizes)
    assert stream.summary()["drop_last"] == [True]
    assert [len(batch) for batch in numbers(stream.eval_loader(0))] == ([7] if lent else [4, 3])


def test_drop_last_shuffles_which_examples_are_dropped():
    loader = one_task([0] * 5, batch_size=4, drop_last=True).train_loader(0, 0)
    assert len({tuple(sorted(numbers(loader)[0])) for _ in range(30)}) > 1


def test_evaluation_drops_nothing_even_if_its_loader_would():
    lent = DataLoader(numbered(7), batch_size=4, shuffle=True, drop_last=True)
    stream = TaskStream.from_datasets([numbered(4)], [lent], clients=1, batch_size=2)
    assert numbers(stream.eval_loader(0)) == [[0, 1, 2, 3], [4, 5, 6]]


# --- evaluation loaders ----------------------------------------------------------------------------------------------


def test_evaluation_keeps_the_order_and_has_a_batch_size_of_its_own():
    stream = one_task([0, 0], batch_size=2, eval_batch_size=5)
    assert numbers(stream.eval_loader(0)) == [[0, 1, 2, 3, 4], [5, 6]]
    assert numbers(one_task([0, 0], batch_size=4).eval_loader(0)) == [[0, 1, 2, 3], [4, 5, 6]]


# --- what others lend ------------------------------------------------------------------------------------------------


def test_a_dataloader_lends_batch_size_collate_and_workers():
    double = partial(stack_doubled, factor=2)
    lent = DataLoader(numbered(6), batch_size=3, collate_fn=double, num_workers=1, shuffle=False)
    stream = TaskStream.from_datasets([lent, numbered(6)], [lent, numbered(6)], clients=2, batch_size=5, num_workers=0)
    for loader in (stream.train_loader(0, 0), stream.eval_loader(0)):
        assert (loader.batch_size, loader.collate_fn, loader.num_workers) == (3, double, 1)
    for loader in (stream.train_loader(1, 0), stream.eval_loader(1)):
        assert (loader.batch_size, loader.num_workers) == (5, 0)
    assert stream.summary()["batch_size"] == [3, 5]
    assert numbers(stream.eval_loader(0)) == [[0, 2, 4], [6, 8, 10]]  # through a worker process
    mine = stream.plan.parts[0][1]
    assert sorted(chain(*numbers(stream.train_loader(0, 1)))) == (2 * mine).tolist()


def test_the_streams_own_collate_function_and_workers():
    stream = one_task([0, 0, 1], collate_fn=partial(stack_doubled, factor=3), num_workers=1, shuffle=False)
    assert numbers(stream.train_loader(0, 0)) == [[0, 3]]
    assert numbers(stream.eval_loader(0))[0][:3] == [0, 3, 6]
    assert stream.train_loader(0, 0).num_workers == 1


def test_map_datasets_with_dict_examples():
    class Table:
        """As a Hugging Face dataset in torch format: rows by number or list of numbers."""

        column_names = ("x", "label")

        def __len__(self):
            return 6

        def __getitem__(self, key):
            if isinstance(key, str):
                return [i % 2 for i in range(6)]
            return {"x": torch.tensor([float(key)]), "label": key % 2}

        def __getitems__(self, keys):
            return [self[key] for key in keys]

    stream = TaskStream.from_datasets([Table()], [Table()], clients=2, partition="shards", shuffle=False)
    assert stream.plan.classes == (0, 1)
    (batch,) = stream.train_loader(0, 1)
    assert batch["x"].flatten().tolist() == stream.plan.parts[0][1].tolist()
    assert torch.equal(batch["label"], batch["x"].flatten().long() % 2)
