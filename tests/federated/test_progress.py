"""ProgressBar: exact lines where there is no terminal, one display where there is one, and never in the way."""

import csv
import io
import itertools
import os
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress

from lightning_fcl.callbacks import EWC, RoundEarlyStopping, ServerCallback
from lightning_fcl.federated import progress
from lightning_fcl.federated.progress import ProgressBar
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

SHOW_CURSOR, CONTROL = "\x1b[?25h", re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class FailingModule(ToyModule):
    """Fails in the third round, unless mended."""

    mended = False

    def on_train_start(self):
        if self.trainer.global_round == 2 and not self.mended:
            raise RuntimeError("boom")


class Terminal:
    """A pseudo-terminal of 100 columns; what is written to ``file`` ends in ``shown``."""

    def __init__(self):
        self.master, slave = os.openpty()
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self.shown = b""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        while True:
            try:
                chunk = os.read(self.master, 4096)
            except OSError:  # the other end is closed
                return
            if not chunk:
                return
            self.shown += chunk

    def text(self):
        self.file.close()
        self.reader.join(timeout=10)
        os.close(self.master)
        return self.shown.decode()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()
    console = Console(file=screen.file, width=100)
    monkeypatch.setattr("rich.get_console", lambda: console)
    screen.console = console
    return screen


@pytest.fixture
def clock(monkeypatch):
    """Ten seconds pass between any two looks at the clock."""
    times = itertools.count(0, 10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))


def fit(run_dir, module=None, *, tasks=2, **options):
    module = module or make_toy()
    trainer = toy_trainer(run_dir, **{"enable_progress_bar": True, "eval_every": 1, **options})
    report = trainer.fit(module, toy_stream(tasks=tasks), ckpt_path="auto")
    return module, report


def rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def places(capsys):
    return [line.partition("  clients")[0] for line in capsys.readouterr().err.splitlines()]


def plain(text):
    """What a reader sees, one entry per line, in the order of drawing."""
    return [line.strip() for line in CONTROL.sub("", text).replace("\r", "\n").splitlines() if line.strip()]


def test_lines_say_where_the_run_is(tmp_path, capsys, clock):
    fit(tmp_path)
    loss, score = (
        [f"{float(row[tag]):.4g}" for row in rows(tmp_path)] for tag in ("client/train_loss", "round/val_acc")
    )
    assert capsys.readouterr().err.splitlines() == [
        f"task 1/2  round 1/2  clients 3/3  val_acc {score[0]}  train_loss {loss[0]}  30 s left",
        f"task 1/2  round 2/2  clients 3/3  val_acc {score[1]}  train_loss {loss[1]}  20 s left",
        f"task 2/2  round 1/2  clients 3/3  val_acc {score[2]}  train_loss {loss[2]}  10 s left",
        f"task 2/2  round 2/2  clients 3/3  val_acc {score[3]}  train_loss {loss[3]}",
    ]


def test_each_line_is_flushed(tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(raw, 1 << 20), write_through=False))
    seen = []

    class Look(ServerCallback):
        def on_round_start(self, trainer, pl_module):
            seen.append(raw.getvalue().count(b"\n"))

    fit(tmp_path, server_callbacks=Look())
    assert seen == [0, 1, 2, 3]


def test_a_boundary_pass_has_a_line_of_its_own(tmp_path, capsys):
    fit(tmp_path, tasks=1, callbacks=EWC(strength=1.0))
    _, second, boundary = capsys.readouterr().err.splitlines()
    assert boundary.startswith("task 1/1  boundary pass  clients 4/4")
    assert "left" not in second


def test_a_lost_client_is_counted(tmp_path, capsys):
    class Lost(ToyModule):
        def on_train_start(self):
            if self.trainer.client == 1:
                raise RuntimeError("gone")

    with pytest.warns(UserWarning, match="gone"):
        fit(tmp_path, make_toy(cls=Lost), tasks=1, rounds=1, clients_per_round=4, on_client_error="skip")
    assert "clients 3/4" in capsys.readouterr().err


def test_early_stopping_leaves_no_time_for_the_task(tmp_path, capsys, clock):
    stop = RoundEarlyStopping("round/val_acc", patience=1, min_delta=1.0)  # improves once, from nothing
    fit(tmp_path, rounds=9, server_callbacks=stop)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("  clients")[0] for line in lines] == [
        f"task {task}/2  round {round}/9" for task in (1, 2) for round in (1, 2)
    ]
    assert [line.rpartition("  ")[2] for line in lines[:3]] == ["2 min 50 s left", "1 min 30 s left", "1 min 20 s left"]
    assert not lines[3].endswith("left")


