"""FedCurv: the full sum against the two sums, the paper's loop on parabolas, what travels, and what it needs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl import FedAvg, FedCurv
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import fedcurv_others, fedcurv_penalty, fedcurv_penalty_grad
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.quadratics import Parabola, client_states, fit, server_tree
from tests.helpers.toy import make_toy, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
FOUR = {"curves": (1.0, 4.0, 2.0, 3.0), "targets": (0.0, 1.0, -1.0, 2.0)}
trees = st.lists(st.tuples(st.floats(0, 5), st.floats(-5, 5)), min_size=2, max_size=4)


def minus_loss(module, batch):
    return -module.loss(batch)


def oracle(curves, targets, sampled, strength, *, lr, steps=10):
    """Every client's last Fisher and weights, all kept apart; one example each, so F = (a (w - b))^2."""
    weight, last, path = 0.0, {}, []
    for chosen in sampled:
        ends = {}
        for i in chosen:
            y = weight
            for _ in range(steps):
                pull = sum(2 * strength * fisher * (y - there) for j, (fisher, there) in last.items() if j != i)
                y -= lr * (curves[i] * (y - targets[i]) + pull)
            ends[i] = y
        last |= {i: ((curves[i] * (y - targets[i])) ** 2, y) for i, y in ends.items()}
        weight = sum(ends.values()) / len(ends)
        path.append(weight)
    return path, last


def test_equals_the_papers_loop_with_partial_participation(tmp_path):
    callback = FedCurv(0.3, log_likelihood=minus_loss)
    module = Parabola(lr=0.01)
    records, _ = fit(tmp_path, callback, **FOUR, module=module, rounds=6, clients_per_round=2)
    path, last = oracle(*FOUR.values(), records.sampled, 0.3, lr=0.01)
    assert records.weights == pytest.approx(path, abs=1e-6)
    sent = {c: s["sent"]["precision/net.weight"].item() for c, s in client_states(tmp_path).items()}
    assert sent == pytest.approx({i: fisher for i, (fisher, _) in last.items()}, rel=1e-5)
    (sums,) = server_tree(tmp_path)["downloads"].values()
    assert sums["precision/net.weight"].item() == pytest.approx(sum(f for f, _ in last.values()), rel=1e-5)
    assert sums["pull/net.weight"].item() == pytest.approx(sum(f * w for f, w in last.values()), rel=1e-5)


@given(others=trees, point=st.floats(-5, 5))
def test_two_sums_stand_for_all_clients(others, point):
    """Baselines 3.9: the gradients agree, and the constant is the sum of F theta squared."""
    weight = torch.tensor([point], dtype=torch.float64, requires_grad=True)
    full = sum(fisher * (weight - there) ** 2 for fisher, there in others).sum()
    (wanted,) = torch.autograd.grad(full, weight)
    precision = {"w": torch.tensor([sum(f for f, _ in others)], dtype=torch.float64)}
    pull = {"w": torch.tensor([sum(f * w for f, w in others)], dtype=torch.float64)}
    params = {"w": weight.detach()}
    torch.testing.assert_close(fedcurv_penalty_grad(params, precision, pull, 1.0)["w"], wanted)
    constant = sum(f * w**2 for f, w in others)
    torch.testing.assert_close(fedcurv_penalty(params, precision, pull, 1.0).item() + constant, full.item())


def test_minimum_of_two_clients():
    """F = (2, 1) at theta = (1, 4): 2.0 (baselines 3.9)."""
    precision, pull = {"w": torch.tensor([3.0])}, {"w": torch.tensor([6.0])}
    assert fedcurv_penalty_grad({"w": torch.tensor([2.0])}, precision, pull, 1.0)["w"].item() == 0.0


def test_nothing_is_left_of_a_client_alone():
    own, pull = {"w": torch.tensor([0.1, 3.0])}, {"w": torch.tensor([0.3, 1.0])}
    total = {"w": torch.tensor([0.1 - 1e-8, 5.0])}
    precision, others = fedcurv_others(total, {"w": torch.tensor([0.30001, 4.0])}, own, pull)
    assert precision["w"].tolist() == [0.0, 2.0]
    assert others["w"].tolist() == [0.0, 3.0]


def test_it_sends_two_more_payloads(tmp_path):
    report = toy_trainer(tmp_path, callbacks=[FedCurv(0.1)]).fit(make_toy(), toy_stream(tasks=1))
    payload = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    assert report.bytes_up == 2 * 3 * payload * 3  # rounds x clients x (weights, F, F theta)
    assert report.bytes_down == 3 * payload + 3 * payload * 3  # nothing to download in the first round


def test_the_first_round_is_fedavgs(tmp_path):
    weights = []
    for name, callbacks in {"a": [], "b": [FedCurv(5.0)]}.items():
        module = make_toy()
        toy_trainer(tmp_path / name, rounds=1, aggregator=FedAvg(), callbacks=callbacks).fit(
            module, toy_stream(tasks=1)
        )
        weights.append(module.net[0].weight.detach().clone())
    assert torch.equal(*weights)


def test_bad_arguments():
    with pytest.raises(MisconfigurationError, match="`strength` must be finite"):
        FedCurv(-1.0)
    with pytest.raises(MisconfigurationError, match="must run in a FederatedTrainer"):
        make_trainer([FedCurv()]).fit(make_toy(), loader())
