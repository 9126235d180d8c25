"""Robust means: slow oracles, values of byzfl 0.0.11, laws, one wild client, and runs in the real loop."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl import functional as F
from lightning_fcl.aggregators import (
    CentredClipping,
    FedAvg,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
)
from lightning_fcl.callbacks import FaultInjector
from lightning_fcl.exceptions import MisconfigurationError
from tests.helpers.server import fit, stats_of
from tests.helpers.toy import make_toy, state_of

ROWS = torch.tensor(
    [
        [-1.5, 1.25, 0.75, 0.25],
        [0.25, 0.5, 0.75, 1.0],
        [-1.0, 0.0, 1.0, -1.25],
        [1.25, -0.25, 1.5, 0.0],
        [0.5, -0.25, -1.0, 1.5],
        [0.0, 0.0, 0.0, 0.0],
        [40.0, -30.0, 20.0, -10.0],
    ],
    dtype=torch.float64,
)
ZERO = torch.zeros(4, dtype=torch.float64)
# byzfl cannot be a test dependency: importing it asks for torchvision. Its aggregators alone gave these.
BYZFL = {
    "median": [0.25, 0.0, 0.75, 0.0],
    "trimmed 1": [0.2, 0.0, 0.8, 0.0],
    "trimmed 2": [0.25, -0.083333335817, 0.833333313465, 0.083333335817],
    "krum": [0.0, 0.0, 0.0, 0.0],
    "multikrum 2": [-0.2, 0.3, 0.8, 0.0],
    "multikrum 1": [-0.083333335817, 0.208333328366, 0.5, 0.25],
    "geometric median": [0.169223532081, 0.062716983259, 0.517892181873, 0.226086184382],
    "clipping 1": [0.148065060377, 0.013048087247, 0.527480781078, 0.160315409303],
    "clipping 5": [0.166816830635, 0.020178506151, 0.636603176594, 0.171968340874],
}


def multi_krum(rows, byzantine, keep=None):
    chosen = F.krum_select(rows, byzantine, keep)
    return rows[chosen].mean(dim=0)


OURS = {
    "median": F.coordinate_median,
    "trimmed 1": lambda rows: F.trimmed_mean(rows, 1),
    "trimmed 2": lambda rows: F.trimmed_mean(rows, 2),
    # byzfl adds up one neighbour more than Blanchard et al., K - f - 1: the paper's rule for f - 1
    "krum": lambda rows: multi_krum(rows, 1, 1),
    "multikrum 2": lambda rows: multi_krum(rows, 1, 5),
    "multikrum 1": lambda rows: multi_krum(rows, 0, 6),
    "geometric median": lambda rows: F.geometric_median(rows, smoothing=1e-9, iterations=2000),
    "clipping 1": lambda rows: F.centred_clipping(rows, ZERO, 2.0),
    "clipping 5": lambda rows: F.centred_clipping(rows, ZERO, 2.0, iterations=5),
}


@pytest.mark.parametrize("name", OURS)
def test_agrees_with_byzfl(name):
    assert OURS[name](ROWS).tolist() == pytest.approx(BYZFL[name], abs=1e-6)


# -- slow oracles -----------------------------------------------------------------------------------------------------


def slow_median(rows):
    middle = [sorted(column) for column in zip(*rows, strict=True)]
    return [(c[(len(c) - 1) // 2] + c[len(c) // 2]) / 2 for c in middle]


def slow_krum_score(rows, k, byzantine):
    distances = sorted(math.dist(rows[k], row) ** 2 for i, row in enumerate(rows) if i != k)
    return sum(distances[: len(rows) - byzantine - 2])


def slow_weiszfeld(rows, weights, smoothing, iterations):
    size = range(len(rows[0]))
    z = [sum(w * row[i] for w, row in zip(weights, rows, strict=True)) / sum(weights) for i in size]
    for _ in range(iterations):
        beta = [w / max(smoothing, math.dist(z, row)) for w, row in zip(weights, rows, strict=True)]
        z = [sum(b * row[i] for b, row in zip(beta, rows, strict=True)) / sum(beta) for i in size]
    return z


def slow_clipping(rows, centre, radius, iterations):
    v = list(centre)
    for _ in range(iterations):
        factors = [min(1.0, radius / d) if (d := math.dist(v, row)) else 1.0 for row in rows]
        v = [
            x + sum(f * (row[i] - x) for f, row in zip(factors, rows, strict=True)) / len(rows) for i, x in enumerate(v)
        ]
    return v


matrices = st.integers(3, 9).flatmap(
    lambda k: st.lists(st.tuples(*[st.floats(-9, 9, width=32)] * 3), min_size=k, max_size=k)
)


@given(rows=matrices)
@settings(max_examples=30)
def test_matches_slow_loops(rows):
    matrix = torch.tensor(rows, dtype=torch.float64)
    byzantine = (len(rows) - 3) // 2
    weights = [1.0 + k % 3 for k in range(len(rows))]
    assert F.coordinate_median(matrix).tolist() == pytest.approx(slow_median(rows), abs=1e-12)
    scores = [slow_krum_score(rows, k, byzantine) for k in range(len(rows))]
    assert F.krum_scores(matrix, byzantine).tolist() == pytest.approx(scores, rel=1e-9, abs=1e-9)
    found = F.geometric_median(matrix, torch.tensor(weights), smoothing=0.1, iterations=3)
    assert found.tolist() == pytest.approx(slow_weiszfeld(rows, weights, 0.1, 3), abs=1e-6)
    found = F.centred_clipping(matrix, torch.ones(3, dtype=torch.float64), 2.0, iterations=3)
    assert found.tolist() == pytest.approx(slow_clipping(rows, [1.0] * 3, 2.0, 3), abs=1e-6)


@given(rows=matrices, seed=st.integers(0, 99))
@settings(max_examples=20)
def test_order_of_clients_and_origin_do_not_matter(rows, seed):
    matrix = torch.tensor(rows, dtype=torch.float64)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    shift = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64)
    rules = {
        "median": F.coordinate_median,
        "trimmed": lambda x: F.trimmed_mean(x, (len(x) - 1) // 2),
        "scores": lambda x: F.krum_scores(x, 0).sort().values,
        "geometric": lambda x: F.geometric_median(x, smoothing=0.1, iterations=5),
    }
    for name, rule in rules.items():
        once = rule(matrix)
        torch.testing.assert_close(rule(matrix[order]), once, rtol=1e-6, atol=1e-6, msg=name)
        moved = once if name == "scores" else once + shift
        torch.testing.assert_close(rule(matrix + shift), moved, rtol=1e-6, atol=1e-6, msg=name)
    clipped = F.centred_clipping(matrix + shift, shift, 1.5, iterations=2) - shift
    torch.testing.assert_close(
        clipped, F.centred_clipping(matrix[order], 0 * shift, 1.5, iterations=2), rtol=1e-6, atol=1e-6
    )


@given(value=st.floats(-50, 50, width=32), clients=st.integers(3, 8))
@settings(max_examples=20)
def test_equal_clients_are_a_fixed_point(value, clients):
    rows = torch.full((clients, 3), value)
    for result in (
        F.coordinate_median(rows),
        F.trimmed_mean(rows, 1),
        multi_krum(rows.double(), 0),
        F.geometric_median(rows),
        F.centred_clipping(rows, rows[0], 1.0),
    ):
        assert result.float().tolist() == pytest.approx([value] * 3, rel=1e-7)


def test_tiles_do_not_show():
    """A matrix of several tiles, as a tensor and as a list of rows."""
    wide = torch.randn(5, 40_000)
    for rule in (F.coordinate_median, lambda x: F.trimmed_mean(x, 1), F.geometric_median):
        whole = rule(wide)
        assert torch.equal(whole, rule(list(wide)))
        narrow = rule(torch.cat([wide[:, 39_990:], wide[:, :39_990]], dim=1))
        torch.testing.assert_close(torch.cat([narrow[10:], narrow[:10]]), whole)


# -- reducers ---------------------------------------------------------------------------------------------------------

RULES = {
    "Median": lambda: Median(),
    "TrimmedMean": lambda: TrimmedMean(1),
    "Krum": lambda: Krum(1),
    "MultiKrum": lambda: MultiKrum(1),
    "GeometricMedian": lambda: GeometricMedian(),
    "CentredClipping": lambda: CentredClipping(3.0),
    "NormBound": lambda: NormBound(3.0),
}


def reduce(rule, rows, reference, **facts):
    """One round on one rank."""
    rows = torch.as_tensor(rows, dtype=torch.float32)
    rule.start(torch.as_tensor(reference), len(rows), range(len(rows)))
    for position, row in enumerate(rows):
        rule.add(position, row, 1.0)
    return rule.finish(rule.partials(), stats_of(clients=len(rows), params=rows.shape[1], **facts))


@pytest.mark.parametrize("name", RULES)
def test_one_outlier_is_bounded(name):
    """Six honest deltas of length about 1; whatever the seventh sends, the merged delta stays near them."""
    honest = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)) * 0.3 + 1.0
    found = [
        reduce(RULES[name](), torch.cat([honest, torch.full((1, 4), size)]), torch.zeros(4)) for size in (1e2, 1e4, 1e6)
    ]
    assert all(delta.norm() < 3.5 for delta in found)
    assert (found[2] - found[1]).norm() < 0.05
    assert reduce(FedAvg(), torch.cat([honest, torch.full((1, 4), 1e6)]), torch.zeros(4)).norm() > 1e5


@pytest.mark.parametrize("name", RULES)
def test_merges_the_same_on_every_split_over_ranks(name):
    rows, reference = torch.randn(7, 5), torch.randn(5)
    whole = reduce(RULES[name](), rows, reference)
    for cut in (0, 3, 7):
        nodes, last = {}, None
        for owned in (range(cut), range(cut, 7)):
            last = RULES[name]()
            last.start(reference, 7, owned)
            for position in owned:
                last.add(position, rows[position], 1.0)
            nodes.update(last.partials())
        assert torch.equal(last.finish(nodes, stats_of(clients=7, params=5)), whole)


def test_buffers_have_no_say_in_who_is_trusted():
    """Clients 0-2 agree on the parameter; the BatchNorm statistic of client 1 is far off, yet comes with it."""
    rows = torch.tensor([[0.0, 0.0], [0.1, 900.0], [0.2, 0.0], [9.0, 0.0], [-9.0, 0.0]])
    rule = Krum(1)
    rule.start(torch.zeros(2), 5, range(5))
    for position, row in enumerate(rows):
        rule.add(position, row, 1.0)
    assert rule.finish(rule.partials(), stats_of(clients=5, params=1)).tolist() == pytest.approx([0.1, 900.0])
    bound = NormBound(1.0)
    bound.prepare({"w": slice(0, 1)})
    bound.start(torch.zeros(2), 1, range(1))
    bound.add(0, rows[1], 1.0)
    assert bound.lone_row().tolist() == rows[1].tolist()


def test_krum_keeps_the_bits_of_the_chosen_row():
    rows, reference = torch.randn(5, 50), torch.randn(50)
    delta = reduce(Krum(1), rows, reference)
    new = (reference.double() + delta).float()
    assert any(torch.equal(new, row) for row in rows)


def test_bound_shortens_what_is_longer():
    """Lengths 5 and 1, bound 2.5: half of the first and all of the second, by examples 1 and 3."""
    rows = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    rule = NormBound(2.5, "samples")
    rule.start(torch.zeros(2), 2, range(2))
    rule.add(0, rows[0], 1.0)
    rule.add(1, rows[1], 3.0)
    delta = rule.finish(rule.partials(), stats_of(examples=[1.0, 3.0], params=2))
    assert delta.tolist() == pytest.approx([(1.5 + 3.0) / 4, 2.0 / 4])
    assert rule.lone_row() is None


def test_weights_of_the_geometric_median():
    rows = [[0.0], [4.0]]
    for weighting, expected in (("uniform", 2.0), ("samples", 0.0)):
        rule = GeometricMedian(weighting)
        rule.start(torch.zeros(1), 2, range(2))
        for position, examples in ((0, 3.0), (1, 1.0)):
            rule.add(position, torch.tensor(rows[position]), examples)
        delta = rule.finish(rule.partials(), stats_of(examples=[3.0, 1.0]))
        assert delta.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("rule", "least"), [(TrimmedMean(2), 5), (Krum(1), 5), (MultiKrum(0, keep=4), 4)])
def test_too_few_clients(rule, least):
    message = f"`{type(rule).__name__}` must have at least {least} sampled clients in a round, got {least - 1}"
    with pytest.raises(MisconfigurationError, match=message):
        rule.start(torch.zeros(1), least - 1, range(least - 1))
    rule.start(torch.zeros(1), least, range(least))
    rule.add(0, torch.zeros(1), 1.0)
    with pytest.raises(MisconfigurationError, match=f"at least {least} accepted clients in a round, got 1"):
        rule.finish(rule.partials(), stats_of())


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: TrimmedMean(-1), "trim"),
        (lambda: Krum(-1), "byzantine"),
        (lambda: MultiKrum(1, keep=0), "keep"),
        (lambda: GeometricMedian("examples"), "weighting"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing"),
        (lambda: GeometricMedian(iterations=0), "iterations"),
        (lambda: CentredClipping(math.inf), "radius"),
        (lambda: CentredClipping(1.0, iterations=0), "iterations"),
        (lambda: NormBound(0.0), "bound"),
    ],
)
def test_bad_arguments(make, argument):
    with pytest.raises(MisconfigurationError, match=f"`{argument}` must .*, got"):
        make()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.trimmed_mean(ROWS[:4], 2), "`updates` must hold more than 2 [*] trim = 4 rows, got 4"),
        (lambda: F.coordinate_median(ROWS[:0]), "got rows of"),
        (lambda: F.krum_scores(ROWS[:4], 1), "`updates` must hold at least 2 [*] byzantine [+] 3 = 5 rows, got 4"),
        (lambda: F.krum_select(ROWS, 2, 6), "`keep` must be from 1 to K - byzantine = 5, got 6"),
    ],
)
def test_bad_rows(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- in the loop ------------------------------------------------------------------------------------------------------


def test_a_hostile_client_ruins_the_mean_and_not_the_median(tmp_path):
    class Hostile(FaultInjector):
        def on_upload(self, trainer, pl_module, update):
            if trainer.client == 1:
                for tensor in update.tensors.values():
                    if tensor.is_floating_point():
                        tensor.mul_(-1e3)
            return update

    def length(rule, folder):
        options = {"callbacks": [Hostile("drop", task=99)], "clients_per_round": 4, "rounds": 1}
        end = fit(tmp_path / folder, rule, **options)
        return max(end[n].abs().max().item() for n in end if n.endswith(("weight", "bias")))

    start = max(t.abs().max().item() for t in state_of(make_toy(batch_norm=True)).values())
    assert length(FedAvg(), "mean") > 50 * start
    assert length(Median(), "median") < 5 * start


def test_subsets_of_clients_agree_on_krums_choice():
    """Of honest rows in a tight cloud Krum takes one of the cloud, wherever the hostile pair stands."""
    cloud = torch.randn(5, 3, dtype=torch.float64) * 0.1
    for direction in itertools.product((-1.0, 1.0), repeat=3):
        rows = torch.cat([cloud, 5 * torch.tensor([direction] * 2, dtype=torch.float64)])
        assert F.krum_select(rows, 2).item() < 5
