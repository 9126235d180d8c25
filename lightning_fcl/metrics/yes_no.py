"""MME and POPE: two tests of general ability by yes and no, read from the files that their authors' tools use."""

import json
from pathlib import Path
from typing import Any

from lightning_fcl.exceptions import DatasetError

MME_PERCEPTION = (
    "existence",
    "count",
    "position",
    "color",
    "posters",
    "celebrity",
    "scene",
    "landmark",
    "artwork",
    "OCR",
)
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")


def mme_scores(folder: str | Path) -> dict[str, float]:
    """Scores of the MME benchmark from a folder of results.

    A sub-task is one file ``<name>.txt`` of lines ``image<TAB>question<TAB>right answer<TAB>model's answer``, two lines
    per image, one after the other. Its score is 100 times the share of right answers, plus 100 times the share of
    images with both answers right: 200 at most.

    Args:
        folder: The folder; sub-tasks without a file are left out.

    Returns:
        The score of each sub-task, and ``perception`` and ``cognition``, the sums over their sub-tasks.

    Raises:
        DatasetError: If there is no such file, or one is malformed.

    Source: Fu et al., "MME: A Comprehensive Evaluation Benchmark for Multimodal Large Language Models", 2023, sec. 2.
    (https://arxiv.org/abs/2306.13394).

    Deviation: None.
    """
    scores = {}
    for name in MME_PERCEPTION + MME_COGNITION:
        file = Path(folder) / f"{name}.txt"
        if file.is_file():
            scores[name] = _mme_score(file)
    if not scores:
        raise DatasetError(f"`folder` must hold MME results such as existence.txt, got none in {str(folder)!r}.")
    sums = {"perception": MME_PERCEPTION, "cognition": MME_COGNITION}
    return scores | {total: sum(scores.get(name, 0.0) for name in names) for total, names in sums.items()}


def _mme_score(file: Path) -> float:
    lines = [line.split("\t") for line in file.read_text(encoding="utf8").splitlines() if line.strip()]
    for number, fields in enumerate(lines, start=1):
        if len(fields) != 4 or fields[2].strip().lower() not in ("yes", "no"):
            raise DatasetError(
                f"{file.name}, line {number}, must be image, question, Yes or No, and the model's answer, with tabs "
                f"between, got {len(fields)} fields."
            )
    pairs = list(zip(lines[::2], lines[1::2], strict=False))
    if len(lines) % 2 or any(first[0] != second[0] for first, second in pairs):
        raise DatasetError(f"{file.name} must hold two questions per image, one after the other.")
    right = [[_mme_answer(fields[3]) == fields[2].strip().lower() for fields in pair] for pair in pairs]
    return 100 * sum(map(sum, right)) / len(lines) + 100 * sum(map(all, right)) / len(pairs)


def _mme_answer(text: str) -> str:
    """Yes or no if the answer starts with it, else the empty string, which is wrong."""
    start = text.strip().lower()[:4]
    return next((word for word in ("yes", "no") if word in start), "")


def pope_scores(questions: str | Path, answers: str | Path) -> dict[str, float]:
    """Scores of the POPE test of object hallucination.

    Args:
        questions: JSON lines with ``question_id``, ``image``, ``text`` and ``label`` (``yes`` or ``no``), such as
            ``coco_pope_random.json``.
        answers: JSON lines with ``answer`` (as POPE's own tool reads them, in the order of the questions) or
            ``question_id`` and ``text`` (as LLaVA writes them). An answer means no if its first sentence holds "no" or
            "not", else yes.

    Returns:
        ``accuracy``, ``precision``, ``recall``, ``f1`` and ``yes_ratio``, from 0 to 1; 0 where nothing can be divided.

    Raises:
        DatasetError: If a row is malformed or an answer is missing.

    Source: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models", EMNLP 2023, sec. 5
    (https://arxiv.org/abs/2305.10355).

    Deviation: None.
    """
    asked, given = _json_lines(Path(questions)), _json_lines(Path(answers))
    by_id = {row["question_id"]: row["text"] for row in given if "text" in row and "question_id" in row}
    texts = [by_id.get(row.get("question_id")) for row in asked] if by_id else [row.get("answer") for row in given]
    if len(texts) != len(asked) or None in texts:
        raise DatasetError(f"`answers` must hold an answer to each of {len(asked)} questions, got {len(given)} rows.")
    if bad := [row for row in asked if row.get("label") not in ("yes", "no")]:
        raise DatasetError(f"`questions` must have the label yes or no in each row, got {bad[0].get('label')!r}.")
    said = [_pope_says_yes(str(text)) for text in texts]
    right = [row["label"] == "yes" for row in asked]
    hits = sum(s and r for s, r in zip(said, right, strict=True))
    precision, recall = _share(hits, sum(said)), _share(hits, sum(right))
    return {
        "accuracy": sum(s == r for s, r in zip(said, right, strict=True)) / len(said),
        "precision": precision,
        "recall": recall,
        "f1": _share(2 * precision * recall, precision + recall),
        "yes_ratio": sum(said) / len(said),
    }


def _pope_says_yes(text: str) -> bool:
    words = text.split(".")[0].replace(",", "").split()
    return not {"No", "no", "not"} & set(words)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DatasetError(f"{str(path)!r} must be a file of JSON lines, got: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{str(path)!r} must hold one JSON object per line, got {len(rows)} rows.")
    return rows


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
