"""Slow references in plain Python floats (float64), written from the papers and not from the library."""

import math
from fractions import Fraction

NAN = math.nan


def tree_sum(values):
    """Sum along the left-complete binary tree: the left part is the largest power of two below the number of leaves."""
    if len(values) == 1:
        return values[0]
    split = 1
    while 2 * split < len(values):
        split *= 2
    return tree_sum(values[:split]) + tree_sum(values[split:])


def weighted_sum(rows, weights, reference=None):
    reference = reference or [0.0] * len(rows[0])
    return [
        tree_sum([w * (row[i] - reference[i]) for w, row in zip(weights, rows, strict=True)])
        for i in range(len(rows[0]))
    ]


def exact_mean(rows, weights):
    """The weighted mean without any rounding."""
    mass = sum(Fraction(w) for w in weights)
    return [
        sum(Fraction(w) * Fraction(row[i]) for w, row in zip(weights, rows, strict=True)) / mass
        for i in range(len(rows[0]))
    ]


def ewc_penalty(params, anchor, importance, strength):
    price = 0.0
    for p, a, f in zip(params, anchor, importance, strict=True):
        price += strength / 2 * f * (p - a) ** 2
    return price


def logistic_fisher(w, xs, ys):
    """Mean over samples of the squared derivative of log p(y | x), p(1 | x) = sigmoid(w x)."""
    squares = 0.0
    for x, y in zip(xs, ys, strict=True):
        squares += ((y - 1 / (1 + math.exp(-w * x))) * x) ** 2
    return squares / len(xs)


def average_accuracy(a):
    return sum(a[-1]) / len(a[-1])


def average_score(a, seen=None):
    seen = seen or [range(t + 1) for t in range(len(a))]
    stages = [sum(row[j] for j in columns) / len(columns) for row, columns in zip(a, seen, strict=True)]
    return sum(stages) / len(stages)


def backward_transfer(a):
    last = len(a) - 1
    return sum(a[last][j] - a[j][j] for j in range(last)) / last if last else NAN


def forward_transfer(a, baseline=None):
    baseline = baseline or [0.0] * len(a)
    return sum(a[j - 1][j] - baseline[j] for j in range(1, len(a))) / (len(a) - 1) if len(a) > 1 else NAN


def worst_drop(a):
    last = len(a) - 1
    return min(a[last][j] - a[j][j] for j in range(last)) if last else NAN


def forgetting(a):
    last = len(a) - 1
    drops = [max(a[i][j] for i in range(last)) - a[last][j] for j in range(last)]
    return sum(drops) / last if last else NAN


def ewma(xs, smoothing):
    out = [xs[0]]
    for x in xs[1:]:
        out.append(smoothing * x + (1 - smoothing) * out[-1])
    return out


def rounds_to_target(xs, target, smoothing):
    for t, s in enumerate(ewma(xs, smoothing), start=1):
        if s >= target:
            return t
    return None
