"""FedDyn: the paper's loop under partial participation, its invariant, the optimum that FedAvg misses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl import FedAvg, FedDyn, ServerProximal
from lightning_fcl.exceptions import MisconfigurationError, ParamMismatchError
from lightning_fcl.functional import feddyn_grad
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.quadratics import CURVES, TARGETS, Parabola, client_states, fit, server_tree
from tests.helpers.toy import make_toy, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

FOUR = {"curves": (1.0, 4.0, 2.0, 3.0), "targets": (0.0, 1.0, -1.0, 2.0)}


def oracle(curves, targets, sampled, alpha, *, lr=0.1, steps=10):
    """Algorithm 1 with plain numbers."""
    clients = len(curves)
    weight, server, duals, path = 0.0, 0.0, [0.0] * clients, []
    for chosen in sampled:
        ends = []
        for i in chosen:
            y = weight
            for _ in range(steps):
                y -= lr * (curves[i] * (y - targets[i]) - duals[i] + alpha * (y - weight))
            duals[i] -= alpha * (y - weight)
            ends.append(y)
        server -= alpha / clients * sum(y - weight for y in ends)
        weight = sum(ends) / len(ends) - server / alpha
        path.append(weight)
    return path, server, duals


def test_equals_the_papers_loop_with_partial_participation(tmp_path):
    """Two of four clients a round: h moves by 1/N, and is the mean of all clients' g_i in every round."""
    module = Parabola(lr=0.05)
    records, _ = fit(tmp_path, FedDyn(0.5), **FOUR, module=module, rounds=6, clients_per_round=2)
    path, server, duals = oracle(*FOUR.values(), records.sampled, 0.5, lr=0.05)
    assert records.weights == pytest.approx(path, abs=1e-12)
    (state,) = server_tree(tmp_path)["steps"]
    assert state["dual"][0].item() == pytest.approx(server, abs=1e-12)
    found = {client: state["dual"]["net.weight"].item() for client, state in client_states(tmp_path).items()}
    assert found == pytest.approx({i: g for i, g in enumerate(duals) if i in found}, abs=1e-12)
    assert server == pytest.approx(sum(duals) / 4, abs=1e-12)


def test_converges_to_the_optimum_where_fedavg_does_not(tmp_path):
    """Baselines 3.9: .8 and g_i = gradient of f_i there, (.8, -.8)."""
    options = {"rounds": 20, "local_steps": 12}
    _, averaged = fit(tmp_path / "fedavg", module=Parabola(lr=0.3), **options)
    _, module = fit(tmp_path / "feddyn", FedDyn(0.5), module=Parabola(lr=0.3), **options)
    assert abs(averaged.weight - 0.8) > 0.1
    assert module.weight == pytest.approx(0.8, abs=2e-3)
    duals = [state["dual"]["net.weight"].item() for _, state in sorted(client_states(tmp_path / "feddyn").items())]
    assert duals == pytest.approx([0.8, -0.8], abs=5e-3)


@pytest.mark.parametrize("reset", [False, True])
def test_reset_on_task(reset, tmp_path):
    records, _ = fit(tmp_path, FedDyn(0.5, reset_on_task=reset), rounds=3, tasks=2)
    whole, _, _ = oracle(CURVES, TARGETS, records.sampled, 0.5)
    assert (records.weights == pytest.approx(whole, abs=1e-12)) != reset
    assert records.weights[:3] == pytest.approx(whole[:3], abs=1e-12)


def test_buffers_are_only_averaged(tmp_path):
    module = make_toy(batch_norm=True)
    toy_trainer(tmp_path, callbacks=[FedDyn(0.1)], rounds=3).fit(module, toy_stream(tasks=1, examples=64))
    dual = server_tree(tmp_path)["steps"][0]["dual"]
    assert dual[: 6 * 8].any()
    assert not dual[-16:].any()
    assert (module.net[1].running_var > 0).all()


def test_its_server_half_joins_any_chain(tmp_path):
    plain = toy_trainer(tmp_path, callbacks=[FedDyn(0.1)])
    assert plain.method == "FedDyn"
    assert plain.chain.reducer.weighting == "uniform"
    mixed = toy_trainer(tmp_path, aggregator=[FedAvg(), ServerProximal(0.1)], callbacks=[FedDyn(0.1)])
    assert [type(rule).__name__ for rule in mixed.chain.rules] == ["FedAvg", "ServerProximal", "FedDynStep"]


@given(values=st.lists(st.floats(-5, 5), min_size=3, max_size=3), alpha=st.floats(0.01, 2))
def test_gradient_is_autograds(values, alpha):
    weight, anchor, dual = ({"w": torch.tensor([v], dtype=torch.float64)} for v in values)
    weight["w"].requires_grad_()
    loss = -(dual["w"] * weight["w"]).sum() + alpha / 2 * (weight["w"] - anchor["w"]).square().sum()
    (wanted,) = torch.autograd.grad(loss, weight["w"])
    torch.testing.assert_close(feddyn_grad(weight, anchor, dual, alpha)["w"], wanted)


def test_bad_arguments():
    with pytest.raises(MisconfigurationError, match="`strength` must be positive, got 0"):
        FedDyn(0.0)
    with pytest.raises(MisconfigurationError, match="`strength` must be finite and not negative"):
        FedDyn(float("nan"))
    with pytest.raises(ParamMismatchError, match="lacks 'w'"):
        feddyn_grad({"w": torch.ones(1)}, {}, {"w": torch.ones(1)}, 0.1)
    with pytest.raises(MisconfigurationError, match="must run in a FederatedTrainer"):
        make_trainer([FedDyn()]).fit(make_toy(), loader())
