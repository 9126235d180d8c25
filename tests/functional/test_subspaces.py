"""Tokens, routing, activation factors and the block form: oracle values of the method reference (C.13), and laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.functional import (
    activation_factors,
    identity_token,
    merge_lora,
    orthogonality_penalty,
    orthogonality_penalty_grad,
    propose_threshold,
    route_tokens,
    subspace_lora,
    token_cosines,
    update_token,
    weighted_mean,
)


def at(*degrees):
    return torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees])


def with_cosines(cosines):
    """A feature and a bank of unit tokens with these cosines to it."""
    bank = torch.tensor([[c, math.sqrt(1 - c * c)] for c in cosines], dtype=torch.float64)
    return torch.tensor([[1.0, 0.0]], dtype=torch.float64), bank


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_token_is_the_plain_mean():
    """C-1."""
    assert identity_token(torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 3.0]])).tolist() == [2.0, 2.0]


def test_running_mean():
    """C-3 and C-9; the published code's misplaced bracket would give (300, .25)."""
    token, count = update_token(torch.tensor([1.0, 0.0]), 300, torch.tensor([0.9, 0.4]), 100)
    torch.testing.assert_close(token, torch.tensor([0.975, 0.1]))
    assert count == 400
    assert update_token(torch.tensor([1.0, 0.0]), 300, torch.tensor([0.0, 1.0]), 100)[0].tolist() == [0.75, 0.25]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
@settings(max_examples=20)
def test_running_mean_equals_the_mean_of_all(counts):
    tokens = torch.randn(len(counts), 3)
    token, count = torch.zeros(3), 0.0
    for one, number in zip(tokens, counts, strict=True):
        token, count = update_token(token, count, one, number)
    whole = weighted_mean(tokens, torch.tensor(counts))
    torch.testing.assert_close(token, whole, rtol=1e-5, atol=1e-5)
    assert count == sum(counts)


def test_bad_tokens():
    with pytest.raises(ValueError, match="`features` must have shape"):
        identity_token(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="must be finite"):
        identity_token(torch.tensor([[math.nan, 1.0]]))
    with pytest.raises(ValueError, match="different encoders"):
        update_token(torch.zeros(3), 1, torch.zeros(4), 1)
    with pytest.raises(ValueError, match="different encoders"):
        token_cosines(torch.zeros(1, 3), torch.zeros(1, 4))


def test_threshold_lies_between_tasks():
    tokens = torch.cat([at(0, 10), at(60, 75)])
    proposal = propose_threshold(tokens, [0, 0, 1, 1])
    assert proposal.within == pytest.approx(math.cos(math.radians(15)))
    assert proposal.between == pytest.approx(math.cos(math.radians(50)))
    assert proposal.threshold == pytest.approx((proposal.within + proposal.between) / 2)
    assert propose_threshold(at(0, 60), [0, 1]).threshold == pytest.approx(0.75)
    with pytest.raises(ValueError, match="at least two tasks"):
        propose_threshold(at(0, 60), [1, 1])


# -- routing ----------------------------------------------------------------------------------------------------------


def route(tokens, bank, counts=None, **options):
    bank = torch.zeros(0, tokens.shape[1]) if bank is None else bank
    return route_tokens(tokens, torch.ones(len(tokens)) if counts is None else torch.tensor(counts), bank, **options)


def test_match_or_open():
    """C-2: cosines .8 and .6 open a subspace, .913812 matches."""
    routing = route(torch.tensor([[4.0, 3.0], [9.0, 4.0]]), torch.eye(2))
    torch.testing.assert_close(routing.cosines[0], torch.tensor([0.8, 0.6], dtype=torch.float64))
    assert routing.cosines[1, 0].item() == pytest.approx(0.913812, abs=1e-6)
    assert (routing.slots.tolist(), routing.opened, routing.forced.tolist()) == ([2, 0], 1, [False, False])


def test_each_client_is_in_one_group():
    """C-10: angles 0, 20, 40 at .9: {0, 1}, {2}; the published code puts client 1 into two groups."""
    assert route(at(0, 20, 40), None).slots.tolist() == [0, 0, 1]


def test_the_largest_client_leads():
    assert route(at(0, 20, 40), None, counts=[1, 5, 1]).slots.tolist() == [0, 0, 0]


def test_two_new_tasks_in_one_round_both_get_a_subspace():
    """C-15, and trap 7 of the published code."""
    routing = route(at(0, 90, 180), at(180))
    assert (routing.slots.tolist(), routing.opened) == ([1, 2, 0], 2)


