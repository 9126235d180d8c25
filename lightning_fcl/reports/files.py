"""Files of a run folder: written whole or not at all, tables with one record per line."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from numbers import Integral
from pathlib import Path

from torch import Tensor

Cell = int | float | str
Row = Mapping[str, Cell]
LONGEST_TEXT = 2_000  # characters; a client's error can quote a whole tensor


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Name the file and the way out in every ``OSError`` of the block; its ``errno`` and class stay.

    Args:
        path: File or folder that the block writes.

    Raises:
        OSError: With one clear line, e.g. for a full disk or a read-only folder.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno, f"cannot write `{path}`: {reason}. Free space there, or pass a writable `run_dir`."
        ) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file by temporary file and rename, so that a reader sees the old file or the new one, never half.

    Args:
        path: File to make or replace; its folder must exist.
        data: Content.

    Raises:
        OSError: If the folder cannot be written; an old file is then intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of UTF-8 text; a lone surrogate, as in undecodable file names, is written as an escape."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def cell_text(value: Cell) -> str:
    r"""One cell of a table: floats as the shortest text that reads back to the same double, text on one line.

    Example:
        >>> cell_text(0.1), cell_text(3), cell_text("two\nlines")
        ('0.1', '3', 'two lines')
    """
    if isinstance(value, str):
        return " ".join(value.splitlines())[:LONGEST_TEXT]
    return str(int(value)) if isinstance(value, Integral) else repr(float(value))


def csv_line(cells: Iterable[Cell]) -> str:
    r"""One record as one line of CSV.

    Example:
        >>> csv_line([1, 0.5, "a,b"])
        '1,0.5,"a,b"\n'
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([cell_text(cell) for cell in cells])
    return buffer.getvalue()


def accuracy_lines(names: Sequence[str], matrix: Tensor) -> list[str]:
    r"""The lines of ``accuracy.csv``: a header, then a row per stage up to the last one measured.

    Args:
        names: Names of the evaluation sets, one per column.
        matrix: Scores, shape ``(T, len(names))``, any float dtype; NaN becomes an empty cell.

    Raises:
        ValueError: If the matrix has another number of columns than there are names.

    Example:
        >>> import torch
        >>> accuracy_lines(["a", "b"], torch.tensor([[0.5, torch.nan], [torch.nan, torch.nan]]))
        ['task,a,b\n', '0,0.5,\n']
    """
    if matrix.ndim != 2 or matrix.shape[1] != len(names):
        raise ValueError(f"`matrix` must have a column for each of {len(names)} names, got {list(matrix.shape)}.")
    measured = (~matrix.isnan()).any(dim=1).nonzero().flatten().tolist()
    stages = matrix[: measured[-1] + 1].tolist() if measured else []
    rows = [[task, *("" if score != score else score for score in scores)] for task, scores in enumerate(stages)]
    return [csv_line(["task", *names]), *(csv_line(row) for row in rows)]


def read_table(path: Path, limit: int | None = None) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file; nothing for a file that is not there.

    Args:
        path: CSV file with a header.
        limit: Rows to read at most; later lines are not looked at, so a torn last line does no harm.

    Returns:
        The column names, and per row its non-empty cells by column name.
    """
    if not path.exists():
        return [], []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        rows = [{k: v for k, v in zip(columns, row, strict=False) if v} for row in islice(reader, limit)]
    return columns, rows
