"""FedExP: oracle values, the paper's round as a loop, and the facts that the loop hands to server steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.aggregators import Chain, FedAvg, FedExP, ServerStep
from lightning_fcl.callbacks import FaultInjector
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import delta_dot, extrapolation, square_distances, tiles
from tests.helpers.server import stats_of
from tests.helpers.toy import make_toy, toy_stream, toy_trainer

rows = st.lists(st.tuples(*[st.floats(-5, 5)] * 3), min_size=1, max_size=6)


def factor(rows, epsilon, weights=None):
    matrix, shares = torch.tensor(rows, dtype=torch.float64), torch.tensor(weights or [1.0] * len(rows))
    mean = (shares.double() / shares.sum()) @ matrix
    norms = [delta_dot(row, torch.zeros_like(row)) for row in matrix]
    return extrapolation(norms, shares.tolist(), delta_dot(mean, torch.zeros_like(mean)), epsilon)


def test_oracle_values():
    """k orthogonal unit updates: k/2; equal ones: 1; four with epsilon .25: 1."""
    assert factor(torch.eye(4).tolist(), 0.0) == pytest.approx(2.0)
    assert factor(torch.eye(10).tolist(), 0.0) == pytest.approx(5.0)
    assert factor([[1.0, 2.0]] * 4, 0.0) == 1.0
    assert factor(torch.eye(4).tolist(), 0.25) == pytest.approx(1.0)
    assert factor([[1.0], [-1.0]], 1e-3) == pytest.approx(500.0)
    assert factor([[0.0], [0.0]], 0.0) == 1.0


@given(rows=rows, epsilon=st.floats(1e-3, 1.0))
@settings(max_examples=30)
def test_matches_the_paper(rows, epsilon):
    clients, size = len(rows), len(rows[0])
    mean = [sum(row[i] for row in rows) / clients for i in range(size)]
    squares = sum(x * x for row in rows for x in row)
    expected = max(1.0, squares / (2 * clients * (sum(x * x for x in mean) + epsilon)))
    assert factor(rows, epsilon) == pytest.approx(expected, rel=1e-9)


@given(rows=rows, weights=st.lists(st.integers(1, 9), min_size=6, max_size=6))
@settings(max_examples=20)
def test_a_client_of_two_counts_as_two(rows, weights):
    doubled = [row for row, n in zip(rows, weights, strict=False) for _ in range(n)]
    assert factor(rows, 0.1, [float(n) for n, _ in zip(weights, rows, strict=False)]) == pytest.approx(
        factor(doubled, 0.1), rel=1e-9
    )


def test_epsilon_falls_by_the_square_of_the_clients_decay():
    rule, params = FedExP(1.0, lr_decay=0.5), torch.zeros(2)
    state = rule.init(params)
    facts = {"params": 2, "clients": 2, "square_norms": (8.0, 8.0)}
    for expected in (8 / (2 * (1 + 1)), 8 / (2 * (1 + 1 / 4)), 8 / (2 * (1 + 1 / 16))):
        stats = stats_of(**facts)
        delta, state = rule.apply(params, torch.tensor([0.6, 0.8], dtype=torch.float64), stats, state)
        assert stats.logs["round/extrapolation"] == pytest.approx(expected, rel=1e-6)
        assert delta.tolist() == pytest.approx([0.6 * expected, 0.8 * expected], rel=1e-6)


def test_the_mean_of_the_last_two_rounds_is_shown():
    rule, params = FedExP(0.0), torch.tensor([1.0])
    state = rule.init(params)
    assert rule.output(params, state) is params
    delta, state = rule.apply(params, torch.ones(1, dtype=torch.float64), stats_of(square_norms=(1.0,)), state)
    assert rule.output(params + delta, state).item() == 1.5
    assert FedExP(average=False).apply(params, delta, stats_of(square_norms=(1.0,)), state)[1]["before"] is None


def test_distances():
    matrix = torch.randn(5, 40_000, dtype=torch.float64) + 1e4
    exact = (matrix[:, None] - matrix[None]).square().sum(dim=2)
    torch.testing.assert_close(square_distances(matrix), exact, rtol=1e-12, atol=0.0)
    assert torch.equal(torch.cat([tile for _, tile in tiles(list(matrix.float()))], dim=1), matrix.float().double())


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(0, 3), [torch.ones(2), torch.ones(3)]])
def test_bad_rows(bad):
    with pytest.raises(ValueError, match=r"`rows` must have shape \(K, P\)"):
        square_distances(bad)


def test_bad_arguments():
    with pytest.raises(MisconfigurationError, match="`epsilon` must be finite and not negative, got -1"):
        FedExP(-1.0)
    with pytest.raises(MisconfigurationError, match=r"`lr_decay` must lie in \(0, 1\], got 0"):
        FedExP(lr_decay=0.0)
    with pytest.raises(ValueError, match="`square_norms` and `weights` must have one entry per client, got 0 and 1"):
        extrapolation([], [1.0], 1.0, 0.0)


# -- in the loop ------------------------------------------------------------------------------------------------------


class Facts(ServerStep):
    """Keeps what it is told."""

    uses_square_norms = True

    def __init__(self):
        self.seen = []

    def apply(self, params, delta, stats, state):
        self.seen.append(stats)
        return delta, state


def test_the_loop_measures_every_accepted_update(tmp_path):
    sent = {}

    class Spy(FaultInjector):
        def on_fit_start(self, trainer, pl_module):
            self.start = {n: p.detach().double().clone() for n, p in pl_module.named_parameters()}

        def on_upload(self, trainer, pl_module, update):
            moves = [(update.tensors[n].double() - p).square().sum().item() for n, p in self.start.items()]
            sent[trainer.task, trainer.round, update.client] = sum(moves)
            return update

    for weighting in ("samples", "uniform"):
        facts, sent = Facts(), {}
        trainer = toy_trainer(
            tmp_path / weighting,
            rounds=[2, 1],
            aggregator=Chain(FedAvg(weighting), facts),
            callbacks=[Spy("drop", task=99), FaultInjector("nan", clients=[1])],
            on_client_error="skip",
        )
        with pytest.warns(UserWarning, match="client 1 dropped"):
            trainer.fit(make_toy(batch_norm=True), toy_stream())
        assert [(s.task, s.round, s.rounds) for s in facts.seen] == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
        for stats in facts.seen:
            expected = [sent[stats.task, stats.round, client] for client in stats.clients]
            assert stats.square_norms == pytest.approx(expected, rel=1e-6)
            assert stats.weights == (stats.num_examples if weighting == "samples" else (1.0,) * len(stats.clients))
