"""Training sets to share, and how far apart the shares are."""

import numpy as np
from hypothesis import strategies as st

from lightning_fcl.data import Examples

ALPHAS = st.floats(1e-8, 1e8)
SEEDS = st.integers(0, 2**31)


def examples_of(labels, domains=3, task=0):
    labels = np.asarray(labels, dtype=np.int64)
    return Examples(len(labels), labels=labels, domains=np.arange(len(labels)) % domains, task=task)


def ten_classes(size, seed=0):
    """``size`` labels in random order, all ten classes among them."""
    return np.random.default_rng(seed).permutation(np.arange(size) % 10)


def label_distance(labels, parts):
    """Mean over clients of the total variation between a client's labels and all labels."""
    classes = labels.max() + 1
    overall = np.bincount(labels, minlength=classes) / len(labels)
    shares = [np.bincount(labels[part], minlength=classes) / len(part) for part in parts]
    return float(np.mean([np.abs(share - overall).sum() / 2 for share in shares]))