def test_at_capacity_the_most_similar_is_forced():
    """C-15."""
    routing = route(at(70, 10), at(0), capacity=1)
    assert (routing.slots.tolist(), routing.opened, routing.forced.tolist()) == ([0, 0], 0, [True, False])
    first = route(at(0, 50, 90), None, capacity=2, counts=[3, 2, 1])
    assert (first.slots.tolist(), first.forced.tolist()) == ([0, 1, 1], [False, False, True])


def test_zero_token_opens_a_subspace():
    """C-15."""
    assert route(torch.zeros(1, 2), torch.eye(2)).slots.tolist() == [2]


def test_ties_go_to_the_lowest():
    assert route(at(45), at(0, 90), threshold=0.5).slots.tolist() == [0]


@given(st.permutations(range(6)))
@settings(max_examples=25)
def test_order_of_clients_does_not_matter(order):
    """With counts that differ, groups are the same for every order in which clients are listed."""
    tokens, counts = at(0, 5, 100, 103, 200, 250), [6, 5, 4, 3, 2, 1]
    straight = route(tokens, at(1), counts=counts).slots
    shuffled = route(tokens[list(order)], at(1), counts=[counts[i] for i in order]).slots
    assert shuffled.tolist() == straight[list(order)].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"threshold": 1.5}, "`threshold`"), ({"capacity": 0}, "`capacity`"), ({"counts": [1.0]}, "`tokens`")],
)
def test_bad_routing_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        route(at(0, 1), None, **options)
    with pytest.raises(ValueError, match="must be finite"):
        route(torch.tensor([[math.nan, 0.0]]), None)


# -- activation -------------------------------------------------------------------------------------------------------


def test_softmax_factors():
    """C-5, C-8."""
    factors = activation_factors(*with_cosines([0.95, 0.85, 0.60]))
    torch.testing.assert_close(factors, torch.tensor([[0.880090, 0.119107, 0.000803]]), rtol=0, atol=5e-7)
    two = activation_factors(*with_cosines([0.95, 0.75]))
    torch.testing.assert_close(two, torch.tensor([[0.982014, 0.017986]]), rtol=0, atol=5e-7)
    free = activation_factors(*with_cosines([0.30, *[0.0] * 7]))
    assert free[0, 0].item() == pytest.approx(0.982945, abs=1e-6)


def test_temperature_goes_from_argmax_to_uniform():
    features, bank = with_cosines([0.95, 0.85, 0.60])
    assert activation_factors(features, bank, 1e-4).tolist() == [[1.0, 0.0, 0.0]]
    torch.testing.assert_close(activation_factors(features, bank, 1e6), torch.full((1, 3), 1 / 3))
    assert activation_factors(features, bank, activation="argmax").tolist() == [[1.0, 0.0, 0.0]]
    assert activation_factors(features, bank, activation="concatenation").tolist() == [[1.0, 1.0, 1.0]]
    torch.testing.assert_close(
        activation_factors(features, bank, activation="cosine"), torch.tensor([[0.95, 0.85, 0.60]])
    )


def test_an_empty_text_runs_the_base_model():
    assert activation_factors(torch.zeros(1, 2), torch.eye(2)).tolist() == [[0.0, 0.0]]


def test_bad_activation_arguments():
    for options, message in (({"temperature": 0.0}, "`temperature`"), ({"activation": "max"}, "`activation`")):
        with pytest.raises(ValueError, match=message):
            activation_factors(torch.ones(1, 2), torch.eye(2), **options)
    with pytest.raises(ValueError, match="`bank`"):
        activation_factors(torch.ones(1, 2), torch.zeros(0, 2))


# -- the block form ---------------------------------------------------------------------------------------------------


def random_bank(slots=3, rank=2, width=5, out=4):
    return (
        torch.randn(slots, rank, width, dtype=torch.float64, requires_grad=True),
        torch.randn(slots, out, rank, dtype=torch.float64, requires_grad=True),
    )


def loop(x, a, b, factors, scaling):
    """C.3 as it is written: per sample, one subspace after the other."""
    rows = []
    for sample, alpha in zip(x, factors, strict=True):
        rows.append(scaling * sum(alpha[i] * (sample @ a[i].T @ b[i].T) for i in range(len(a))))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(3, 5), (3, 7, 5), (3, 2, 7, 5)])
def test_block_form_equals_the_loop_forward_and_backward(shape):
    """C-6."""
    a, b = random_bank()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    factors = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    inputs = (x, a, b, factors)
    ours, theirs = subspace_lora(*inputs, 2.0), loop(*inputs, 2.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)


