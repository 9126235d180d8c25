"""RunFolder: what is written, when, and that a cut folder continues to the bytes of an unbroken run."""

import errno
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fcl.exceptions import CheckpointError
from lightning_fcl.federated.run_folder import RunFolder
from lightning_fcl.reports.files import read_table, write_text

FILES = ("metrics.csv", "timing.csv", "failures.csv", "accuracy.csv")


def metrics_row(index: int, **metrics: float) -> dict[str, int | float | str]:
    return {"global_round": index, "task": 0, "round": index, "phase": "train", **metrics}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_new_folder_holds_four_tables_with_only_a_header(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    assert contents(folder.path) == {
        "metrics.csv": b"global_round,task,round,phase\n",
        "timing.csv": b"global_round,seconds,train,aggregate,evaluate,commit,server\n",
        "failures.csv": b"global_round,task,round,client,phase,reason,detail\n",
        "accuracy.csv": b"task\n",
    }
    assert folder.lengths() == dict.fromkeys(FILES, 0)


def test_each_row_is_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics(metrics_row(0, loss=0.1))
    assert (tmp_path / "metrics.csv").read_text() == "global_round,task,round,phase,loss\n0,0,0,train,0.1\n"
    folder.append_timing({"global_round": 0, "seconds": 1.5, "train": 1.0})
    assert (tmp_path / "timing.csv").read_text().splitlines()[1] == "0,1.5,1.0,,,,"
    folder.append_failure(
        {
            "global_round": 0,
            "task": 0,
            "round": 0,
            "client": 3,
            "phase": "train",
            "reason": "error",
            "detail": "a\r\nb,c",
        }
    )
    assert (tmp_path / "failures.csv").read_text().splitlines()[1] == '0,0,0,3,train,error,"a b,c"'


def test_a_new_metric_widens_the_table_and_keeps_old_rows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics(metrics_row(0, b=1.0))
    folder.append_metrics(metrics_row(1, a=2.0))
    folder.append_metrics(metrics_row(2, b=3.0))
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "global_round,task,round,phase,b,a",
        "0,0,0,train,1.0,",
        "1,0,1,train,,2.0",
        "2,0,2,train,3.0,",
    ]


