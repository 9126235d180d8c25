"""Softmax and divergence in plain Python floats, and what the tests of loss terms share."""

import math

import torch
from hypothesis import strategies as st


def softmax(values):
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


def divergence(teacher, student, temperature):
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) of one example."""
    q, p = (softmax([value / temperature for value in row]) for row in (teacher, student))
    return temperature**2 * sum(a * math.log(a / b) for a, b in zip(q, p, strict=True) if a > 0)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@st.composite
def logit_pairs(draw, classes=None):
    """Student's and teacher's logits of one small batch, its labels and a temperature."""
    width = draw(st.integers(2, 5)) if classes is None else classes
    count = draw(st.integers(1, 4))
    row = st.lists(st.floats(-5, 5), min_size=width, max_size=width)
    rows = st.lists(row, min_size=count, max_size=count)
    targets = st.lists(st.integers(0, width - 1), min_size=count, max_size=count)
    return draw(rows), draw(rows), draw(targets), draw(st.floats(0.5, 4.0))


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def gradient(function, rows):
    """The gradient of ``function`` at a tensor made of ``rows``."""
    point = double(rows).requires_grad_()
    (found,) = torch.autograd.grad(function(point), point, allow_unused=True, materialize_grads=True)
    return found
