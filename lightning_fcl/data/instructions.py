"""Visual instructions in LLaVA's form: read from JSON or JSON lines, checked before training starts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from lightning_fcl._imports import optional_import
from lightning_fcl.data.labels import IntArray
from lightning_fcl.exceptions import DatasetError

Row: TypeAlias = Mapping[str, Any]
IMAGE = "<image>"
_SPEAKERS = ("human", "gpt")
_SUFFIXES = (".jsonl", ".json")


def read_instructions(
    path: str | Path, *, images: str | Path | None = None, decode: bool = True, limit: int | None = None
) -> list[dict[str, Any]]:
    """Read and check a file of visual instructions.

    A row has an ``image`` and ``conversations``: turns ``{"from": "human" | "gpt", "value": text}``, human first, the
    first of them with one ``<image>``. Other keys are kept: ``metric`` says how answers are scored
    (:func:`~lightning_fcl.metrics.score_answers`), ``task`` names the row's task.

    Args:
        path: A ``.json`` file with a list, or a ``.jsonl`` file with one row per line.
        images: Folder that the images' names are relative to; by default the first of the file's folder, its parent and
            the parent's parent that holds the first row's image.
        decode: Open each image in full, which finds truncated ones. ``False`` only looks whether the file is there.
        limit: Most rows to read and check, from the first on; by default all.

    Returns:
        The rows, with ``image`` made an absolute path.

    Raises:
        DatasetError: If a row is malformed or its image missing or damaged; it names the first such row.
        MissingExtraError: If Pillow is not installed (extra ``mllm``).
    """
    file = Path(path)
    rows = _parse(file)[:limit]
    root = Path(images) if images is not None else _image_root(file, rows[0])
    for number, row in enumerate(rows):
        if problem := row_problem(row):
            raise DatasetError(f"{file.name}, row {number + 1} ({_name_of(row)}): {problem}")
        row["image"] = str((root / row["image"]).resolve())
        if problem := _image_problem(row["image"], decode):
            raise DatasetError(f"{file.name}, row {number + 1} ({_name_of(row)}): {problem}")
    return rows


def row_problem(row: Any) -> str | None:
    """What is wrong with the form of a row, as a sentence, or ``None``.

    Example:
        >>> turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "a cat"}]
        >>> row_problem({"image": "cat.jpg", "conversations": turns})
        'the first question must hold `<image>` once, got 0 in "What is it?".'
    """
    if not isinstance(row, Mapping):
        return f"a row must be an object, got {type(row).__name__}."
    turns = row.get("conversations")
    if isinstance(row.get("image"), str | None) and not row.get("image"):
        return "`image` must name a file, got none."
    if not isinstance(turns, Sequence) or not turns or len(turns) % 2:
        return "`conversations` must be a list of questions and answers in turn, got " + (
            f"{len(turns)} turns." if isinstance(turns, Sequence) else f"{type(turns).__name__}."
        )
    for number, turn in enumerate(turns):
        speaker = _SPEAKERS[number % 2]
        if not isinstance(turn, Mapping) or turn.get("from") != speaker:
            said = turn.get("from") if isinstance(turn, Mapping) else turn
            return f"turn {number + 1} must be from {speaker!r}, got {said!r}."
        if not isinstance(turn.get("value"), str) or not turn["value"].replace(IMAGE, "").strip():
            return f"turn {number + 1} must not be empty: {speaker!r} says nothing."
    counts = [str(turn["value"]).count(IMAGE) for turn in turns]
    if counts[0] != 1:
        return f'the first question must hold `{IMAGE}` once, got {counts[0]} in "{turns[0]["value"][:80]}".'
    return f"only the first question may hold `{IMAGE}`." if sum(counts) > 1 else None


def question_of(row: Row) -> str:
    r"""The first question with its format hint, without the image's mark: what DISCO's tokens are computed on.

    Example:
        >>> question_of({"conversations": [{"from": "human", "value": "<image>\nWhat is it?"}]})
        'What is it?'
    """
    return str(row["conversations"][0]["value"]).replace(IMAGE, "").strip()


def answer_of(row: Row) -> str:
    """The answer to the first question."""
    return str(row["conversations"][1]["value"]).strip()


class InstructionDataset(Dataset[dict[str, Any]]):
    """Rows with their pictures, read when asked for.

    Args:
        rows: As :func:`read_instructions` or :func:`~lightning_fcl.data.drawn_instructions` give them: ``image`` is a
            path, a picture or an array ``(H, W, 3)``.
        metric: How answers are scored in rows that do not say so.

    Attributes:
        labels: A number per row that stands for its answer, int64, for partitions by label.

    Raises:
        DatasetError: If a row is malformed.
    """

    def __init__(self, rows: Sequence[Row], *, metric: str = "exact") -> None:
        for number, row in enumerate(rows):
            if problem := row_problem(row):
                raise DatasetError(f"`rows`, row {number + 1} ({_name_of(row)}): {problem}")
        self.rows = [{"metric": metric, **row} for row in rows]
        self.labels: IntArray = np.unique([answer_of(row) for row in rows], return_inverse=True)[1].astype(np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {**row, "image": _opened(row["image"])} if isinstance(row["image"], str) else dict(row)


def as_list(examples: list[Any]) -> list[Any]:
    """A batch that is the list of its rows; the module makes tensors of it, since it knows its processor."""
    return examples


def _parse(file: Path) -> list[Any]:
    if not file.is_file() or file.suffix not in _SUFFIXES:
        raise DatasetError(f"`path` must be a .json or .jsonl file, got {str(file)!r}. Is the path right?")
    try:
        text = file.read_text(encoding="utf8")
        if file.suffix == ".json":
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise DatasetError(f"{file.name} must hold {file.suffix[1:].upper()}, got: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise DatasetError(f"{file.name} must hold a list of rows, got {type(rows).__name__} of none.")
    return rows


def _image_root(file: Path, row: Any) -> Path:
    name = row.get("image") if isinstance(row, Mapping) else None
    folders = [file.parent, *file.resolve().parents[1:3]]
    return next((folder for folder in folders if isinstance(name, str) and (folder / name).is_file()), file.parent)


def _image_problem(path: str, decode: bool) -> str | None:
    if not Path(path).is_file():
        return f"image {path!r} is missing. Pass `images=` if names are relative to another folder."
    try:
        if decode:
            _opened(path)
    except OSError as error:
        return f"image {path!r} cannot be read: {error}"
    return None


def _opened(path: str) -> Any:
    with optional_import("PIL.Image", extra="mllm").open(path) as image:
        return image.convert("RGB")


def _name_of(row: Any) -> str:
    return str(row.get("id", "no id")) if isinstance(row, Mapping) else "no object"
