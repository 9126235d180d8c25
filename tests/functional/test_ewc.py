"""EWC's penalty and its memory of all tasks in two tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.exceptions import ParamMismatchError
from lightning_fcl.functional import ewc_penalty, ewc_penalty_grad, merge_quadratics
from tests.helpers import oracles

WEIGHT = st.floats(-100, 100)
IMPORTANCE = st.one_of(st.just(0.0), st.floats(1e-12, 1e4))


def tree(*values, dtype=torch.float64):
    return {"w": torch.tensor(values, dtype=dtype)}


@st.composite
def quadratics(draw, count):
    """``count`` lists each of weights, anchors and importances, of one length."""
    size = draw(st.integers(1, 5))
    lists = lambda values: [draw(st.lists(values, min_size=size, max_size=size)) for _ in range(count)]  # noqa: E731
    return draw(st.lists(WEIGHT, min_size=size, max_size=size)), lists(WEIGHT), lists(IMPORTANCE)


@given(quadratics(1), st.floats(0, 1e3))
def test_the_penalty_matches_loops_and_its_gradient_autograd(case, strength):
    weights, (anchor,), (importance,) = case
    params = {"w": torch.tensor(weights, dtype=torch.float64, requires_grad=True)}
    penalty = ewc_penalty(params, tree(*anchor), tree(*importance), strength)
    assert penalty.item() == pytest.approx(oracles.ewc_penalty(weights, anchor, importance, strength), rel=1e-12)
    (grad,) = torch.autograd.grad(penalty, params["w"])
    torch.testing.assert_close(ewc_penalty_grad(params, tree(*anchor), tree(*importance), strength)["w"], grad)


def test_no_price_and_no_pull_at_the_anchor():
    anchor, importance = tree(1.5, -2.0), tree(3.0, 4.0)
    assert ewc_penalty(anchor, anchor, importance, 10.0).item() == 0.0
    assert not ewc_penalty_grad(anchor, anchor, importance, 10.0)["w"].any()


def test_two_tasks_end_at_their_joint_optimum():
    # task 1: (w - 1)**2 with Fisher 2; task 2: 3/2 (w - 4)**2; the joint optimum is (2*1 + 3*4) / 5
    w = 0.0
    for _ in range(500):
        w -= 0.1 * (3 * (w - 4) + ewc_penalty_grad(tree(w), tree(1.0), tree(2.0), 1.0)["w"].item())
    assert w == pytest.approx(2.8)


@given(quadratics(2), st.floats(0, 100))
def test_merged_quadratics_equal_their_sum_everywhere(case, strength):
    weights, (a1, a2), (f1, f2) = case
    importance, anchor, offset = merge_quadratics((tree(*f1), tree(*a1)), (tree(*f2), tree(*a2)))
    merged = ewc_penalty(tree(*weights), anchor, importance, strength).item() + strength * offset.item()
    loops = oracles.ewc_penalty(weights, a1, f1, strength) + oracles.ewc_penalty(weights, a2, f2, strength)
    assert merged == pytest.approx(loops, rel=1e-9, abs=1e-9)
    assert offset.item() >= 0


@given(quadratics(3))
def test_merging_is_associative(case):
    weights, anchors, importances = case
    one, two, three = ((tree(*f), tree(*a)) for f, a in zip(importances, anchors, strict=True))
    f12, a12, c12 = merge_quadratics(one, two)
    left, left_anchor, c_left = merge_quadratics((f12, a12), three)
    f23, a23, c23 = merge_quadratics(two, three)
    right, right_anchor, c_right = merge_quadratics(one, (f23, a23))
    here = tree(*weights)
    first = ewc_penalty(here, left_anchor, left, 1.0) + c12 + c_left
    second = ewc_penalty(here, right_anchor, right, 1.0) + c23 + c_right
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


def test_merging_keeps_what_only_one_task_knows():
    importance, anchor, offset = merge_quadratics(
        (tree(2.0, 0.0, 0.0, 3.0), tree(1.0, 1.0, 1.0, 0.1)), (tree(0.0, 5.0, 0.0, 7.0), tree(9.0, 9.0, 9.0, 0.1))
    )
    assert importance["w"].tolist() == [2.0, 5.0, 0.0, 10.0]
    assert anchor["w"].tolist() == [1.0, 9.0, 9.0, 0.1]
    assert offset.item() == 0.0


def test_merging_rounds_once_to_the_dtypes_of_the_first():
    f1, f2 = tree(0.1, dtype=torch.float32), tree(0.2, dtype=torch.float32)
    a1, a2 = tree(1.0, dtype=torch.bfloat16), tree(1.0, dtype=torch.bfloat16)
    importance, anchor, offset = merge_quadratics((f1, a1), (f2, a2))
    assert torch.equal(importance["w"], (f1["w"].double() + f2["w"].double()).float())
    assert (anchor["w"].dtype, offset.dtype) == (torch.bfloat16, torch.float64)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_importance_is_refused(bad):
    good = tree(1.0), tree(1.0)
    with pytest.raises(ValueError, match=r"`importance` must be finite and not negative, got values from .* in 'w'"):
        merge_quadratics(good, (tree(bad), tree(1.0)))


def test_broadcasting_is_refused():
    with pytest.raises(ParamMismatchError, match="`anchor` must have the shapes of `params`"):
        ewc_penalty(tree(1.0, 2.0), tree(1.0), tree(1.0, 1.0), 1.0)
    with pytest.raises(ParamMismatchError, match="`importance` must name the same parameters as `params`"):
        ewc_penalty_grad(tree(1.0), tree(1.0), {}, 1.0)
