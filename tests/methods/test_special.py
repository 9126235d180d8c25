"""SPECIAL: oracle values of the method reference (part D.11), laws, and runs in the real loop."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.aggregators import Chain, FedAvg, RoundStats, ServerProximal, SubspaceRouter
from lightning_fcl.callbacks import FaultInjector, ServerCallback
from lightning_fcl.exceptions import MisconfigurationError
from tests.helpers.subspaces import make_net, subspace_stream
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer


def stats_of(task, *, clients=(0,), examples=None, params=1):
    return RoundStats(
        task=task,
        round=0,
        num_tasks=9,
        num_params=params,
        clients=tuple(clients),
        num_examples=tuple(examples or [1.0] * len(clients)),
        total_clients=9,
    )


def run_rounds(rule, params, rounds):
    """Apply mean deltas ``(task, delta)`` in turn; returns the weights after each."""
    chain, params = Chain(rule), torch.tensor([params], dtype=torch.float64)
    states, seen = chain.init(params), []
    for task, delta in rounds:
        value = delta(params.item()) if callable(delta) else delta
        params, states = chain.apply(params, torch.tensor([value], dtype=torch.float64), stats_of(task), states)
        seen.append(params.item())
    return seen


def test_unrolled_rounds():
    """D-4: anchor 0, mean delta 1 in every round: .8, 1.44, 1.952, in the limit 4."""
    seen = run_rounds(ServerProximal(0.25, lr=1.0), 0.0, [(0, 0.0), *[(1, 1.0)] * 200])
    assert seen[1:4] == pytest.approx([0.8, 1.44, 1.952], abs=1e-12)
    assert seen[-1] == pytest.approx(4.0, abs=1e-12)


def test_one_push_decays():
    """D-11: delta 1, then 0: .64."""
    assert run_rounds(ServerProximal(0.25, lr=1.0), 0.0, [(0, 0.0), (1, 1.0), (1, 0.0)])[-1] == pytest.approx(0.64)


@pytest.mark.parametrize(("task", "point"), [(1, 2 / 3), (2, 4 / 7), (3, 0.5)])
def test_fixed_points_under_the_falling_step(task, point):
    """D-5: clients that want 1, anchor 0, strength .25: the step 1/i alone tightens the anchor."""
    rounds = [(0, 0.0), *[(task, lambda theta: 1.0 - theta)] * 400]
    assert run_rounds(ServerProximal(0.25), 0.0, rounds)[-1] == pytest.approx(point, abs=1e-9)


def test_drift_bound():
    """D-6: constant delta .5 (five local steps of .1 on unit gradients): the limit is 2, its square the bound."""
    seen = run_rounds(ServerProximal(0.25, lr=1.0), 0.0, [(0, 0.0), *[(1, 0.5)] * 300])
    assert max(abs(x) for x in seen) <= 2.0 + 1e-12
    assert seen[-1] == pytest.approx(2.0, abs=1e-12)


def test_uniform_weights_by_default():
    """D-8: deltas 1 and 3 of clients with 100 and 300 examples: 2, not 2.5."""
    for rule, expected in ((ServerProximal(0.25), 2.0), (Chain(FedAvg(), ServerProximal(0.25)), 2.5)):
        reducer = (rule if isinstance(rule, Chain) else Chain(rule)).reducer
        reducer.start(torch.zeros(1), 2, range(2))
        reducer.add(0, torch.tensor([1.0]), 100.0)
        reducer.add(1, torch.tensor([3.0]), 300.0)
        delta = reducer.finish(reducer.partials(), stats_of(0, clients=(0, 1), examples=(100.0, 300.0)))
        assert delta.item() == expected


def test_uniform_mean_over_a_uniform_subset_is_unbiased():
    """D-9: over all subsets of 4 of 8 clients; the variance is that of sampling without replacement."""
    values = torch.randn(8, dtype=torch.float64)
    means = torch.stack([values[list(s)].mean() for s in itertools.combinations(range(8), 4)])
    assert means.mean().item() == pytest.approx(values.mean().item(), abs=1e-12)
    expected = values.var(correction=0) * (8 - 4) / (4 * (8 - 1))
    assert means.var(correction=0).item() == pytest.approx(expected.item(), abs=1e-12)


@given(anchor=st.floats(-10, 10), strength=st.floats(0, 50), rounds=st.integers(1, 5))
def test_without_updates_the_model_contracts_to_the_anchor(anchor, strength, rounds):
    seen = run_rounds(ServerProximal(strength, lr=1.0), anchor, [(0, 0.0), (1, 3.0), *[(1, 0.0)] * rounds])
    start = 3.0 / (1 + strength)
    assert seen[-1] - anchor == pytest.approx(start / (1 + strength) ** rounds, abs=1e-9)


@given(strength=st.floats(0, 100))
def test_first_task_is_not_blended(strength):
    """D-10."""
    assert run_rounds(ServerProximal(strength, lr=1.0), 1.0, [(0, 2.0), (0, -1.0)]) == [3.0, 2.0]


def test_buffers_can_be_left_out_of_the_blend():
    rule = ServerProximal(1.0, lr=1.0, bn_stats="current")
    params = torch.zeros(2)
    _, state = rule.apply(params, torch.zeros(2, dtype=torch.float64), stats_of(0), rule.init(params))
    delta, _ = rule.apply(params, torch.ones(2, dtype=torch.float64), stats_of(1), state)
    assert delta.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("arguments", [{"strength": -1.0}, {"strength": float("nan")}, {"strength": float("inf")}])
def test_bad_strength(arguments):
    with pytest.raises(MisconfigurationError, match="`strength` must be finite and not negative, got"):
        ServerProximal(**arguments)


def test_other_bad_arguments():
    with pytest.raises(MisconfigurationError, match="`bn_stats` must be"):
        ServerProximal(0.1, bn_stats="none")
    with pytest.raises(MisconfigurationError, match="`lr` must be a positive number"):
        ServerProximal(0.1, lr=0.0)


# -- in the loop ------------------------------------------------------------------------------------------------------


def fit(run_dir, aggregator, **options):
    module = make_toy(batch_norm=True)
    callbacks = options.pop("callbacks", [])
    stream = toy_stream(tasks=3, **options.pop("stream", {}))
    trainer = toy_trainer(run_dir, aggregator=aggregator, callbacks=callbacks, **options)
    trainer.fit(module, stream)
    return state_of(module)


def test_neutral_setting_equals_fedavg_bit_for_bit(tmp_path):
    """D-1, D-10."""
    special = fit(tmp_path / "a", ServerProximal(0.0, lr=1.0))
    assert_same_bits(special, fit(tmp_path / "b", FedAvg("uniform")))
    assert_same_bits(
        fit(tmp_path / "c", ServerProximal(0.0)), fit(tmp_path / "d", FedAvg("uniform", lr="inverse_task"))
    )


def test_run_equals_a_slow_server_written_from_the_paper(tmp_path):
    """The paper's Algorithm 1 in float64 on the very updates that the clients of a real run sent."""
    sent, started = [], []

    class Spy(FaultInjector):
        def on_upload(self, trainer, pl_module, update):
            sent.append((trainer.task, trainer.round, {n: t.double().clone() for n, t in update.tensors.items()}))
            return update

        def on_fit_start(self, trainer, pl_module):
            started.append(state_of(pl_module))

    final = fit(tmp_path, ServerProximal(0.4), callbacks=[Spy("drop", task=99)], rounds=2, clients_per_round=3)
    theta = {n: t.double() for n, t in started[0].items() if t.is_floating_point()}
    anchor = None
    for i in range(1, 4):
        for r in range(2):
            updates = [u for task, round_, u in sent if (task, round_) == (i - 1, r)]
            assert len(updates) == 3
            for name in theta:
                mean = sum(u[name] - theta[name] for u in updates) / 3
                value = theta[name] + mean / i
                if i >= 2:
                    value = (value + 0.4 * anchor[name]) / 1.4
                theta[name] = value.float().double()
        anchor = {n: t.clone() for n, t in theta.items()}
    for name in theta:
        torch.testing.assert_close(final[name].double(), theta[name], rtol=1e-6, atol=1e-7)


