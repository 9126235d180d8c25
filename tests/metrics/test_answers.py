import sys

import pytest

from lightning_fcl.exceptions import MissingExtraError
from lightning_fcl.metrics import box_hit, caption_scores, contained, exact_match, rouge_l, score_answers


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [("Yes", "yes", 1), (" yes. ", "yes", 1), ("yes", "no", 0), ("", "yes", 0), (".", "", 0), ("10", "1", 0)],
)
def test_exact_match(prediction, answer, score):
    assert exact_match(prediction, answer) == score


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [("blue", "Light blue", 1), ("light blue", "blue", 0), ("", "blue", 0), ("  ", "blue", 0)],
)
def test_contained_and_that_nothing_said_is_wrong(prediction, answer, score):
    assert contained(prediction, answer) == score


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("[0.00,0.00,0.50,1.00]", 1),
        ("[0.00, 0.00, 0.50, 0.52]", 1),  # overlap .26, union .5: above .5
        ("[0.00,0.00,0.50,0.50]", 0),  # exactly .5 is not above it
        ("[0.5,0.0,1.0,1.0]", 0),
        ("[0.5,1.0,0.0,0.0]", 0),
        ("0 0 0.5 1 and 2", 0),
        ("", 0),
    ],
)
def test_boxes_hit_above_half(prediction, score):
    assert box_hit(prediction, "[0,0,0.5,1]") == score


def test_a_box_must_be_in_the_answer():
    with pytest.raises(ValueError, match="`answer` must hold the four numbers of a box, got 'none'"):
        box_hit("[0,0,1,1]", "none")


def test_rouge_by_hand():
    # longest common subsequence "a circle" of 3 and 4 words: P 2/3, R 2/4, F 4/7
    assert rouge_l("a small circle", "a big red circle") == pytest.approx(4 / 7, abs=1e-4)


def test_captions_word_for_word_are_perfect():
    captions = ["a red circle left of a blue square", "a green cross left of a cyan triangle"]
    scores = caption_scores(captions, captions)
    assert [scores[f"bleu_{n}"] for n in (1, 2, 3, 4)] == pytest.approx([1.0] * 4)
    assert scores["rouge_l"] == pytest.approx(1.0)
    assert scores["meteor"] == pytest.approx(1 - 0.5 * (1 / 8) ** 3)  # its penalty for one chunk of eight words
    assert scores["cider"] == pytest.approx(10.0)
    parts = [value for name, value in scores.items() if name != "mean"]
    assert scores["mean"] == pytest.approx(sum(parts) / 7)


def test_captions_take_the_best_of_several_references():
    scores = caption_scores(["a dog"], [["a cat", "A dog!"]])
    assert scores["bleu_1"] == scores["rouge_l"] == 1.0
    assert caption_scores(["so"], ["a cat"])["mean"] == 0.0


def test_captions_that_do_not_fit_their_references():
    with pytest.raises(ValueError, match="`references` must hold one entry per prediction, at least one, got 2 for 1"):
        caption_scores(["a"], ["a", "b"])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocoevalcap.cider.cider", None)
    monkeypatch.setitem(sys.modules, "nltk.translate.meteor_score", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-fcl\[captions\]'"):
        caption_scores(["a"], ["a"])


def test_score_answers():
    assert score_answers("contained", ["a", ""], ["a b", "c"]) == 0.5
    assert score_answers("iou", ["[0,0,1,1]"], ["[0,0,1,1]"]) == 1.0
    assert score_answers("rouge", ["a b"], ["a b"]) == 1.0
    assert score_answers("caption", ["a b"], ["c d"]) == 0.0
    with pytest.raises(ValueError, match="`metric` must be one of exact, contained, iou, rouge, caption, got 'bleu'"):
        score_answers("bleu", ["a"], ["a"])
