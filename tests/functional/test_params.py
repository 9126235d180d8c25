"""Trees of parameters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.exceptions import ParamMismatchError
from lightning_fcl.functional import (
    axpy,
    check_same_names,
    check_same_shapes,
    dot,
    expand_like,
    norm,
    total,
    zeros_like,
)

VECTORS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6)


def tree(values):
    return {"a": torch.tensor(values), "b.c": torch.tensor(values[::-1])}


@given(VECTORS, st.floats(-3, 3))
def test_axpy_dot_and_norm_match_loops(values, scale):
    x, y = tree(values), tree([2 * v + 1 for v in values])
    flat_x, flat_y = ([v for t in part.values() for v in t.tolist()] for part in (x, y))
    pairs = list(zip(flat_x, flat_y, strict=True))
    result = [v for t in axpy(scale, x, y).values() for v in t.tolist()]
    torch.testing.assert_close(result, [scale * a + b for a, b in pairs], rtol=1e-5, atol=1e-3)
    assert dot(x, y).item() == pytest.approx(sum(a * b for a, b in pairs), rel=1e-12, abs=1e-9)
    assert norm(x).item() == pytest.approx(math.sqrt(sum(a * a for a in flat_x)), rel=1e-12)


def test_dot_does_not_overflow_half_precision():
    large = {"w": torch.full((4,), 60_000.0, dtype=torch.float16)}
    assert dot(large, large).item() == 4 * large["w"][0].double().item() ** 2


def test_zeros_keep_names_shapes_and_dtypes():
    zero = zeros_like({"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert zero["w"].dtype == torch.bfloat16
    assert torch.equal(zero["w"], torch.zeros(2, 3, dtype=torch.bfloat16))


def test_an_empty_tree_costs_nothing():
    assert total([]).item() == dot({}, {}).item() == 0.0


def test_messages_name_both_trees_and_at_most_three_parameters():
    many = {f"w{i}": torch.zeros(1) for i in range(5)}
    with pytest.raises(ParamMismatchError, match=r"`anchor` .* `params`, but it lacks 'w0', 'w1', 'w2' and 2 more\."):
        check_same_names(params=many, anchor={})
    with pytest.raises(ParamMismatchError, match=r"lacks 'w0'.*; adds 'x'\. .*expand_like\(old, new\)"):
        check_same_names(new={"w0": torch.zeros(1)}, old={"x": torch.zeros(1)})
    with pytest.raises(ParamMismatchError, match=r"`y` .* the shapes of `x`, got \(1,\) instead of \(3,\) for 'w'"):
        dot({"w": torch.zeros(3)}, {"w": torch.zeros(1)})
    check_same_shapes(a=many, b=dict(reversed(many.items())))


def test_expanded_trees_keep_old_values_in_place():
    old = {"head": torch.arange(6.0, dtype=torch.float64).reshape(2, 3)}
    grown = expand_like(old, {"head": torch.ones(4, 3), "new": torch.ones(2)})
    assert torch.equal(grown["head"][:2], old["head"])
    assert not grown["head"][2:].any()
    assert not grown["new"].any()
    assert (grown["head"].dtype, grown["new"].dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize(
    "like", [{}, {"w": torch.zeros(1)}, {"w": torch.zeros(2, 2)}], ids=["lost", "shrunk", "reshaped"]
)
def test_expanding_never_drops_values(like):
    with pytest.raises(ParamMismatchError, match="`like` must"):
        expand_like({"w": torch.ones(2)}, like)
