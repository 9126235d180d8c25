"""Laws of all partitioners, the repair, and what cannot be shared."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.data import (
    IID,
    ByDomain,
    Examples,
    ExtendedDirichlet,
    LabelDirichlet,
    NaturalClients,
    QuantityDirichlet,
    Shards,
)
from lightning_fcl.data.split import split
from lightning_fcl.exceptions import DatasetError
from tests.helpers.partition import ALPHAS, SEEDS, examples_of, ten_classes

PARTITIONERS = {
    "iid": lambda alpha, least: IID(min_examples=least),
    "shards": lambda alpha, least: Shards(2, min_examples=least),
    "by_domain": lambda alpha, least: ByDomain(min_examples=least),
    "by_domain skewed": lambda alpha, least: ByDomain(within=LabelDirichlet(alpha), min_examples=least),
    "label_dirichlet": lambda alpha, least: LabelDirichlet(alpha, min_examples=least),
    "plain label_dirichlet": lambda alpha, least: LabelDirichlet(alpha, balance=False, min_examples=least),
    "quantity_dirichlet": lambda alpha, least: QuantityDirichlet(alpha, min_examples=least),
    "extended_dirichlet": lambda alpha, least: ExtendedDirichlet(10, alpha=alpha, min_examples=least),
}


@pytest.mark.parametrize("name", PARTITIONERS)
@given(alpha=ALPHAS, seed=SEEDS, size=st.integers(10, 120), clients=st.integers(1, 12), data=st.data())
def test_every_example_has_one_owner_and_every_client_enough(name, alpha, seed, size, clients, data):
    least = data.draw(st.integers(0, size // clients), label="least")
    examples = examples_of(ten_classes(size, seed % 97))
    parts, moved = split(examples, PARTITIONERS[name](alpha, least), clients, seed=seed)
    assert len(parts) == clients
    assert np.sort(np.concatenate(parts)).tolist() == list(range(size))
    assert min(map(len, parts)) >= least
    assert 0 <= moved <= clients * least
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("name", PARTITIONERS)
@given(seed=SEEDS, noise=SEEDS)
def test_the_seed_alone_decides(name, seed, noise):
    def draw(task=0):
        parts, moved = split(examples_of(ten_classes(200), task=task), PARTITIONERS[name](0.5, 2), 6, seed=seed)
        return [part.tolist() for part in parts], moved

    first = draw()
    np.random.seed(noise % 2**32)
    before = np.random.get_state()[1].copy()
    assert draw() == first
    assert np.array_equal(before, np.random.get_state()[1])
    assert draw(task=1) != first  # each task draws its own


@pytest.mark.parametrize("name", PARTITIONERS)
def test_another_seed_is_another_split(name):
    splits = {
        str([part.tolist() for part in split(examples_of(ten_classes(200)), PARTITIONERS[name](0.5, 1), 6, seed=s)[0]])
        for s in range(5)
    }
    assert len(splits) == 5


@pytest.mark.parametrize("name", PARTITIONERS)
@pytest.mark.parametrize(("clients", "least"), [(500, 1), (500, 100)])
def test_five_hundred_clients_take_under_a_second(name, clients, least):
    # 100 classes, 50,000 examples: CIFAR-100, on which retrying splits are known to go on for ever. With 100 examples
    # each, every client ends with exactly its even share, so the repair has the most to do.
    labels = np.random.default_rng(0).permutation(np.arange(50_000) % 100)
    start = time.process_time()
    parts, _ = split(examples_of(labels), PARTITIONERS[name](0.05, least), clients)
    assert time.process_time() - start < 1
    assert min(map(len, parts)) >= least


def test_hardly_more_examples_than_clients():
    parts, moved = split(examples_of(ten_classes(200)), LabelDirichlet(0.05), 100)
    assert min(map(len, parts)) >= 1
    assert moved > 0


# --- the repair ------------------------------------------------------------------------------------------------------


def owners(*counts):
    """A partition function that gives client c ``counts[c]`` examples."""

    def owners_of(examples, clients, rng):
        return np.repeat(np.arange(len(counts)), counts)

    owners_of.min_examples = 3
    return owners_of


def test_repair_takes_from_the_largest():
    # By hand: client 2 lacks 3. Client 0 (10) gives until it is as large as client 1 (8); then they take turns.
    parts, moved = split(Examples(18), owners(10, 8, 0), 3)
    assert ([len(part) for part in parts], moved) == ([7, 8, 3], 3)
    parts, moved = split(Examples(18), owners(9, 9, 0), 3)
    assert (sorted(map(len, parts)), moved) == ([3, 7, 8], 3)
    assert split(Examples(18), owners(3, 12, 3), 3)[1] == 0


def test_repair_moves_random_examples_of_the_largest():
    taken = {tuple(split(Examples(18), owners(15, 3, 0), 3, seed=seed)[0][2]) for seed in range(20)}
    assert len(taken) > 15
    assert all(example < 15 for part in taken for example in part)


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=10), seed=SEEDS)
def test_repair_moves_no_more_than_what_is_missing(counts, seed):
    least = min(3, sum(counts) // len(counts))
    if sum(counts) == 0:
        return
    draw = owners(*counts)
    draw.min_examples = least
    parts, moved = split(Examples(sum(counts)), draw, len(counts), seed=seed)
    assert moved == sum(max(least - count, 0) for count in counts)
    assert all(len(part) >= min(count, least) for part, count in zip(parts, counts, strict=True))
    assert all(len(part) <= max(count, least) for part, count in zip(parts, counts, strict=True))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LabelDirichlet(0.0), r"`alpha` must be above 0 and finite, got 0\.0\. For even shares"),
        (lambda: QuantityDirichlet(float("nan")), "`alpha` must be above 0 and finite, got nan"),
        (lambda: ExtendedDirichlet(alpha=float("inf")), "`alpha` must be above 0 and finite, got inf"),
        (lambda: ExtendedDirichlet(0), "`classes_per_client` must be at least 1, got 0"),
        (lambda: Shards(0), "`shards_per_client` must be at least 1, got 0"),
        (lambda: split(Examples(9), "dirichlet", 3), "`partition` must be one of 'by_domain', .* got 'dirichlet'"),
        (lambda: split(Examples(9), IID, 3), r"`LabelDirichlet\(alpha=0\.1\)` .* got <class"),
        (lambda: split(Examples(9), 3, 3), "`partition` must be one of .* got 3"),
        (lambda: split(Examples(9), "iid", 0), "`clients` must be at least 1, got 0"),
        (lambda: split(Examples(9), IID(min_examples=-1), 3), "`min_examples` must be at least 0, got -1"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("examples", "partition", "clients", "message"),
    [
        (
            Examples(5, task=2),
            IID(min_examples=2),
            3,
            r"`train\[2\]` must hold at least `clients` x `min_examples` = 6",
        ),
        (Examples(0), "iid", 3, "= 3 examples, got 0"),
        (Examples(5), lambda e, c, r: np.zeros(4, int), 2, r"one client number per example, shape \(5,\), got int64"),
        (Examples(5), lambda e, c, r: np.zeros(5), 2, "one client number per example, .* got float64"),
        (Examples(3), NaturalClients([0, 1, 2]), 2, "client numbers from 0 to 1, got 0 to 2 .* Is `clients` too small"),
        (Examples(3), NaturalClients([0, -1, 1]), 2, "client numbers from 0 to 1, got -1 to 1"),
        (Examples(3), NaturalClients(["a", "b", "c"]), 3, "`client_of` must hold one integer per example, got <U1"),
        (Examples(3), NaturalClients([0, 1]), 2, "`client_of` must hold one id per example, got 2 ids for 3 examples"),
        (Examples(3, task=1), NaturalClients([[0, 1, 1]]), 2, "one list per task, got 1 lists and no list 1"),
        (Examples(3), ByDomain([0.5, 1, 2]), 2, "`domain_of` must hold one integer per example, got float64"),
        (Examples(3), "by_domain", 2, "needs `domains` of the examples, and none are known. Pass `domains=`"),
        (Examples(3), "label_dirichlet", 2, "needs `labels` of the examples, and none are known. Pass `labels=`"),
        (examples_of([0, 1] * 5), ExtendedDirichlet(3), 2, "must be at most the 2 classes of the task, .* got 3"),
        (examples_of([0, 1, 2] * 5), ExtendedDirichlet(1), 2, "large enough that 2 clients hold them all, got 1"),
    ],
)
def test_what_cannot_be_shared(examples, partition, clients, message):
    with pytest.raises(DatasetError, match=message):
        split(examples, partition, clients)
