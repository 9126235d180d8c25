import json

import pytest

from lightning_fcl.exceptions import DatasetError
from lightning_fcl.metrics import mme_scores, pope_scores


def write_mme(folder, name, rows):
    (folder / f"{name}.txt").write_text("\n".join("\t".join(row) for row in rows) + "\n", encoding="utf8")


def test_mme_counts_answers_and_pictures(tmp_path):
    write_mme(
        tmp_path,
        "existence",
        [
            ("1.jpg", "Is there a cat?", "Yes", "Yes, there is."),
            ("1.jpg", "Is there a dog?", "No", "no"),
            ("2.jpg", "Is there a cat?", "Yes", "No"),
            ("2.jpg", "Is there a dog?", "No", " No."),
        ],
    )
    write_mme(tmp_path, "OCR", [("3.jpg", "?", "Yes", "I think yes"), ("3.jpg", "?", "No", "No")])
    write_mme(tmp_path, "code_reasoning", [("4.py", "?", "Yes", "yes"), ("4.py", "?", "No", "No")])
    scores = mme_scores(tmp_path)
    assert scores == {
        "existence": 75 + 50,
        "OCR": 50,
        "code_reasoning": 200,
        "perception": 175,
        "cognition": 200,
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("1.jpg", "?", "Yes")], r"existence.txt, line 1, must be image, question.*got 3 fields"),
        ([("1.jpg", "?", "maybe", "Yes")], r"line 1"),
        ([("1.jpg", "?", "Yes", "Yes")], r"must hold two questions per image"),
        ([("1.jpg", "?", "Yes", "Yes"), ("2.jpg", "?", "No", "Yes")], r"must hold two questions per image"),
    ],
)
def test_malformed_mme_files_are_named(tmp_path, rows, message):
    write_mme(tmp_path, "existence", rows)
    with pytest.raises(DatasetError, match=message):
        mme_scores(tmp_path)


def test_no_mme_files(tmp_path):
    with pytest.raises(DatasetError, match=r"`folder` must hold MME results such as existence\.txt"):
        mme_scores(tmp_path)


QUESTIONS = [
    {"question_id": number, "image": "a.jpg", "text": "Is there a cat?", "label": label}
    for number, label in enumerate(["yes", "yes", "no", "no"], start=1)
]


def write_lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf8")
    return path


@pytest.mark.parametrize("layout", ["pope", "llava"])
def test_pope_by_hand(tmp_path, layout):
    said = ["Yes, there is.", "There is no cat. Yes.", "Yes", "I do not see one"]
    if layout == "pope":
        rows = [{"question": "Is there a cat?", "answer": text} for text in said]
    else:
        rows = [{"question_id": number, "text": text} for number, text in reversed(list(enumerate(said, start=1)))]
    files = write_lines(tmp_path / "coco_pope_random.json", QUESTIONS), write_lines(tmp_path / "answers.jsonl", rows)
    expected = {"accuracy": 0.5, "precision": 0.5, "recall": 0.5, "f1": 0.5, "yes_ratio": 0.5}
    assert pope_scores(*files) == pytest.approx(expected)


def test_pope_that_cannot_be_divided(tmp_path):
    files = (
        write_lines(tmp_path / "q.json", QUESTIONS),
        write_lines(tmp_path / "a.jsonl", [{"answer": "no"} for _ in QUESTIONS]),
    )
    assert pope_scores(*files) == {"accuracy": 0.5, "precision": 0.0, "recall": 0.0, "f1": 0.0, "yes_ratio": 0.0}


def test_malformed_pope_files(tmp_path):
    questions = write_lines(tmp_path / "q.json", QUESTIONS)
    with pytest.raises(DatasetError, match="`answers` must hold an answer to each of 4 questions, got 1 rows"):
        pope_scores(questions, write_lines(tmp_path / "a.jsonl", [{"answer": "yes"}]))
    with pytest.raises(DatasetError, match="must hold one JSON object per line, got 0 rows"):
        pope_scores(questions, write_lines(tmp_path / "a.jsonl", []))
    with pytest.raises(DatasetError, match="must be a file of JSON lines, got"):
        pope_scores(questions, tmp_path / "nothing.jsonl")
    bad = write_lines(tmp_path / "bad.json", [{"label": "maybe"}])
    with pytest.raises(DatasetError, match="`questions` must have the label yes or no in each row, got 'maybe'"):
        pope_scores(bad, write_lines(tmp_path / "a.jsonl", [{"answer": "yes"}]))
