"""What a client holds of a task's embeddings while a generator is fitted: sums by event, and a bounded choice."""

import pytest
import torch

from lightning_fcl import EmbeddingReplay
from lightning_fcl.callbacks.task_embeddings import TaskEmbeddings
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.mixins import EmbeddingForwardMixin
from tests.helpers.toy import ToyModule, make_toy, state_of, toy_stream, toy_trainer


class Toy(EmbeddingForwardMixin, ToyModule):
    pass


def batches(count, positions=(4,), seed=0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=draw) * 2  # events 0, 2 and 4
    teacher = torch.rand(count, 5, generator=draw)
    sequences = torch.randn(count, *positions, 3, generator=draw)
    return [(labels[i : i + 7], teacher[i : i + 7], [sequences[i : i + 7]]) for i in range(0, count, 7)]


@pytest.mark.parametrize("positions", [(), (4,)])
def test_means_are_those_of_all_examples_and_rows_of_those_that_are_held(positions):
    data = batches(40, positions)
    held = TaskEmbeddings(10, torch.Generator().manual_seed(0))
    for batch in data:
        held.add(*batch)
    labels, teacher = (torch.cat([batch[part] for batch in data]) for part in (0, 1))
    sequences = torch.cat([batch[2][0] for batch in data])
    known, (belief, means) = held.means()
    assert known.tolist() == [0, 2, 4]
    for row, label in enumerate((0, 2, 4)):
        torch.testing.assert_close(belief[row], teacher[labels == label].mean(0))
        torch.testing.assert_close(means[row], sequences[labels == label].mean(0))
    events, own, vectors = held.kept()
    assert vectors.shape == (10, 3)
    places = [next(n for n in range(40) if torch.equal(teacher[n], one)) for one in own]
    assert len(set(places)) == 10
    assert [int(known[event]) for event in events] == labels[places].tolist()
    torch.testing.assert_close(vectors, sequences[places].mean(1) if positions else sequences[places])


def test_every_example_has_the_same_chance_to_be_held():
    drawn = torch.Generator().manual_seed(0)
    hits = torch.zeros(12)
    for _ in range(600):
        held = TaskEmbeddings(3, drawn)
        held.add(torch.arange(12), torch.ones(12, 1), [torch.arange(12.0)[:, None]])
        hits[held.kept()[0]] += 1
    assert hits.sum() == 1800
    assert ((hits / 600 - 0.25).abs() < 4 * (0.25 * 0.75 / 600) ** 0.5).all()


def test_with_fewer_examples_than_the_limit_nothing_is_drawn():
    draw = torch.Generator().manual_seed(0)
    before = draw.get_state()
    for most in (None, 40):
        held = TaskEmbeddings(most, draw)
        for batch in batches(40):
            held.add(*batch)
        assert len(held.kept()[0]) == 40
    assert torch.equal(draw.get_state(), before)


def test_a_generator_is_fitted_to_few_of_many(tmp_path):
    module = make_toy(cls=Toy)
    toy_trainer(tmp_path, callbacks=[EmbeddingReplay(num_samples=4, budget=6)]).fit(module, toy_stream())
    assert all(value.isfinite().all() for value in state_of(module).values())
    with pytest.raises(MisconfigurationError, match="`num_samples` must be at least 1, got 0"):
        EmbeddingReplay(num_samples=0)
