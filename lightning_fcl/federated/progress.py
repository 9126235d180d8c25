"""Shows how far a run is: one display on a terminal, a line per round elsewhere."""

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import lightning as L
from typing_extensions import override

from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.reports.tables import duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from lightning_fcl.federated.trainer import FederatedTrainer

_MOST_METRICS = 4  # more do not fit into a line
_LOST_TERMINAL = (OSError, ValueError)  # ValueError: a closed stream, or a character that it cannot show


class ProgressBar(ServerCallback):
    """Progress of a run on rank 0; :class:`~lightning_fcl.FederatedTrainer` adds it unless told not to.

    On a terminal: one display with a row for tasks, rounds and clients, the time left and the latest metrics. It is
    drawn between client jobs, by no thread of its own, and joins a rich display that is already there. Elsewhere, and
    where another display does not share the screen: one line per round on standard error. Losing the terminal does not
    end a run.

    Args:
        refresh_seconds: Least time between two drawings, in seconds.
    """

    needs_weights = False

    def __init__(self, *, refresh_seconds: float = 0.1) -> None:
        self.refresh_seconds = refresh_seconds
        self._display: _Display | None = None
        self._started: float | None = None
        self._rounds = 0
        self._latest: dict[str, float] = {}

    @override
    def on_round_start(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self._started is None:
            self._started = time.monotonic()
            self._display = _open_display(self.refresh_seconds)
        self._draw(trainer, clients=0)

    @override
    def on_client_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        if self._display is not None:
            ranks = trainer.fabric.world_size if trainer.parallel == "clients" else 1
            self._draw(trainer, clients=self._display.clients + ranks)

    @override
    def on_round_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        if self._started is None:
            return
        self._rounds += trainer.state.phase == "train"
        metrics = _headlines(trainer.state.metrics)
        self._latest.update(metrics)
        if self._display is not None:
            self._draw(trainer, clients=len(trainer.state.sampled), ended=1)
            return
        left = self._left(trainer)
        parts = [*_position(trainer), *_metric_texts(metrics), f"{left} left" if left else ""]
        with suppress(*_LOST_TERMINAL):
            print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    @override
    def on_fit_end(self, trainer: "FederatedTrainer", pl_module: L.LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: "FederatedTrainer", pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        """Leave the last picture on the screen and be ready for another run."""
        if self._display is not None:
            with suppress(*_LOST_TERMINAL):
                self._display.bars.stop()
        self._display, self._started, self._rounds, self._latest = None, None, 0, {}

    def _draw(self, trainer: "FederatedTrainer", *, clients: int, ended: int = 0) -> None:
        if self._display is None:
            return
        left = self._left(trainer)
        notes = [f"{left} left" if left else "", "  ".join(_metric_texts(self._latest))]
        with suppress(*_LOST_TERMINAL):
            self._display.draw(trainer, clients, ended, notes)

    def _left(self, trainer: "FederatedTrainer") -> str:
        """Time that the remaining rounds take if they take as long as those of this process; empty if unknown."""
        if not self._rounds or self._started is None:
            return ""
        state = trainer.state
        rounds = trainer.rounds_of(state.task)
        here = rounds if trainer.should_stop else min(state.round + 1, rounds)
        remaining = trainer.total_rounds - sum(map(trainer.rounds_of, range(state.task))) - here
        return duration((time.monotonic() - self._started) / self._rounds * remaining) if remaining > 0 else ""


class _Display:
    """The rows of a rich display: tasks, rounds, clients.

    Args:
        bars: Not started; it starts here.
        refresh_seconds: Least time between two drawings, in seconds.
    """

    def __init__(self, bars: "Progress", refresh_seconds: float) -> None:
        self.bars = bars
        self.refresh_seconds = refresh_seconds
        self.rows: list[TaskID] = [bars.add_task(name, total=0, note="") for name in ("tasks", "rounds", "clients")]
        bars.start()
        self.clients = 0
        self._drawn = -float("inf")

    def draw(self, trainer: "FederatedTrainer", clients: int, ended: int, notes: list[str]) -> None:
        """Show the position, with ``ended`` = 1 once the current round is over."""
        state = trainer.state
        rounds, sampled = trainer.rounds_of(state.task), len(state.sampled)
        self.clients = min(clients, sampled)
        done = rounds if trainer.should_stop else min(state.round + ended, rounds)
        values = [(state.task + (ended and done == rounds), _tasks(trainer)), (done, rounds), (self.clients, sampled)]
        notes = [*notes, "boundary pass" if state.phase == "boundary" else ""]
        for row, (completed, total), note in zip(self.rows, values, notes, strict=True):
            self.bars.update(row, completed=completed, total=total, note=note)
        now = time.monotonic()
        if now - self._drawn >= self.refresh_seconds:
            self._drawn = now
            self.bars.refresh()


def _open_display(refresh_seconds: float) -> _Display | None:
    """A started display on rich's own console, where Lightning's and other displays are too; ``None`` for lines."""
    import rich
    from rich.errors import LiveError
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    try:
        console = rich.get_console()
        if not console.file.isatty() or console.is_dumb_terminal or console.is_jupyter:
            return None
        one_line: Any = {"markup": False, "table_column": Column(no_wrap=True, overflow="ellipsis")}
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", **one_line),
        ]
        return _Display(Progress(*columns, console=console, auto_refresh=False), refresh_seconds)
    except (LiveError, *_LOST_TERMINAL):  # before 14.1, rich has only one display at a time
        return None


def _tasks(trainer: "FederatedTrainer") -> int:
    return 1 if trainer.fast_dev_run or trainer.stream is None else len(trainer.stream)


def _position(trainer: "FederatedTrainer") -> list[str]:
    state, rounds = trainer.state, trainer.rounds_of(trainer.state.task)
    place = f"round {state.round + 1}/{rounds}" if state.phase == "train" else "boundary pass"
    clients = f"clients {len(state.completed)}/{len(state.sampled)}"
    return [f"task {state.task + 1}/{_tasks(trainer)}", place, clients]


def _headlines(metrics: dict[str, float]) -> dict[str, float]:
    """The round's score, if it was evaluated, then what clients logged; without the prefix of the tag."""
    tags = [tag for prefix in ("round/", "client/", "loss/") for tag in metrics if tag.startswith(prefix)]
    shown = [tag for tag in tags if tag != "round/clients"][:_MOST_METRICS]
    return {tag.split("/", 1)[1]: metrics[tag] for tag in shown}


def _metric_texts(metrics: dict[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in list(metrics.items())[:_MOST_METRICS]]
