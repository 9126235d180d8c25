"""SCAFFOLD: the paper's loop, the optimum that FedAvg misses, momentum and schedules, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl import SCAFFOLD, FedAvg
from lightning_fcl.exceptions import MisconfigurationError, ParamMismatchError
from lightning_fcl.functional import scaffold_variate, sgd_travel
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.quadratics import CURVES, TARGETS, Parabola, client_states, fit, server_tree
from tests.helpers.toy import make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

FOUR = {"curves": (1.0, 4.0, 2.0, 3.0), "targets": (0.0, 1.0, -1.0, 2.0)}


def oracle(curves, targets, sampled, *, lr=0.1, steps=10, momentum=0.0, option="II"):
    """Algorithm 1 with plain numbers; K becomes K' under momentum (baselines 3.7 f)."""
    rho, clients = momentum, len(curves)
    length = steps if not rho else (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    weight, server, own, path = 0.0, 0.0, [0.0] * clients, []
    for chosen in sampled:
        ends, changes = [], []
        for i in chosen:
            y, velocity = weight, 0.0
            for _ in range(steps):
                velocity = rho * velocity + curves[i] * (y - targets[i]) - own[i] + server
                y -= lr * velocity
            gradient = curves[i] * (weight - targets[i])
            new = gradient if option == "I" else own[i] - server + (weight - y) / (length * lr)
            ends.append(y)
            changes.append(new - own[i])
            own[i] = new
        weight += sum(y - weight for y in ends) / len(ends)
        server += len(chosen) / clients * sum(changes) / len(changes)
        path.append(weight)
    return path, server, own


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("option", ["I", "II"])
def test_equals_the_papers_loop(option, momentum, tmp_path):
    """Two of four clients a round, so the server's part must be the sum over N, not over the sampled."""
    module = Parabola(lr=0.05, momentum=momentum)
    records, _ = fit(tmp_path, SCAFFOLD(option), **FOUR, module=module, rounds=6, clients_per_round=2)
    path, server, own = oracle(*FOUR.values(), records.sampled, lr=0.05, momentum=momentum, option=option)
    assert records.weights == pytest.approx(path, abs=1e-12)
    (served,) = server_tree(tmp_path)["downloads"].values()
    assert served["net.weight"].item() == pytest.approx(server, abs=1e-12)
    states = {client: state["variate"]["net.weight"].item() for client, state in client_states(tmp_path).items()}
    assert states == pytest.approx({i: c for i, c in enumerate(own) if i in states}, abs=1e-12)
    assert served["net.weight"].item() == pytest.approx(sum(states.values()) / 4, abs=1e-12)  # c is the mean of all c_i


def test_converges_to_the_optimum_where_fedavg_does_not(tmp_path):
    """Baselines 3.7: FedAvg stops at .6041; SCAFFOLD at .8 with variates (.8, -.8) and 0."""
    _, averaged = fit(tmp_path / "fedavg", rounds=15)
    _, module = fit(tmp_path / "scaffold", SCAFFOLD(), rounds=25)
    assert averaged.weight == pytest.approx(0.6041, abs=1e-3)
    assert module.weight == pytest.approx(0.8, abs=1e-3)
    states = [
        state["variate"]["net.weight"].item() for _, state in sorted(client_states(tmp_path / "scaffold").items())
    ]
    assert states == pytest.approx([0.8, -0.8], abs=1e-2)


class Decays(Parabola):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


def test_schedules_and_factors_do_not_move_the_optimum(tmp_path):
    options = {"module": Decays(), "rounds": 25, "lr_factor": lambda task, round_: 0.9**round_ + 0.3}
    assert fit(tmp_path, SCAFFOLD(), **options)[1].weight == pytest.approx(0.8, abs=1e-3)


def test_any_optimizer_with_option_one(tmp_path):
    _, module = fit(tmp_path, SCAFFOLD("I"), module=Parabola(lr=0.01, optimizer=torch.optim.Adam), rounds=3)
    assert module.weight != 0.0


@pytest.mark.parametrize("reset", [False, True])
def test_reset_on_task(reset, tmp_path):
    records, _ = fit(tmp_path, SCAFFOLD(reset_on_task=reset), rounds=3, tasks=2)
    first, _, _ = oracle(CURVES, TARGETS, records.sampled[:3])
    assert records.weights[:3] == pytest.approx(first, abs=1e-12)
    plain = first[-1]  # without variates, the fourth round is FedAvg's
    ends = [b + (plain - b) * (1 - 0.1 * a) ** 10 for a, b in zip(CURVES, TARGETS, strict=True)]
    assert (records.weights[3] == pytest.approx(sum(ends) / 2, abs=1e-12)) == reset


def test_the_first_round_is_fedavgs_with_the_plain_mean(tmp_path):
    states = []
    for name, options in {"a": {"aggregator": FedAvg("uniform")}, "b": {"callbacks": [SCAFFOLD()]}}.items():
        module = make_toy()
        toy_trainer(tmp_path / name, rounds=1, **options).fit(module, toy_stream(tasks=1))
        states.append(state_of(module))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@given(
    steps=st.lists(st.tuples(st.floats(1e-4, 1.0), st.sampled_from([0.0, 0.5, 0.9])), min_size=1, max_size=12),
    nesterov=st.booleans(),
)
def test_travel_is_what_sgd_moves(steps, nesterov):
    momentum = steps[0][1]
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    nesterov = nesterov and momentum > 0
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum, nesterov=nesterov)
    for rate, _ in steps:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    found = sgd_travel([rate for rate, _ in steps], [momentum] * len(steps), nesterov=nesterov)
    assert found == pytest.approx(-weight.item(), rel=1e-12)


def test_travel_with_dampening():
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=0.3)
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert sgd_travel([0.1] * 5, [0.9] * 5, dampening=0.3) == pytest.approx(-weight.item())


def test_names_must_agree():
    one = {"w": torch.ones(1)}
    with pytest.raises(ParamMismatchError, match="lacks 'w'"):
        scaffold_variate(one, {}, one, one, {"w": 1.0})


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Parabola(optimizer=torch.optim.Adam), {}, "minimising torch.optim.SGD, got Adam"),
        (Parabola(momentum=0.5), {"keep_optimizer_state": True, "rounds": 2}, "`keep_optimizer_state` must be False"),
    ],
)
def test_what_its_identity_does_not_hold_for_is_refused(module, options, message, tmp_path):
    with pytest.raises(MisconfigurationError, match=message):
        fit(tmp_path, SCAFFOLD(), module=module, **options)


def test_a_stock_trainer_has_no_server():
    with pytest.raises(MisconfigurationError, match="must run in a FederatedTrainer"):
        make_trainer([SCAFFOLD()]).fit(make_toy(), loader())
    with pytest.raises(MisconfigurationError, match='`option` must be "I" or "II"'):
        SCAFFOLD("III")
