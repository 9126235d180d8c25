"""Clients that are one task behind (FedCMM, table IV): in the stream, so for every method alike."""

import torch

from lightning_fcl import EWC, EmbeddingReplay
from lightning_fcl.callbacks import ContinualCallback
from lightning_fcl.data import LabelDirichlet, drawn_events, event_stream
from lightning_fcl.mixins import EmbeddingForwardMixin
from tests.helpers.toy import ToyModule, make_toy, toy_stream, toy_trainer


class Toy(EmbeddingForwardMixin, ToyModule):
    """A plain classifier with a way in for embeddings."""


class Diary(ContinualCallback):
    """What each client trained on, and with the memory of how many tasks."""

    def __init__(self, replay, ewc):
        self.replay, self.ewc = replay, ewc
        self.saw, self.kept = {}, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.saw.setdefault((trainer.task, trainer.client), []).append(batch[0].mean().item())

    def on_train_end(self, trainer, pl_module):
        self.kept[trainer.task, trainer.client] = len(self.replay.generators), bool(self.ewc.importance)


def test_who_lags_trains_on_the_task_before_with_the_memory_of_the_one_before_that(tmp_path):
    """The toy's task t is shifted by 1.5 t, so that the mean of what a client sees tells which task it is."""
    replay, ewc = EmbeddingReplay(), EWC(1.0)
    diary = Diary(replay, ewc)
    stream = toy_stream(tasks=3, clients=3, examples=90).stages(lag=0.34)
    on_time = toy_stream(tasks=3, clients=3, examples=90)
    behind = [c for c in range(3) if stream.plan.schedule[2][c] != on_time.plan.schedule[2][c]]
    assert len(behind) == 1
    trainer = toy_trainer(tmp_path, rounds=1, callbacks=[ewc, replay, diary])
    trainer.fit(make_toy(cls=Toy), stream)
    base = {c: torch.tensor(diary.saw[0, c]).mean().item() for c in range(3)}
    for client in range(3):
        late = client in behind
        for stage in range(3):
            task = max(stage - late, 0)
            seen = torch.tensor(diary.saw[stage, client]).mean().item()
            assert round((seen - base[client]) / 1.5) == task
            # Each boundary adds the client's own data of the stage: of the task before, or of the one before that.
            assert diary.kept[stage, client] == (stage, stage > 0)


def test_a_third_of_ten_clients_is_behind_in_the_paper_s_setting():
    posts = drawn_events(20, 2)
    shares = LabelDirichlet(0.5, min_examples=1)
    together, lagging = (event_stream(posts, partition=shares, lag=lag) for lag in (0.0, 0.3))
    for task in range(3):
        late = [c for c in range(10) if lagging.plan.schedule[task][c] != together.plan.schedule[task][c]]
        assert len(late) == (0 if task == 0 else 3)
        assert all(lagging.plan.schedule[task][c] == (task - 1,) for c in late)
    assert lagging.seen(2) == (0, 1, 2)
