"""What FCIT asks beside the stream: unseen tasks, general ability, each activation; once, and of finished runs too."""

import json
import math

import pytest
import torch

from lightning_fcl import FederatedTrainer
from lightning_fcl.data.fcit import fcit_stream, unseen_sets
from lightning_fcl.functional.subspace_lora import ACTIVATIONS
from lightning_fcl.models import subspace_layers
from lightning_fcl.reports import FCIT, RunReport, compare
from lightning_fcl.suites.fcit import fcit_module, fcit_rules, uplink
from lightning_fcl.suites.fcit_scores import HeldOut, ablate_activation, fcit_table

pytest.importorskip("transformers")
from tests.helpers.llava import save_random_llava

TASKS = ["odd", "same"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llava(tmp_path_factory.mktemp("llava"))


def make(folder, method="disco", **options):
    return fcit_module(method, folder, stages=2, rank=2, lr=5e-2, dropout=0.0, max_new_tokens=1, **options)


def make_trainer(run_dir, module, method="disco"):
    return FederatedTrainer(
        rounds=1, clients_per_round=2, accelerator="cpu", devices=1, run_dir=run_dir, score="val_acc",
        enable_progress_bar=False, measure_baseline=False, **fcit_rules(method, module, threshold=0.5),
    )  # fmt: skip


def stream():
    return fcit_stream(tasks=TASKS, train_size=24, test_size=6, clients=2, batch_size=8)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """A run of DISCO: its trainer, its module and its report."""
    module, run_dir = make(folder), tmp_path_factory.mktemp("runs") / "disco"
    trainer = make_trainer(run_dir, module)
    return trainer, module, trainer.fit(module, stream())


def test_unseen_tasks_are_those_that_the_stream_leaves_out():
    assert list(unseen_sets(["relation", "tallest"], test_size=2))[:2] == ["parity", "caption"]
    assert len(unseen_sets(fcit_stream(train_size=20, test_size=1, clients=2).names, test_size=1)) == 4
    assert unseen_sets(["general", "chart", "math", "other"], test_size=2) == {}
    assert [row["task"] for row in unseen_sets(TASKS, test_size=2)["box"]] == ["box", "box"]


def test_unseen_tasks_of_a_folder(tmp_path):
    row = '{"id": "1", "image": "a.png", "conversations": [{"from": "human", "value": "<image>\\nWhat?"}, '
    row += '{"from": "gpt", "value": "A"}]}\n'
    import numpy as np
    from PIL import Image

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / name / "a.png")
        for part in ("train", "test"):
            (tmp_path / name / f"{part}.jsonl").write_text(row)
    assert list(unseen_sets(["two"], tmp_path)) == ["one"]
    assert unseen_sets(["one", "two"], tmp_path) == {}


def test_figures_are_measured_once_with_the_routing_and_the_start_once_for_all(finished, folder, monkeypatch):
    trainer, module, report = finished
    starts = []

    def start():
        starts.append(make(folder, "zero-shot"))
        return starts[-1]

    held_out = HeldOut(TASKS, start, size=4, batch_size=4)
    routed = []
    monkeypatch.setattr(
        module, "factors", lambda batch: routed.append(type(module).factors(module, batch)) or routed[-1]
    )
    figures = held_out.figures(report, trainer, module)
    assert len(routed) == len(held_out.stream) == 11
    assert all(row.shape == (4, 2) for row in routed)
    tasks = [value for name, value in figures.items() if name.startswith("unseen ") and name != "unseen before"]
    assert len(tasks) == 10
    assert figures["unseen"] == pytest.approx(sum(tasks) / 10)
    assert held_out.scores(trainer, starts[0])["general"] == figures["general before"]
    assert json.loads((report.run_dir / "figures.json").read_text()) == figures
    monkeypatch.setattr(held_out, "scores", None)  # a finished run is not scored again
    assert held_out.figures(RunReport.load(report.run_dir), trainer, module) == figures
    assert len(starts) == 1


def test_a_run_that_was_finished_before_is_scored_from_its_last_commit(finished, folder):
    trainer, module, report = finished
    again = make(folder)
    resumed = make_trainer(trainer.run_dir, again)
    report_again = resumed.fit(again, stream(), "auto")
    assert report_again.accuracy.equal(report.accuracy)
    assert report_again.wall_seconds == RunReport.load(trainer.run_dir).wall_seconds == report.wall_seconds
    held_out = HeldOut(TASKS, lambda: make(folder, "zero-shot"), size=4, batch_size=4)
    assert held_out.scores(resumed, again) == held_out.scores(trainer, module)


def test_training_does_not_depend_on_the_activation_and_each_scores_the_same_weights(finished, folder, tmp_path):
    trainer, module, report = finished
    other = make(folder, routing_activation="argmax")
    make_trainer(tmp_path / "argmax", other).fit(other, stream())
    for name, layer in subspace_layers(module).items():
        for one, two in zip(layer.bank, subspace_layers(other)[name].bank, strict=True):
            assert torch.equal(one, two)
    assert torch.equal(module.subspace_tokens, other.subspace_tokens)
    reports = ablate_activation(trainer, module, stream())
    assert [r.method for r in reports] == [f"DISCO, {name}" for name in ACTIVATIONS]
    assert [r.run_dir.name for r in reports] == [f"disco-{name}" for name in ACTIVATIONS]
    assert module.routing_activation == "softmax"
    torch.testing.assert_close(reports[0].accuracy[0], report.accuracy[-1])
    argmax = RunReport.load(tmp_path / "argmax")
    torch.testing.assert_close(reports[1].accuracy[0], argmax.accuracy[-1])


def test_the_table_has_seeds_and_gaps(finished):
    report = finished[2]
    one = RunReport(run_dir="a", method="X", accuracy=torch.tensor([[0.5]]), names=["x"], seed=0)
    two = RunReport(run_dir="b", method="X", accuracy=torch.tensor([[0.7]]), names=["x"], seed=1)
    table = fcit_table([one, two, report], {one.run_dir: {"unseen": 0.2}, two.run_dir: {"unseen": 0.4}})
    header, first, last = table.splitlines()
    assert header.split() == ["in", "%", "Last", "Avg", "unseen"]
    assert first.split("  ")[0] == "X"
    assert "60.0 ± 14.1" in first
    assert "30.0 ± 14.1" in first
    assert last.split()[-1] == "-"


def test_bytes_up_are_one_slot_and_a_token(finished):
    _, module, report = finished
    sizes = uplink(module, 8)
    assert sizes["slot"] == sum(p.numel() * 4 for p in module.parameters() if p.requires_grad)
    assert sizes["token"] == 4 * module.subspace_tokens.shape[1] + 8
    assert sizes["here"] == sizes["slot"] + sizes["token"]
    assert report.bytes_up == 2 * 2 * sizes["here"]  # two rounds of two clients
    assert sizes["published"] > 8 * sizes["slot"]


def test_the_papers_figures_stand_beside_ours(finished):
    text = str(compare([finished[2]], FCIT["hom", "task"]))
    assert "DISCO (paper)" in text
    assert "56.2" in text
    assert FCIT["het", "activation"].rows["DISCO, argmax"]["acc"] == pytest.approx(0.6288)
    assert all(math.isfinite(x) for table in FCIT.values() for row in table.rows.values() for x in row.values())
