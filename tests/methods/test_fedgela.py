"""FedGELA: the oracle and laws of the fixed frame and of the local scale."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import class_scale, simplex_etf
from lightning_fcl.mixins import FedGELA
from tests.helpers.mixins import federate, fit
from tests.helpers.penalty import loader
from tests.helpers.toy import ToyModule, make_toy, toy_data, toy_stream

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

few = settings(max_examples=25)


@few
@given(classes=st.integers(2, 6), more=st.integers(0, 4), seed=st.integers(0, 99))
def test_directions_are_as_far_apart_as_can_be(classes, more, seed):
    """Length 1, cosine -1 / (C - 1), sum 0 (baselines 4.4)."""
    frame = simplex_etf(classes, classes + more, torch.Generator().manual_seed(seed)).double()
    wanted = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1.0)
    torch.testing.assert_close(frame @ frame.T, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(frame.sum(dim=0), torch.zeros_like(frame[0]), rtol=0, atol=1e-6)


def test_the_frame_is_its_seeds():
    first, again, other = (simplex_etf(3, 8, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("counts", "wanted"), [([3, 1, 0], [2.25, 0.75, 0.0]), ([4, 4, 4, 4], [1.0] * 4)])
def test_scale_by_hand(counts, wanted):
    assert class_scale(torch.tensor(counts)).tolist() == wanted


@few
@given(counts=st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any))
def test_scales_have_mean_one(counts):
    scale = class_scale(torch.tensor(counts))
    assert scale.mean().item() == pytest.approx(1.0, rel=1e-5)
    assert ((scale == 0) == (torch.tensor(counts) == 0)).all()


def test_an_absent_class_still_takes_probability():
    """Its logit is 0, not minus infinity: cosine logits at temperature 0.2 give it a share."""
    logits = class_scale(torch.tensor([1, 1, 0])) * torch.tensor([0.5, -0.2, 0.9]) / 0.2
    assert logits[2] == 0
    assert logits.softmax(0)[2] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((1, 8), "`num_classes` must be at least 2, got 1"), ((5, 4), "must be at least `num_classes`, 5, got 4")],
)
def test_frames_that_do_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        simplex_etf(*arguments)


def test_no_examples():
    with pytest.raises(ValueError, match="`counts` must count at least one example"):
        class_scale(torch.zeros(3))


# -- shell ------------------------------------------------------------------------------------------------------------


class Net(FedGELA, ToyModule):
    """Notes the scale of each job."""

    def on_train_start(self):
        super().on_train_start()
        self.scales = {
            **getattr(self, "scales", {}),
            (self.trainer.task, self.trainer.client): self.find_head().scale,
        }


class Stock(FedGELA, ToyModule):
    pass


class ByHandGELA(ToyModule):
    """The reference: BatchNorm, a fixed matrix, and the scale in training only."""

    def __init__(self, scale, frame):
        super().__init__()
        self.net[-1] = torch.nn.BatchNorm1d(8)
        self.fixed = scale, frame

    def training_step(self, batch, batch_idx):
        x, y = batch
        scale, frame = self.fixed
        return torch.nn.functional.cross_entropy(scale * (self.net(x) @ frame.T) / 0.2, y)


def test_equals_the_head_written_by_hand():
    labels = [y for _, y in loader().dataset]
    scale = torch.tensor([3 * labels.count(c) / len(labels) for c in range(3)])
    frame = simplex_etf(3, 8, torch.Generator().manual_seed(0))
    module, twin = make_toy(cls=Stock), make_toy(cls=ByHandGELA, scale=scale, frame=frame)
    for one in (module, twin):
        fit(one)
    torch.testing.assert_close(module.net[0].weight, twin.net[0].weight, rtol=1e-5, atol=1e-6)
    x = toy_data(10).tensors[0]
    torch.testing.assert_close(module.eval()(x), twin.eval().net(x) @ frame.T / 0.2, rtol=1e-5, atol=1e-5)


def test_every_client_scales_by_its_own_task(tmp_path):
    stream = toy_stream(partition="label_dirichlet")
    module = make_toy(cls=Net)
    report = federate(module, tmp_path, stream, clients_per_round=4)
    assert report.method == "FedGELA"
    assert module.find_head().scale is None
    for (task, client), scale in module.scales.items():
        labels = torch.tensor([int(y) for _, y in stream.train_loader(task, client).dataset])
        assert torch.equal(scale, class_scale(torch.bincount(labels, minlength=3)))


def test_the_frame_neither_learns_nor_travels(tmp_path):
    module, plain = make_toy(cls=Stock), make_toy()
    frame = module.find_head().weight.clone()
    sent = [federate(one, tmp_path / str(i)).bytes_up for i, one in enumerate((module, plain))]
    assert torch.equal(module.find_head().weight, frame)
    old, new = 8 * 3 + 3, 4 * 8  # weight and bias; BatchNorm's weight, bias, mean and variance
    updates = 2 * 2 * 3
    counter = 8  # num_batches_tracked
    assert sent[0] - sent[1] == updates * (4 * (new - old) + counter)


def test_evaluation_sees_the_global_head():
    module = make_toy(cls=Stock)
    x = toy_data(10).tensors[0]
    module.eval()
    unscaled = module(x)
    module.find_head().scale = torch.tensor([2.0, 1.0, 0.0])
    assert torch.equal(module(x), unscaled)
    assert (module.train()(x)[:, 2] == 0).all()


def test_a_batch_of_one_example_trains():
    module = make_toy(cls=Stock).train()
    x = toy_data(1).tensors[0]
    torch.testing.assert_close(module(x), make_toy(cls=Stock).eval()(x))
    assert module.find_head().norm.num_batches_tracked == 0


def test_learns(tmp_path):
    report = federate(make_toy(cls=Stock), tmp_path, toy_stream(tasks=1), rounds=3, local_epochs=3)
    assert report.accuracy[0, 0] > 0.8


class Narrow(FedGELA, ToyModule):
    feature_module = "net.0"  # six inputs, eight outputs


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (Stock, {"gela_temperature": 0.0}, "`gela_temperature` must be finite and positive, got 0.0"),
        (Narrow, {}, "at least as many inputs, got Linear"),
    ],
)
def test_bad_arguments(cls, arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        cls(**arguments)
