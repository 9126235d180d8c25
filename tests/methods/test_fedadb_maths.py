"""FedADB's maths: the oracle values worked out from the paper, and laws of anchors, quotas and the weight."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import (
    anchor_confidence,
    class_anchors,
    class_balanced_batch,
    ewma,
    input_box,
    local_branch_weight,
    missing_rate,
)


def softmax(logits):
    powers = [math.exp(z) for z in logits]
    return [p / sum(powers) for p in powers]


def oracle_anchors(weight, start, target, *, steps, lr, l2, box=None):
    """Equations 3 and 4 for logits ``W x``, in plain floats."""
    x = list(start)
    for _ in range(steps):
        p = softmax([sum(w * v for w, v in zip(row, x, strict=True)) for row in weight])
        slope = [
            sum((p[c] - (c == target)) * weight[c][i] for c in range(len(weight))) + 2 * l2 * x[i]
            for i in range(len(x))
        ]
        x = [v - lr * g for v, g in zip(x, slope, strict=True)]
        if box:
            x = [min(max(v, box[0]), box[1]) for v in x]
    return x


@pytest.mark.parametrize(
    ("progress", "missing", "quality", "weight"),
    [
        (0.001, 0.5, 0.9, 0.0446684),
        (0.5, 0.5, 0.9, 0.7320428),
        (1.0, 0.3, 0.7, 1.0),
        (0.001, 0.0, 0.9, 1.0),
        (0.25, 1.0, 1.0, 0.25),
    ],
)
def test_weight_of_the_local_branch(progress, missing, quality, weight):
    assert local_branch_weight(progress, missing, quality) == pytest.approx(weight, abs=1e-7)


def test_weight_dips_while_anchors_become_confident():
    """It is not monotone in the rounds: values at a missing rate of .7."""
    points = [(0.001, 0.1), (0.01, 0.3), (0.1, 0.9), (0.5, 0.99), (1.0, 0.99)]
    found = [local_branch_weight(r, 0.7, tau) for r, tau in points]
    assert found == pytest.approx([0.617, 0.380, 0.234, 0.619, 1.0], abs=1e-3)


def test_missing_rate_of_three_classes_in_ten():
    assert missing_rate(3, 10) == pytest.approx(0.7)
    assert missing_rate(10, 10) == 0
    assert missing_rate(0, 4) == 1


def test_confidence_and_quality():
    confidence = anchor_confidence(torch.tensor([[2.0, 0, 0], [0, 0, 0]]).double(), torch.tensor([0, 0]))
    assert confidence.tolist() == pytest.approx([0.786986, 0.333333], abs=1e-6)
    assert confidence.mean().item() == pytest.approx(0.560160, abs=1e-6)


@pytest.mark.parametrize(("steps", "box", "expected"), [(1, None, 0.5), (2, None, 0.668941), (1, (0.0, 1.0), 0.5)])
def test_descent_of_a_linear_model(steps, box, expected):
    start = torch.zeros(1, 2, dtype=torch.float64)
    made = class_anchors(
        lambda x: x, torch.tensor([0]), (2,), steps=steps, l2=0.1, bounds=box, start=start, dtype=torch.float64
    )
    second = -expected if box is None else 0.0
    assert made.inputs[0].tolist() == pytest.approx([expected, second], abs=1e-6)
    assert made.inputs[0].tolist() == pytest.approx(
        oracle_anchors([[1, 0], [0, 1]], [0, 0], 0, steps=steps, lr=1.0, l2=0.1, box=box)
    )


def test_box_of_normalised_pixels():
    low, high = input_box(0.5, 0.25)
    assert (low.item(), high.item()) == (-2.0, 2.0)
    low, _ = input_box([0.0, 0.5], [1.0, 0.25])
    assert low.flatten().tolist() == [0.0, -2.0]


def test_quotas_of_a_batch():
    labels, anchors = torch.tensor([0] * 5 + [1] * 7), torch.tensor([0, 1, 2, 3])
    drawn = class_balanced_batch(labels, anchors, 8, num_classes=4)
    assert torch.cat([labels, anchors])[drawn].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (drawn[4:] >= len(labels)).all()  # classes 2 and 3 are anchors alone


def test_the_l2_term_alone():
    """Flat logits: from (1, 1) one step of .05 at strength 10 ends at the origin; it is stable below lr * l2 = 1."""
    start = torch.ones(1, 2)
    made = class_anchors(lambda x: x * 0, torch.tensor([0]), (2,), steps=1, lr=0.05, l2=10, start=start)
    assert made.inputs.abs().max() == 0
    almost = class_anchors(lambda x: x * 0, torch.tensor([0]), (2,), steps=200, lr=0.099, l2=10, start=start)
    assert almost.inputs.abs().max() < 0.02
    with pytest.raises(MisconfigurationError, match=r"`lr \* l2` must be below 1, got 1"):
        class_anchors(lambda x: x, torch.tensor([0]), (2,), lr=0.1, l2=10)


def test_twice_the_same_bits_and_no_trace_in_the_model():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    def make():
        return class_anchors(net, torch.arange(3), (4,), steps=5, generator=torch.Generator().manual_seed(3))

    first, second = make(), make()
    assert torch.equal(first.inputs, second.inputs)
    assert first.quality == second.quality > 1 / 3
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not first.inputs.requires_grad


def test_smoothing_weighs_the_new_score():
    """EWMA .2 of (0, .5, 1), and with the weights the other way round."""
    curve = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert ewma(curve, 0.2).tolist() == pytest.approx([0, 0.1, 0.28])
    assert ewma(curve, 0.8).tolist() == pytest.approx([0, 0.4, 0.88])


# -- laws -------------------------------------------------------------------------------------------------------------

small = st.floats(-2, 2, allow_nan=False)


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(small, small), min_size=2, max_size=4),
    starts=st.lists(st.tuples(small, small), min_size=1, max_size=3),
    l2=st.floats(0, 0.3),
    boxed=st.booleans(),
)
def test_matches_the_paper_and_anchors_do_not_meet(rows, starts, l2, boxed):
    weight, box = torch.tensor(rows, dtype=torch.float64), (-1.0, 1.5) if boxed else None
    targets = torch.arange(len(starts)) % len(rows)
    made = class_anchors(
        lambda x: x @ weight.T,
        targets,
        (2,),
        steps=4,
        lr=0.5,
        l2=l2,
        bounds=box,
        start=torch.tensor(starts, dtype=torch.float64),
        dtype=torch.float64,
    )
    for found, start, target in zip(made.inputs, starts, targets.tolist(), strict=True):
        first = [min(max(v, box[0]), box[1]) for v in start] if box else start
        wanted = oracle_anchors(rows, first, target, steps=4, lr=0.5, l2=l2, box=box)
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)  # cross-entropy in float32


@settings(max_examples=40)
@given(
    labels=st.lists(st.integers(0, 5), max_size=20),
    anchors=st.lists(st.integers(0, 5), max_size=6),
    size=st.integers(1, 17),
)
def test_no_class_gets_two_places_more_than_another(labels, anchors, size):
    if not labels and not anchors:
        return
    pool = torch.tensor(labels + anchors)
    drawn = class_balanced_batch(
        torch.tensor(labels, dtype=torch.long), torch.tensor(anchors, dtype=torch.long), size, num_classes=6
    )
    counts = pool[drawn].bincount(minlength=6)
    present = pool.bincount(minlength=6) > 0
    assert len(drawn) == size
    assert counts[~present].sum() == 0
    assert counts[present].max() - counts[present].min() <= 1


def test_a_class_draws_local_examples_and_anchors_alike():
    labels, anchors = torch.zeros(3, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    drawn = class_balanced_batch(labels, anchors, 40_000, num_classes=1, generator=torch.Generator().manual_seed(0))
    assert (drawn.bincount(minlength=4) / 40_000 - 0.25).abs().max() < 0.01


# -- safeguards -------------------------------------------------------------------------------------------------------


def explosive(limit):
    """Logits that become NaN where an input left ``[-limit, limit]``."""

    def logits(x):
        return torch.where(x.abs().amax(dim=1, keepdim=True) > limit, torch.nan, x)

    return logits


def test_an_anchor_that_exploded_starts_again_with_half_the_step():
    start = torch.tensor([[9.0, 0.0], [0.0, 0.0]])  # the first one is out of range at once
    made = class_anchors(explosive(5.0), torch.tensor([0, 1]), (2,), steps=3, lr=0.5, start=start)
    alone = class_anchors(explosive(5.0), torch.tensor([1]), (2,), steps=3, lr=0.5, start=start[1:])
    assert made.inputs.isfinite().all()
    assert made.targets.tolist() == [0, 1]
    torch.testing.assert_close(made.inputs[1:], alone.inputs)


def test_an_anchor_that_never_becomes_finite_is_left_out():
    def logits(x):
        return torch.where(torch.arange(len(x)).unsqueeze(1) == 0, torch.nan, x)

    made = class_anchors(logits, torch.tensor([0, 1]), (2,), steps=2)
    assert made.targets.tolist() == [1]
    assert len(made.inputs) == len(made.confidence) == 1
    assert made.quality == pytest.approx(made.confidence.item())
    nothing = class_anchors(lambda x: x * torch.nan, torch.tensor([0, 1]), (2,), steps=2)
    assert len(nothing.inputs) == 0
    assert nothing.quality == 0


def test_bad_input_is_named():
    with pytest.raises(MisconfigurationError, match=r"`progress` must lie in \(0, 1\], got 0"):
        local_branch_weight(0.0, 0.5, 0.5)
    with pytest.raises(MisconfigurationError, match="`missing_rate` and `quality` must lie"):
        local_branch_weight(0.5, 1.5, 0.5)
    with pytest.raises(MisconfigurationError, match=r"`present` must lie in \[0, total\], got 3 of 2"):
        missing_rate(3, 2)
    with pytest.raises(MisconfigurationError, match="`lr` must be positive"):
        class_anchors(lambda x: x, torch.tensor([0]), (2,), lr=0.0)
    with pytest.raises(MisconfigurationError, match="`std` must be positive"):
        input_box(0.5, 0.0)
    empty = torch.zeros(0, dtype=torch.long)
    with pytest.raises(MisconfigurationError, match="`batch_size` and the number of examples"):
        class_balanced_batch(empty, empty, 4, num_classes=2)
    with pytest.raises(MisconfigurationError, match=r"`labels` must lie in \[0, 2\), got values from 2 to 2"):
        class_balanced_batch(torch.tensor([2]), empty, 4, num_classes=2)
