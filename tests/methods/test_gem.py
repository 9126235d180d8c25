"""GEM and A-GEM: the quadratic program against all its corners, what is projected, and that no exemplar travels."""

import copy
import itertools

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics import Accuracy

from lightning_fcl import AGEM, GEM
from lightning_fcl.callbacks import ContinualCallback
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import agem_project, gem_project, nonnegative_minimum
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.quadratics import server_tree
from tests.helpers.toy import ManualModule, ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
number = st.floats(-3, 3).map(lambda value: round(value, 2))


def vectors(count, size):
    return st.lists(st.lists(number, min_size=size, max_size=size), min_size=count, max_size=count)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


# -- the maths --------------------------------------------------------------------------------------------------------


def corners(gram, linear, lower):
    """Every choice of entries at the bound, each solved; the best one that is feasible."""
    best, price = None, float("inf")
    size = len(linear)
    for free in itertools.product([False, True], repeat=size):
        v = torch.full((size,), lower, dtype=torch.float64)
        mask = torch.tensor(free)
        if mask.any():
            rhs = -linear[mask] - gram[mask][:, ~mask] @ v[~mask]
            v[mask] = torch.linalg.lstsq(gram[mask][:, mask], rhs[:, None], driver="gelsd").solution[:, 0]
        value = 0.5 * v @ gram @ v + linear @ v
        if (v >= lower - 1e-9).all() and value < price - 1e-12:
            best, price = v, value
    return best, price


@settings(max_examples=40)
@given(rows=st.integers(1, 4).flatmap(lambda t: vectors(t + 1, 4)), margin=st.sampled_from([0.0, 0.5]))
def test_projection_is_the_best_corner(rows, margin):
    gradient, memories = double(rows[0]), double(rows[1:])
    found = gem_project(gradient, memories, margin)
    if (memories @ gradient >= 0).all():
        assert torch.equal(found, gradient)
        return
    best, _ = corners(memories @ memories.T, memories @ gradient, margin)
    torch.testing.assert_close(found, gradient + memories.T @ best, rtol=1e-6, atol=1e-6)


@given(rows=vectors(4, 5))
def test_no_stored_loss_rises(rows):
    gradient, memories = double(rows[0]), double(rows[1:])
    found = gem_project(gradient, memories)
    products = memories @ found
    assert (products >= -1e-10 * (1 + memories.norm() * gradient.norm())).all()
    assert found.norm() <= gradient.norm() + 1e-9


def test_oracle_values():
    """Baselines 5.4 and 5.5."""
    up = double([[0.0, 1.0]])
    assert gem_project(double([1.0, -1.0]), up).tolist() == [1.0, 0.0]
    assert gem_project(double([1.0, -0.1]), up, margin=0.5).tolist() == pytest.approx([1.0, 0.4])
    assert agem_project(double([1.0, -1.0]), double([0.0, 2.0])).tolist() == [1.0, 0.0]
    both = double([[1.0, 0.0], [0.0, 1.0]])
    gradient = double([-1.0, 3.0])
    assert gem_project(gradient, both).tolist() == [0.0, 3.0]
    assert agem_project(gradient, both.mean(0)).tolist() == [-1.0, 3.0]


@given(rows=vectors(2, 4))
def test_agem_leaves_a_right_angle(rows):
    gradient, reference = double(rows[0]), double(rows[1])
    found = agem_project(gradient, reference)
    assert found.norm() <= gradient.norm() + 1e-12
    if gradient @ reference < 0:
        assert abs(found @ reference) < 1e-9
    else:
        assert torch.equal(found, gradient)


