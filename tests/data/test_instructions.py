import json

import numpy as np
import pytest
from PIL import Image

from lightning_fcl.data.instructions import InstructionDataset, answer_of, question_of, read_instructions
from lightning_fcl.exceptions import DatasetError


def row(**changes):
    turns = [{"from": "human", "value": "<image>\nWhat is it?\nOne word."}, {"from": "gpt", "value": "cat"}]
    return {"id": "a", "image": "images/a.png", "conversations": turns} | changes


def said(*values, speakers=("human", "gpt") * 3):
    return row(conversations=[{"from": who, "value": text} for who, text in zip(speakers, values, strict=False)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    Image.fromarray(np.full((20, 30, 3), 7, dtype=np.uint8)).save(tmp_path / "images" / "a.png")
    return tmp_path


def write(folder, rows, name="train.jsonl"):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
    file.write_text(text, encoding="utf8")
    return file


@pytest.mark.parametrize("name", ["train.json", "train.jsonl", "task/train.jsonl"])
def test_rows_are_read_with_their_pictures(folder, name):
    rows = read_instructions(write(folder, [row(), row(id="b", metric="iou")], name))
    data = InstructionDataset(rows)
    assert [len(data), data[0]["image"].size, data[0]["metric"], data[1]["metric"]] == [2, (30, 20), "exact", "iou"]
    assert question_of(data[0]) == "What is it?\nOne word."
    assert answer_of(data[0]) == "cat"


def test_labels_number_the_answers():
    rows = [said("<image> Is it?", answer) | {"image": np.zeros((2, 2, 3), np.uint8)} for answer in ("no", "yes", "no")]
    assert InstructionDataset(rows).labels.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(image="images/b.png"), r"row 2 \(a\): image '.*b.png' is missing. Pass `images=`"),
        (row(image=None), r"row 2 \(a\): `image` must name a file"),
        (said("What is it?", "cat"), r"row 2 \(a\): the first question must hold `<image>` once, got 0"),
        (said("<image>\n<image>\nWhat?", "cat"), r"row 2 .*once, got 2"),
        (said("<image>\nWhat?", " "), r"row 2 .*turn 2 must not be empty"),
        (said("<image>\n", "cat"), r"row 2 .*turn 1 must not be empty"),
        (said("<image>\nWhat?", "cat", speakers=("gpt", "human")), r"row 2 .*turn 1 must be from 'human', got 'gpt'"),
        (said("<image>\nWhat?", "cat", "And?"), r"row 2 .*questions and answers in turn, got 3 turns"),
        (said("<image>\nWhat?", "cat", "<image> And?", "dog"), r"row 2 .*only the first question may hold"),
        (row(conversations=None), r"row 2 .*got NoneType"),
        ([], r"row 2 \(no object\): a row must be an object, got list"),
    ],
)
def test_the_first_bad_row_is_named(folder, bad, message):
    with pytest.raises(DatasetError, match=message):
        read_instructions(write(folder, [row(), bad, row(image="images/c.png")]))


def test_a_truncated_picture_is_found_before_training(folder):
    whole = (folder / "images" / "a.png").read_bytes()
    (folder / "images" / "cut.png").write_bytes(whole[:60])
    file = write(folder, [row(), row(image="images/cut.png")])
    with pytest.raises(DatasetError, match=r"row 2 \(a\): image '.*cut.png' cannot be read"):
        read_instructions(file)
    assert len(read_instructions(file, decode=False)) == 2


def test_files_that_are_no_files_of_rows(folder):
    with pytest.raises(DatasetError, match=r"must be a .json or .jsonl file, got '.*nothing.jsonl'"):
        read_instructions(folder / "nothing.jsonl")
    (folder / "bad.jsonl").write_text("{")
    with pytest.raises(DatasetError, match=r"bad.jsonl must hold JSONL, got"):
        read_instructions(folder / "bad.jsonl")
    with pytest.raises(DatasetError, match="must hold a list of rows"):
        read_instructions(write(folder, [], "none.json"))
    with pytest.raises(DatasetError, match=r"`rows`, row 1 \(a\): turn 2 must not be empty"):
        InstructionDataset([said("<image> What?", "")])
