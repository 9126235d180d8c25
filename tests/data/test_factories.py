"""digit_stream: what a configuration gets is what the code for it would build."""

import pytest
import torch

from lightning_fcl.data import TaskStream, digit_domains, digit_stream

pytest.importorskip("sklearn")


def test_it_is_digit_domains_shared_among_clients():
    stream = digit_stream(3, partition="iid", batch_size=7, seed=1, domains=("turned", "clean"), size=8, channels=3)
    data = digit_domains(("turned", "clean"), size=8, channels=3, seed=1)
    by_hand = TaskStream.domains(data, clients=3, partition="iid", batch_size=7, seed=1)
    assert stream.summary() == by_hand.summary()
    assert stream.names == ("turned", "clean")
    for column in range(2):
        images, labels = next(iter(stream.eval_loader(column)))
        expected = next(iter(by_hand.eval_loader(column)))
        assert images.shape == (7, 3, 8, 8)
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])


def test_defaults_are_four_domains_and_eight_clients():
    stream = digit_stream()
    assert (len(stream), stream.num_clients) == (4, 8)
    assert all(stream.clients(task) == list(range(8)) for task in range(4))


def test_another_seed_is_another_partition():
    assert digit_stream(seed=1).plan.hash != digit_stream(seed=2).plan.hash == digit_stream(seed=2).plan.hash


def test_schedule_and_lag_are_those_of_the_stream():
    plain = digit_stream(4, partition="iid")
    late = digit_stream(4, partition="iid", schedule="het", lag=0.5)
    assert late.plan.schedule == plain.stages("het", lag=0.5).plan.schedule != plain.plan.schedule
