"""Scores of written answers: exact, contained, boxes, captions."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from lightning_fcl._imports import optional_import

IOU = 0.5
_NUMBER = re.compile(r"-?\d*\.?\d+")
_WORD = re.compile(r"\w+")


def exact_match(prediction: str, answer: str) -> float:
    """1 if both say the same but for case, outer white space and a closing full stop, else 0.

    Example:
        >>> exact_match(" Yes.", "yes"), exact_match("", ""), exact_match("yes it is", "yes")
        (1.0, 0.0, 0.0)
    """
    said = _plain(prediction)
    return float(said != "" and said == _plain(answer))


def contained(prediction: str, answer: str) -> float:
    """1 if the prediction is a part of the answer, else 0; saying nothing is wrong.

    Source: the scorer of DVQA and FigureQA in the FCIT benchmark's code (github.com/Ghy0501/FCIT at 9b10259).

    Deviation: there, an empty prediction counts as right.

    Example:
        >>> contained("blue", "light blue"), contained("", "light blue"), contained("light blue", "blue")
        (1.0, 0.0, 0.0)
    """
    said = _plain(prediction)
    return float(said != "" and said in _plain(answer))


def box_hit(prediction: str, answer: str) -> float:
    """1 if the boxes written in both overlap by more than half of their union, else 0.

    Args:
        prediction: Text with exactly four numbers, left, top, right and bottom, in the answer's units.
        answer: The same.

    Raises:
        ValueError: If the answer holds no box.

    Example:
        >>> box_hit("[0.0,0.0,0.5,1.0]", "[0.0,0.0,0.5,0.9]"), box_hit("left", "[0,0,1,1]")
        (1.0, 0.0)
    """
    truth = _box(answer)
    if truth is None:
        raise ValueError(f"`answer` must hold the four numbers of a box, got {answer!r}.")
    box = _box(prediction)
    return float(box is not None and _iou(box, truth) > IOU)


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L (F measure) of one sentence, from 0 to 1, by torchmetrics.

    Example:
        >>> rouge_l("a red circle", "a red square")
        0.6667
    """
    rouge_score = optional_import("torchmetrics.functional.text.rouge", extra="captions").rouge_score
    value = rouge_score(prediction, answer, rouge_keys="rougeL")["rougeL_fmeasure"]
    return round(float(value), 4)


def caption_scores(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> dict[str, float]:
    """The usual scores of captions over a whole set, and their mean as in the FCIT benchmark.

    BLEU-1 to 4 and ROUGE-L by torchmetrics, METEOR by nltk, CIDEr by pycocoevalcap; all on lower-case words without
    punctuation.

    Args:
        predictions: One caption per picture.
        references: One or several right captions per picture.

    Returns:
        ``bleu_1`` to ``bleu_4``, ``meteor``, ``rouge_l`` (0 to 1), ``cider`` (0 to 10), and ``mean``, their plain mean.

    Raises:
        ValueError: If there is no caption, or not as many references.
        MissingExtraError: If nltk or pycocoevalcap is not installed (extra ``captions``).

    Source: Papineni et al., ACL 2002; Banerjee & Lavie, 2005; Lin, 2004; Vedantam et al., CVPR 2015; the mean is that
    of the FCIT benchmark's code (github.com/Ghy0501/FCIT at 9b10259).

    Deviation: METEOR matches words and stems; synonyms only if nltk's WordNet data is installed. The tokenizer is not
    that of COCO, which needs Java.
    """
    if not predictions or len(references) != len(predictions):
        raise ValueError(
            f"`references` must hold one entry per prediction, at least one, got {len(references)} for "
            f"{len(predictions)} predictions."
        )
    said = [_words(text) for text in predictions]
    right = [[_words(text) for text in ([one] if isinstance(one, str) else one)] for one in references]
    scores = _overlaps(said, right)
    scores["meteor"] = _meteor(said, right)
    cider = optional_import("pycocoevalcap.cider.cider", extra="captions").Cider()
    joined = {number: [" ".join(words) for words in group] for number, group in enumerate(right)}
    scores["cider"] = float(cider.compute_score(joined, {n: [" ".join(words)] for n, words in enumerate(said)})[0])
    return {**scores, "mean": sum(scores.values()) / len(scores)}


def score_answers(metric: str, predictions: Sequence[str], answers: Sequence[str]) -> float:
    """Mean score of a set of answers.

    Args:
        metric: ``"exact"``, ``"contained"``, ``"iou"`` or ``"rouge"``, averaged over answers, or ``"caption"``, the
            mean of :func:`caption_scores`.
        predictions: What the model wrote.
        answers: What is right.

    Raises:
        ValueError: If the metric is unknown.
        MissingExtraError: If a package for captions is not installed (extra ``captions``).

    Example:
        >>> score_answers("exact", ["yes", "no"], ["yes", "yes"])
        0.5
    """
    if metric == "caption":
        return caption_scores(predictions, answers)["mean"]
    if metric not in _PER_ANSWER:
        raise ValueError(f"`metric` must be one of {', '.join([*_PER_ANSWER, 'caption'])}, got {metric!r}.")
    rule = _PER_ANSWER[metric]
    return sum(map(rule, predictions, answers)) / len(answers)


_PER_ANSWER: dict[str, Callable[[str, str], float]] = {
    "exact": exact_match,
    "contained": contained,
    "iou": box_hit,
    "rouge": rouge_l,
}
METRICS = (*_PER_ANSWER, "caption")


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").rstrip().lower()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _box(text: str) -> list[float] | None:
    numbers = [float(number) for number in _NUMBER.findall(text)]
    return numbers if len(numbers) == 4 else None


def _iou(a: Sequence[float], b: Sequence[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    union = sum(max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0) for box in (a, b)) - shared
    return shared / union if union > 0 else 0.0


def _overlaps(said: list[list[str]], right: list[list[list[str]]]) -> dict[str, float]:
    text: Any = optional_import("torchmetrics.functional.text", extra="captions")
    predictions, references = [" ".join(words) for words in said], [[" ".join(one) for one in group] for group in right]
    scores = {f"bleu_{n}": float(text.bleu_score(predictions, references, n_gram=n)) for n in range(1, 5)}
    rouge = text.rouge_score(predictions, references, rouge_keys="rougeL", accumulate="best")
    return {**scores, "rouge_l": float(rouge["rougeL_fmeasure"])}


class _NoSynonyms:
    """Stands in for WordNet where its data is not installed."""

    def synsets(self, word: str) -> list[Any]:
        return []


def _meteor(said: list[list[str]], right: list[list[list[str]]]) -> float:
    score = optional_import("nltk.translate.meteor_score", extra="captions").meteor_score
    wordnet = optional_import("nltk.corpus", extra="captions").wordnet
    try:
        wordnet.ensure_loaded()
    except LookupError:
        wordnet = _NoSynonyms()
    return float(sum(score(group, words, wordnet=wordnet) for words, group in zip(said, right, strict=True))) / len(
        said
    )
