"""Exact sums: bits against a plain-Python tree, and the laws that aggregation rests on."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.functional import mean, tree_sum, weighted_delta_sum, weighted_mean
from tests.helpers import oracles

FINITE = st.floats(-1e6, 1e6, width=32)
WEIGHT = st.integers(1, 1000)


@st.composite
def cohorts(draw, max_clients=19):
    clients, size = draw(st.integers(1, max_clients)), draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(FINITE, min_size=size, max_size=size), min_size=clients, max_size=clients))
    weights = draw(st.lists(WEIGHT, min_size=clients, max_size=clients))
    return torch.tensor(rows), torch.tensor(weights)


def random_cohort(clients, size=40_000):
    return torch.randn(clients, size), torch.randint(1, 500, (clients,))


@given(cohorts())
def test_tree_sum_matches_the_recursive_tree_bit_for_bit(cohort):
    rows = cohort[0].double() / 3
    expected = [oracles.tree_sum(column) for column in rows.T.tolist()]
    assert tree_sum(rows).tolist() == expected


def test_five_rows_pair_level_by_level():
    a, b, c, d, e = torch.randn(5, 100, dtype=torch.float64)
    assert torch.equal(tree_sum(torch.stack([a, b, c, d, e])), ((a + b) + (c + d)) + e)


@pytest.mark.parametrize("clients", [1, 7, 8, 9, 16, 21, 37])
@pytest.mark.parametrize("slab", [1, 2, 4, 8])
def test_sums_of_slabs_add_up_to_the_whole_bit_for_bit(clients, slab):
    rows, weights = random_cohort(clients, 100)
    reference = torch.randn(100)
    whole = weighted_delta_sum(rows, reference, weights)
    nodes = [weighted_delta_sum(r, reference, w) for r, w in zip(rows.split(slab), weights.split(slab), strict=True)]
    assert torch.equal(tree_sum(torch.stack(nodes)), whole)


@given(cohorts())
def test_weighted_delta_sum_matches_float64_loops_bit_for_bit(cohort):
    rows, weights = cohort
    reference = rows.flip(0)[0] / 7
    expected = oracles.weighted_sum(rows.tolist(), weights.tolist(), reference.tolist())
    assert weighted_delta_sum(rows, reference, weights).tolist() == expected


@given(cohorts())
def test_weighted_mean_is_the_exact_mean_to_the_last_bit(cohort):
    rows, weights = cohort
    result = weighted_mean(rows, weights)
    assert result.dtype == torch.float32
    for got, exact in zip(result.tolist(), oracles.exact_mean(rows.tolist(), weights.tolist()), strict=True):
        ulp = max(2.0 ** (math.frexp(got)[1] - 24), 2.0**-149)
        # half an ulp of float32, plus what float64 loses when large rows cancel
        assert abs(Fraction(got) - exact) <= Fraction(ulp) / 2 + Fraction(1e-9)


@given(cohorts())
def test_scaling_all_weights_changes_nothing(cohort):
    rows, weights = cohort
    assert torch.equal(weighted_mean(rows, weights), weighted_mean(rows, weights / 4))


@given(st.lists(FINITE, min_size=1, max_size=5), st.lists(WEIGHT, min_size=1, max_size=20))
def test_equal_clients_are_a_fixed_point_bit_for_bit(row, weights):
    rows = torch.tensor(row).expand(len(weights), -1)
    assert torch.equal(weighted_mean(rows, torch.tensor(weights)), rows[0])


@given(cohorts(), st.randoms())
def test_client_order_matters_less_than_a_float32_ulp(cohort, random):
    rows, weights = cohort
    order = random.sample(range(len(rows)), len(rows))
    shuffled = weighted_mean(rows[order], weights[order])
    torch.testing.assert_close(shuffled, weighted_mean(rows, weights), rtol=2e-7, atol=1e-8)


@given(cohorts(max_clients=8))
def test_splitting_one_client_in_two_changes_nothing(cohort):
    rows, weights = cohort
    halves = torch.cat([rows, rows[-1:]]), torch.cat([weights[:-1], weights[-1:] / 2, weights[-1:] / 2])
    torch.testing.assert_close(weighted_mean(*halves), weighted_mean(rows, weights), rtol=2e-7, atol=1e-8)


@pytest.mark.parametrize("elements", [1, 3_000, 10**9])
def test_the_tile_size_changes_no_bit(elements, monkeypatch):
    rows, weights = random_cohort(5)
    expected = weighted_delta_sum(rows, rows[0], weights)
    monkeypatch.setattr(mean, "_BUFFER_ELEMENTS", elements)
    assert torch.equal(weighted_delta_sum(rows, rows[0], weights), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_lone_client_is_copied(dtype):
    rows = torch.randn(1, 9).to(dtype)
    result = weighted_mean(rows, torch.tensor([3]))
    assert torch.equal(result, rows[0])
    assert result.dtype == dtype
    assert result.data_ptr() != rows.data_ptr()


def test_one_rounding_where_float32_arithmetic_needs_two():
    old, new = torch.randn(2, 10_000)
    float32 = old + (new - old)
    exact = (old.double() + weighted_delta_sum(new[None], old, torch.ones(1))).float()
    assert not torch.equal(float32, new)
    assert torch.equal(exact, new)


def test_inputs_stay_as_they_were_and_out_is_used():
    rows, weights = random_cohort(4, 10)
    rows.requires_grad_()
    kept, out = rows.detach().clone(), torch.empty(10, dtype=torch.float64)
    assert weighted_delta_sum(rows, rows[0], weights, out=out) is out
    assert torch.equal(out, weighted_delta_sum(rows, rows[0], weights))
    assert not weighted_mean(rows, weights).requires_grad
    wide = kept.double()
    tree_sum(wide)
    assert torch.equal(rows, kept)
    assert torch.equal(wide, kept.double())


def test_a_strided_view_of_a_buffer_works():
    buffer = torch.randn(6, 50)
    view = buffer[::2, 5:25]
    assert torch.equal(weighted_mean(view, torch.ones(3)), weighted_mean(view.contiguous(), torch.ones(3)))


def test_a_mean_of_nothing_is_empty_and_a_bad_value_stays_visible():
    assert weighted_mean(torch.empty(3, 0), torch.ones(3)).shape == (0,)
    poisoned = torch.tensor([[1.0, 1.0], [torch.nan, 1.0]])
    assert weighted_mean(poisoned, torch.ones(2)).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], "`weights` must be finite and not negative"),
        ([1.0, math.nan], "`weights` must be finite and not negative"),
        ([1.0, math.inf], "`weights` must be finite and not negative"),
        ([0.0, 0.0], "`weights` must have a positive, finite total"),
        ([1e308, 1e308], "`weights` must have a positive, finite total"),
        ([1.0], r"`weights` must have shape \(2,\)"),
        ([[1.0], [1.0]], r"`weights` must have shape \(2,\)"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        weighted_mean(torch.ones(2, 3), torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: weighted_mean(torch.ones(3), torch.ones(3)), id="vector"),
        pytest.param(lambda: weighted_mean(torch.ones(0, 3), torch.ones(0)), id="no row"),
        pytest.param(lambda: weighted_mean(torch.ones(2, 3, dtype=torch.int64), torch.ones(2)), id="integers"),
    ],
)
def test_bad_updates_are_refused(call):
    with pytest.raises(ValueError, match="`updates` must"):
        call()


def test_bad_references_and_outputs_are_refused():
    rows, weights = torch.ones(2, 3), torch.ones(2)
    with pytest.raises(ValueError, match=r"`reference` must have shape \(3,\), got \(1,\)"):
        weighted_delta_sum(rows, torch.ones(1), weights)
    with pytest.raises(ValueError, match=r"`out` must have shape \(3,\)"):
        weighted_delta_sum(rows, rows[0], weights, out=torch.empty(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="`out` must be float64"):
        weighted_delta_sum(rows, rows[0], weights, out=torch.empty(3))
    with pytest.raises(ValueError, match="`rows` must be float64"):
        tree_sum(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.0123])
def test_an_inner_product_of_equal_entries_keeps_its_digits(value, dtype):
    row = torch.full((100_000,), value, dtype=dtype)
    exact = row.double().square().sum().item()
    direction = torch.full((100_000,), value**-1, dtype=torch.float64)
    assert mean.delta_dot(row) == pytest.approx(exact, rel=1e-6)
    assert mean.delta_dot(row, torch.zeros_like(row)) == pytest.approx(exact, rel=1e-6)
    assert mean.delta_dot(row, None, direction) == pytest.approx(row.double().dot(direction).item(), rel=1e-6)
