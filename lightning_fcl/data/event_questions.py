"""Posts about events as visual instructions: a picture, its text and the question, answered by the event's name."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

from lightning_fcl.data.events import EventPosts
from lightning_fcl.data.instructions import IMAGE, InstructionDataset
from lightning_fcl.exceptions import DatasetError

QUESTION = "Which event is it?"


def event_questions(posts: EventPosts) -> EventPosts:
    """The same posts as rows of visual instructions.

    Args:
        posts: With their texts, as :func:`~lightning_fcl.data.drawn_events` and
            :func:`~lightning_fcl.data.load_event_folder` give them.

    Returns:
        The posts; each set is an :class:`~lightning_fcl.data.InstructionDataset` in the order of the old one, whose
        ``labels`` are the old ones.

    Raises:
        DatasetError: If the posts have no texts.

    Example:
        >>> from lightning_fcl.data import drawn_events
        >>> turns = event_questions(drawn_events(1, 1)).test[0]["conversations"]
        >>> turns[1]["value"], turns[0]["value"].splitlines()[-1]
        ('harbour flood', 'Which event is it?')
    """
    sets = {"train": posts.train, "test": posts.test, "unseen": posts.unseen}
    if missing := [name for name, part in sets.items() if part is not None and name not in posts.texts]:
        raise DatasetError(f"`posts` must hold the texts of each set, got none of {missing}. Pass `texts=`.")
    train, test, unseen = (
        None if part is None else _questions(part, posts.texts[name], posts.names) for name, part in sets.items()
    )
    return posts._replace(train=train, test=test, unseen=unseen)


def _questions(part: TensorDataset, texts: Sequence[str], names: Sequence[str]) -> InstructionDataset:
    pictures, _, labels = part.tensors
    rows: list[dict[str, Any]] = []
    for picture, text, label in zip(pictures.numpy(), texts, labels.tolist(), strict=True):
        pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
        asked = f"{IMAGE}\n{text.replace(IMAGE, ' ').strip()}\n{QUESTION}"
        turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": names[label]}]
        rows.append({"image": pixels, "conversations": turns})
    dataset = InstructionDataset(rows)
    dataset.labels = labels.numpy().astype(np.int64)  # the numbers of the events, not of the sorted answers
    return dataset
