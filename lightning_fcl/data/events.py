"""Posts of picture and text about events that arrive one after another: drawn and written here, or from a folder."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fcl._imports import optional_import
from lightning_fcl.data.event_pictures import SCENES, draw_scene
from lightning_fcl.data.instructions import InstructionDataset, as_list
from lightning_fcl.data.partition import check_at_least
from lightning_fcl.data.split import Partition
from lightning_fcl.data.stream import TaskStream
from lightning_fcl.exceptions import DatasetError

DRAWN_EVENTS: dict[str, tuple[str, str]] = {
    "harbour flood": ("water", "coast"),
    "downtown fire": ("fire", "city"),
    "valley quake": ("rubble", "mountain"),
    "city flood": ("water", "city"),
    "beach fire": ("fire", "coast"),
    "city quake": ("rubble", "city"),
    "mountain flood": ("water", "mountain"),
}
"""By event, what its pictures show and what its texts speak of; neither alone tells which event it is."""

MEDIAEVAL_EVENTS = ("nepal", "eclipse", "fuji", "paris", "bowie", "refugees", "other")
"""The events of the folder of real posts, in the order of the tasks."""

_WORDS = re.compile(r"\w+|#")
_PLACES = {
    "coast": ("harbour", "beach", "pier", "sailors", "tide", "island", "lighthouse", "ferry"),
    "city": ("downtown", "subway", "avenue", "tower", "mayor", "traffic", "metro", "plaza"),
    "mountain": ("valley", "ridge", "trail", "village", "summit", "pass", "glacier", "hikers"),
}
_FILLERS = _WORDS.findall(
    "breaking please help now near people we see this morning night stay safe all friends everyone unbelievable "
    "just heard reports say roads closed rescue teams on their way pray for families share update live photo from "
    "my window so sad cannot believe it again still hope ok wow stunned news today emergency crews arrive "
)


class EventPosts(NamedTuple):
    """Posts of several events; the examples of each set are ``(picture, tokens, label)``.

    Args:
        train: Training posts: pictures ``[N, 3, H, W]`` in [-1, 1], tokens ``[N, L]`` (int64, 0 pads), labels ``[N]``.
        test: Posts to evaluate on.
        names: Name of each label.
        unseen: Posts with pictures that ``train`` does not hold, or ``None``.
        texts: The texts of each set's posts, in their order, by ``"train"``, ``"test"`` and ``"unseen"``.
    """

    train: Any
    test: Any
    names: tuple[str, ...]
    unseen: Any = None
    texts: Mapping[str, Sequence[str]] = {}


def hash_tokens(texts: Sequence[str], *, vocabulary: int = 512, length: int = 16) -> Tensor:
    r"""Words as numbers, without a vocabulary to learn or to share: each word's checksum modulo the table's size.

    Args:
        texts: Texts in any language; words are what ``\w+`` finds, in lower case.
        vocabulary: Size of the table; 0 is kept for padding.
        length: Tokens per text; longer texts are cut.

    Returns:
        Shape ``(N, length)``, int64, from 0 to ``vocabulary - 1``.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> hash_tokens(["Flood in the harbour!", "flood"], vocabulary=100, length=4).tolist()
        [[65, 90, 49, 23], [65, 0, 0, 0]]
    """
    check_at_least("vocabulary", vocabulary, 2)
    check_at_least("length", length, 1)
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        words = _WORDS.findall(text.lower())[:length]
        row[: len(words)] = torch.tensor([1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in words])
    return tokens


def drawn_events(
    posts: int = 120, test_posts: int = 40, *, size: int = 16, vocabulary: int = 512, length: int = 16, seed: int = 0
) -> EventPosts:
    """Seven events in drawn pictures and generated texts, offline: what happened is in the picture, where in the text.

    Three kinds of scenes and three kinds of places make the seven events of :data:`DRAWN_EVENTS`. The best possible
    guess from the picture or from the text alone is right for three events of seven.

    Args:
        posts: Training posts per event.
        test_posts: Posts per event to evaluate on.
        size: Height and width of the pictures in pixels, at least 12.
        vocabulary: As in :func:`hash_tokens`.
        length: As in :func:`hash_tokens`.
        seed: Seeds pictures and texts.

    Returns:
        The posts; labels follow the order of :data:`DRAWN_EVENTS`.

    Raises:
        ValueError: If a number is out of range.
    """
    check_at_least("posts", posts, 1)
    check_at_least("test_posts", test_posts, 1)
    check_at_least("size", size, 12)
    rng = np.random.default_rng(seed)
    sets, texts = [], {}
    for part, count in (("train", posts), ("test", test_posts)):
        labels = np.repeat(np.arange(len(DRAWN_EVENTS)), count)
        cues = [list(DRAWN_EVENTS.values())[label] for label in labels]
        pictures = np.stack([draw_scene(scene, size, rng) for scene, _ in cues])
        texts[part] = [_write(place, rng) for _, place in cues]
        tokens = hash_tokens(texts[part], vocabulary=vocabulary, length=length)
        sets.append(TensorDataset(torch.from_numpy(pictures), tokens, torch.from_numpy(labels)))
    return EventPosts(sets[0], sets[1], tuple(DRAWN_EVENTS), texts=texts)


def cue_posts(
    posts: int = 600, *, size: int = 16, vocabulary: int = 512, length: int = 16, seed: int = 0
) -> TensorDataset:
    """Drawn posts of no event: any scene with any place, to teach a model what there is to see and to read.

    Args:
        posts: How many.
        size: As in :func:`drawn_events`.
        vocabulary: As in :func:`hash_tokens`.
        length: As in :func:`hash_tokens`.
        seed: Seeds pictures and texts; other draws than those of :func:`drawn_events`.

    Returns:
        Pictures, tokens, numbers of the scene and numbers of the place, as in :class:`EventPosts`.

    Raises:
        ValueError: If a number is out of range.
    """
    check_at_least("posts", posts, 1)
    check_at_least("size", size, 12)
    rng = np.random.default_rng([seed, 1])
    scenes, places = rng.integers(len(SCENES), size=posts), rng.integers(len(_PLACES), size=posts)
    pictures = np.stack([draw_scene(list(SCENES)[scene], size, rng) for scene in scenes])
    texts = [_write(list(_PLACES)[place], rng) for place in places]
    tokens = hash_tokens(texts, vocabulary=vocabulary, length=length)
    return TensorDataset(torch.from_numpy(pictures), tokens, torch.from_numpy(scenes), torch.from_numpy(places))


def load_event_folder(
    path: str | Path,
    events: Sequence[str] = MEDIAEVAL_EVENTS,
    *,
    size: int = 32,
    vocabulary: int = 4096,
    length: int = 32,
    unseen_share: float = 0.25,
    seed: int = 0,
) -> EventPosts:
    """Real posts from a folder with ``posts.jsonl`` and its pictures.

    A line of ``posts.jsonl`` is an object with ``event``, ``text``, ``image`` (a path in the folder) and ``split``
    (``"train"`` or ``"test"``). Many posts share a picture, so a random split tests the knowledge of events and not of
    new pictures: some pictures are therefore held out of both sets and returned with all their posts as ``unseen``.

    Args:
        path: The folder.
        events: The events to read, in the order of the tasks.
        size: Height and width to which the pictures are resized bilinearly, in pixels.
        vocabulary: As in :func:`hash_tokens`.
        length: As in :func:`hash_tokens`.
        unseen_share: About this share of each event's pictures, in [0, 1), is held out; an event with one picture keeps
            it. With 0 there is no ``unseen``.
        seed: Chooses the pictures.

    Returns:
        The posts.

    Raises:
        DatasetError: If a file is missing or malformed, or an event has no post.
        ValueError: If a number is out of range.
        MissingExtraError: If Pillow is not installed (extra ``mllm``).
    """
    check_at_least("size", size, 1)
    if not 0 <= unseen_share < 1:
        raise ValueError(f"`unseen_share` must lie in [0, 1), got {unseen_share}.")
    rows = [row for row in _read_posts(Path(path)) if row["event"] in events]
    if missing := [event for event in events if not any(row["event"] == event for row in rows)]:
        raise DatasetError(f"`path` must hold posts of each event, got none of {missing[0]!r} in {str(path)!r}.")
    pictures = {name: _open(Path(path) / name, size) for name in sorted({row["image"] for row in rows})}
    held_out = _held_out(rows, events, unseen_share, np.random.default_rng(seed))
    parts: dict[str, list[dict[str, str]]] = {"train": [], "test": [], "unseen": []}
    for row in rows:
        parts["unseen" if row["image"] in held_out else row["split"]].append(row)
    sets = {}
    for name, part in parts.items():
        if part:
            tokens = hash_tokens([row["text"] for row in part], vocabulary=vocabulary, length=length)
            labels = torch.tensor([events.index(row["event"]) for row in part])
            sets[name] = TensorDataset(torch.stack([pictures[row["image"]] for row in part]), tokens, labels)
    if not {"train", "test"} <= sets.keys():
        raise DatasetError(f"`path` must hold posts of the splits 'train' and 'test', got {sorted(sets)}.")
    texts = {name: [row["text"] for row in part] for name, part in parts.items()}
    return EventPosts(sets["train"], sets["test"], tuple(events), sets.get("unseen"), texts)


def event_stream(
    posts: EventPosts | None = None,
    *,
    clients: int = 10,
    tasks: Sequence[int] = (2, 2, 3),
    partition: Partition = "label_dirichlet",
    batch_size: int = 16,
    seed: int = 0,
    lag: float = 0.0,
) -> TaskStream:
    """Events as a class-incremental stream: each task brings new events, all tasks share one space of labels.

    Args:
        posts: By default :func:`drawn_events`; :func:`event_questions` makes them a stream of visual instructions.
        clients: Number of clients.
        tasks: Events per task.
        partition: How the posts of a task are shared, as in :meth:`TaskStream.from_datasets`.
        batch_size: Posts per batch.
        seed: Seeds the partition.
        lag: Share of the clients, in [0, 1), that are one task behind, as in :meth:`TaskStream.stages`.

    Returns:
        One task per group of events, named after them.

    Raises:
        DatasetError: If the events cannot be cut or shared so.
    """
    posts = drawn_events() if posts is None else posts
    cuts = np.cumsum([0, *tasks])
    names = [" + ".join(posts.names[low:high]) for low, high in pairwise(cuts)]
    stream = TaskStream.split_classes(
        posts.train,
        posts.test,
        tasks=tasks,
        names=names,
        clients=clients,
        partition=partition,
        batch_size=batch_size,
        eval_batch_size=256,
        collate_fn=as_list if isinstance(posts.train, InstructionDataset) else None,
        seed=seed,
    )
    return stream.stages(lag=lag) if lag else stream


def _write(place: str, rng: np.random.Generator) -> str:
    """A post that speaks of ``place``; one of twenty has no telling word, one of ten a misleading one."""
    words = list(rng.choice(_FILLERS, size=int(rng.integers(5, 10))))
    if rng.random() > 0.05:
        words += list(rng.choice(_PLACES[place], size=int(rng.integers(1, 4)), replace=False))
    if rng.random() < 0.1:
        words.append(rng.choice(_PLACES[rng.choice([other for other in _PLACES if other != place])]))
    return " ".join(rng.permutation(words))


def _read_posts(folder: Path) -> list[dict[str, str]]:
    path = folder / "posts.jsonl"
    if not path.is_file():
        raise DatasetError(f"`path` must hold posts.jsonl, got none in {str(folder)!r}. Is the folder right?")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row: Any = json.loads(line)
            good = all(isinstance(row[key], str) for key in ("event", "text", "image", "split"))
        except (json.JSONDecodeError, KeyError, TypeError):
            good = False
        if not good or row["split"] not in ("train", "test"):
            raise DatasetError(
                f"{path}, line {number}, must be an object with event, text, image and split ('train' or 'test')."
            )
        rows.append(row)
    return rows


def _held_out(
    rows: Sequence[dict[str, str]], events: Sequence[str], share: float, rng: np.random.Generator
) -> set[str]:
    held_out: set[str] = set()
    for event in events:
        pictures = sorted({row["image"] for row in rows if row["event"] == event})
        count = min(max(round(share * len(pictures)), share > 0), len(pictures) - 1)
        held_out.update(rng.permutation(pictures)[:count].tolist())
    return held_out


def _open(path: Path, size: int) -> Tensor:
    image = optional_import("PIL.Image", extra="mllm")
    try:
        with image.open(path) as file:
            pixels: NDArray[np.uint8] = np.asarray(file.convert("RGB").resize((size, size), image.Resampling.BILINEAR))
    except OSError as error:
        raise DatasetError(f"{path} must be a picture, got: {error}.") from error
    return torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1).permute(2, 0, 1)
