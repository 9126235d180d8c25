"""The merged update depends on the clients alone: not on their order, the number of ranks, or float32 rounding."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.aggregators.base import RoundStats
from lightning_fcl.aggregators.chain import Chain
from lightning_fcl.aggregators.fedavg import FedAvg
from lightning_fcl.aggregators.tree import SLAB_ROWS, TreeSum, merge_nodes
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

SIZE = 7


def rows_of(count, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.pow(10.0, torch.randint(-6, 4, (count, SIZE), generator=generator).float())
    return torch.randn(count, SIZE, generator=generator) * scale, torch.randn(SIZE, generator=generator)


def node_sums(rows, reference, weights, missing, cuts):
    """Nodes of several ranks whose borders are ``cuts``."""
    borders = [0, *sorted(cuts), len(rows)]
    nodes = {}
    for start, stop in itertools.pairwise(borders):
        part = TreeSum(reference, len(rows), range(start, stop))
        for position in range(start, stop):
            if position not in missing:
                part.add(position, rows[position], weights[position])
        nodes.update(part.partials())
    return nodes


def recursive_sum(rows, reference, weights, missing):
    """The tree of the definition: halves of the next power of two, one float64 addition per inner node."""

    def node(start, width):
        if width == 1:
            if start >= len(rows) or start in missing:
                return None
            return (rows[start].double() - reference.double()) * weights[start]
        left, right = node(start, width // 2), node(start + width // 2, width // 2)
        if left is None or right is None:
            return left if right is None else right
        return left + right

    return node(0, 1 << max(len(rows) - 1, 0).bit_length())


@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    missing=st.sets(st.integers(0, 40), max_size=10),
)
def test_any_split_over_ranks_gives_the_bits_of_the_tree(count, seed, cuts, missing):
    rows, reference = rows_of(count, seed)
    weights = torch.randint(1, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    missing = {m for m in missing if m < count}
    if len(missing) == count:
        missing.pop()
    expected = recursive_sum(rows, reference, weights, missing)
    split = merge_nodes(node_sums(rows, reference, weights, missing, [c for c in cuts if c <= count]))
    assert torch.equal(split, expected)


@given(count=st.integers(2, 20), seed=st.integers(0, 10**6))
def test_mean_is_right_to_the_last_float32_bit(count, seed):
    rows, reference = rows_of(count, seed)
    weights = torch.randint(1, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    reducer = FedAvg()
    reducer.start(reference, count, range(count))
    for position in range(count):
        reducer.add(position, rows[position], weights[position])
    stats = RoundStats(
        task=0,
        round=0,
        num_tasks=1,
        num_params=SIZE,
        clients=tuple(range(count)),
        num_examples=tuple(weights),
        total_clients=count,
    )
    new, _ = Chain(reducer).apply(reference, reducer.finish(reducer.partials(), stats), stats, [])
    for element in range(SIZE):  # exact rational arithmetic on the very float32 inputs
        total = sum(Fraction(float(rows[k, element])) * weights[k] for k in range(count)) / sum(weights)
        exact = float(total)
        spacing = math.ulp(exact) * 2**29 + 2**-149  # of float32
        magnitude = max(rows[:, element].abs().max().item(), abs(reference[element].item()))
        assert abs(new[element].item() - exact) <= spacing / 2 * 1.0001 + magnitude * 2**-50 * count


def test_lone_client_is_copied_where_the_sum_would_round(tmp_path):
    """In float64 too, 1e30 + (1e-3 - 1e30) is not 1e-3."""
    reference, row = torch.full((4,), 1e30), torch.full((4,), 1e-3)
    reducer = FedAvg()
    reducer.start(reference, 3, range(3))
    reducer.add(1, row, 5.0)
    facts = {"task": 0, "round": 0, "num_tasks": 1, "num_params": 4, "total_clients": 3}
    stats = RoundStats(clients=(1,), num_examples=(5.0,), lone=reducer.lone_row(), **facts)
    new, _ = Chain(reducer).apply(reference, reducer.finish(reducer.partials(), stats), stats, [])
    assert torch.equal(new, row)


def test_memory_is_one_slab_and_a_node_per_level():
    rows, reference = rows_of(64, 0)
    part = TreeSum(reference, 64, range(64))
    most = 0
    for position in range(64):
        part.add(position, rows[position], 1.0)
        most = max(most, len(part._nodes))
    assert part._slab.shape == (SLAB_ROWS, SIZE)
    assert most <= 3  # log2(64 / 8)
    assert set(part.partials()) == {(6, 0)}


def test_foreign_position_is_refused():
    part = TreeSum(torch.zeros(2), 4, range(2))
    with pytest.raises(ValueError, match=r"`position` must be one of range\(0, 2\), got 3"):
        part.add(3, torch.zeros(2), 1.0)


def test_equal_clients_are_a_fixed_point_of_every_weighting(tmp_path):
    """All clients hold the same data and draw nothing: their mean is what one of them sends."""
    results = []
    for clients, weighting in ((1, "samples"), (5, "samples"), (5, "uniform")):
        module = make_toy()
        stream = toy_stream(tasks=1, clients=clients, partition=lambda e, c, rng: rng.permutation(len(e)) % c)
        whole = toy_stream(tasks=1, clients=1, shuffle=False, batch_size=60)
        stream.train_loader = lambda task, client, whole=whole: whole.train_loader(0, 0)
        run = tmp_path / f"{clients}{weighting}"
        trainer = toy_trainer(run, rounds=1, clients_per_round=clients, aggregator=FedAvg(weighting), preload_mb=0)
        trainer.fit(module, stream)
        results.append(state_of(module))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])
