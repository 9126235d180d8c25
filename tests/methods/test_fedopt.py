"""FedAvgM, FedAdam, FedYogi, FedAdagrad: oracle values, the papers' algorithms as loops, and runs in the real loop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.aggregators import (
    Chain,
    FedACG,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    ServerProximal,
    WeightAverage,
)
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import second_moment
from tests.helpers.server import check_resumes, fit, stats_of, weights

deltas = st.lists(st.floats(-10, 10), min_size=1, max_size=6)
ADAPTIVE = {"adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}


def test_momentum_as_a_heavy_ball_and_as_an_average():
    """beta .9, mean delta 1 for three rounds."""
    assert weights(FedAvgM(0.9), [1.0] * 3) == pytest.approx([1.0, 2.9, 5.61], abs=1e-12)
    assert weights(FedAvgM(0.9, ema=True), [1.0] * 3) == pytest.approx([1.0, 2.0, 3.0], abs=1e-12)


def test_first_steps_of_the_adaptive_rules():
    """No bias correction, tau outside of the root, v from tau squared."""
    assert weights(FedAdam(0.1), [0.5])[0] == pytest.approx(0.09802, abs=1e-5)
    first, both = weights(FedAdagrad(0.1), [1.0, 1.0])
    assert (first, both - first) == pytest.approx((0.09990, 0.07066), abs=1e-5)


def test_yogi_falls_slowly_and_rises_fast():
    """Squared delta .25: v from 1 to .9975 (Adam: .9925), and from 1e-6 to .002501."""
    delta = torch.tensor([0.5], dtype=torch.float64)
    for old, yogi, adam in ((1.0, 0.9975, 0.9925), (1e-6, 0.002501, 0.00250099)):
        second = torch.tensor([old], dtype=torch.float64)
        assert second_moment(second, delta, 0.99, "yogi").item() == pytest.approx(yogi, abs=1e-9)
        assert second_moment(second, delta, 0.99, "adam").item() == pytest.approx(adam, abs=1e-9)


def slow(name, rounds, lr, beta1, beta2, tau):
    """Algorithm 2 of Reddi et al., element by element."""
    theta, m, v, seen = 0.0, 0.0, tau**2, []
    for delta in rounds:
        m = beta1 * m + (1 - beta1) * delta
        if name == "adagrad":
            v = v + delta**2
        elif name == "yogi":
            v = v - (1 - beta2) * delta**2 * ((v > delta**2) - (v < delta**2))
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        theta += lr * m / (math.sqrt(v) + tau)
        seen.append(theta)
    return seen


@given(rounds=deltas, beta1=st.floats(0, 0.99), tau=st.floats(1e-4, 1.0))
@settings(max_examples=30)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_matches_the_paper(name, rounds, beta1, tau):
    rule = ADAPTIVE[name](0.3, beta1=beta1, tau=tau, **({} if name == "adagrad" else {"beta2": 0.9}))
    expected = slow(name, rounds, 0.3, beta1, 0.9, tau)
    assert weights(rule, rounds) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(rounds=deltas, scale=st.floats(0.5, 100))
@settings(max_examples=20)
def test_adaptive_steps_forget_the_scale_of_the_deltas(rounds, scale):
    """With tau scaled along, the weights do not notice that all deltas are larger."""
    plain = weights(FedAdam(0.1, tau=0.01), rounds)
    assert weights(FedAdam(0.1, tau=0.01 * scale), [scale * d for d in rounds]) == pytest.approx(plain, abs=1e-9)


@pytest.mark.parametrize("rule", [FedAvgM(0.9), FedAdam(0.1), FedYogi(0.1), FedAdagrad(0.1)])
def test_buffers_follow_the_mean_and_the_state_is_left_alone(rule):
    params = torch.zeros(3)
    state = rule.init(params)
    for _ in range(2):
        before = {key: value.clone() if torch.is_tensor(value) else value for key, value in state.items()}
        delta, new = rule.apply(params, torch.ones(3, dtype=torch.float64), stats_of(params=2), state)
        assert delta[2] == 1.0
        assert all(torch.equal(state[k], v) for k, v in before.items() if torch.is_tensor(v))
        state = new
    assert delta[0] != 1.0
    assert {len(value) for value in state.values() if torch.is_tensor(value)} == {2}


@pytest.mark.parametrize("make", [FedAvgM, FedAdam, FedYogi, FedAdagrad])
def test_reset_on_task_starts_anew(make):
    rounds, tasks = [1.0, -2.0, 1.0, -2.0], [0, 0, 1, 1]
    kept, reset = (weights(make(reset_on_task=flag), rounds, tasks=tasks) for flag in (False, True))
    assert reset[3] - reset[1] == pytest.approx(reset[1], abs=1e-12)
    assert kept[:2] == reset[:2]
    assert kept[2] != reset[2]


def test_step_size_follows_the_task():
    assert weights(FedAvgM(0.0, lr="inverse_task"), [1.0, 1.0], tasks=[0, 3]) == [1.0, 1.25]


def test_default_means():
    """Plain for the adaptive rules, as in the paper; by examples for momentum."""
    assert {type(r): r.default_reducer().weighting for r in (FedAdam(), FedYogi(), FedAdagrad(), FedAvgM())} == {
        FedAdam: "uniform",
        FedYogi: "uniform",
        FedAdagrad: "uniform",
        FedAvgM: "samples",
    }


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: FedAvgM(1.0), "momentum"),
        (lambda: FedAvgM(float("nan")), "momentum"),
        (lambda: FedAdam(0.0), "lr"),
        (lambda: FedYogi(beta1=1.0), "beta1"),
        (lambda: FedAdam(beta2=1.1), "beta2"),
        (lambda: FedAdagrad(tau=0.0), "tau"),
    ],
)
def test_bad_arguments(make, argument):
    with pytest.raises(MisconfigurationError, match=f"`{argument}` must .*, got"):
        make()


def test_bad_rule():
    with pytest.raises(ValueError, match='`rule` must be "adam", "yogi" or "adagrad"'):
        second_moment(torch.ones(1), torch.ones(1), 0.9, "adamax")


# -- in the loop ------------------------------------------------------------------------------------------------------


def test_a_chain_of_all_resumes_bit_for_bit(tmp_path):
    """Each by itself is a matter of the conformance tests."""

    def rules():
        return Chain(FedAvg(), FedAvgM(0.5), FedYogi(0.05), FedACG(0.5), ServerProximal(0.2), WeightAverage(0.0))

    whole = check_resumes(tmp_path / "a", rules)
    plain = fit(tmp_path / "b", Chain(FedAvg(), ServerProximal(0.2)))
    assert any(not torch.equal(whole[name], plain[name]) for name in whole)
