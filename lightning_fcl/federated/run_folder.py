"""The tables of a run folder: appended as the run goes, cut back to the last committed round on a resume."""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from torch import Tensor

from lightning_fcl.exceptions import CheckpointError
from lightning_fcl.reports.files import (
    Row,
    accuracy_lines,
    cell_text,
    csv_line,
    explain_write_errors,
    read_table,
    write_text,
)

METRICS: Final = "metrics.csv"
TIMING: Final = "timing.csv"
FAILURES: Final = "failures.csv"
ACCURACY: Final = "accuracy.csv"
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    METRICS: ("global_round", "task", "round", "phase"),
    TIMING: ("global_round", "seconds", "train", "aggregate", "evaluate", "commit", "server"),
    FAILURES: ("global_round", "task", "round", "client", "phase", "reason", "detail"),
    ACCURACY: ("task",),
}


class RunFolder:
    """Writes ``metrics.csv``, ``timing.csv``, ``failures.csv`` and ``accuracy.csv`` of one run.

    Every row is on its way to the disk when the call returns. Floats are written so that they read back to the same
    double. :meth:`lengths` belongs into a checkpoint and :meth:`cut` undoes what came after it, so that a resumed run
    leaves the same bytes as an unbroken one.

    Args:
        path: The run folder; made if it is not there, with its parents.
        enabled: Whether this process writes. Only rank 0 should; elsewhere every call does nothing.

    Raises:
        OSError: If the folder cannot be made or written; the message names the file. Any method may raise it.

    Example:
        >>> folder = RunFolder(getfixture("tmp_path") / "run")
        >>> folder.append_metrics({"global_round": 0, "task": 0, "round": 0, "phase": "train", "round/loss": 0.1})
        >>> print((folder.path / "metrics.csv").read_text().strip())
        global_round,task,round,phase,round/loss
        0,0,0,train,0.1
    """

    def __init__(self, path: str | os.PathLike[str], *, enabled: bool = True) -> None:
        self.path = Path(path)
        self.enabled = enabled
        self._columns: dict[str, list[str]] = {}
        self._rows: dict[str, int] = {}
        if not enabled:
            return
        with explain_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        for file, columns in COLUMNS.items():
            if not (self.path / file).exists():
                write_text(self.path / file, csv_line(columns))
            self._load(file)

    def append_metrics(self, row: Row) -> None:
        """Add a round to ``metrics.csv``; a metric that was never seen before makes the table wider.

        Args:
            row: ``global_round``, ``task``, ``round``, ``phase`` (``"train"`` or ``"boundary"``), and metrics by tag.

        Raises:
            ValueError: If one of the four first columns is missing.
        """
        if missing := [name for name in COLUMNS[METRICS] if name not in row]:
            raise ValueError(f"`row` must hold {', '.join(COLUMNS[METRICS])}, got none for {', '.join(missing)}.")
        row = {cell_text(name): value for name, value in row.items()}
        if self.enabled and (new := [name for name in row if name not in self._columns[METRICS]]):
            columns = [*self._columns[METRICS], *new]
            self._write(METRICS, columns, _lines(columns, read_table(self.path / METRICS)[1]))
        self._append(METRICS, row)

    def append_timing(self, row: Row) -> None:
        """Add a round to ``timing.csv``.

        Args:
            row: ``global_round``, and wall times in seconds: ``seconds`` in all, of which ``train``, ``aggregate``,
                ``evaluate``, ``commit``, and ``server`` (server callbacks before the clients start). A part that did
                not happen may be left out.

        Raises:
            ValueError: If ``row`` holds another column.
        """
        self._append(TIMING, row)

    def append_failure(self, row: Row) -> None:
        """Add a lost or refused update to ``failures.csv``.

        Args:
            row: ``global_round``, ``task``, ``round``, ``client``, ``phase``, ``reason`` (a short name to group by),
                ``detail`` (free text, written on one line).

        Raises:
            ValueError: If ``row`` holds another column.
        """
        self._append(FAILURES, row)

    def write_accuracy(self, names: Sequence[str], matrix: Tensor) -> None:
        """Write ``accuracy.csv`` anew: a row per stage up to the last one measured, an empty cell for NaN.

        Args:
            names: Names of the evaluation sets, one per column.
            matrix: Scores, shape ``(T, len(names))``, any float dtype.

        Raises:
            ValueError: If the matrix has another number of columns than there are names.
        """
        if not self.enabled:
            return
        self._write(ACCURACY, ["task", *names], accuracy_lines(names, matrix)[1:])

    def lengths(self) -> dict[str, int]:
        """Rows per file, all of them safely on the disk; keep it in the checkpoint of the round.

        Returns:
            Number of rows by file name, without the header; empty where ``enabled`` is false.
        """
        for file in self._rows:
            with explain_write_errors(self.path / file), (self.path / file).open("rb") as handle:
                os.fsync(handle.fileno())
        return dict(self._rows)

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Drop all rows after those counted in ``lengths``, and the metrics that only the dropped rows had.

        Args:
            lengths: What :meth:`lengths` returned; a file that it does not name loses all rows, so ``cut({})``
                starts a run afresh.

        Raises:
            CheckpointError: If a file holds fewer rows than the checkpoint knows of; no file is changed then.
        """
        if not self.enabled:
            return
        for file, found in self._rows.items():
            if found < lengths.get(file, 0):
                raise CheckpointError(
                    f"`{self.path / file}` must hold the {lengths[file]} rows of the checkpoint, got {found}. "
                    "Restore the file, or start a new run from these weights in another `run_dir`."
                )
        for file, first in COLUMNS.items():
            length = lengths.get(file, 0)
            if length == 0:
                self._write(file, first, [])
            elif file == METRICS:
                _, rows = read_table(self.path / file, length)
                used = {name for row in rows for name in row}.union(first)
                columns = [name for name in self._columns[file] if name in used]
                self._write(file, columns, _lines(columns, rows))
            else:
                with (self.path / file).open(encoding="utf-8", errors="replace", newline="\n") as table:
                    _, *lines = islice(table, length + 1)
                self._write(file, self._columns[file], lines)

    def _append(self, file: str, row: Row) -> None:
        if unknown := [name for name in row if name not in self._columns.get(file, row)]:
            raise ValueError(f"`row` must use the columns {', '.join(COLUMNS[file])}, got {', '.join(unknown)}.")
        if not self.enabled:
            return
        path = self.path / file
        with explain_write_errors(path), path.open("a", encoding="utf-8", errors="backslashreplace", newline="") as out:
            out.writelines(_lines(self._columns[file], [row]))
        self._rows[file] += 1

    def _write(self, file: str, columns: Sequence[str], lines: Sequence[str]) -> None:
        write_text(self.path / file, csv_line(columns) + "".join(lines))
        self._columns[file], self._rows[file] = list(columns), len(lines)

    def _load(self, file: str) -> None:
        columns, rows = read_table(self.path / file)
        if columns[: len(COLUMNS[file])] != [*COLUMNS[file]]:
            raise CheckpointError(
                f"`{self.path / file}` must start with the columns {', '.join(COLUMNS[file])}, got "
                f"{', '.join(columns) or 'an empty file'}. It is not of this version; pass another `run_dir`."
            )
        self._columns[file], self._rows[file] = columns, len(rows)


def _lines(columns: Sequence[str], rows: Iterable[Row]) -> list[str]:
    return [csv_line(row.get(name, "") for name in columns) for row in rows]
