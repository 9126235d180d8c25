"""Event posts: both cues are needed, the drawn ones follow the seed, the real ones are read and split as asked."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lightning_fcl.data import LabelDirichlet, drawn_events, event_stream, hash_tokens, load_event_folder
from lightning_fcl.data.events import DRAWN_EVENTS, MEDIAEVAL_EVENTS
from lightning_fcl.exceptions import DatasetError
from lightning_fcl.models import TwoTower

REAL = Path(os.environ.get("FCL_DATA", "nowhere"), "mediaeval_events")


# -- drawn ------------------------------------------------------------------------------------------------------------


def accuracy(posts, blind=None, epochs=4):
    """Of a network trained on all events at once, which sees no pictures or no words if ``blind``."""
    torch.manual_seed(0)
    sets = [list(part.tensors) for part in (posts.train, posts.test)]
    for tensors in sets:
        if blind is not None:
            tensors[blind] = torch.zeros_like(tensors[blind])
    (x, words, y), (test_x, test_words, test_y) = sets
    net = TwoTower(rank=0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows], words[rows]), y[rows]).backward()
            optimizer.step()
    return (net(test_x, test_words).argmax(1) == test_y).float().mean().item()


def test_picture_and_text_together_tell_what_neither_tells_alone():
    """The best guess from one of them is right for three events of seven: 0.43."""
    posts = drawn_events(posts=80, test_posts=40)
    both, no_picture, no_text = accuracy(posts), accuracy(posts, blind=0), accuracy(posts, blind=1)
    assert both > 0.75
    assert max(no_picture, no_text) < 0.55


def test_each_cue_belongs_to_several_events():
    scenes, places = zip(*DRAWN_EVENTS.values(), strict=True)
    assert len(set(DRAWN_EVENTS.values())) == 7
    assert all(scenes.count(one) > 1 for one in scenes)
    assert all(places.count(one) > 1 for one in places)


def test_posts_follow_the_seed_and_no_picture_comes_twice():
    first, second, other = drawn_events(5, 2), drawn_events(5, 2), drawn_events(5, 2, seed=1)
    for mine, same in zip(first.train.tensors, second.train.tensors, strict=True):
        assert torch.equal(mine, same)
    assert not torch.equal(first.train.tensors[0], other.train.tensors[0])
    pictures = torch.cat([first.train.tensors[0], first.test.tensors[0]]).flatten(1)
    assert len(pictures.unique(dim=0)) == len(pictures) == 49
    assert pictures.dtype == torch.float32
    assert pictures.abs().max() <= 1


def test_words_are_counted_alike_everywhere():
    tokens = hash_tokens(["Über die Brücke!", "", "a b c d e f"], vocabulary=1000, length=4)
    assert tokens.dtype == torch.int64
    assert (tokens > 0).sum(1).tolist() == [3, 0, 4]
    assert torch.equal(tokens[0], hash_tokens(["über DIE brücke"], vocabulary=1000, length=4)[0])
    assert hash_tokens(["x y"], vocabulary=2, length=2).tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: drawn_events(0), "`posts` must be at least 1"),
        (lambda: drawn_events(1, 0), "`test_posts` must be at least 1"),
        (lambda: drawn_events(size=8), "`size` must be at least 12"),
        (lambda: hash_tokens(["a"], vocabulary=1), "`vocabulary` must be at least 2"),
        (lambda: hash_tokens(["a"], length=0), "`length` must be at least 1"),
    ],
)
def test_numbers_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- the stream -------------------------------------------------------------------------------------------------------


def test_three_tasks_of_two_two_and_three_events():
    stream = event_stream(drawn_events(20, 2), partition=LabelDirichlet(0.5, min_examples=2))
    assert stream.names == ("harbour flood + downtown fire", "valley quake + city flood", stream.names[2])
    assert len(stream) == 3
    assert stream.num_clients == 10
    for task, events in enumerate([{0, 1}, {2, 3}, {4, 5, 6}]):
        assert {int(y) for batch in stream.eval_loader(task) for y in batch[2]} == events
        assert sum(stream.num_examples(task, client) for client in stream.clients(task)) == 20 * len(events)


def test_the_more_uneven_the_smaller_alpha():
    posts = drawn_events(60, 2)

    def spread(alpha):
        stream = event_stream(posts, partition=LabelDirichlet(alpha, min_examples=1), seed=3)
        return np.std([stream.num_examples(task, client) for task in range(3) for client in range(10)])

    assert spread(0.1) > spread(0.5) > spread(100.0)


# -- a folder ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two events of three pictures with four posts each, one post of four for testing."""
    draw, rows = np.random.default_rng(0), []
    for event in ("flood", "fire"):
        for number in range(3):
            name = f"{event}_{number}.png"
            Image.fromarray(draw.integers(0, 255, (9, 7, 3), dtype=np.uint8)).save(tmp_path / name)
            rows += [
                {"event": event, "text": f"{event} {post}", "image": name, "split": "test" if post == 3 else "train"}
                for post in range(4)
            ]
    (tmp_path / "posts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_a_folder_of_posts_with_pictures_held_out(folder):
    posts = load_event_folder(folder, ["flood", "fire"], size=8, length=4)
    assert posts.names == ("flood", "fire")
    assert posts.train.tensors[0].shape == (12, 3, 8, 8)
    assert [len(part) for part in (posts.train, posts.test, posts.unseen)] == [12, 4, 8]
    seen = torch.cat([posts.train.tensors[0], posts.test.tensors[0]]).flatten(1).unique(dim=0)
    unseen = posts.unseen.tensors[0].flatten(1).unique(dim=0)
    assert len(seen) == 4
    assert len(unseen) == 2
    assert len(torch.cat([seen, unseen]).unique(dim=0)) == 6
    whole = load_event_folder(folder, ["flood", "fire"], unseen_share=0)
    assert whole.unseen is None
    assert [len(whole.train), len(whole.test)] == [18, 6]


def spoil(folder, text):
    path = folder / "posts.jsonl"
    path.write_text(path.read_text() + "\n" + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 25, must be an object with event, text, image and split"),
        ('{"event": "flood", "text": "x", "image": "a.png", "split": "dev"}', "line 25, must be an object"),
        ('{"event": "flood", "text": 3, "image": "a.png", "split": "train"}', "line 25, must be an object"),
        ('{"event": "flood", "text": "x", "image": "a.png", "split": "train"}', "a.png must be a picture"),
    ],
)
def test_damaged_folders(folder, text, message):
    spoil(folder, text)
    with pytest.raises(DatasetError, match=message):
        load_event_folder(folder, ["flood", "fire"])


def test_missing_events_and_folders(folder):
    with pytest.raises(DatasetError, match="none of 'quake'"):
        load_event_folder(folder, ["flood", "quake"])
    with pytest.raises(DatasetError, match=r"must hold posts.jsonl, got none in 'nowhere'"):
        load_event_folder("nowhere")
    with pytest.raises(ValueError, match="`unseen_share` must lie"):
        load_event_folder(folder, ["flood", "fire"], unseen_share=1.0)


@pytest.mark.skipif(not REAL.is_dir(), reason="set FCL_DATA to a folder that holds mediaeval_events")
def test_real_posts():
    posts = load_event_folder(REAL)
    assert posts.names == MEDIAEVAL_EVENTS
    assert len(posts.train) + len(posts.test) + len(posts.unseen) == 1204
    assert set(posts.train.tensors[2].tolist()) == set(range(7))
    stream = event_stream(posts, partition=LabelDirichlet(0.5, min_examples=1))
    assert [len(stream.clients(task)) for task in range(3)] == [10, 10, 10]
