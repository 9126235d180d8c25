"""LwF: distillation's oracle and laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl.data import TaskStream
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import distillation_loss
from lightning_fcl.mixins import LwF
from tests.helpers.distillation import divergence, double, gradient, logit_pairs, mean
from tests.helpers.mixins import ByHand, Teacher, assert_close, federate, fit, twins
from tests.helpers.penalty import make_trainer
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_data, toy_stream

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

few = settings(max_examples=25)


@few
@given(case=logit_pairs())
def test_matches_the_formula(case):
    logits, teacher, _, temperature = case
    wanted = mean(divergence(t, z, temperature) for t, z in zip(teacher, logits, strict=True))
    found = distillation_loss(double(logits), double(teacher), temperature).item()
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_two_classes_by_hand():
    """z = (2, 0), teacher (0, 2), T 2: KL 0.46212, times 4 (baselines 5.3)."""
    assert distillation_loss(double([[2, 0]]), double([[0, 2]]), 2.0).item() == pytest.approx(1.84847, abs=1e-5)


@few
@given(case=logit_pairs())
def test_nothing_to_learn_from_oneself(case):
    logits, _, _, temperature = case
    own = double(logits)
    assert distillation_loss(own, own, temperature).item() == pytest.approx(0.0, abs=1e-12)
    assert gradient(lambda z: distillation_loss(z, own, temperature), logits).abs().max() < 1e-9


@few
@given(case=logit_pairs())
def test_the_cross_entropy_form_has_the_same_gradient(case):
    logits, teacher, _, temperature = case
    goal = F.softmax(double(teacher) / temperature, dim=1)
    wanted = gradient(lambda z: temperature**2 * F.cross_entropy(z / temperature, goal), logits)
    found = gradient(lambda z: distillation_loss(z, double(teacher), temperature), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_the_teacher_gets_no_gradient():
    teacher = double([[0.0, 2.0]]).requires_grad_()
    student = double([[2.0, 0.0]]).requires_grad_()
    distillation_loss(student, teacher).backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_a_class_that_both_exclude_takes_no_part():
    wide, narrow = double([[2.0, -math.inf, 0.0]]), double([[2.0, 0.0]])
    teacher = double([[0.0, -math.inf, 2.0]])
    assert distillation_loss(wide, teacher).item() == distillation_loss(narrow, double([[0.0, 2.0]])).item()
    found = gradient(lambda z: distillation_loss(z, teacher), wide.tolist())
    torch.testing.assert_close(found[:, [0, 2]], gradient(lambda z: distillation_loss(z, teacher[:, [0, 2]]), [[2, 0]]))
    assert found[0, 1] == 0


@pytest.mark.parametrize(
    ("logits", "teacher", "temperature", "message"),
    [
        ((2, 3), (2, 4), 1.0, r"must be of one shape \(B, C\), C at least 1, got \(2, 3\) and \(2, 4\)"),
        ((3,), (3,), 1.0, r"must be of one shape"),
        ((2, 3), (2, 3), 0.0, "`temperature` must be positive and finite, got 0.0"),
    ],
)
def test_bad_input(logits, teacher, temperature, message):
    with pytest.raises(ValueError, match=message):
        distillation_loss(torch.zeros(logits), torch.zeros(teacher), temperature)


# -- shell ------------------------------------------------------------------------------------------------------------


class Net(LwF, ToyModule):
    pass


def test_equals_the_term_written_by_hand():
    """The teacher is the module at the end of the last fit, however far this one gets."""
    module, twin = twins(Net, lwf_strength=0.7, lwf_temperature=3.0)
    for one in (module, twin):
        fit(one)
    teacher = Teacher(twin)
    twin.total = lambda loss, x, y, _, logits: loss + 0.7 * distillation_loss(logits, teacher.logits(x), 3.0)
    for one in (module, twin):
        fit(one, shift=2.0)
    assert_close(module, twin)


def test_the_teacher_of_all_rounds_is_the_end_of_the_last_task(tmp_path):
    """In a federation: one client with the hand-written term, taught by the global model after the first task."""
    one = {"clients_per_round": 1, "rounds": 2}
    module, twin = twins(Net)
    streams = [toy_stream(clients=1, shuffle=False) for _ in range(2)]
    report = federate(module, tmp_path / "lwf", streams[0], **one)
    federate(twin, tmp_path / "task_0", toy_stream(tasks=1, clients=1, shuffle=False), **one)
    teacher = Teacher(twin)
    twin.total = lambda loss, x, y, _, logits: loss + distillation_loss(logits, teacher.logits(x), 2.0)
    second = TaskStream.from_datasets([toy_data(60, 1, 1.5)], [toy_data(30)], clients=1, batch_size=8, shuffle=False)
    federate(twin, tmp_path / "task_1", second, **one)
    assert report.method == "LwF"
    assert_close(module, twin)


def test_the_first_task_is_fedavgs(tmp_path):
    module, plain = make_toy(cls=Net, lwf_strength=5.0), make_toy()
    for one, name in ((module, "lwf"), (plain, "plain")):
        federate(one, tmp_path / name, toy_stream(tasks=1))
    assert_same_bits(state_of(module), state_of(plain))


def test_remembers_an_earlier_task_at_a_price_in_the_new_one():
    scores = []
    x, y = toy_data(200, seed=5).tensors
    for strength in (0.0, 1.0):
        module = make_toy(cls=Net, lr=0.05, lwf_strength=strength)
        fit(module, max_epochs=10)
        fit(module, shift=4.0, max_epochs=10)
        scores.append([(module(one).argmax(1) == y).float().mean().item() for one in (x, x + 4.0)])
    assert scores[1][0] > scores[0][0] + 0.05
    assert scores[1][1] < scores[0][1]


def test_a_head_that_grew_is_taught_the_old_classes():
    module = make_toy(cls=Net, lwf_classes="all")
    fit(module)
    old, new = module.net[-1], torch.nn.Linear(8, 5)
    with torch.no_grad():
        new.weight[:3], new.bias[:3] = old.weight, old.bias
    module.net[-1] = new
    fit(module, shift=1.0)
    assert module(torch.zeros(1, 6)).shape == (1, 5)


def by_class(labels):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.tensor(labels).repeat(16 // len(labels)))


class Masked(Net):
    """Keeps the columns that the term saw."""

    def loss_terms(self, outputs, batch):
        self.old = self._lwf_old
        return super().loss_terms(outputs, batch)


def test_only_classes_of_earlier_tasks_are_taught():
    """Class-incremental: classes 0 and 1, then 2 and 0 (baselines 5.3: both softmaxes over the old classes)."""
    module, twin = make_toy(cls=Net), make_toy(cls=ByHand)
    for one in (module, twin):
        make_trainer().fit(one, DataLoader(by_class([0, 1]), batch_size=8))
    teacher = Teacher(twin)
    twin.total = lambda loss, x, y, _, logits: loss + distillation_loss(logits[:, :2], teacher.logits(x)[:, :2])
    for one in (module, twin):
        make_trainer().fit(one, DataLoader(by_class([2, 0]), batch_size=8))
    assert_close(module, twin)
    assert module._lwf_seen == [0, 1, 2]


def test_in_a_federation_the_stream_knows_the_earlier_classes(tmp_path):
    """A client that never had class 1 is taught it too."""
    tasks = [by_class([0, 1]), by_class([2, 0])]
    stream = TaskStream.from_datasets(tasks, tasks, clients=2, partition="shards", batch_size=4)
    module = make_toy(cls=Masked)
    federate(module, tmp_path, stream, clients_per_round=2)
    assert module.old.tolist() == [0, 1]


def test_classes_seen_survive_a_lightning_checkpoint(tmp_path):
    module, again = make_toy(cls=Net), make_toy(cls=Net)
    fit(module).save_checkpoint(tmp_path / "end.ckpt")
    again.on_load_checkpoint(torch.load(tmp_path / "end.ckpt", weights_only=True))
    assert again._lwf_seen == module._lwf_seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lwf_classes": "old"}, '`lwf_classes` must be "seen" or "all", got \'old\''),
        ({"lwf_strength": -1.0}, "`lwf_strength` must be finite and not negative, got -1.0"),
        ({"lwf_temperature": math.inf}, "`lwf_temperature` must be finite and positive, got inf"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        Net(**arguments)
