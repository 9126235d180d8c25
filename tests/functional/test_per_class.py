"""Accuracy class by class."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.functional import per_class_accuracy, per_class_summary

NAN = math.nan
PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30)


@given(PAIRS)
def test_per_class_accuracy_matches_loops(pairs):
    predictions = torch.tensor([p for p, _ in pairs], dtype=torch.int64)
    labels = torch.tensor([y for _, y in pairs], dtype=torch.int64)
    result = per_class_accuracy(predictions, labels, 5).tolist()
    for c in range(5):
        hits = [p == y for p, y in pairs if y == c]
        assert result[c] == pytest.approx(sum(hits) / len(hits) if hits else NAN, nan_ok=True)


def test_worked_summary():
    table = torch.tensor([[1.0, 0.0, NAN], [0.5, 0.0, NAN], [0.0, 0.4, NAN]])
    summary = per_class_summary(table)
    assert summary.mean.tolist() == pytest.approx([0.5, 0.25, 0.2])
    assert summary.minimum.tolist() == [0.0, 0.0, 0.0]
    assert summary.oscillation == pytest.approx((0.5 + 0.0 + 0.5 + 0.4) / 4)
    assert summary.zeros == 3


def test_a_single_round_does_not_oscillate_and_a_round_of_nan_stays_nan():
    summary = per_class_summary(torch.tensor([[NAN, NAN]]))
    assert math.isnan(summary.oscillation)
    assert summary.mean.isnan().all()
    assert summary.minimum.isnan().all()
    assert summary.zeros == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`labels` must lie in \[0, 2\), got values from 0 to 2"):
        per_class_accuracy(torch.tensor([0, 1]), torch.tensor([0, 2]), 2)
    with pytest.raises(ValueError, match=r"`predictions` and `labels` must both .* got \(2, 3\) and \(2,\)"):
        per_class_accuracy(torch.ones(2, 3), torch.tensor([0, 1]), 2)
    with pytest.raises(ValueError, match="`table` must be float"):
        per_class_summary(torch.ones(2, 2, dtype=torch.int64))
