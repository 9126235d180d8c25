"""FedLMD: the oracle and laws of label-masking distillation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import label_masked_distillation, majority_classes, not_true_distillation
from lightning_fcl.mixins import FedLMD
from tests.helpers.distillation import double, gradient, logit_pairs, mean, softmax
from tests.helpers.mixins import Teacher, assert_close, federate, twins
from tests.helpers.penalty import make_trainer
from tests.helpers.toy import ToyModule, make_toy, toy_stream

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

few = settings(max_examples=25)
STUDENT, TEACHER = [[2.0, 1.0, 0.0, -1.0]], [[0.0, 1.0, 2.0, 3.0]]


def mask(*classes, width=4):
    return torch.tensor([c in classes for c in range(width)])


def penalised(logits, teacher, label, majority, temperature):
    """One example as the authors' code has it: masked logits are lowered by 1000; 0 where no class is left."""
    classes = range(len(logits))
    if all(c == label or c in majority for c in classes):
        return 0.0
    q = softmax([teacher[c] / temperature - 1000 * (c in majority) - 1000 * (c == label) for c in classes])
    p = softmax([logits[c] / temperature - 1000 * (c == label) for c in classes])
    return temperature**2 * sum(a * (math.log(a) - math.log(b)) for a, b in zip(q, p, strict=True) if a > 0)


@few
@given(case=logit_pairs(), data=st.data())
def test_matches_the_formula(case, data):
    logits, teacher, targets, temperature = case
    width = len(logits[0])
    majority = data.draw(st.sets(st.integers(0, width - 1)))
    rows = zip(logits, teacher, targets, strict=True)
    wanted = mean(penalised(z, t, y, majority, temperature) for z, t, y in rows)
    arguments = torch.tensor(targets), mask(*majority, width=width), temperature
    found = label_masked_distillation(double(logits), double(teacher), *arguments).item()
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("teacher", "majority", "wanted"),
    [(TEACHER, mask(), 1.15042), (TEACHER, mask(1), 1.55646), ([[0.0, 99.0, 2.0, 3.0]], mask(1), 1.55646)],
)
def test_four_classes_by_hand(teacher, majority, wanted):
    """z = (2, 1, 0, -1), teacher (0, 1, 2, 3), y = 0 (baselines 4.3)."""
    found = label_masked_distillation(double(STUDENT), double(teacher), torch.tensor([0]), majority)
    assert found.item() == pytest.approx(wanted, abs=1e-5)


@few
@given(case=logit_pairs())
def test_a_balanced_client_gets_not_true_distillation(case):
    logits, teacher, targets, temperature = case
    arguments = double(logits), double(teacher), torch.tensor(targets)
    majority = majority_classes(torch.full((len(logits[0]),), 7))
    assert not majority.any()
    found = label_masked_distillation(*arguments, majority, temperature)
    assert found == not_true_distillation(*arguments, temperature)


def test_where_no_class_is_left_nothing_is_said():
    """Counts (1, 10, 10) and y = 0: the published code lets the loss jump to 33 (baselines 4.3)."""
    majority = majority_classes(torch.tensor([1, 10, 10]))
    assert majority.tolist() == [False, True, True]
    function = lambda z: label_masked_distillation(z, double([[5, 1, 2]]), torch.tensor([0]), majority)  # noqa: E731
    assert function(double([[0, 1, 2]])).item() == 0
    assert gradient(function, [[0, 1, 2]]).abs().max() == 0


@few
@given(case=logit_pairs(), data=st.data())
def test_gradients_are_finite_and_spare_the_true_class(case, data):
    logits, teacher, targets, temperature = case
    majority = mask(*data.draw(st.sets(st.integers(0, len(logits[0]) - 1))), width=len(logits[0]))
    labels = torch.tensor(targets)
    found = gradient(lambda z: label_masked_distillation(z, double(teacher), labels, majority, temperature), logits)
    assert found.isfinite().all()
    assert found.gather(1, labels[:, None]).abs().max() == 0


def test_bad_majority():
    with pytest.raises(ValueError, match=r"`majority` must be of shape \(4,\), got \(3,\)"):
        label_masked_distillation(double(STUDENT), double(TEACHER), torch.tensor([0]), mask(width=3))


# -- shell ------------------------------------------------------------------------------------------------------------


class Net(FedLMD, ToyModule):
    """Notes what was counted in each job."""

    def on_train_start(self):
        super().on_train_start()
        job = (self.trainer.task, self.trainer.client) if hasattr(self.trainer, "client") else "stock"
        self.counted = {**getattr(self, "counted", {}), job: self._lmd_counts.tolist()}


def skewed(labels):
    """A loader in which the given class labels occur in turn."""
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, torch.tensor(labels).repeat(24 // len(labels))), batch_size=8)


def test_equals_the_term_written_by_hand():
    module, twin = twins(Net, lmd_strength=0.7, lmd_temperature=2.0)
    data = skewed([0, 0, 0, 1, 2, 0])  # only class 0 has more than a third
    teacher, majority = Teacher(twin), mask(0, width=3)
    twin.total = lambda loss, x, y, _, logits: (
        loss + 0.7 * label_masked_distillation(logits, teacher.logits(x), y, majority, 2.0)
    )
    for one in (module, twin):
        make_trainer().fit(one, data)
    assert module.counted == {"stock": [16, 4, 4]}
    assert_close(module, twin)


def test_every_client_counts_its_own_task(tmp_path):
    stream = toy_stream(partition="label_dirichlet")
    module = make_toy(cls=Net)
    federate(module, tmp_path, stream, clients_per_round=4)
    assert len(module.counted) == sum(len(stream.clients(task)) for task in range(2))
    for (task, client), counts in module.counted.items():
        labels = [int(y) for _, y in stream.train_loader(task, client).dataset]
        assert counts == [labels.count(c) for c in range(len(counts))]
        assert sum(counts) == len(labels)


class Unlabelled(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(6), {"class": 0}


def test_data_without_labels_are_refused_before_the_first_batch():
    with pytest.raises(MisconfigurationError, match="must be a dataset with one integer label per example"):
        make_trainer().fit(make_toy(cls=Net), DataLoader(Unlabelled()))


def test_a_label_beyond_the_head_is_refused():
    class Wide(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0], batch[1] % 3), batch_idx)

    with pytest.raises(MisconfigurationError, match=r"an output for each label, got 3 .* label 3"):
        make_trainer().fit(make_toy(cls=Wide), skewed([0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lmd_strength": float("nan")}, "`lmd_strength` must be finite and not negative, got nan"),
        ({"lmd_temperature": -1.0}, "`lmd_temperature` must be finite and positive, got -1.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        Net(**arguments)
