"""SPECIAL's blend and FedProx's penalty: the worked values of the method reference, and laws."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.exceptions import ParamMismatchError
from lightning_fcl.functional import proximal_blend, proximal_penalty, proximal_penalty_grad, weighted_mean

VALUES = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8)
STRENGTH = st.floats(0, 1e6)


def blend(x, a, strength):
    wide = (torch.tensor([value], dtype=torch.float64) for value in (x, a))
    return proximal_blend(*wide, strength).item()


def run(rounds, *, delta, strength, server_lr=1.0, start=0.0, anchor=0.0):
    """Server rounds of SPECIAL on one weight; ``delta`` maps (weight, round) to the mean client delta."""
    path = [start]
    for t in range(rounds):
        path.append(blend(path[-1] + server_lr * delta(path[-1], t), anchor, strength))
    return path[1:]


def test_zero_strength_is_the_server_step_bit_for_bit():
    x = torch.tensor([-0.0, 1e-40, torch.inf, 3.3])
    result = proximal_blend(x, torch.tensor([torch.nan, 1.0, 2.0, 3.0]), 0.0)
    assert torch.equal(result.view(torch.int32), x.view(torch.int32))
    assert result.data_ptr() != x.data_ptr()


def test_worked_values_of_the_blend():
    assert blend(3.0, 1.0, 0.25) == pytest.approx(2.6, abs=1e-15)
    constant = run(300, delta=lambda w, t: 1.0, strength=0.25)
    assert constant[:3] == pytest.approx([0.8, 1.44, 1.952])
    assert constant[-1] == pytest.approx(4.0)
    assert run(2, delta=lambda w, t: 1.0 - t, strength=0.25)[-1] == pytest.approx(0.64)
    assert run(300, delta=lambda w, t: 0.5, strength=0.25)[-1] == pytest.approx(2.0)


@pytest.mark.parametrize(("task", "fixed_point"), [(1, 0.8), (2, 2 / 3), (3, 4 / 7), (4, 0.5)])
def test_a_smaller_server_step_is_a_stiffer_pull(task, fixed_point):
    path = run(500, delta=lambda w, t: 1 - w, strength=0.25, server_lr=1 / task)
    assert path[-1] == pytest.approx(fixed_point)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60))
def test_drift_stays_within_the_papers_bound(directions):
    path = run(len(directions), delta=lambda w, t: 0.5 * directions[t], strength=0.25)  # server lr 1, lr .1, 5 steps
    assert all(w**2 <= (0.1 * 5) ** 2 / 0.25**2 + 1e-12 for w in path)


def test_worked_values_of_the_client_variant():
    def client(steps, strength):
        path = [0.0]
        for _ in range(steps):
            path.append(blend(path[-1] + 0.1, 0.0, strength))  # gradient -1, learning rate 0.1
        return path[1:]

    assert client(3, 0.2) == pytest.approx([0.083333, 0.152778, 0.210648], abs=1e-6)
    assert client(300, 0.2)[-1] == pytest.approx(0.5)
    assert client(3, 0.0) == [0.1, 0.2, 0.1 + 0.1 + 0.1]


def test_uniform_weights_ignore_the_number_of_examples():
    deltas = torch.tensor([[1.0], [3.0]])
    assert weighted_mean(deltas, torch.ones(2)).item() == 2.0
    assert weighted_mean(deltas, torch.tensor([100, 300])).item() == 2.5


def test_a_uniform_mean_over_a_uniform_subset_is_unbiased():
    updates = torch.randn(8, 1, dtype=torch.float64)
    means = torch.cat([weighted_mean(updates[list(s)], torch.ones(4)) for s in itertools.combinations(range(8), 4)])
    torch.testing.assert_close(means.mean(), updates.mean())
    expected = updates.var(correction=0) * (8 - 4) / (4 * (8 - 1))
    torch.testing.assert_close(means.var(correction=0), expected)


@given(VALUES, STRENGTH)
def test_the_anchor_is_a_fixed_point(values, strength):
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(values, dtype=dtype)
        assert torch.equal(proximal_blend(x, x.clone(), strength), x)


@given(VALUES, STRENGTH)
def test_the_blend_matches_its_formula_to_one_float32_rounding(values, strength):
    x, a = torch.tensor(values), torch.tensor(values[::-1]) + 1
    expected = (x.double() + strength * a.double()) / (1 + strength)
    torch.testing.assert_close(proximal_blend(x, a, strength), expected.float(), rtol=2e-7, atol=1e-10)


@given(VALUES, st.floats(0, 100))
def test_the_blend_minimises_what_it_says(values, strength):
    x, a = torch.tensor(values, dtype=torch.float64), torch.tensor(values[::-1], dtype=torch.float64)
    u = proximal_blend(x, a, strength)
    torch.testing.assert_close((u - x) + strength * (u - a), torch.zeros_like(u), rtol=0, atol=1e-8)


def test_worked_values_of_fedprox():
    at = {"w": torch.tensor([1.0])}
    weight = {"w": torch.tensor([2.0])}  # minimum of (w - 3)**2 / 2 + (w - 1)**2 / 2
    assert (weight["w"] - 3).item() + proximal_penalty_grad(weight, at, 1.0)["w"].item() == 0.0
    assert proximal_penalty_grad(at, at, 1.0)["w"].item() == 0.0
    assert proximal_penalty_grad({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}, 1.0)["w"].tolist() == [3, 4]


@given(VALUES, st.floats(0, 10))
def test_the_closed_gradient_equals_autograd(values, strength):
    params = {"a": torch.tensor(values, requires_grad=True), "b": torch.tensor(values[:1], requires_grad=True)}
    anchor = {name: -p.detach() / 3 for name, p in params.items()}
    penalty = proximal_penalty(params, anchor, strength)
    for name, grad in zip(params, torch.autograd.grad(penalty, list(params.values())), strict=True):
        torch.testing.assert_close(proximal_penalty_grad(params, anchor, strength)[name], grad)
    loops = sum((p - a) ** 2 for n in params for p, a in zip(params[n].tolist(), anchor[n].tolist(), strict=True))
    assert penalty.item() == pytest.approx(strength / 2 * loops, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("strength", [-0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("function", [proximal_penalty, proximal_penalty_grad])
def test_bad_strengths_are_refused(strength, function):
    with pytest.raises(ValueError, match="`strength` must be finite and not negative"):
        function({}, {}, strength)
    with pytest.raises(ValueError, match="`strength` must be finite and not negative"):
        blend(1.0, 1.0, strength)


def test_shapes_and_dtypes_are_checked():
    with pytest.raises(ValueError, match=r"`anchor` must have the shape of `aggregate`, got \(1,\) and \(3,\)"):
        proximal_blend(torch.ones(3), torch.ones(1), 0.5)
    with pytest.raises(ValueError, match=r"must be floats, got torch\.int64"):
        proximal_blend(torch.ones(1, dtype=torch.int64), torch.ones(1), 0.5)
    with pytest.raises(ParamMismatchError, match="got"):
        proximal_penalty({"w": torch.ones(3)}, {"w": torch.ones(1)}, 1.0)
