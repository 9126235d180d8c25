"""ModalityDrift: norms by group against the previous task's weights, weighted ones beside EWC, and no effect."""

import csv

import pytest
import torch

from lightning_fcl import EWC
from lightning_fcl.callbacks import ContinualCallback, ModalityDrift
from lightning_fcl.exceptions import MisconfigurationError
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

GROUPS = {"vision": "net.0.*", "language": "net.2.*"}


class Norms(ContinualCallback):
    """The same norms, from the weights themselves."""

    uses_task_anchor = True

    def __init__(self):
        self.seen = {}

    def on_train_end(self, trainer, pl_module):
        if trainer.task_anchor is None:
            return
        moves = [
            (p - trainer.task_anchor[n]).flatten() for n, p in pl_module.named_parameters() if n.startswith("net.0")
        ]
        self.seen.setdefault((trainer.task, trainer.round), []).append(torch.cat(moves).norm().item())


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_drift_is_the_norm_of_the_move_since_the_last_task(tmp_path):
    norms = Norms()
    trainer = toy_trainer(tmp_path, callbacks=[ModalityDrift(GROUPS), norms])
    trainer.fit(make_toy(), toy_stream(examples=64))
    logged = [float(row["client/drift/vision"] or "nan") for row in rows(tmp_path)]
    assert all(value != value for value in logged[:2])  # the first task has no anchor
    wanted = [sum(norms.seen[1, round]) / 3 for round in range(2)]
    assert logged[2:] == pytest.approx(wanted, rel=1e-5)


def test_beside_ewc_it_weighs_by_importance_and_changes_nothing(tmp_path):
    plain, watched = make_toy(), make_toy()
    toy_trainer(tmp_path / "plain", callbacks=[EWC(1.0)]).fit(plain, toy_stream())
    toy_trainer(tmp_path / "watched", callbacks=[EWC(1.0), ModalityDrift(GROUPS)]).fit(watched, toy_stream())
    assert_same_bits(state_of(plain), state_of(watched))
    last = [row for row in rows(tmp_path / "watched") if row["phase"] == "train"][-1]
    assert 0 < float(last["client/drift/language_weighted"]) != float(last["client/drift/language"])


def test_parameters_in_no_group_are_listed(tmp_path):
    trainer = toy_trainer(tmp_path, callbacks=[ModalityDrift({"vision": "net.0.*"})])
    with pytest.raises(MisconfigurationError, match=r"net\.2\.weight"):
        trainer.fit(make_toy(), toy_stream())
