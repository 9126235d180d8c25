"""Figures of a curve over rounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.functional import ewma, rounds_to_best, rounds_to_target, top_k_mean
from tests.helpers import oracles

WORKED = torch.tensor([0.10, 0.30, 0.55, 0.52, 0.60, 0.62, 0.61, 0.65], dtype=torch.float64)
NAN = math.nan
CURVES = st.lists(st.floats(0, 1), min_size=1, max_size=20)
SMOOTHING = st.floats(0.01, 1)


def test_worked_values_of_the_smoothed_curve():
    expected = [0.1, 0.14, 0.222, 0.2816, 0.34528, 0.400224, 0.442179, 0.483743]
    assert ewma(WORKED).tolist() == pytest.approx(expected, abs=1e-6)
    assert (rounds_to_target(WORKED, 0.4, smoothing=1.0), rounds_to_target(WORKED, 0.4)) == (3, 6)
    assert rounds_to_target(WORKED, 0.5) is None


def test_worked_values_of_r50_and_r75():
    curve = torch.tensor([20.0, 48.0, 51.0, 49.0, 76.0])
    assert [rounds_to_target(curve, target, smoothing=1.0) for target in (50.0, 75.0)] == [3, 5]


@given(CURVES, SMOOTHING, st.floats(0, 1))
def test_curves_match_loops(xs, smoothing, target):
    curve = torch.tensor(xs, dtype=torch.float64)
    assert ewma(curve, smoothing).tolist() == oracles.ewma(xs, smoothing)
    assert rounds_to_target(curve, target, smoothing) == oracles.rounds_to_target(xs, target, smoothing)


@given(CURVES, SMOOTHING, st.integers(0, 3))
def test_rounds_without_evaluation_count_and_change_nothing_else(xs, smoothing, gap):
    sparse = torch.full((len(xs) * (gap + 1),), NAN, dtype=torch.float64)
    sparse[gap :: gap + 1] = torch.tensor(xs, dtype=torch.float64)
    smooth = ewma(sparse, smoothing)
    assert torch.equal(smooth.isnan(), sparse.isnan())
    assert smooth[~smooth.isnan()].tolist() == oracles.ewma(xs, smoothing)
    dense = oracles.rounds_to_target(xs, 0.5, smoothing)
    assert rounds_to_target(sparse, 0.5, smoothing) == (None if dense is None else dense * (gap + 1))


def test_an_empty_curve_reaches_nothing():
    assert rounds_to_target(torch.empty(0), 0.5) is None
    assert rounds_to_best([torch.empty(0)]) is None
    assert math.isnan(top_k_mean(torch.empty(0), k=1))


def test_rounds_to_best_adds_first_maxima_over_tasks():
    assert (
        rounds_to_best([torch.tensor([0.2, 0.9, 0.9]), torch.tensor([NAN, 0.0, -1.0]), torch.tensor([0.4])])
        == 2 + 2 + 1
    )
    assert rounds_to_best([torch.tensor([0.2]), torch.tensor([NAN, NAN])]) is None
    assert rounds_to_best([]) == 0


@given(st.lists(CURVES, min_size=1, max_size=4))
def test_rounds_to_best_matches_loops(curves):
    expected = sum(xs.index(max(xs)) + 1 for xs in curves)
    assert rounds_to_best(torch.tensor(xs, dtype=torch.float64) for xs in curves) == expected


def test_worked_value_of_the_top_five():
    assert top_k_mean(torch.tensor([10.0, 50.0, 40.0, 30.0, 20.0, 60.0, 70.0])) == 50.0


@given(CURVES, st.integers(1, 20))
def test_top_k_mean_matches_loops_and_is_nan_when_undefined(xs, k):
    result = top_k_mean(torch.tensor([NAN, *xs], dtype=torch.float64), k)
    expected = sum(sorted(xs)[-k:]) / k if k <= len(xs) else NAN
    assert result == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True)


@pytest.mark.parametrize("smoothing", [0.0, -0.5, 1.1, NAN])
def test_bad_smoothing_is_refused(smoothing):
    with pytest.raises(ValueError, match=r"`smoothing` must lie in \(0, 1\]"):
        rounds_to_target(WORKED, 0.5, smoothing)


@pytest.mark.parametrize(
    "function", [ewma, top_k_mean, lambda c: rounds_to_target(c, 0.5), lambda c: rounds_to_best([c])]
)
@pytest.mark.parametrize("bad", [torch.ones(2, 2), torch.ones(2, dtype=torch.int64)])
def test_what_is_no_curve_is_refused(function, bad):
    with pytest.raises(ValueError, match="`curve` must be a float vector"):
        function(bad)


def test_k_must_be_positive():
    with pytest.raises(ValueError, match="`k` must be at least 1, got 0"):
        top_k_mean(WORKED, 0)
