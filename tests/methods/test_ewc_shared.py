"""EWC in a federation: local or shared importance, and what fades."""

import pytest
import torch

from lightning_fcl import EWC
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import fisher_diagonal
from lightning_fcl.functional.likelihood import classification_log_likelihood
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.quadratics import Parabola, fit, server_tree
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
CURVES, TARGETS = (1.0, 2.0, 0.5), (0.0, 1.0, -1.0)


def minus_loss(module, batch):
    return -module.loss(batch)


def oracle(*, strength, shared, decay, tasks=3, rounds=2, lr=0.05, steps=10):
    """One example per client, so F_i = (a (w - b))^2; all quadratics of all tasks are kept apart."""
    weight, kept, path = 0.0, [[] for _ in CURVES], []
    for _ in range(tasks):
        for _ in range(rounds):
            ends = []
            for i, (a, b) in enumerate(zip(CURVES, TARGETS, strict=True)):
                y = weight
                for _ in range(steps):
                    pull = sum(strength * fisher * (y - there) for fisher, there in kept[i])
                    y -= lr * (a * (y - b) + pull)
                ends.append(y)
            weight = sum(ends) / len(ends)
            path.append(weight)
        fishers = [(a * (weight - b)) ** 2 for a, b in zip(CURVES, TARGETS, strict=True)]
        mean = sum(fishers) / len(fishers)
        for i, fisher in enumerate(fishers):
            kept[i] = [(decay * old, there) for old, there in kept[i]] + [(mean if shared else fisher, weight)]
    return path


@pytest.mark.parametrize(("shared", "decay"), [(False, 1.0), (True, 1.0), (True, 0.5)])
def test_equals_the_papers_loop(shared, decay, tmp_path):
    callback = EWC(0.4, shared=shared, decay=decay, log_likelihood=minus_loss)
    options = {"curves": CURVES, "targets": TARGETS, "tasks": 3, "rounds": 2, "module": Parabola(lr=0.05)}
    records, _ = fit(tmp_path, callback, **options)
    assert records.weights == pytest.approx(oracle(strength=0.4, shared=shared, decay=decay), abs=1e-6)
    assert (tmp_path / "clients").exists() != shared  # what all share is kept once, on the server


def test_shared_importance_is_that_of_all_data(tmp_path):
    """Baselines 5.1: the mean of the clients' Fishers, weighted by examples, is the pooled one; the anchor is exact."""
    module, stream = make_toy(), toy_stream(tasks=1)
    report = toy_trainer(tmp_path, callbacks=[EWC(1.0, shared=True)]).fit(module, stream)
    (served,) = server_tree(tmp_path)["downloads"].values()
    batches = [batch for client in range(4) for batch in stream.train_loader(0, client)]
    for name, pooled in fisher_diagonal(module, classification_log_likelihood, batches).items():
        torch.testing.assert_close(served[f"importance/{name}"], pooled, rtol=1e-5, atol=1e-9)
    assert_same_bits({n: served[f"anchor/{n}"] for n in state_of(module)}, state_of(module))
    payload = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    assert report.bytes_up == 2 * 3 * payload + 4 * 2 * payload  # two rounds, then the boundary pass of all four


def test_memory_last_replaces_what_is_shared(tmp_path):
    module = make_toy()
    toy_trainer(tmp_path, callbacks=[EWC(0.001, shared=True, memory="last")]).fit(module, toy_stream())
    (served,) = server_tree(tmp_path)["downloads"].values()
    assert_same_bits({n: served[f"anchor/{n}"] for n in state_of(module)}, state_of(module))


def test_bad_arguments():
    with pytest.raises(MisconfigurationError, match="`decay` must be between 0 and 1"):
        EWC(decay=1.5)
    with pytest.raises(MisconfigurationError, match=r"`EWC\(shared=True\)` must run in a FederatedTrainer"):
        make_trainer([EWC(shared=True)]).fit(make_toy(), loader())
