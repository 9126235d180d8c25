"""Figures of the score matrix: the worked matrix of the method reference, loops, and what NaN means."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl import functional
from lightning_fcl.functional import (
    average_accuracy,
    average_score,
    backward_transfer,
    forgetting,
    forward_transfer,
    last_score,
    worst_drop,
)
from tests.helpers import oracles

WORKED = torch.tensor([[80.0, 5.0, 2.0], [60.0, 85.0, 4.0], [50.0, 70.0, 90.0]])
BASELINE = torch.tensor([10.0, 8.0, 6.0])
NAN = math.nan
SQUARE = [average_score, backward_transfer, forward_transfer, forgetting, worst_drop]
ALL = [average_accuracy, last_score, *SQUARE]


@st.composite
def matrices(draw):
    size = draw(st.integers(1, 6))
    row = st.lists(st.floats(0, 100), min_size=size, max_size=size)
    return draw(st.lists(row, min_size=size, max_size=size))


def test_worked_values():
    assert average_accuracy(WORKED) == last_score(WORKED) == pytest.approx(70.0)
    assert backward_transfer(WORKED) == pytest.approx(-22.5)
    assert forward_transfer(WORKED) == pytest.approx(4.5)
    assert forward_transfer(WORKED, BASELINE) == pytest.approx(-2.5)
    assert average_score(WORKED) == pytest.approx(74.166667)
    assert average_score(WORKED) != pytest.approx(76.944444)  # the rejected per-task reading
    assert worst_drop(WORKED) == pytest.approx(-30.0)
    assert forgetting(WORKED) == pytest.approx(22.5)


def test_a_second_worked_matrix():
    scores = torch.tensor([[0.9, 0.1, 0.1], [0.6, 0.8, 0.2], [0.5, 0.6, 0.9]], dtype=torch.float64)
    figures = average_accuracy(scores), backward_transfer(scores), forward_transfer(scores)
    assert figures == pytest.approx((2 / 3, -0.30, 0.15))


@given(matrices())
def test_every_figure_matches_loops(rows):
    matrix = torch.tensor(rows, dtype=torch.float64)
    for figure in SQUARE:
        expected = getattr(oracles, figure.__name__)(rows)
        assert figure(matrix) == pytest.approx(expected, rel=1e-12, abs=1e-11, nan_ok=True), figure.__name__
    baseline = torch.tensor(rows[-1], dtype=torch.float64)
    assert forward_transfer(matrix, baseline) == pytest.approx(
        oracles.forward_transfer(rows, rows[-1]), rel=1e-12, abs=1e-11, nan_ok=True
    )


@given(matrices())
def test_averages_of_wide_and_tall_matrices_match_loops(rows):
    wide = torch.tensor([row + row[:1] for row in rows], dtype=torch.float64)
    assert last_score(wide) == pytest.approx(oracles.average_accuracy(wide.tolist()), rel=1e-12, abs=1e-12)
    seen = torch.ones_like(wide, dtype=torch.bool).tril(1)
    columns = [mask.nonzero().flatten().tolist() for mask in seen]
    assert average_score(wide, seen) == pytest.approx(
        oracles.average_score(wide.tolist(), columns), rel=1e-12, abs=1e-12
    )


@given(matrices(), st.floats(0.01, 100))
def test_figures_come_in_the_unit_of_the_scores(rows, unit):
    matrix = torch.tensor(rows, dtype=torch.float64)
    for figure in ALL:
        assert figure(matrix * unit) == pytest.approx(figure(matrix) * unit, rel=1e-9, abs=1e-9, nan_ok=True)


def test_a_single_task_has_scores_but_no_transfer():
    one = torch.tensor([[80.0]])
    assert average_accuracy(one) == average_score(one) == 80.0
    for figure in (backward_transfer, forward_transfer, forgetting, worst_drop):
        assert math.isnan(figure(one)), figure.__name__


@pytest.mark.parametrize("figure", [f for f in ALL if f is not forward_transfer])
def test_an_unfinished_run_has_no_figures(figure):
    unfinished = WORKED.clone()
    unfinished[-1] = NAN
    assert math.isnan(figure(unfinished))
    assert not math.isnan(figure(unfinished[:2, :2]))


MEASURED_BY = {  # which cells of a 3 x 3 matrix each figure needs
    average_accuracy: {(2, 0), (2, 1), (2, 2)},
    last_score: {(2, 0), (2, 1), (2, 2)},
    average_score: {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)},
    backward_transfer: {(2, 0), (2, 1), (0, 0), (1, 1)},
    worst_drop: {(2, 0), (2, 1), (0, 0), (1, 1)},
    forward_transfer: {(0, 1), (1, 2)},
    forgetting: {(2, 0), (2, 1), (0, 0), (1, 0), (1, 1)},
}


@pytest.mark.parametrize("figure", ALL)
def test_a_missing_score_gives_nan_exactly_where_it_is_needed(figure):
    for i in range(3):
        for j in range(3):
            holed = WORKED.clone()
            holed[i, j] = NAN
            if (i, j) in MEASURED_BY[figure]:
                assert math.isnan(figure(holed)), (i, j)
            else:
                assert figure(holed) == figure(WORKED), (i, j)


def test_forgetting_counts_a_good_score_from_before_training_if_it_was_measured():
    scores = torch.tensor([[80.0, 95.0, 0.0], [80.0, 85.0, 0.0], [80.0, 70.0, 90.0]])
    assert forgetting(scores) == pytest.approx((0 + 25) / 2)
    scores[0, 1] = NAN
    assert forgetting(scores) == pytest.approx((0 + 15) / 2)


def test_seen_may_hold_several_columns_of_one_stage():
    scores = torch.tensor([[80.0, 60.0, NAN], [60.0, 70.0, 20.0]])
    seen = torch.tensor([[True, True, False], [True, True, True]])
    assert average_score(scores, seen) == pytest.approx((70 + 50) / 2)
    assert math.isnan(average_score(scores, torch.zeros(2, 3, dtype=torch.bool)))


@pytest.mark.parametrize("figure", ALL)
@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(0, 0), torch.ones(2, 2, dtype=torch.int64)])
def test_what_is_no_score_matrix_is_refused(figure, bad):
    with pytest.raises(ValueError, match="`matrix` must be a float matrix"):
        figure(bad)


@pytest.mark.parametrize("figure", SQUARE)
def test_figures_of_the_diagonal_need_a_square_matrix(figure):
    with pytest.raises(ValueError, match=r"`matrix` must be square, .* got shape \(2, 3\)"):
        figure(torch.ones(2, 3))


def test_bad_companions_are_refused():
    with pytest.raises(ValueError, match=r"`seen` must be bool of shape \(3, 3\)"):
        average_score(WORKED, torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"`baseline` must have shape \(3,\), got \(2,\)"):
        forward_transfer(WORKED, torch.ones(2))


def test_the_matrix_stays_as_it_was():
    kept = WORKED.clone()
    for figure in ALL:
        figure(WORKED)
    assert torch.equal(WORKED, kept)
    assert {f.__name__ for f in ALL} <= vars(functional).keys()
