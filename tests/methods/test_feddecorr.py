"""FedDecorr: the oracle and laws of the decorrelation loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import decorrelation_loss
from lightning_fcl.mixins import FedDecorr
from tests.helpers.distillation import double, gradient, mean
from tests.helpers.mixins import assert_close, federate, fit, twins
from tests.helpers.toy import ToyModule, make_toy, toy_data, toy_stream

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

few = settings(max_examples=25)
tables = st.integers(2, 4).flatmap(
    lambda d: st.lists(st.lists(st.floats(-5, 5), min_size=d, max_size=d), min_size=2, max_size=6)
)


def formula(rows):
    count, columns = len(rows), list(zip(*rows, strict=True))
    scaled = []
    for column in columns:
        middle = mean(column)
        variance = sum((value - middle) ** 2 for value in column) / (count - 1)
        scaled.append([(value - middle) / math.sqrt(variance + 1e-8) for value in column])
    pairs = [(a, b) for a in range(len(columns)) for b in range(len(columns)) if a != b]
    products = [sum(x * y for x, y in zip(scaled[a], scaled[b], strict=True)) for a, b in pairs]
    return mean(product**2 for product in products) / count


@few
@given(rows=tables)
def test_matches_the_formula(rows):
    assert decorrelation_loss(double(rows)).item() == pytest.approx(formula(rows), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("count", "wanted"), [(4, 2.25), (8, 6.125)])
def test_features_all_alike_cost_more_in_a_larger_batch(count, wanted):
    """(N - 1)^2 / N (baselines 4.6)."""
    column = torch.arange(count, dtype=torch.float64)[:, None]
    assert decorrelation_loss(column.expand(count, 2)).item() == pytest.approx(wanted, abs=1e-6)


def test_an_orthogonal_design_costs_nothing():
    design = double([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    assert decorrelation_loss(design).item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("shape", [(1, 3), (4, 1)])
def test_one_example_or_one_feature_costs_nothing(shape):
    rows = torch.ones(shape).tolist()
    assert decorrelation_loss(double(rows)).item() == 0
    assert gradient(decorrelation_loss, rows).abs().max() == 0


def test_a_constant_feature_has_a_finite_gradient_and_no_price():
    rows = [[1.0, 3.0], [1.0, 4.0], [1.0, 8.0]]
    assert decorrelation_loss(double(rows)).item() == 0
    assert gradient(decorrelation_loss, rows).isfinite().all()


@few
@given(rows=tables, shift=st.floats(-3, 3))
def test_a_shift_changes_nothing(rows, shift):
    moved = decorrelation_loss(double(rows) + shift).item()
    assert moved == pytest.approx(decorrelation_loss(double(rows)).item(), rel=1e-4, abs=1e-6)


def test_bad_input():
    with pytest.raises(ValueError, match=r"`features` must be of shape \(B, d\), got \(2, 3, 4\)"):
        decorrelation_loss(torch.zeros(2, 3, 4))


# -- shell ------------------------------------------------------------------------------------------------------------


class Net(FedDecorr, ToyModule):
    pass


def test_equals_the_term_written_by_hand():
    module, twin = twins(Net, decorr_strength=0.3)
    twin.total = lambda loss, x, y, features, logits: loss + 0.3 * decorrelation_loss(features)
    for one in (module, twin):
        fit(one)
    assert_close(module, twin)


def test_features_repeat_each_other_less(tmp_path):
    repeats = []
    for strength in (0.0, 2.0):
        module = make_toy(cls=Net, decorr_strength=strength)
        federate(module, tmp_path / str(strength), toy_stream(tasks=1), local_epochs=4)
        repeats.append(decorrelation_loss(module.net[:-1](toy_data(60).tensors[0])).item())
    assert repeats[1] < repeats[0]


def test_bad_arguments():
    with pytest.raises(MisconfigurationError, match="`decorr_strength` must be finite and not negative"):
        Net(decorr_strength=-1.0)
