"""FLwF-2T: the oracle and laws of distilling from two teachers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import distillation_loss, two_teacher_distillation
from lightning_fcl.mixins import FLwF2T
from tests.helpers.distillation import divergence, double, gradient, logit_pairs, mean
from tests.helpers.mixins import Teacher, assert_close, federate, fit, twins
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

few = settings(max_examples=25)


@few
@given(case=logit_pairs(classes=3), second=logit_pairs(classes=3), weights=st.tuples(*[st.floats(0, 1)] * 2))
def test_matches_the_formula(case, second, weights):
    logits, old, _, temperature = case
    server = [second[0][0] for _ in logits]
    terms = [
        mean(divergence(t, z, temperature) for t, z in zip(teacher, logits, strict=True)) for teacher in (old, server)
    ]
    wanted = weights[0] * terms[0] + weights[1] * terms[1]
    options = {"old_weight": weights[0], "server_weight": weights[1], "temperature": temperature}
    found = two_teacher_distillation(double(logits), double(old), double(server), **options).item()
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@few
@given(case=logit_pairs())
def test_at_both_teachers_there_is_no_gradient(case):
    own = double(case[0])
    assert gradient(lambda z: two_teacher_distillation(z, own, own), case[0]).abs().max() < 1e-9


def test_an_old_teacher_with_fewer_classes_speaks_of_those():
    student, old = double([[2.0, 0.0, 1.0]]), double([[0.0, 2.0]])
    found = two_teacher_distillation(student, old, student)
    torch.testing.assert_close(found, 0.25 * distillation_loss(student[:, :2], old))


def test_bad_input():
    with pytest.raises(ValueError, match="must be of one shape"):
        two_teacher_distillation(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 4))


# -- shell ------------------------------------------------------------------------------------------------------------


class Net(FLwF2T, ToyModule):
    pass


def test_equals_the_terms_written_by_hand():
    module, twin = twins(Net, flwf2t_label_weight=0.6, flwf2t_old_weight=0.3)
    for one in (module, twin):
        fit(one)
    old = Teacher(twin)
    for one in (module, twin):  # something else arrives from a server
        with torch.no_grad():
            one.net[0].weight.mul_(0.9)
    server = Teacher(twin)
    twin.total = lambda loss, x, y, _, logits: (
        0.6 * loss
        + 0.3 * distillation_loss(logits, old.logits(x), 2.0)
        + 0.1 * distillation_loss(logits, server.logits(x), 2.0)
    )
    for one in (module, twin):
        fit(one, shift=2.0)
    assert_close(module, twin)


def test_the_first_task_has_the_whole_loss(tmp_path):
    module, plain = make_toy(cls=Net), make_toy()
    for one, name in ((module, "two"), (plain, "plain")):
        federate(one, tmp_path / name, toy_stream(tasks=1))
    assert_same_bits(state_of(module), state_of(plain))


def test_the_first_step_of_a_task_is_a_shorter_step_of_fedavg(tmp_path):
    """At both teachers the gradient is the label weight's share of the plain one (baselines 6.10)."""
    moved = {}
    for cls, options in ((Net, {"flwf2t_label_weight": 0.5}), (ToyModule, {})):
        module = make_toy(cls=cls, **options)
        fit(module, max_epochs=1)
        before = state_of(module)
        fit(module, shift=2.0, max_epochs=1, limit_train_batches=1)
        moved[cls] = {name: value - before[name] for name, value in state_of(module).items()}
    for name, value in moved[Net].items():
        torch.testing.assert_close(value, 0.5 * moved[ToyModule][name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flwf2t_label_weight": 0.8, "flwf2t_old_weight": 0.3}, "not exceed 1 together, got 0.8 and 0.3"),
        ({"flwf2t_old_weight": -0.1}, "must not be negative"),
        ({"flwf2t_label_weight": float("nan")}, "got nan and 0.25"),
        ({"flwf2t_temperature": 0.0}, "`flwf2t_temperature` must be finite and positive"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        Net(**arguments)
