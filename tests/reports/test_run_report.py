"""RunReport: its figures, strict JSON there and back, what it prints, and what it refuses."""

import json
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_fcl.reports import RunReport
from tests.helpers.reports import HOSTILE, NAN, make_report

SCORES = [[0.80, 0.05, NAN], [0.60, 0.85, 0.10], [0.50, 0.90, 0.70]]
PUBLIC = {
    *("method", "summary", "accuracy", "names", "score", "seen", "baseline", "seed", "wall_seconds"),
    *("bytes_up", "bytes_down", "peak_memory_bytes", "versions", "config"),
}


def strict(text):
    """JSON as other languages read it: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def full_report(run_dir):
    return make_report(
        run_dir,
        SCORES,
        method="EWC",
        seed=3,
        names=["a", "b", HOSTILE],
        score="val_acc",
        seen=torch.tensor([[True, False, False], [True, True, False], [True, True, True]]),
        baseline=torch.tensor([0.1, NAN, 0.1], dtype=torch.float64),
        config={"trainer": {"rounds": 2, "lr": NAN}, "net": object(), "path": Path("x"), "ids": (1, np.int64(2))},
        wall_seconds=1.5,
        bytes_up=2**40,
        bytes_down=3,
        peak_memory_bytes=None,
    )


def test_summary_by_hand():
    summary = make_report("run", SCORES).summary
    assert summary["acc"] == pytest.approx((0.5 + 0.9 + 0.7) / 3)
    assert summary["bwt"] == pytest.approx(((0.5 - 0.8) + (0.9 - 0.85)) / 2)
    assert summary["last"] == pytest.approx((0.5 + 0.9 + 0.7) / 3)
    assert summary["avg"] == pytest.approx((0.8 + (0.6 + 0.85) / 2 + (0.5 + 0.9 + 0.7) / 3) / 3)
    assert summary["forgetting"] == pytest.approx(((0.8 - 0.5) + (0.85 - 0.9)) / 2)
    assert summary["worst_drop"] == pytest.approx(0.5 - 0.8)


def test_report_json_is_strict_and_complete(tmp_path):
    full_report(tmp_path).save()
    content = strict((tmp_path / "report.json").read_text())
    assert content.keys() == PUBLIC
    assert content["accuracy"] == [[0.80, 0.05, None], [0.60, 0.85, 0.10], [0.50, 0.90, 0.70]]
    assert content["baseline"] == [0.1, None, 0.1]
    assert content["config"] == {
        "trainer": {"rounds": 2, "lr": None},
        "net": "object",
        "path": "x",
        "ids": [1, 2],
    }
    assert content["summary"].keys() == {"acc", "bwt", "fwt", "last", "avg", "forgetting", "worst_drop"}
    assert content["versions"]["python"] == platform.python_version()


def test_a_saved_report_comes_back_from_wherever_it_lies(tmp_path):
    before = full_report(tmp_path / "run")
    before.save()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    after = RunReport.load(tmp_path / "elsewhere")
    assert after.run_dir == tmp_path / "elsewhere"
    assert torch.equal(after.seen, before.seen)
    for name in ("accuracy", "baseline"):
        torch.testing.assert_close(getattr(after, name), getattr(before, name), rtol=0, atol=0, equal_nan=True)
    assert after.to_dict() == before.to_dict()


@given(st.lists(st.lists(st.floats(0, 1) | st.just(NAN), min_size=3, max_size=3), min_size=1, max_size=4))
def test_scores_keep_their_bits(tmp_path_factory, scores):
    folder = tmp_path_factory.mktemp("run")
    report = make_report(folder, scores)
    (folder / "report.json").write_text(json.dumps(report.to_dict(), allow_nan=False))
    assert torch.equal(RunReport.load(folder).accuracy.nan_to_num(-1), report.accuracy.nan_to_num(-1))


def test_it_prints_as_a_table(tmp_path):
    assert str(make_report(tmp_path, score="val_acc")).splitlines() == [
        "FedAvg, seed 0: val_acc in %",
        "         task_0  task_1",
        "after 0    80.0     5.0",
        "after 1    60.0    85.0",
        "acc 72.5  bwt -20.0  fwt 5.0  last 72.5  avg 76.2  forgetting 20.0  worst_drop -20.0",
        f"run folder: {tmp_path}",
    ]


def test_scores_that_are_no_fractions_stay_as_they_are(tmp_path):
    text = str(make_report(tmp_path, [[-120.5]], score="reward"))
    assert "reward in %" not in text
    assert "-120.500" in text


def test_accuracy_csv_has_an_empty_cell_where_nothing_was_measured(tmp_path):
    full_report(tmp_path).save()
    lines = (tmp_path / "accuracy.csv").read_text().splitlines()
    assert lines[1:] == ["0,0.8,0.05,", "1,0.6,0.85,0.1", "2,0.5,0.9,0.7"]


def test_only_rank_zero_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    make_report(tmp_path / "run").save()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write `.*file/run`: .* pass a writable `run_dir`"):
        make_report(tmp_path / "file" / "run").save()


def test_a_matrix_needs_a_column_per_name():
    with pytest.raises(ValueError, match=r"`accuracy` must have a column for each of 1 names, got \[2, 2\]"):
        make_report("run", names=["a"])


def test_loading_an_unfinished_run_says_how_to_finish_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`run_dir` must hold report.json.*ckpt_path='last'"):
        RunReport.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace('"names"', '"nams"'),
        lambda text: text.replace('"seed"', '"sed"'),
        lambda text: text.replace("0.8,", '"high",'),
    ],
)
def test_loading_an_edited_report_says_so(tmp_path, damage):
    make_report(tmp_path).save()
    path = tmp_path / "report.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match="must be a report of this version"):
        RunReport.load(tmp_path)