def test_an_empty_round_does_not_roll_the_model_back(tmp_path):
    whole = fit(tmp_path / "a", ServerProximal(0.5), rounds=[2, 1, 1])
    fault = [FaultInjector("drop", task=1, round=1)]
    options = {"rounds": [2, 2, 1], "callbacks": fault, "on_client_error": "skip", "stream": {"shuffle": False}}
    broken = fit(tmp_path / "b", ServerProximal(0.5), **options)
    again = fit(tmp_path / "c", ServerProximal(0.5), rounds=[2, 1, 1], stream={"shuffle": False})
    assert whole.keys() == broken.keys()
    assert_same_bits(broken, again)


class KeepSlots(ServerCallback):
    def __init__(self):
        self.slots = []

    def on_round_end(self, trainer, pl_module):
        self.slots.append(trainer.state.slots.weights)


def test_behind_a_router_a_slot_is_pulled_to_its_own_last_task_and_never_to_fresh_weights(tmp_path):
    keeps = (KeepSlots(), KeepSlots())
    for keep, steps in zip(keeps, ([], [ServerProximal(3.0, lr=1.0)]), strict=True):
        chain = Chain(SubspaceRouter(), FedAvg(), *steps)
        stream = subspace_stream(tasks=2, clients=2, examples=80).stages([[0, 0], [1, 1], [0, 0]])
        trainer = toy_trainer(tmp_path / str(len(steps)), rounds=1, aggregator=chain, server_callbacks=[keep])
        trainer.fit(make_net(), stream)
    (_, plain, averaged), (first, second, blended) = (keep.slots for keep in keeps)
    assert torch.equal(second[1], plain[1])  # opened in the second stage: nothing to be pulled to
    by_hand = (averaged[0].double() + 3.0 * first[0].double()) / 4.0
    torch.testing.assert_close(blended[0].double(), by_hand, rtol=0, atol=1e-6)
    assert not torch.equal(averaged[0], first[0])
