"""SWA over rounds: what is averaged, what is shown, and that training does not see it."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.aggregators import Chain, FedAvg, ServerProximal, TaskSubspaces, WeightAverage
from lightning_fcl.aggregators.chain import chain_of
from lightning_fcl.callbacks import FedDyn
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.layout import build_layout
from lightning_fcl.functional import cyclic_factor, running_mean
from tests.helpers.server import run_rounds
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer


def shown(rule, deltas, **options):
    return [output for _, _, output in run_rounds(Chain(FedAvg(), rule), deltas, **options)]


def test_mean_of_the_last_rounds():
    """Weights 1, 2, 3, ...: all averaged, the mean of 1, 2, 3 is 2; from three quarters on, that of 7 and 8 is 7.5."""
    assert shown(WeightAverage(0.0), [1.0] * 3) == [1.0, 1.5, 2.0]
    assert shown(WeightAverage(), [1.0] * 8) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.5]


def test_every_takes_the_end_of_each_cycle():
    assert shown(WeightAverage(0.0, every=3), [1.0] * 6) == [1.0, 2.0, 3.0, 3.0, 3.0, 4.5]


def test_each_task_averages_anew():
    seen = [
        shown(WeightAverage(0.0), [1.0] * 4, tasks=[0, 0, 1, 1]),
        shown(WeightAverage(0.5), [1.0] * 4, tasks=[0, 0, 1, 1], rounds=2),
    ]
    assert seen[0] == [1.0, 1.5, 3.0, 3.5]
    assert seen[1] == [1.0, 2.0, 3.0, 3.5]


@given(values=st.lists(st.floats(-100, 100), min_size=1, max_size=8))
@settings(max_examples=30)
def test_running_mean_is_the_mean(values):
    mean = None
    for count, value in enumerate(values):
        mean = running_mean(mean, torch.tensor([value], dtype=torch.float64), count)
    assert mean.item() == pytest.approx(sum(values) / len(values), abs=1e-12)


def test_cyclic_factor():
    factor = partial(cyclic_factor, start=4, every=4, low=0.2)
    assert [factor(7, r) for r in range(9)] == pytest.approx([1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.8])
    assert cyclic_factor(0, 9, start=4, every=1, low=0.2) == 1.0


def test_bad_arguments():
    with pytest.raises(MisconfigurationError, match=r"`start` must be a share .* in \[0, 1\), got 1"):
        WeightAverage(1)
    with pytest.raises(MisconfigurationError, match="`every` must be at least 1, got 0"):
        WeightAverage(every=0)
    with pytest.raises(MisconfigurationError, match="must hold WeightAverage in last place, got ServerProximal"):
        Chain(WeightAverage(), ServerProximal())
    with pytest.raises(MisconfigurationError, match="must not hold WeightAverage behind a router"):
        Chain(TaskSubspaces(), WeightAverage())


def test_what_callbacks_bring_goes_before_it():
    chain = chain_of(WeightAverage(), [FedDyn(0.1)])
    assert [type(step).__name__ for step in chain.steps] == ["FedDynStep", "WeightAverage"]


# -- in the loop ------------------------------------------------------------------------------------------------------


def test_the_module_ends_with_the_mean_and_training_does_not_see_it(tmp_path):
    ends = []

    class Watched(WeightAverage):
        def apply(self, params, delta, stats, state):
            ends.append(params.double() + delta)
            return super().apply(params, delta, stats, state)

    plain, module = make_toy(), make_toy()
    options = {"rounds": 4, "eval_every": 1}
    toy_trainer(tmp_path / "a", aggregator=FedAvg(), **options).fit(plain, toy_stream())
    report = toy_trainer(tmp_path / "b", aggregator=Watched(0.5), **options).fit(module, toy_stream())
    layout = build_layout(make_toy())
    assert len(ends) == 8
    assert_same_bits(state_of(plain), layout.views(ends[-1].float()))  # clients never saw the mean
    assert_same_bits(state_of(module), layout.views(((ends[-1] - ends[-2]) / 2 + ends[-2]).float()))
    assert report.method == "SWA"