def test_one_hot_and_all_ones():
    """C-6: one-hot is that expert alone, all ones the plain concatenation; C-13: B = 0 adds nothing."""
    a, b = random_bank()
    x = torch.randn(2, 5, dtype=torch.float64)
    hot = torch.nn.functional.one_hot(torch.tensor([1, 1]), 3).double()
    torch.testing.assert_close(subspace_lora(x, a, b, hot, 2.0), 2.0 * x @ a[1].T @ b[1].T)
    plain = 2.0 * x @ a.flatten(0, 1).T @ torch.cat(list(b), dim=1).T
    torch.testing.assert_close(subspace_lora(x, a, b, torch.ones(2, 3).double(), 2.0), plain)
    assert not subspace_lora(x, a, torch.zeros_like(b), torch.rand(2, 3).double(), 2.0).any()


def test_the_block_form_takes_two_products():
    """Whatever the number of subspaces, and without a copy of a bank that lies as the layer keeps it."""
    a, b = random_bank(slots=6)
    stored = b.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert stored.transpose(0, 1).flatten(1).data_ptr() == stored.data_ptr()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        subspace_lora(torch.randn(2, 5).double(), a, stored, torch.rand(2, 6).double(), 1.0)
    products = [event for event in profile.events() if event.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert len(products) == 2


def test_shapes_that_do_not_fit():
    a, b = random_bank()
    with pytest.raises(ValueError, match="must have shapes"):
        subspace_lora(torch.randn(2, 6).double(), a, b, torch.ones(2, 3), 1.0)


# -- merging ----------------------------------------------------------------------------------------------------------


def test_mean_of_products_is_not_the_product_of_means():
    """C-7: factors B = 1, 3 and A = 2, 4: 6 and 7."""
    a, b, half = torch.tensor([[[2.0]], [[4.0]]]), torch.tensor([[[1.0]], [[3.0]]]), torch.full((2,), 0.5)
    for method, expected in (("factors", 6.0), ("products", 7.0)):
        down, up = merge_lora(a, b, half, method)
        assert (up @ down).item() == pytest.approx(expected, abs=1e-6)


def test_products_give_the_best_pair_of_that_rank():
    a, b = random_bank(slots=4, rank=2)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    dense = sum(w * up @ down for w, up, down in zip(weights, b, a, strict=True)).detach()
    down, up = merge_lora(a, b, weights, "products")
    u, s, vh = torch.linalg.svd(dense)
    torch.testing.assert_close(up @ down, u[:, :2] * s[:2] @ vh[:2], rtol=1e-9, atol=1e-9)


def test_merging_is_exact_where_one_factor_is_shared_and_for_one_pair():
    a, b = random_bank()
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    shared = a[:1].expand(3, -1, -1)
    dense = sum(w * up for w, up in zip(weights, b, strict=True)) @ a[0]
    for method in ("factors", "products"):
        down, up = merge_lora(shared, b, weights, method)
        torch.testing.assert_close(up @ down, dense, rtol=1e-9, atol=1e-9)
    down, up = merge_lora(a[:1], b[:1], torch.ones(1), "products")
    torch.testing.assert_close(up @ down, b[0] @ a[0], rtol=1e-9, atol=1e-9)
    assert not merge_lora(a, torch.zeros_like(b), weights, "products")[1].any()


def test_factor_merge_adds_cross_terms():
    """M-LoRA's ablation: c (sum B) c (sum A) - c^2 sum BA = c^2 times the cross terms."""
    a, b = random_bank(slots=2)
    down, up = merge_lora(a, b, torch.full((2,), 0.6, dtype=torch.float64), "factors")
    cross = 0.36 * (b[0] @ a[1] + b[1] @ a[0])
    torch.testing.assert_close(up @ down - 0.36 * (b[0] @ a[0] + b[1] @ a[1]), cross, rtol=1e-12, atol=1e-12)


def test_bad_merge():
    a, b = random_bank()
    with pytest.raises(ValueError, match="`method`"):
        merge_lora(a, b, torch.ones(3), "sum")


# -- O-LoRA -----------------------------------------------------------------------------------------------------------


def test_orthogonality_penalty():
    frozen = torch.tensor([[[1.0, 0.0, 0.0]]])
    assert orthogonality_penalty(torch.tensor([[0.0, 2.0, 0.0], [0.5, 0.0, 1.0]]), frozen, 1.0).item() == 0.5
    assert orthogonality_penalty(torch.tensor([[0.0, 2.0, 0.0]]), frozen, 1.0).item() == 0.0


def test_orthogonality_gradient_is_autograds():
    a, frozen = torch.randn(2, 5, requires_grad=True), torch.randn(3, 2, 5)
    price = orthogonality_penalty(a, frozen, 0.7)
    slow = 0.7 * sum((row * one).sum().abs() for old in frozen for row in old for one in a)
    torch.testing.assert_close(price, slow)
    torch.testing.assert_close(orthogonality_penalty_grad(a, frozen, 0.7), torch.autograd.grad(price, a)[0])
    assert not orthogonality_penalty_grad(a, frozen[:0], 0.7).any()
