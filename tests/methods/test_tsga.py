"""TSGA: the paper's arithmetic by hand, laws of the filter, and the round that uses it."""

import csv
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.aggregators import TSGA, FedAvg, RoundStats
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import similarity_threshold, tsga
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

few = settings(max_examples=25)


def oracle(updates, examples, threshold=0.5):
    """FedCMM's equations in plain Python."""
    size = len(updates[0])
    norms = [math.sqrt(sum(x * x for x in u)) for u in updates]
    units = [[x / n if n >= 1e-12 else 0.0 for x in u] for u, n in zip(updates, norms, strict=True)]
    mean = [sum(u[i] for u in units) / len(units) for i in range(size)]
    length = math.sqrt(sum(x * x for x in mean))
    scores = [sum(a * b for a, b in zip(u, mean, strict=True)) / length if length >= 1e-12 else 0.0 for u in units]
    kept = [s >= threshold - 1e-6 for s in scores]
    kept = kept if any(kept) else [True] * len(kept)
    mass = sum(n for n, k in zip(examples, kept, strict=True) if k)
    share = [n / mass if k else 0.0 for n, k in zip(examples, kept, strict=True)]
    return [sum(a * u[i] for a, u in zip(share, updates, strict=True)) for i in range(size)], scores, kept


def merge(updates, examples, rule=None, params=None, start=None):
    """One round by a reducer; returns the merged delta and the log."""
    rows = torch.as_tensor(updates, dtype=torch.float64)
    reference = torch.zeros(rows.shape[1], dtype=torch.float64) if start is None else start
    rule = rule or TSGA()
    rule.prepare(params or {"w": slice(0, rows.shape[1])})
    rule.start(reference, len(rows), range(len(rows)))
    for position, row in enumerate(rows):
        rule.add(position, reference + row, float(examples[position]))
    facts = {"task": 0, "round": 0, "num_tasks": 1, "num_params": rows.shape[1], "total_clients": 100}
    stats = RoundStats(clients=tuple(range(len(rows))), num_examples=tuple(map(float, examples)), **facts)
    return rule.merge(lambda nodes, like=None: dict(nodes), stats), stats.logs


def test_worked_values():
    """Oracle values A-T1 to A-T10."""
    half = math.sqrt(0.5)
    line = torch.tensor([2.0, 5.0, 0.1])[:, None] * torch.tensor([3.0, -1.0])
    cases = [
        ([[1, 0], [0, 1]], [1, 3], [half, half], [0.25, 0.75]),
        ([[2, 1]] * 3, [5, 1, 4], [1, 1, 1], [2, 1]),
        (line.tolist(), [1, 2, 7], [1, 1, 1], [1.27 * 3, -1.27]),
        ([[1, 0], [-1, 0]], [3, 1], [0, 0], [0.5, 0]),  # directions cancel: all are kept
        ([[1, 0], [1, 0], [-1, 0]], [10, 30, 60], [1, 1, -1], [1, 0]),
        ([[0, 0], [1, 0], [1, 0]], [2, 1, 1], [0, 1, 1], [1, 0]),  # no direction, no vote
        ([[7, -2]], [4], [1], [7, -2]),
    ]
    for updates, examples, scores, delta in cases:
        result = tsga(torch.tensor(updates, dtype=torch.float64), torch.tensor(examples))
        torch.testing.assert_close(result.scores, torch.tensor(scores, dtype=torch.float64))
        torch.testing.assert_close(result.delta, torch.tensor(delta, dtype=torch.float64))
        torch.testing.assert_close(merge(updates, examples)[0], torch.tensor(delta, dtype=torch.float64))


@pytest.mark.parametrize(("clients", "kept"), [(2, 2), (3, 3), (4, 4), (5, 0), (10, 0)])
def test_orthogonal_clients_score_one_over_the_root_of_their_number(clients, kept):
    _, logs = merge(torch.eye(clients), [1] * clients)
    assert [logs[f"tsga/score/{k}"] for k in range(clients)] == pytest.approx([clients**-0.5] * clients, abs=1e-12)
    assert (logs["tsga/kept"], logs["tsga/fallback"]) == (clients, float(kept == 0))


def test_long_orthogonal_updates_of_one_size_pass_at_one_half():
    updates = torch.zeros(4, 4 * 70_000)
    for client, row in enumerate(updates):
        row[client * 70_000 : (client + 1) * 70_000] = 0.0123  # what one step of Adam, or of signs, gives
    scores = tsga(updates, torch.ones(4)).scores
    assert scores.tolist() == pytest.approx([0.5] * 4, abs=1e-6)  # the slack of the threshold


