"""ModalityDrift: norms by group against the previous task's weights, weighted ones by the task's Fisher, no effect."""

import copy
import csv

import pytest
import torch

from lightning_fcl import EWC, ModalityEWC
from lightning_fcl.callbacks import ContinualCallback, ModalityDrift
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import classification_log_likelihood
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
        return [row for row in csv.DictReader(file) if row["phase"] == "train"]


def test_drift_is_the_norm_of_the_move_since_the_last_task(tmp_path):
    norms = Norms()
    trainer = toy_trainer(tmp_path, callbacks=[ModalityDrift(GROUPS), norms])
    trainer.fit(make_toy(), toy_stream(examples=64))
    logged = [float(row["client/drift/vision"] or "nan") for row in rows(tmp_path)]
    assert all(value != value for value in logged[:2])  # the first task has no anchor
    wanted = [sum(norms.seen[1, round]) / 3 for round in range(2)]
    assert logged[2:] == pytest.approx(wanted, rel=1e-5)


class WeightedNorms(ContinualCallback):
    """The weighted ones, from gradients taken one example at a time in float64."""

    def __init__(self):
        self.kept, self.seen = {}, {}

    def state_dict(self):
        return self.kept

    def load_state_dict(self, state_dict):
        self.kept = dict(state_dict)

    def on_task_end(self, trainer, pl_module):
        x, y = (torch.cat(part) for part in zip(*trainer.train_dataloader, strict=True))
        net, squares = copy.deepcopy(pl_module.net).double(), {}
        for one, label in zip(x.double(), y, strict=True):
            net.zero_grad()
            net(one[None]).log_softmax(1)[0, label].backward()
            for name, p in net.named_parameters():
                squares[name] = squares.get(name, 0) + p.grad**2 / len(y)
        self.kept = {f"fisher.{n}": f.float() for n, f in squares.items()}
        self.kept |= {f"anchor.{n}": p.detach().clone() for n, p in pl_module.net.named_parameters()}

    def on_train_end(self, trainer, pl_module):
        if self.kept:
            moves = {n: p.detach() - self.kept[f"anchor.{n}"] for n, p in pl_module.net.named_parameters()}
            price = sum((self.kept[f"fisher.{n}"] * m**2).sum() for n, m in moves.items() if n.startswith("2."))
            self.seen.setdefault((trainer.task, trainer.round), []).append(price.sqrt().item())


@pytest.mark.parametrize("methods", [[], ["EWC"], ["ModalityEWC"]])
def test_weighted_drift_is_a_fisher_norm_whatever_the_method(tmp_path, methods):
    """Beside importances with a mean of 1 too, and beside none at all."""
    made = {"EWC": lambda: EWC(1.0), "ModalityEWC": lambda: ModalityEWC(0.1, groups=GROUPS, normalise="per_group")}
    slow = WeightedNorms()
    drift = ModalityDrift(GROUPS, log_likelihood=classification_log_likelihood)
    trainer = toy_trainer(tmp_path, callbacks=[*(made[name]() for name in methods), drift, slow])
    trainer.fit(make_toy(), toy_stream(examples=64))
    logged = [float(row["client/drift/language_weighted"] or "nan") for row in rows(tmp_path)]
    assert all(value != value for value in logged[:2])  # in the first task there is nothing to drift from
    assert logged[2:] == pytest.approx([sum(slow.seen[1, round]) / 3 for round in range(2)], rel=1e-4)


def test_without_a_likelihood_nothing_is_weighted_or_measured(tmp_path):
    trainer = toy_trainer(tmp_path, callbacks=[EWC(1.0), drift := ModalityDrift(GROUPS)])
    trainer.fit(make_toy(), toy_stream())
    assert "client/drift/language_weighted" not in rows(tmp_path)[-1]
    assert drift.state_dict() == {}


def test_it_changes_no_weight(tmp_path):
    plain, watched = make_toy(dropout=0.5), make_toy(dropout=0.5)
    groups = {"vision": "net.0.*", "language": "net.3.*"}
    drift = ModalityDrift(groups, log_likelihood=classification_log_likelihood)
    toy_trainer(tmp_path / "plain", callbacks=[EWC(1.0)]).fit(plain, toy_stream())
    toy_trainer(tmp_path / "watched", callbacks=[drift, EWC(1.0)]).fit(watched, toy_stream())
    assert_same_bits(state_of(plain), state_of(watched))


def test_parameters_in_no_group_are_listed(tmp_path):
    trainer = toy_trainer(tmp_path, callbacks=[ModalityDrift({"vision": "net.0.*"})])
    with pytest.raises(MisconfigurationError, match=r"net\.2\.weight"):
        trainer.fit(make_toy(), toy_stream())
