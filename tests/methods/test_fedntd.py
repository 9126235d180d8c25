"""FedNTD: the oracle and laws of not-true distillation."""

import pytest
import torch
from hypothesis import given, settings

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import distillation_loss, not_true_distillation
from lightning_fcl.mixins import FedNTD
from tests.helpers.distillation import divergence, double, gradient, logit_pairs, mean
from tests.helpers.mixins import Teacher, assert_close, federate, fit, twins
from tests.helpers.toy import ToyModule, make_toy, toy_data, toy_stream

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

few = settings(max_examples=25)


def without(row, label):
    return [value for index, value in enumerate(row) if index != label]


@few
@given(case=logit_pairs())
def test_matches_the_formula(case):
    logits, teacher, targets, temperature = case
    rows = zip(logits, teacher, targets, strict=True)
    wanted = mean(divergence(without(t, y), without(z, y), temperature) for z, t, y in rows)
    found = not_true_distillation(double(logits), double(teacher), torch.tensor(targets), temperature).item()
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("true_logit", [2.0, 50.0])
def test_three_classes_by_hand(true_logit):
    """z = (2, 1, 0), teacher 0, y = 0: 0.12011, whatever the true class's logit (baselines 4.2)."""
    found = not_true_distillation(double([[true_logit, 1, 0]]), double([[0, 0, 0]]), torch.tensor([0]))
    assert found.item() == pytest.approx(0.12011, abs=1e-5)


@few
@given(case=logit_pairs())
def test_the_true_class_gets_no_gradient(case):
    logits, teacher, targets, temperature = case
    labels = torch.tensor(targets)
    found = gradient(lambda z: not_true_distillation(z, double(teacher), labels, temperature), logits)
    assert found.isfinite().all()
    assert found.gather(1, labels[:, None]).abs().max() == 0


@few
@given(case=logit_pairs(classes=2))
def test_two_classes_leave_nothing_to_say(case):
    logits, teacher, targets, temperature = case
    function = lambda z: not_true_distillation(z, double(teacher), torch.tensor(targets), temperature)  # noqa: E731
    assert function(double(logits)).item() == 0
    assert gradient(function, logits).abs().max() == 0


def test_classes_masked_by_the_user_stay_out():
    """With class-incremental masks the not-true set is inside the active classes."""
    hidden = [float("-inf")]
    logits, teacher = [[0.3, 1.0, -2.0]], [[1.0, 0.5, 0.0]]
    found = not_true_distillation(double([logits[0] + hidden]), double([teacher[0] + hidden]), torch.tensor([0]))
    wanted = distillation_loss(double([logits[0][1:]]), double([teacher[0][1:]]), 1.0)
    torch.testing.assert_close(found, wanted)


def test_one_class_is_refused():
    with pytest.raises(ValueError, match="C at least 2, got"):
        not_true_distillation(torch.zeros(2, 1), torch.zeros(2, 1), torch.tensor([0, 0]))


# -- shell ------------------------------------------------------------------------------------------------------------


class Net(FedNTD, ToyModule):
    pass


def test_equals_the_term_written_by_hand():
    module, twin = twins(Net, ntd_strength=0.7, ntd_temperature=2.0)
    teacher = Teacher(twin)
    twin.total = lambda loss, x, y, _, logits: loss + 0.7 * not_true_distillation(logits, teacher.logits(x), y, 2.0)
    for one in (module, twin):
        fit(one)
    assert_close(module, twin)


def test_the_first_step_is_fedavgs(tmp_path):
    """The teacher is where the student starts: no gradient yet."""
    module, plain = make_toy(cls=Net, ntd_strength=5.0), make_toy()
    for one, name in ((module, "ntd"), (plain, "plain")):
        federate(one, tmp_path / name, toy_stream(tasks=1), local_steps=1, rounds=1)
    assert_close(module, plain)


def test_a_strong_teacher_keeps_its_view_of_other_classes(tmp_path):
    """Clients of one class each: the more the teacher counts, the less the global model drifts on the others."""
    stream = toy_stream(tasks=1, clients=3, partition="shards")
    drift = []
    for strength in (0.0, 5.0):
        module = make_toy(cls=Net, ntd_strength=strength)
        teacher = Teacher(module)
        federate(module, tmp_path / str(strength), stream, rounds=1, local_epochs=5)
        x, y = toy_data(60).tensors
        drift.append(not_true_distillation(module(x), teacher.logits(x), y).item())
    assert drift[1] < drift[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ntd_strength": -1.0}, "`ntd_strength` must be finite and not negative, got -1.0"),
        ({"ntd_temperature": 0.0}, "`ntd_temperature` must be finite and positive, got 0.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        Net(**arguments)