@given(value=st.floats())
def test_floats_read_back_to_the_same_double(value: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.append_metrics(metrics_row(0, x=value))
    _, [row] = read_table(folder.path / "metrics.csv")
    back = float(row["x"])
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_numpy_and_tensor_numbers_are_written_as_plain_numbers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics(metrics_row(0, a=np.float64(0.1), b=np.int64(3), c=torch.tensor(0.5)))  # type: ignore[arg-type]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1] == "0,0,0,train,0.1,3,0.5"


def test_accuracy_has_a_row_per_measured_stage(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    nan = math.nan
    folder.write_accuracy(["task", "b,c", "ß"], torch.tensor([[0.5, nan, nan], [0.25, 1.0, nan], [nan] * 3]))
    assert (tmp_path / "accuracy.csv").read_text(encoding="utf-8") == 'task,task,"b,c",ß\n0,0.5,,\n1,0.25,1.0,\n'
    assert folder.lengths()["accuracy.csv"] == 2


def test_wrong_rows_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="`row` must hold global_round, task, round, phase, got none for task"):
        folder.append_metrics({"global_round": 0, "round": 0, "phase": "train"})
    with pytest.raises(ValueError, match=r"`row` must use the columns .*, got colour"):
        folder.append_timing({"global_round": 0, "colour": 1.0})
    with pytest.raises(ValueError, match="`matrix` must have a column for each of 2 names, got \\[2, 3\\]"):
        folder.write_accuracy(["a", "b"], torch.zeros(2, 3))
    assert contents(tmp_path) == before


def play(folder: RunFolder, events: list[tuple[str, set[str]]], start: int = 0) -> list[dict[str, int]]:
    """Write rounds; returns the lengths after each of them."""
    marks = []
    for index, (kind, tags) in enumerate(events[start:], start):
        folder.append_metrics(metrics_row(index, **dict.fromkeys(sorted(tags), index / 7)))
        folder.append_timing({"global_round": index, "seconds": 0.5})
        if kind == "failure":
            folder.append_failure({"global_round": index, "client": index, "reason": "error", "detail": "x,\ny"})
        if kind == "task":
            matrix = torch.full((len(events), 2), math.nan, dtype=torch.float64)
            matrix[: index + 1, 0] = 1 / 3
            folder.write_accuracy(["task", "naïve name"], matrix)
        marks.append(folder.lengths())
    return marks


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["", "failure", "task"]), st.sets(st.sampled_from("abcde"))), min_size=1, max_size=6
    ),
    data=st.data(),
)
def test_cut_then_replay_equals_an_unbroken_run(
    events: list[tuple[str, set[str]]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    straight = RunFolder(tmp_path_factory.mktemp("straight"))
    marks = [dict.fromkeys(FILES, 0), *play(straight, events)]

    killed_after = data.draw(st.integers(0, len(events)), label="rounds written")
    committed = data.draw(st.integers(0, killed_after), label="rounds committed")
    torn = data.draw(st.sampled_from(["9,0,9,tra", '9,0,9,train,"half a', "\0\0", "\xc3"]))
    path = tmp_path_factory.mktemp("killed")
    play(RunFolder(path), events[:killed_after])
    for file in FILES:
        with (path / file).open("ab") as handle:
            handle.write(torn.encode("latin-1"))

    resumed = RunFolder(path)
    resumed.cut(marks[committed])
    assert resumed.lengths() == marks[committed]
    play(resumed, events, start=committed)
    assert contents(path) == contents(straight.path)


def test_cut_to_nothing_is_a_fresh_folder(tmp_path: Path) -> None:
    folder, fresh = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    play(folder, [("failure", {"x"}), ("task", set())])
    folder.cut({})
    assert contents(folder.path) == contents(fresh.path)


def test_a_file_shorter_than_the_checkpoint_is_refused_before_anything_changes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    play(folder, [("failure", {"x"}), ("", set())])
    lengths = folder.lengths()
    (tmp_path / "timing.csv").write_text("global_round,seconds,train,aggregate,evaluate,commit,server\n0,1.0,,,,,\n")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"timing.csv` must hold the 2 rows of the checkpoint, got 1"):
        RunFolder(tmp_path).cut(lengths)
    assert contents(tmp_path) == before


def test_a_table_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "timing.csv").write_text("round,seconds\n")
    with pytest.raises(CheckpointError, match=r"must start with the columns global_round, seconds.*got round, seconds"):
        RunFolder(tmp_path)


def test_only_an_enabled_folder_writes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", enabled=False)
    play(folder, [("failure", {"x"}), ("task", set())])
    folder.cut({"metrics.csv": 5})
    assert folder.lengths() == {}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["with space", "ünï-код-名", "it's 100% <b>&"])
def test_any_folder_name_works(name: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / name / "run")
    play(folder, [("task", {"x"})])
    assert RunFolder(tmp_path / name / "run").lengths() == folder.lengths()


def test_a_full_disk_names_the_file_and_the_way_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "timing.csv").unlink()
    (tmp_path / "timing.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write `.*timing.csv`: No space left.*Free space") as caught:
        folder.append_timing({"global_round": 0, "seconds": 1.0})
    assert caught.value.errno == errno.ENOSPC


def test_a_failed_rewrite_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt", "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*a.txt"):
        write_text(tmp_path / "a.txt", "new")
    assert contents(tmp_path) == {"a.txt": b"old"}


def test_a_place_that_cannot_be_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="pass a writable `run_dir`"):
        RunFolder(tmp_path / "file" / "run")


def test_a_read_only_place_keeps_its_error_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(PermissionError, match=r"cannot write `.*run`: Permission denied"):
        RunFolder(tmp_path / "run")
