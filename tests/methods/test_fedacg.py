"""FedACG: oracle values, the paper's algorithm on real updates, and what is sent, kept and shown."""

import pytest
import torch

from lightning_fcl.aggregators import FedACG
from lightning_fcl.callbacks import ContinualCallback, FedProx
from lightning_fcl.exceptions import MisconfigurationError
from tests.helpers.server import fit, run_rounds
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer


def test_oracle_values():
    """lambda .85, delta 1: (sent, weights, momentum) is (0, 1, 1), (1.85, 2.85, 1.85), (4.4225, 5.4225, 2.5725)."""
    seen = run_rounds(FedACG(0.85), [1.0] * 3)
    assert [sent for sent, _, _ in seen] == pytest.approx([0.0, 1.85, 4.4225], abs=1e-12)
    assert [theta for _, theta, _ in seen] == pytest.approx([1.0, 2.85, 5.4225], abs=1e-12)
    assert [theta for _, theta, _ in seen] == [shown for _, _, shown in seen]


def test_weights_are_the_mean_of_the_clients():
    """theta + m is what was sent plus the mean delta."""
    for sent, theta, _ in run_rounds(FedACG(0.7), [lambda w: 3.0 - w, lambda w: -1.0 - w, lambda w: 0.5 - w]):
        assert theta in (pytest.approx(3.0), pytest.approx(-1.0), pytest.approx(0.5)), sent


def test_reset_on_task():
    tasks = [0, 0, 1]
    assert run_rounds(FedACG(0.5, reset_on_task=True), [1.0] * 3, tasks=tasks)[2][:2] == (2.5, 3.5)
    assert run_rounds(FedACG(0.5), [1.0] * 3, tasks=tasks)[2][:2] == (3.25, 4.25)


def test_bad_momentum():
    with pytest.raises(MisconfigurationError, match=r"`momentum` must lie in \[0, 1\), got 1"):
        FedACG(1)


# -- in the loop ------------------------------------------------------------------------------------------------------


class Spy(ContinualCallback):
    """What clients start from, what they send, and what the boundary pass measures."""

    def __init__(self):
        self.starts, self.sent, self.boundary = {}, {}, {}

    def on_fit_start(self, trainer, pl_module):
        self.starts[trainer.task, trainer.round] = state_of(pl_module)

    def on_upload(self, trainer, pl_module, update):
        tensors = {n: t.double().clone() for n, t in update.tensors.items()}
        self.sent.setdefault((trainer.task, trainer.round), []).append(tensors)
        return update

    def on_task_end(self, trainer, pl_module):
        self.boundary[trainer.task] = state_of(pl_module)


def test_run_equals_the_papers_server(tmp_path):
    spy, module = Spy(), make_toy()
    trainer = toy_trainer(tmp_path, aggregator=FedACG(0.6), callbacks=[spy], rounds=3)
    trainer.fit(module, toy_stream())
    theta = {n: t.double() for n, t in spy.starts[0, 0].items()}
    momentum = {n: torch.zeros_like(t) for n, t in theta.items()}
    for key in sorted(spy.sent):
        for name in theta:
            sent = (theta[name] + 0.6 * momentum[name]).float().double()
            assert torch.equal(spy.starts[key][name].double(), sent), key
            mean = sum(update[name] - sent for update in spy.sent[key]) / len(spy.sent[key])
            momentum[name] = 0.6 * momentum[name] + mean
            theta[name] = (theta[name] + momentum[name]).float().double()
        if key[1] == 2:  # the task's last round
            assert_same_bits(spy.boundary[key[0]], {n: t.float() for n, t in theta.items()})
    assert_same_bits(state_of(module), {n: t.float() for n, t in theta.items()})


def test_the_clients_half_pulls_to_what_was_sent(tmp_path):
    """The pull keeps clients near what they were sent, so the run stays nearer to where it began."""
    free = fit(tmp_path / "a", FedACG(0.85))
    pulled = fit(tmp_path / "b", FedACG(0.85), callbacks=[FedProx(5.0)])
    start = state_of(make_toy(batch_norm=True))

    def distance(end):
        return sum((end[n] - start[n]).square().sum() for n in start if n.endswith(("weight", "bias")))

    assert distance(pulled) < 0.7 * distance(free)