@pytest.mark.parametrize("angle", [60, 120, 130])
def test_two_clients_cannot_be_told_apart(angle):
    radians = math.radians(angle)
    result = tsga(torch.tensor([[1.0, 0.0], [math.cos(radians), math.sin(radians)]]).double(), torch.ones(2))
    assert result.scores.tolist() == pytest.approx([math.cos(radians / 2)] * 2)
    assert result.accepted.all()


@pytest.mark.parametrize(("clients", "rho", "score"), [(5, 0.0625, 0.5), (5, 0.5, 0.774597), (10, 1 / 6, 0.5)])
def test_equal_pairwise_cosines(clients, rho, score):
    gram = torch.full((clients, clients), rho, dtype=torch.float64).fill_diagonal_(1.0)
    scores = tsga(torch.linalg.cholesky(gram), torch.ones(clients)).scores
    assert scores.tolist() == pytest.approx([score] * clients, abs=1e-6)
    assert similarity_threshold(clients, rho) == pytest.approx(score, abs=1e-6)


rounds = st.integers(1, 9).flatmap(
    lambda k: st.tuples(
        st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=k, max_size=k),
        st.lists(st.integers(1, 50), min_size=k, max_size=k),
    )
)


@few
@given(round_=rounds, threshold=st.floats(-1, 1).filter(lambda t: abs(t) > 1e-3))
def test_matches_the_paper(round_, threshold):
    delta, scores, kept = oracle(*round_, threshold)
    if any(abs(s - threshold) < 1e-5 for s in scores):
        return
    result = tsga(torch.tensor(round_[0], dtype=torch.float64), torch.tensor(round_[1]), threshold)
    assert result.scores.tolist() == pytest.approx(scores, abs=1e-9)
    assert result.accepted.tolist() == kept
    assert result.delta.tolist() == pytest.approx(delta, abs=1e-9)
    assert merge(*round_, TSGA(threshold))[0].tolist() == pytest.approx(delta, abs=1e-9)


@few
@given(round_=rounds, factor=st.floats(0.01, 100), order=st.randoms(use_true_random=False))
def test_neither_length_nor_order_changes_a_score(round_, factor, order):
    updates, examples = torch.tensor(round_[0], dtype=torch.float64), torch.tensor(round_[1])
    scores = tsga(updates, examples).scores
    longer = torch.cat((updates[:1] * factor, updates[1:]))
    torch.testing.assert_close(tsga(longer, examples).scores, scores, rtol=0, atol=1e-9)
    places = order.sample(range(len(updates)), len(updates))
    torch.testing.assert_close(tsga(updates[places], examples).scores, scores[places], rtol=0, atol=1e-9)


@few
@given(round_=rounds)
def test_a_threshold_that_all_pass_is_fedavg_bit_for_bit(round_):
    assert torch.equal(merge(*round_, TSGA(-1.0))[0], merge(*round_, FedAvg())[0])
    assert torch.equal(merge(*round_, TSGA(-1.0, weighting="uniform"))[0], merge(*round_, FedAvg("uniform"))[0])


def test_soft_weights():
    updates, examples = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([1, 2, 3])
    result = tsga(updates, examples, 0.0, "soft")
    expected = examples * result.scores / (examples * result.scores).sum()
    torch.testing.assert_close(result.weights, expected)
    torch.testing.assert_close(result.delta, expected @ updates)
    fallback = tsga(torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([3, 1]), 0.5, "soft")
    assert fallback.delta.tolist() == [0.5]


def test_the_threshold_follows_the_number_of_clients():
    """Five clients that agree a little pass under both; ten that agree as much pass only under the corrected one."""
    for clients, kept in ((5, 0.0), (10, 1.0)):
        gram = torch.full((clients, clients), 0.1, dtype=torch.float64).fill_diagonal_(1.0)
        updates = torch.linalg.cholesky(gram)
        assert merge(updates, [1] * clients, TSGA(0.5))[1]["tsga/fallback"] == kept
        assert merge(updates, [1] * clients, TSGA("auto"))[1]["tsga/fallback"] == 0.0


def test_comparing_a_part():
    """Clients agree on the body and differ on the head: only the body decides; all of it is merged."""
    updates = [[1.0, 0.0, 5.0], [1.0, 0.0, -5.0], [-1.0, 0.0, 5.0]]
    params = {"body.w": slice(0, 1), "body.b": slice(1, 2), "head.w": slice(2, 3)}
    delta, logs = merge(updates, [1, 1, 1], TSGA(only="body.*"), params)
    assert delta.tolist() == [1.0, 0.0, 0.0]
    assert [logs[f"tsga/score/{k}"] for k in range(3)] == [1.0, 1.0, -1.0]
    assert merge(updates, [1, 1, 1], TSGA(only=["head.*"]), params)[0].tolist() == pytest.approx([0.0, 0.0, 5.0])


