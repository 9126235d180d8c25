"""Image sets in four file formats, and streams made of them."""

import io

import numpy as np
import pytest
import torch

from lightning_fcl.data import image_stream, load_images
from lightning_fcl.data.labels import matched
from lightning_fcl.exceptions import DatasetError


def grey(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)


def write_plain(folder):
    for part, count in (("train", 12), ("test", 6)):
        np.savez(folder / f"{part}.npz", x=grey(count), y=np.arange(count, dtype=np.uint8) % 3)


def write_medical(folder):
    arrays = {f"{part}_images": grey(8) for part in ("train", "val", "test")}
    arrays |= {f"{part}_labels": np.arange(8, dtype=np.uint8).reshape(8, 1) % 3 for part in ("train", "val", "test")}
    np.savez(folder / "somemnist.npz", **arrays)


def write_pictures(folder):
    from PIL import Image

    for name in ("train_0", "train_1", "test_0"):
        blobs = []
        for image in grey(6):
            buffer = io.BytesIO()
            Image.fromarray(np.stack([image] * 3, axis=2)).save(buffer, format="PNG")
            blobs.append(buffer.getvalue())
        offsets = np.cumsum([0, *map(len, blobs)])
        blob = np.frombuffer(b"".join(blobs), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", blob=blob, offsets=offsets, label=np.arange(6, dtype=np.uint8) % 3)


def write_drawers(folder):
    """Two files share an alphabet: three characters in all, four drawers, of which the last is for evaluation."""
    for name, chars in (("small1", ["A/1", "A/2"]), ("small2", ["A/2", "B/1"])):
        number, drawer = np.repeat(np.arange(2), 4), np.tile(np.arange(4), 2)
        np.savez(folder / f"{name}.npz", x=grey(8), char=number, chars=np.array(chars), drawer=drawer)


@pytest.mark.parametrize(
    ("write", "train", "test", "channels"),
    [(write_plain, 12, 6, 1), (write_medical, 8, 8, 1), (write_pictures, 12, 6, 3), (write_drawers, 9, 3, 1)],
)
def test_formats_are_told_apart(tmp_path, write, train, test, channels):
    write(tmp_path)
    sets = load_images(tmp_path, size=16)
    assert sets.train.tensors[0].shape == (train, channels, 16, 16)
    assert sets.test.tensors[0].shape == (test, channels, 16, 16)
    assert -1 <= sets.train.tensors[0].min() < sets.train.tensors[0].max() <= 1
    assert sets.num_classes == 3
    assert sets.train.tensors[1].unique().tolist() == [0, 1, 2]
    assert (sets.owners is not None) == (write is write_drawers)
    assert len(load_images(tmp_path, limit=4).train) == 4


def test_pictures_keep_their_pixels(tmp_path):
    write_pictures(tmp_path)
    images = load_images(tmp_path).train.tensors[0]
    torch.testing.assert_close(images[0, 0], torch.from_numpy(grey(6)[0]).float() / 127.5 - 1)


def test_drawers_are_clients_and_drawn_once(tmp_path):
    write_drawers(tmp_path)
    stream = image_stream(str(tmp_path), shift="natural", batch_size=4)
    assert stream.clients(0) == [0, 1, 2]
    assert [stream.num_examples(0, client) for client in range(3)] == [3, 3, 3]
    assert stream.classes(0) == (0, 1, 2)


def test_what_is_no_image_set_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"^`path` must hold train.npz, .* Is the folder right\?"):
        load_images(tmp_path)
    np.savez(tmp_path / "train.npz", x=np.zeros((3, 4, 4)), y=np.zeros(3))
    with pytest.raises(DatasetError, match="uint8 images"):
        load_images(tmp_path)
    with pytest.raises(DatasetError, match="`shift='natural'` needs a set that knows its clients"):
        image_stream(shift="natural")


def test_digits_by_label_domain_and_class():
    by_label = image_stream(clients=10, alpha=0.1, limit=300, size=12)
    held = [len(set(labels_of(by_label, client))) for client in by_label.clients(0)]
    assert min(held) < 5
    by_domain = image_stream(clients=16, shift="domain", size=12)
    assert len(by_domain.clients(0)) == 16
    assert max(len(set(labels_of(by_domain, client))) for client in range(16)) <= 4  # three, and one by the repair
    assert len(image_stream(clients=6, shift="domain", size=12).clients(0)) == 6
    stepwise = image_stream(clients=2, tasks=5, alpha=100.0, limit=300, size=12)
    assert [stepwise.classes(task)[-1] for task in range(5)] == [1, 3, 5, 7, 9]


def labels_of(stream, client):
    return [int(y) for batch in stream.train_loader(0, client) for y in batch[1]]


def test_a_clients_evaluation_set_has_its_own_shares():
    stream = image_stream(clients=10, alpha=0.2, limit=400, size=12)
    for client in stream.clients(0):
        mine = np.bincount(labels_of(stream, client), minlength=10)
        seen = np.bincount([int(y) for b in stream.client_eval_loader(0, client) for y in b[1]], minlength=10)
        assert ((seen > 0) == (mine > 0)).all()
        assert np.abs(seen / seen.sum() - mine / mine.sum()).max() < 0.1


def test_classes_without_evaluation_examples_are_left_out():
    assert matched(np.array([0, 5, 5]), np.array([0, 1, 0])).tolist() == [0, 2]
    assert len(matched(np.array([5]), np.array([0]))) == 0
