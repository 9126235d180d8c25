"""Suites: every method of the table can be made, a small suite runs, resumes and is refused other sizes."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_fcl.aggregators import Krum
from lightning_fcl.cli import main
from lightning_fcl.data import TaskStream
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.trainer import FederatedTrainer
from lightning_fcl.federated.zero_shot import zero_shot
from lightning_fcl.models import ImageClassifier
from lightning_fcl.reports import FEDADB_SILO, FEDCMM_PHEME, SPECIAL_DIGIT10, RunReport
from lightning_fcl.suites import METHODS, SUITES, Method, Sizes, run_suite
from lightning_fcl.suites import run as running
from tests.helpers.reports import Page
from tests.helpers.toy import ToyModule, make_toy, toy_data, toy_stream, toy_trainer

SMALL = Sizes(clients=3, rounds=1)


def two_toys(clients, seed, data_dir):
    sets = [[toy_data(n, seed=k + t, shift=1.5 * t) for t in range(2)] for n, k in ((36, 0), (30, 100))]
    return TaskStream.from_datasets(*sets, clients=clients, batch_size=8, seed=seed)


TOY = replace(
    SUITES["special"], name="toy", stream=two_toys, module=ToyModule, options=lambda data_dir: {"lr": 0.1},
    local_epochs=1, trainer={"enable_progress_bar": False},
)  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_table_can_be_made(name, tmp_path):
    method = METHODS[name]()
    trainer = FederatedTrainer(
        rounds=1,
        clients_per_round=1,
        aggregator=method.aggregator,
        callbacks=method.callbacks,
        server_callbacks=method.server_callbacks,
        run_dir=tmp_path,
    )
    assert trainer.chain.reducer is not None
    assert isinstance(running._module(SUITES["special"], method, None), ImageClassifier)
    assert METHODS[name]().callbacks is not method.callbacks


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_data_and_a_module_that_fits(name):
    suite = SUITES[name]
    stream = suite.stream(suite.clients, 0, None)
    assert stream.num_clients == suite.clients
    x, y = next(iter(stream.train_loader(0, stream.clients(0)[0])))
    assert suite.module(**suite.options(None))(x).shape == (len(y), 10)
    assert set(suite.leave_out) <= METHODS.keys()
    assert Sizes(scale=1.0).rounds_of(suite) == suite.rounds


def test_a_small_suite_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    names = ["FedAvg", "FedACG"]
    table = run_suite(TOY, out, sizes=SMALL, seeds=2, methods=names)
    assert [(run.method, run.seed) for run in table.runs] == [(m, s) for m in names for s in (0, 1)]
    assert all(run.accuracy.shape == (2, 2) for run in table.runs)
    assert "SPECIAL (paper)" in (out / "comparison.md").read_text()
    Page((out / "comparison.html").read_text()).assert_self_contained()

    monkeypatch.setattr(running, "FederatedTrainer", None)  # nothing is trained again
    again = run_suite(TOY, out, sizes=SMALL, seeds=2, methods=names)
    assert str(again) == str(table)
    monkeypatch.undo()

    (out / "fedacg-seed1" / "report.json").unlink()  # as if it had been stopped after its last commit
    assert str(run_suite(TOY, out, sizes=SMALL, seeds=2, methods=names)) == str(table)

    with pytest.raises(MisconfigurationError, match="`out` must be a new folder, or be run on with what it was begun"):
        run_suite(TOY, out, sizes=Sizes(clients=3, rounds=2), methods=names)


def test_bounds_run_in_the_same_suite(tmp_path):
    names = ["Zero-shot", "Fine-tuning", "Joint", "FedAvg"]
    table = run_suite(TOY, tmp_path, sizes=SMALL, seeds=1, methods=names)
    shapes = {run.method: tuple(run.accuracy.shape) for run in table.runs}
    assert shapes == {"FedAvg": (2, 2), "Zero-shot": (1, 2), "Fine-tuning": (2, 2), "Joint": (1, 2)}
    assert next(iter(shapes)) == "FedAvg"  # which the others are held against, whatever the order of the names
    assert {note.split(",")[0] for note in table.notes} == {"Fine-tuning", "Joint"}


def test_a_refused_method_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(METHODS, "Krum", lambda: Method(aggregator=Krum(3)))
    table = run_suite(TOY, tmp_path / "a", sizes=SMALL, seeds=2, methods=["Krum", "FedAvg"])
    assert list(table.methods) == ["FedAvg"]
    assert capsys.readouterr().err.count("Krum was left out: `Krum` must have at least 9 sampled clients") == 1
    with pytest.raises(MisconfigurationError, match="`methods` must name one that can run in toy, got Krum"):
        run_suite(TOY, tmp_path / "b", sizes=SMALL, seeds=1, methods=["Krum"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda out: run_suite(TOY, out, methods=["FedMagic"]), "`methods` must be some of .*, got 'FedMagic'"),
        (lambda out: run_suite(TOY, out, seeds=0), "`seeds` must be at least 1, got 0"),
        (lambda out: Sizes(clients=0), "`clients` must be at least 1, got 0"),
        (lambda out: Sizes(scale=-1.0), "`scale` must be positive, got -1"),
    ],
)
def test_bad_arguments(make, message, tmp_path):
    with pytest.raises(MisconfigurationError, match=message):
        make(tmp_path)


def test_the_command_runs_a_suite(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "special", TOY)
    words = ["--suite", "special", "--out", "out", "--methods", "[FedAvg,Zero-shot]", "--seeds", "1", "--rounds", "1"]
    assert main(["compare", *words]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("SPECIAL, Digit-10")
    assert "FLwF-2T (paper)" in out
    assert json.loads((tmp_path / "out" / "suite.json").read_text())["rounds"] == 1


def test_zero_shot_is_what_validate_says(tmp_path):
    module, trainer = make_toy(), toy_trainer(tmp_path, method="Zero-shot", seed=4)
    report = zero_shot(trainer, module, toy_stream())
    assert report.accuracy.tolist() == [[m["val_acc"] for m in trainer.validate(module, toy_stream())]]
    assert torch.equal(RunReport.load(tmp_path).accuracy, report.accuracy)
    assert (report.method, report.seed, report.summary["acc"]) == ("Zero-shot", 4, report.accuracy.mean().item())


def test_papers_figures():
    assert SPECIAL_DIGIT10.rows["SR-FDIL"] == {"acc": 0.6163, "bwt": -0.3638, "worst_drop": -0.5276}
    assert FEDADB_SILO.rows["FedADB"]["acc"] - FEDADB_SILO.rows["FedAvg"]["acc"] == pytest.approx(0.0713)  # their 7.13
    assert FEDCMM_PHEME.rows["FedCMM"] == {"acc": 0.863, "bwt": -0.087, "fwt": 0.020}