def test_buffers_are_merged_and_not_compared():
    updates = [[1.0, 100.0], [1.0, -100.0], [-1.0, 100.0]]
    delta, logs = merge(updates, [1, 1, 1], TSGA(), {"w": slice(0, 1)})
    assert delta.tolist() == [1.0, 0.0]
    assert logs["tsga/kept"] == 2


def test_small_deltas_of_large_weights_keep_their_direction():
    """The cosine is formed from float64 differences, as the weights are; a float32 dot product would lose it."""
    start = torch.full((4000,), 1000.0, dtype=torch.float64)
    rows = torch.randn(6, 4000, generator=torch.Generator().manual_seed(0)).double() * 1e-3
    _, logs = merge(rows, [1] * 6, start=start)
    exact = tsga(rows, torch.ones(6)).scores
    assert [logs[f"tsga/score/{k}"] for k in range(6)] == pytest.approx(exact.tolist(), abs=1e-7)


# -- in a run ---------------------------------------------------------------------------------------------------------


def fit(run_dir, aggregator, clients=6):
    module = make_toy(batch_norm=True)
    stream = toy_stream(tasks=2, clients=clients)
    toy_trainer(run_dir, clients_per_round=min(clients, 5), aggregator=aggregator).fit(module, stream)
    return state_of(module)


def test_a_run_logs_scores_and_who_counts(tmp_path):
    filtered, plain = fit(tmp_path / "a", TSGA(0.55)), fit(tmp_path / "b", FedAvg())
    with (tmp_path / "a" / "metrics.csv").open() as file:
        first = next(csv.DictReader(file))
    scores = [float(score) for k in range(6) if (score := first.get(f"tsga/score/{k}"))]
    assert len(scores) == 5
    assert 0 < sum(s >= 0.55 for s in scores) == float(first["tsga/kept"]) < 5
    assert any(not torch.equal(filtered[name], plain[name]) for name in plain)


def test_a_lone_client_is_copied(tmp_path):
    assert_same_bits(fit(tmp_path / "a", TSGA(), clients=1), fit(tmp_path / "b", FedAvg(), clients=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 1.5}, '`threshold` must be "auto" or a cosine in \\[-1, 1\\], got 1.5'),
        ({"threshold": "adaptive"}, "`threshold` must be"),
        ({"threshold": math.nan}, "`threshold` must be"),
        ({"weighting": "scores"}, '`weighting` must be "samples", "uniform" or "soft"'),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        TSGA(**arguments)


def test_a_part_that_does_not_exist():
    with pytest.raises(MisconfigurationError, match=r"`only` must match a parameter .* Names look like: \['w'\]"):
        merge([[1.0]], [1], TSGA(only="head.*"))


@pytest.mark.parametrize(
    ("updates", "examples", "message"),
    [
        (torch.ones(3), torch.ones(3), r"must have shapes \(K, P\) and \(K,\)"),
        (torch.ones(2, 3), torch.ones(3), r"must have shapes \(K, P\) and \(K,\)"),
        (torch.tensor([[math.nan]]), torch.ones(1), "`updates` must be finite"),
        (torch.ones(2, 3), torch.zeros(2), "`num_examples` must be finite, not negative and not all zero"),
        (torch.ones(2, 3), torch.tensor([1, -1]), "`num_examples` must be finite, not negative"),
    ],
)
def test_bad_input(updates, examples, message):
    with pytest.raises(ValueError, match=message):
        tsga(updates, examples)


def test_the_study_of_the_threshold_runs(tmp_path):
    """Three clients, one reversed: found out at a cosine of 0.5, whatever the seed."""
    path = Path(__file__).resolve().parents[2] / "recipes" / "bench" / "similarity.py"
    spec = importlib.util.spec_from_file_location("bench_similarity", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    report = bench.main(clients=(3,), cosines=(0.5,), rounds=5, seeds=1, out=tmp_path / "out.json")
    summary = report["runs"][0]["summary"]
    assert (summary["honest kept at 0.5"], summary["reversed kept at auto"]) == (1.0, 0.0)


def test_a_run_on_another_device_gets_memory_there():
    rule = TSGA()
    for device in ("cpu", "meta"):
        rule.start(torch.zeros(3, device=device), 2, range(2))
        assert rule._kept.device.type == device
