"""What a server callback sends down: every client gets it, it is counted, resumes and two ranks send the same."""

from pathlib import Path

import pytest
import torch

from lightning_fcl import ClassAnchors, DualBranchMixin
from lightning_fcl.callbacks import ContinualCallback, ServerCallback
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer


class Sender(ServerCallback):
    """Sends how many rounds it has seen, and the global weights' sum."""

    def __init__(self):
        self.rounds = 0

    def on_round_start(self, trainer, pl_module):
        self.rounds += 1
        self.total = sum(p.detach().sum() for p in pl_module.parameters())

    def broadcast(self, trainer):
        return {"rounds": torch.tensor(self.rounds), "total": self.total.view(1)}

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state_dict):
        self.rounds = state_dict.get("rounds", 0)


class Receiver(ContinualCallback):
    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        self.seen.append((trainer.client, trainer.broadcast["Sender"]["rounds"].item()))

    def on_task_end(self, trainer, pl_module):
        assert trainer.broadcast == {}  # nothing is sent in a boundary pass


def test_every_client_of_a_round_gets_it_and_it_is_counted(tmp_path):
    receiver = Receiver()
    trainer = toy_trainer(tmp_path / "a", server_callbacks=Sender(), callbacks=receiver)
    sent = trainer.fit(make_toy(), toy_stream(tasks=1))
    assert [rounds for _, rounds in receiver.seen] == [1, 1, 1, 2, 2, 2]
    plain = toy_trainer(tmp_path / "b", server_callbacks=ServerCallback()).fit(make_toy(), toy_stream(tasks=1))
    assert sent.bytes_down - plain.bytes_down == (8 + 4) * 3 * 2
    assert sent.bytes_up == plain.bytes_up


def test_only_tensors_are_sent(tmp_path):
    class Wrong(ServerCallback):
        def broadcast(self, trainer):
            return {"text": "hello"}

    with pytest.raises(TypeError, match=r"`broadcast` of .*Wrong' must return tensors, got str for 'text'"):
        toy_trainer(tmp_path, server_callbacks=Wrong()).fit(make_toy(), toy_stream(tasks=1))


class Dual(DualBranchMixin, ToyModule):
    pass


class Stop(ServerCallback):
    """Ends the run in round ``at`` before anything is committed."""

    needs_weights = False
    at: int | None = None

    def on_after_aggregate(self, trainer, pl_module):
        if trainer.state.global_round == self.at:
            raise KeyboardInterrupt


def fit_dual(run_dir, **options):
    module = make_toy(cls=Dual, dual_share_local=False, batch_norm=True, dropout=0.2)
    anchors = ClassAnchors(steps=4, lr=0.2, mean=None, gate=0, warm_steps=2)
    trainer = toy_trainer(run_dir, server_callbacks=[anchors, Stop()], **options)
    report = trainer.fit(module, toy_stream(examples=48), ckpt_path="auto")
    return {**state_of(module), "down": torch.tensor(report.bytes_down)}


def test_resumed_runs_send_the_same(tmp_path, monkeypatch):
    whole = fit_dual(tmp_path / "whole")
    monkeypatch.setattr(Stop, "at", 3)
    with pytest.raises(KeyboardInterrupt):
        fit_dual(tmp_path / "killed")
    monkeypatch.undo()
    assert_same_bits(whole, fit_dual(tmp_path / "killed"))
    first, second = ((tmp_path / name / "metrics.csv").read_bytes() for name in ("whole", "killed"))
    assert first == second


@pytest.mark.distributed
def test_two_ranks_send_what_one_sends(ranks, tmp_path):
    alone = fit_dual(tmp_path / "one")
    for state in ranks.run(fit_on_ranks, str(tmp_path / "two")):
        assert_same_bits(alone, state)
    first, second = ((tmp_path / name / "metrics.csv").read_bytes() for name in ("one", "two"))
    assert first == second


def fit_on_ranks(run_dir: str):
    return fit_dual(Path(run_dir), devices=2, strategy="ddp")