def test_a_resumed_run_goes_on_where_it_was(tmp_path, capsys):
    module = make_toy(cls=FailingModule)
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, module)
    assert places(capsys) == ["task 1/2  round 1/2", "task 1/2  round 2/2"]
    module.mended = True
    fit(tmp_path, module)
    assert places(capsys) == ["task 2/2  round 1/2", "task 2/2  round 2/2"]


def test_one_display_on_a_terminal(tmp_path, terminal, capsys):
    fit(tmp_path)
    shown = terminal.text()
    *_, tasks, rounds, clients = plain(shown)
    last = rows(tmp_path)[-1]
    score, loss = (f"{float(last[tag]):.4g}" for tag in ("round/val_acc", "client/train_loss"))
    assert re.fullmatch(r"tasks +━+ 2/2", tasks)
    assert re.fullmatch(rf"rounds +━+ 2/2 val_acc {score}  train_loss {loss}", rounds)
    assert re.fullmatch(r"clients +━+ 3/3", clients)
    assert shown.endswith(f"\n{SHOW_CURSOR}")
    assert capsys.readouterr().err == ""


def test_every_step_is_drawn_if_asked(tmp_path, terminal):
    fit(tmp_path, tasks=1, rounds=1, enable_progress_bar=False, server_callbacks=ProgressBar(refresh_seconds=0))
    counts = [line.rpartition(" ")[2] for line in plain(terminal.text()) if line.startswith("clients")]
    assert [count for count, _ in itertools.groupby(counts)] == ["0/0", "0/3", "1/3", "2/3", "3/3"]


def test_an_error_closes_the_display(tmp_path, terminal):
    before = sys.stdout, sys.stderr
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, make_toy(cls=FailingModule))
    assert (sys.stdout, sys.stderr) == before
    with Progress(console=terminal.console, auto_refresh=False) as another:
        assert another.live.is_started
    assert terminal.text().count(SHOW_CURSOR) == 2


def test_a_name_is_no_markup_and_does_not_break_the_line(tmp_path, terminal):
    class Odd(ToyModule):
        def training_step(self, batch, batch_idx):
            self.log("[red]" + "x" * 200, 1.0)
            return super().training_step(batch, batch_idx)

    fit(tmp_path, make_toy(cls=Odd))
    shown = plain(terminal.text())
    assert any("[red]xxx" in line for line in shown)
    assert max(map(len, shown)) <= 100


def test_it_joins_a_display_that_is_there_already(tmp_path, terminal, capsys):
    with Progress(console=terminal.console, auto_refresh=False) as outer:
        outer.add_task("outer", total=2)
        _, report = fit(tmp_path)
        assert outer.live.is_started
    assert report.summary["acc"] > 0
    shown = plain(terminal.text())
    assert any(line.startswith("outer") for line in shown)
    assert capsys.readouterr().err == ""


def test_lines_where_rich_allows_one_display_only(tmp_path, terminal, capsys, monkeypatch):
    def refuse(self):
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Progress, "start", refuse)
    fit(tmp_path)
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert terminal.text() == ""


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_lines_on_a_terminal_that_cannot_move_its_cursor(tmp_path, terminal, capsys, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    fit(tmp_path, tasks=1)
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert terminal.text() == ""


def test_progress_changes_no_result(tmp_path, terminal):
    with_bar, _ = fit(tmp_path / "with")
    terminal.text()
    without, _ = fit(tmp_path / "without", enable_progress_bar=False)
    assert_same_bits(state_of(with_bar), state_of(without))
    assert (tmp_path / "with" / "metrics.csv").read_bytes() == (tmp_path / "without" / "metrics.csv").read_bytes()


def test_it_listens_to_no_hook_that_makes_the_run_work_more():
    assert not {"on_fit_start", "on_after_aggregate", "on_task_end"} & vars(ProgressBar).keys()


def test_a_lost_standard_error_does_not_end_the_run(tmp_path, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert fit(tmp_path)[1].summary["acc"] > 0


def test_a_lost_terminal_does_not_end_the_run(tmp_path, terminal):
    class Lose(ServerCallback):
        def on_round_end(self, trainer, pl_module):
            terminal.file.close()

    assert fit(tmp_path, server_callbacks=Lose())[1].summary["acc"] > 0
    terminal.text()


def test_other_ranks_are_silent(capsys, terminal):
    trainer = SimpleNamespace(is_global_zero=False)
    bar = ProgressBar()
    bar.on_round_start(trainer, None)
    bar.on_client_end(trainer, None)
    bar.on_round_end(trainer, None)
    bar.on_exception(trainer, None, RuntimeError())
    assert terminal.text() + "".join(capsys.readouterr()) == ""


def test_one_bar_serves_several_runs(tmp_path, capsys, clock):
    bar = ProgressBar()
    for name in ("one", "two"):
        torch.manual_seed(0)
        fit(tmp_path / name, enable_progress_bar=False, server_callbacks=bar)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == lines[4:]
