"""MOON: the oracle and laws of the model-contrastive loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import model_contrastive_loss
from lightning_fcl.mixins import MOON
from tests.helpers.distillation import double, gradient, mean
from tests.helpers.mixins import ByHand, Teacher, assert_close, federate, fit
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

few = settings(max_examples=25)
vectors = st.lists(st.floats(0.1, 5) | st.floats(-5, -0.1), min_size=3, max_size=3)
triples = st.lists(st.tuples(vectors, vectors, vectors), min_size=1, max_size=4)


def cosine(a, b):
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def formula(triples, temperature):
    losses = []
    for own, server, previous in triples:
        near, far = (math.exp(cosine(own, other) / temperature) for other in (server, previous))
        losses.append(-math.log(near / (near + far)))
    return mean(losses)


@few
@given(triples=triples, temperature=st.floats(0.2, 2))
def test_matches_the_formula(triples, temperature):
    found = model_contrastive_loss(*map(double, zip(*triples, strict=True)), temperature).item()
    assert found == pytest.approx(formula(triples, temperature), rel=1e-9)


def test_by_hand():
    """All alike: ln 2. Cosines 1 and -1 at 0.5: 0.01815 (baselines 3.8)."""
    ahead, behind = double([[1.0, 2.0]]), double([[-1.0, -2.0]])
    assert model_contrastive_loss(ahead, ahead, ahead).item() == pytest.approx(math.log(2))
    assert model_contrastive_loss(ahead, ahead, behind).item() == pytest.approx(0.01815, abs=1e-5)


@few
@given(triples=triples)
def test_two_others_that_agree_give_no_gradient(triples):
    own, server, _ = zip(*triples, strict=True)
    found = gradient(lambda u: model_contrastive_loss(u, double(server), double(server)), own)
    assert found.abs().max() < 1e-15


@few
@given(triples=triples, factor=st.floats(0.5, 3))
def test_lengths_do_not_matter(triples, factor):
    own, server, previous = map(double, zip(*triples, strict=True))
    found = model_contrastive_loss(factor * own, server, previous)
    torch.testing.assert_close(found, model_contrastive_loss(own, server, previous))


def test_features_without_a_direction_give_no_nan():
    nothing = [[0.0, 0.0]]
    found = gradient(lambda u: model_contrastive_loss(u, double([[1, 0]]), double([[0, 1]])), nothing)
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "temperature", "message"),
    [((1, 3), 0.5, r"must be of one shape \(B, d\)"), ((1, 2), -1.0, "`temperature` must be positive")],
)
def test_bad_input(shape, temperature, message):
    with pytest.raises(ValueError, match=message):
        model_contrastive_loss(torch.ones(1, 2), torch.ones(shape), torch.ones(1, 2), temperature)


# -- shell ------------------------------------------------------------------------------------------------------------


class Net(MOON, ToyModule):
    """Notes the last model at the start of each job, and the weights at its end."""

    def on_train_start(self):
        super().on_train_start()
        self.had = [*getattr(self, "had", []), dict(self._moon_previous.weights)]

    def on_train_end(self):
        super().on_train_end()
        job = (self.trainer.client, {n: p.detach().clone() for n, p in self.named_parameters()})
        self.left = [*getattr(self, "left", []), job]


def test_equals_the_term_written_by_hand():
    """In a stock Trainer: the last model is the end of the last fit, the server's the start of this one."""
    module, twin = make_toy(cls=Stock, batch_norm=True), make_toy(cls=ByHand, batch_norm=True)
    twin.total = lambda loss, *_: loss + math.log(2)
    for one in (module, twin):
        fit(one)
    own = Teacher(twin)
    for one in (module, twin):  # the server merged in another client
        with torch.no_grad():
            one.net[0].weight.mul_(0.5)
    server = Teacher(twin)
    twin.total = lambda loss, x, y, features, _: (
        loss + model_contrastive_loss(features, server.features(x), own.features(x))
    )
    for one in (module, twin):
        fit(one, shift=1.0)
    assert_close(module, twin)


class Stock(MOON, ToyModule):
    pass


def test_every_client_is_given_its_own_last_model(tmp_path):
    module = make_toy(cls=Net)
    report = federate(module, tmp_path, clients_per_round=2, rounds=3)
    assert report.method == "MOON"
    last = {}
    for had, (client, left) in zip(module.had, module.left, strict=True):
        assert_same_bits(had, last.get(client, {}))
        last[client] = left
    assert len(module.had) > len(last)  # somebody came back
    assert module._moon_previous.weights == {}  # nobody's model stays behind


def test_a_clients_first_round_is_fedavgs(tmp_path):
    """Its last model would be the server's: a constant term."""
    module, plain = make_toy(cls=Stock), make_toy()
    for one, name in ((module, "moon"), (plain, "plain")):
        federate(one, tmp_path / name, toy_stream(tasks=1), rounds=1)
    assert_same_bits(state_of(module), state_of(plain))


def test_a_dry_run_leaves_no_last_model():
    module = make_toy(cls=Stock)
    fit(module, fast_dev_run=True)
    assert module._moon_previous.weights == {}
    fit(module)
    assert module._moon_previous.weights.keys() == dict(module.named_parameters()).keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"moon_strength": -1.0}, "`moon_strength` must be finite and not negative, got -1.0"),
        ({"moon_temperature": 0.0}, "`moon_temperature` must be finite and positive, got 0.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        Stock(**arguments)
