"""What each partitioner promises; the label Dirichlet against its slow oracle."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset

from lightning_fcl.data import (
    IID,
    ByDomain,
    Examples,
    ExtendedDirichlet,
    LabelDirichlet,
    NaturalClients,
    QuantityDirichlet,
    Shards,
    TaskStream,
)
from lightning_fcl.data.split import split
from tests.helpers.partition import ALPHAS, SEEDS, examples_of, label_distance, ten_classes


def slow_label_dirichlet(labels, clients, alpha, balance, rng):
    """The stated draw, one number at a time."""
    held = [0] * clients
    owner = [None] * len(labels)
    for label in sorted(set(labels)):
        members = rng.permutation([i for i, y in enumerate(labels) if y == label]).tolist()
        shares = rng.dirichlet([alpha] * clients).tolist()
        if balance:
            is_open = [count * clients < len(labels) for count in held]
            shares = [share if ok else 0.0 for share, ok in zip(shares, is_open, strict=True)]
            if max(shares) == 0:
                shares[rng.choice([c for c in range(clients) if is_open[c]])] = 1.0
            total = float(np.sum(shares))
            shares = [share / total for share in shares]
        start, cumulative = 0, 0.0
        for client in range(clients):
            cumulative += shares[client]
            end = min(math.floor(cumulative * len(members)), len(members))
            if not any(shares[client + 1 :]):
                end = len(members)
            for member in members[start:end]:
                owner[member] = client
            held[client] += end - start
            start = end
    return owner


@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    clients=st.integers(1, 9),
    alpha=ALPHAS,
    balance=st.booleans(),
    seed=SEEDS,
)
@example(labels=[0] * 30 + [1] * 30, clients=3, alpha=1e-8, balance=True, seed=0)
def test_label_dirichlet_equals_the_slow_oracle(labels, clients, alpha, balance, seed):
    draw = LabelDirichlet(alpha, balance=balance)
    got = draw(examples_of(labels), clients, np.random.default_rng(seed))
    assert got.tolist() == slow_label_dirichlet(labels, clients, alpha, balance, np.random.default_rng(seed))


def test_label_dirichlet_balance_bounds_the_sizes():
    def sizes(balance):
        draw = LabelDirichlet(0.1, balance=balance)
        return np.array([[len(part) for part in split(examples, draw, 20, seed=seed)[0]] for seed in range(10)])

    examples = examples_of(ten_classes(5000))
    assert sizes(True).max() < 5000 / 20 + 500  # below its even share a client stays open, for one class of 500 more
    assert sizes(True).std() < 0.8 * sizes(False).std()


@pytest.mark.parametrize("balance", [True, False])
def test_label_skew_grows_as_alpha_falls(balance):
    labels = ten_classes(4000)
    distances = [
        np.mean(
            [
                label_distance(labels, split(examples_of(labels), LabelDirichlet(a, balance=balance), 10, seed=s)[0])
                for s in range(5)
            ]
        )
        for a in (0.01, 0.1, 1.0, 10.0, 1000.0)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.7
    assert distances[-1] < 0.05


# --- the others ------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 200), clients=st.integers(1, 12), seed=SEEDS)
def test_iid_sizes_differ_by_at_most_one(size, clients, seed):
    sizes = [len(part) for part in split(examples_of(ten_classes(size)), IID(min_examples=0), clients, seed=seed)[0]]
    assert max(sizes) - min(sizes) <= 1


def test_quantity_skew_grows_as_alpha_falls_and_labels_stay_mixed():
    labels = np.sort(ten_classes(20_000))
    spread = []
    for alpha in (0.1, 1.0, 10.0, 1000.0):
        parts, _ = split(examples_of(labels), QuantityDirichlet(alpha, min_examples=100), 10)
        spread.append(float(np.std([len(part) for part in parts])))
        assert label_distance(labels, parts) < 0.15
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 1500
    assert spread[-1] < 150


def test_quantity_dirichlet_cuts_at_the_floors_of_the_cumulative_shares():
    rng, same = np.random.default_rng(3), np.random.default_rng(3)
    owner = QuantityDirichlet(0.7)(Examples(1000), 5, rng)
    ends = [math.floor(1000 * end) for end in np.cumsum(same.dirichlet([0.7] * 5))[:-1]] + [1000]
    assert np.bincount(owner, minlength=5).tolist() == np.diff([0, *ends]).tolist()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_are_equal_runs_of_the_sorted_labels(shards):
    labels = ten_classes(6000)
    parts, moved = split(examples_of(labels), Shards(shards), 10)
    assert moved == 0
    assert {len(part) for part in parts} == {600}
    # A shard of 600 / shards examples lies in at most two of the classes of 600.
    assert all(len(np.unique(labels[part])) <= 2 * shards for part in parts)
    if shards == 1:
        assert all(len(np.unique(labels[part])) == 1 for part in parts)


def test_shards_are_dealt_at_random():
    labels = ten_classes(1000)
    hands = {tuple(np.unique(labels[split(examples_of(labels), "shards", 5, seed=s)[0][0]])) for s in range(20)}
    assert len(hands) > 10


@given(classes_per_client=st.integers(1, 10), alpha=st.floats(1e-3, 1e3), clients=st.integers(10, 40), seed=SEEDS)
def test_extended_dirichlet_deals_equally_many_classes(classes_per_client, alpha, clients, seed):
    labels = ten_classes(1000)
    draw = ExtendedDirichlet(classes_per_client, alpha=alpha)
    parts, moved = split(examples_of(labels), draw, clients, seed=seed)
    assert moved == 0
    assert {len(np.unique(labels[part])) for part in parts} == {classes_per_client}
    holders = [sum(label in labels[part] for part in parts) for label in range(10)]
    assert max(holders) - min(holders) <= 1


def test_by_domain_gives_each_client_one_domain():
    examples = examples_of(ten_classes(90), domains=3)
    parts, _ = split(examples, "by_domain", 6)
    assert [np.unique(part % 3).tolist() for part in parts] == [[0], [1], [2], [0], [1], [2]]
    assert {len(part) for part in parts} == {15}


def test_by_domain_gives_few_clients_several_domains():
    parts, _ = split(examples_of(ten_classes(90), domains=4), "by_domain", 2)
    assert [np.unique(part % 4).tolist() for part in parts] == [[0, 2], [1, 3]]


def test_by_domain_shares_a_domain_as_told():
    labels = ten_classes(3000)
    even, _ = split(examples_of(labels, domains=2), ByDomain(), 8)
    skewed, _ = split(examples_of(labels, domains=2), ByDomain(within=LabelDirichlet(0.05)), 8)
    assert label_distance(labels, even) < 0.6 < label_distance(labels, skewed)


def test_domains_are_found_in_the_data():
    sites = ConcatDataset([[(0.0, 1)] * 4, [(1.0, 1)] * 2])
    stream = TaskStream.from_datasets([sites], [sites], clients=2, partition="by_domain")
    assert [part.tolist() for part in stream.plan.parts[0]] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("form", [list, np.array])
def test_domains_of_each_task_may_be_given(form):
    data = [[0.0, 0]] * 4
    given_ = [form([0, 1, 0, 1]), form([1, 1, 0, 0])]
    stream = TaskStream.from_datasets([data, data], [data, data], clients=2, partition=ByDomain(given_))
    assert [[part.tolist() for part in task] for task in stream.plan.parts] == [[[0, 2], [1, 3]], [[2, 3], [0, 1]]]


@pytest.mark.parametrize("form", [list, np.array])
def test_natural_clients_keep_their_examples(form):
    parts, moved = split(Examples(5), NaturalClients(form([2, 0, 2, 0, 0])), 4)
    assert ([part.tolist() for part in parts], moved) == ([[1, 3, 4], [], [0, 2], []], 0)


def test_a_function_is_a_partitioner():
    parts, _ = split(examples_of([3, 4, 3, 4]), lambda examples, clients, rng: examples.labels - 3, 2)
    assert [part.tolist() for part in parts] == [[0, 2], [1, 3]]