def test_singular_and_small_problems():
    """Twin and vanishing memories; gradients so small that a ridge of 1e-3 would hide them."""
    twins = double([[0.0, 1e-6], [0.0, 1e-6], [0.0, 0.0]])
    torch.testing.assert_close(gem_project(double([1e-6, -1e-6]), twins), double([1e-6, 0.0]))
    assert gem_project(double([1.0]), torch.zeros(0, 1).double()).tolist() == [1.0]
    assert nonnegative_minimum(torch.zeros(0, 0).double(), torch.zeros(0).double()).tolist() == []
    with pytest.raises(ValueError, match="`memories` must have shape"):
        gem_project(torch.zeros(2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="`reference` must have the shape"):
        agem_project(torch.zeros(2), torch.zeros(3))


# -- in a stock Trainer -----------------------------------------------------------------------------------------------


class Sees(L.Callback):
    """The gradient before and behind a method that stands between two of them."""

    def __init__(self):
        self.gradients = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(torch.cat([p.grad.reshape(-1).clone() for p in pl_module.parameters()]))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("method", [GEM(16, margin=0.0), AGEM(16, batch_size=16)], ids=["GEM", "A-GEM"])
def test_steps_with_the_projected_gradient(method, accumulate):
    """Against the same projection by hand, on the stored examples as one batch, at the weights of the step."""
    method, module = copy.deepcopy(method), make_toy()
    make_trainer([method], max_epochs=1).fit(module, loader())
    (stored,) = method.exemplars.tasks
    assert [len(t) for t in stored] == [16, 16]
    weights = []

    class Weights(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            weights.append(state_of(pl_module))

    before, after = Sees(), Sees()
    callbacks = [before, method, after, Weights()]
    make_trainer(callbacks, max_epochs=2, accumulate_grad_batches=accumulate).fit(module, loader(shift=-4.0))
    changed = 0
    for old, new, at in zip(before.gradients, after.gradients, weights, strict=True):
        twin = make_toy()
        twin.load_state_dict(at)
        nn.functional.cross_entropy(twin(stored[0]), stored[1]).backward()
        memory = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
        wanted = gem_project(old, memory[None]) if isinstance(method, GEM) else agem_project(old, memory)
        torch.testing.assert_close(new, wanted, rtol=1e-4, atol=1e-6)
        changed += not torch.equal(old, new)
    assert changed > 0


class Counts(ToyModule):
    """Everything that a pass may leave traces in."""

    def __init__(self, **options):
        super().__init__(batch_norm=True, dropout=0.3, **options)
        self.accuracy = Accuracy("multiclass", num_classes=3)
        self.register_buffer("ema", torch.zeros(6))

    def training_step(self, batch, batch_idx):
        self.accuracy.update(self(batch[0]), batch[1])
        self.ema = 0.5 * self.ema + 0.5 * batch[0].mean(0)
        self.log("seen", self.accuracy)
        self.log_dict({"ema": self.ema.mean()})
        return super().training_step(batch, batch_idx)


class WithoutProjection(AGEM):
    """Takes the gradient on the memory and throws it away."""

    def _project(self, trainer, pl_module, gradient):
        super()._project(trainer, pl_module, gradient)
        return gradient.clone()


@pytest.mark.parametrize("federated", [False, True])
def test_the_pass_over_the_memory_leaves_no_traces(federated, tmp_path):
    ends = []
    for name, callbacks in {"plain": [], "watched": [WithoutProjection(8)]}.items():
        module = make_toy(cls=Counts)
        if federated:
            toy_trainer(tmp_path / name, callbacks=callbacks).fit(module, toy_stream(examples=64))
            logged = [line.split(",") for line in (tmp_path / name / "metrics.csv").read_text().splitlines()]
            logged = [line[1:8] for line in logged if "boundary" not in line]  # what clients logged
        else:
            for shift in (0.0, -2.0):
                trainer = make_trainer(callbacks, max_epochs=2)
                trainer.fit(module, loader(shift=shift))
            logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
        ends.append((state_of(module), logged))
    assert_same_bits(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_protects_an_earlier_task():
    losses = []
    for callbacks in ([], [GEM(64)]):
        module = make_toy(lr=0.05)
        for shift in (0.0, -4.0):
            make_trainer(callbacks, max_epochs=8).fit(module, loader(shift=shift))
        x, y = loader().dataset.tensors
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(module(x), y).item())
    assert losses[1] < 0.7 * losses[0]


# -- in a federation --------------------------------------------------------------------------------------------------


class Inspects(ContinualCallback):
    """Keeps all that leaves a client, and the exemplars that stand beside it."""

    def __init__(self, method):
        self.method, self.sent, self.held = method, [], []

    def on_upload(self, trainer, pl_module, update):
        self.sent.append(
            (sorted(update.tensors), dict(update.extra), {n: t.clone() for n, t in update.tensors.items()})
        )
        self.held.append(copy.deepcopy(self.method.exemplars.tasks))
        return update


@pytest.mark.parametrize("kind", [GEM, AGEM])
def test_no_exemplar_leaves_the_client(kind, tmp_path):
    method = kind(8)
    inspects, module = Inspects(method), make_toy()
    report = toy_trainer(tmp_path, callbacks=[method, inspects]).fit(module, toy_stream())
    names = sorted(dict(module.named_parameters()))
    values = {value for held in inspects.held for x, _ in held for value in x.flatten().tolist()}
    assert len(values) > 100
    for tensors, extra, sent in inspects.sent:
        assert tensors == names  # the weights
        assert extra == {}  # and nothing else,
        assert not values & {v for tensor in sent.values() for v in tensor.flatten().tolist()}  # nor hidden in them
    assert report.bytes_up == 4 * 3 * 4 * (6 * 8 + 8 + 8 * 3 + 3)
    assert "tasks" not in str(server_tree(tmp_path))
    committed = {path.parent.parent.name for path in tmp_path.rglob("*.safetensors") if b'"tasks"' in path.read_bytes()}
    assert committed <= {"clients"}
    assert "raw exemplars, kept on the client" in kind.card.needs


def test_each_client_keeps_its_own(tmp_path):
    method = GEM(8)
    inspects = Inspects(method)
    toy_trainer(tmp_path, callbacks=[method, inspects], clients_per_round=4).fit(make_toy(), toy_stream(tasks=3))
    assert [len(held) for held in inspects.held] == [0] * 8 + [1] * 8 + [2] * 8
    first = [held[0][0] for held in inspects.held[8:12]]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    assert method.exemplars.tasks == []  # given back empty


def test_refusals_and_bad_arguments():
    for arguments in ({"memory_size": -1}, {"batch_size": 0}):
        with pytest.raises(MisconfigurationError, match="must be at least"):
            AGEM(**arguments)
    with pytest.raises(MisconfigurationError, match="`margin` must be finite"):
        GEM(margin=-1.0)
    with pytest.raises(MisconfigurationError, match="Use automatic optimisation"):
        make_trainer([GEM()]).fit(make_toy(cls=ManualModule), loader())
    with pytest.raises(MisconfigurationError, match="gradient scaler"):
        make_trainer([AGEM()], scaler=1024.0).fit(make_toy(), loader())
