"""FedAvg and the chain: weights, step sizes, laws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.aggregators import Chain, FedAvg, RoundStats, ServerProximal, ServerStep
from lightning_fcl.aggregators.chain import as_chain
from lightning_fcl.exceptions import MisconfigurationError

clients = st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(1, 1000)), min_size=1, max_size=20)


def merge(rows, params=0.0, rule=None, task=0):
    """One round of scalar models ``(value, examples)``."""
    chain, reference = as_chain(rule or FedAvg()), torch.tensor([params], dtype=torch.float64)
    chain.reducer.start(reference, len(rows), range(len(rows)))
    for position, (value, examples) in enumerate(rows):
        chain.reducer.add(position, torch.tensor([value], dtype=torch.float64), float(examples))
    stats = RoundStats(
        task=task,
        round=0,
        num_tasks=4,
        num_params=1,
        clients=tuple(range(len(rows))),
        num_examples=tuple(float(n) for _, n in rows),
        total_clients=len(rows),
        lone=chain.reducer.lone_row() if len(rows) == 1 else None,
    )
    delta = chain.reducer.finish(chain.reducer.partials(), stats)
    return chain.apply(reference, delta, stats, chain.init(reference))[0].item()


def test_paper_example():
    assert merge([(1.0, 1), (2.0, 3)]) == 1.75
    assert merge([(1.0, 1), (2.0, 3)], rule=FedAvg("uniform")) == 1.5


@given(rows=clients, params=st.floats(-100, 100, width=32))
def test_matches_a_plain_loop(rows, params):
    expected = params + sum(n * (v - params) for v, n in rows) / sum(n for _, n in rows)
    assert merge(rows, params) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(rows=clients, factor=st.integers(2, 50))
def test_scaling_all_weights_changes_nothing(rows, factor):
    scaled = [(v, n * factor) for v, n in rows]
    assert merge(rows) == pytest.approx(merge(scaled), rel=1e-12, abs=1e-12)


@given(rows=clients)
def test_splitting_a_client_in_two_changes_nothing(rows):
    (value, examples), *others = rows
    assert merge([(value, examples), (value, examples), *others]) == pytest.approx(
        merge([(value, 2 * examples), *others]), rel=1e-9, abs=1e-9
    )


@given(value=st.floats(-100, 100, width=32), counts=st.lists(st.integers(1, 100), min_size=1, max_size=9))
def test_equal_clients_are_a_fixed_point(value, counts):
    assert merge([(value, n) for n in counts], params=value) == value


@pytest.mark.parametrize(
    ("lr", "task", "expected"), [(0.5, 0, 1.0), ("inverse_task", 3, 0.5), (lambda task: 0.1 * (task + 1), 1, 0.4)]
)
def test_server_step_size(lr, task, expected):
    assert merge([(1.0, 1), (3.0, 1)], rule=FedAvg(lr=lr), task=task) == pytest.approx(expected)


class Half(ServerStep):
    def apply(self, params, delta, stats, state):
        return delta * 0.5, state


class AddOne(ServerStep):
    def apply(self, params, delta, stats, state):
        return delta + 1.0, state


def test_steps_act_in_order():
    assert merge([(2.0, 1), (4.0, 1)], rule=[FedAvg(), Half(), AddOne()]) == 2.5
    assert merge([(2.0, 1), (4.0, 1)], rule=Chain(FedAvg(), AddOne(), Half())) == 2.0
    assert merge([(2.0, 1), (4.0, 3)], rule=Half()) == 1.75


def test_default_reducers():
    assert isinstance(as_chain(Half()).reducer, FedAvg)
    assert as_chain(Half()).reducer.weighting == "samples"
    assert as_chain(ServerProximal(0.1)).reducer.weighting == "uniform"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedAvg("examples"), '`weighting` must be "samples" or "uniform", got \'examples\''),
        (lambda: FedAvg(lr=-1.0), "`lr` must be a positive number"),
        (lambda: FedAvg(lr="1/i"), "`lr` must be a positive number"),
        (lambda: Chain(), "`Chain` must hold at least one rule"),
        (lambda: Chain(Half(), FedAvg()), "must hold its reducer in first place, got FedAvg in place 1"),
        (lambda: Chain("fedavg"), "`aggregator` must be a Reducer, a ServerStep or a Chain of them, got str"),
    ],
)
def test_bad_rules(make, message):
    with pytest.raises(MisconfigurationError, match=message):
        make()
