"""Digits in several domains: made from scikit-learn's, and read from files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fcl.data import TaskStream, digit_domains, load_digit_folder
from lightning_fcl.exceptions import DatasetError, MissingExtraError

FOLDER = Path(os.environ.get("FCL_DATA", "")) / "digits"
REAL = pytest.mark.skipif("FCL_DATA" not in os.environ, reason="FCL_DATA names no folder of real data")
NAMES = ["clean", "inverted", "turned", "textured"]


def as_clean(name, images):
    """Undo a domain's shift; for ``"textured"`` there is no way back."""
    return {"clean": images, "inverted": -images, "turned": images.rot90(-1, dims=(2, 3))}[name]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


# --- made ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels"), [(16, 1), (8, 3), (32, 3)])
def test_shapes_and_ranges(size, channels):
    domains = digit_domains(size=size, channels=channels)
    assert list(domains) == NAMES
    for train, test in domains.values():
        for part, count in ((train, 1438), (test, 359)):
            images, labels = part.tensors
            assert images.shape == (count, channels, size, size)
            assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
            assert images.min() >= -1
            assert images.max() <= 1
            assert images.max() - images.min() > 1.8
            assert images.is_contiguous()
            assert labels.unique().tolist() == list(range(10))
            assert torch.equal(images[:, 0], images[:, -1])


def test_domains_show_the_same_digits_and_no_test_digit_is_trained_on():
    domains = digit_domains()
    train, test = domains["clean"]
    digits = {image.numpy().tobytes() for image in train.tensors[0]}
    assert not digits & {image.numpy().tobytes() for image in test.tensors[0]}
    for name in ("inverted", "turned"):
        for part, clean in zip(domains[name], (train, test), strict=True):
            assert torch.allclose(as_clean(name, part.tensors[0]), clean.tensors[0], atol=1e-6)
    for name in NAMES:
        for part, clean in zip(domains[name], (train, test), strict=True):
            assert torch.equal(part.tensors[1], clean.tensors[1])


def test_textured_keeps_the_digit():
    domains = digit_domains()
    clean, textured = (domains[name][0].tensors[0].flatten(1) / 2 + 0.5 for name in ("clean", "textured"))
    # abs(paper - ink): paper where there is no ink, its opposite where there is all of it.
    paper, opposite = textured[clean == 0], 1 - textured[clean == 1]
    assert paper.std() > 0.1
    assert abs(paper.mean() - 0.5) < 0.05
    assert abs(opposite.mean() - 0.5) < 0.05
    backgrounds = {image.numpy().tobytes() for image in textured}
    assert len(backgrounds) == len(textured)


def test_the_seed_alone_decides():
    first = digit_domains(seed=3)
    torch.manual_seed(99)
    np.random.seed(99)
    again = digit_domains(NAMES[::-1], seed=3)  # a domain does not depend on which others are asked for
    other = digit_domains(seed=4)
    for name in NAMES:
        for part in range(2):
            assert same(first[name][part], again[name][part])
            assert not same(first[name][part], other[name][part])
    corners = [domains["textured"][0].tensors[0][:, 0, 0, 0] for domains in (first, other)]  # no digit has ink there
    assert not torch.equal(*corners)


def test_other_shares():
    train, test = digit_domains(["turned"], test_share=0.5)["turned"]
    assert (len(train), len(test)) == (899, 898)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["clean", "dirty"]}, r"`names` must name some of \['clean', .*each once, got \['clean', 'dirty'\]"),
        ({"names": []}, "`names` must name some of"),
        ({"names": ["clean", "clean"]}, "each once"),
        ({"size": 0}, "`size` must be at least 1, got 0"),
        ({"channels": 2}, "`channels` must be 1 or 3, got 2"),
        ({"test_share": 1.0}, r"`test_share` must lie in \(0, 1\), got 1\.0"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        digit_domains(**options)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-fcl\[recipes\]'"):
        digit_domains()


# --- read ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two domains: one file of grey 4x4 images, and a series of colour 2x3 ones."""
    grey = np.arange(5 * 16, dtype=np.uint8).reshape(5, 4, 4)
    labels = np.arange(5, dtype=np.uint8)
    np.savez(tmp_path / "grey.npz", x_train=grey, y_train=labels, x_test=grey[:2], y_test=labels[:2])
    for part, number in (("train_0", 0), ("train_1", 1), ("test", 2)):
        colour = np.zeros((3, 2, 3, 3), dtype=np.uint8)
        colour[..., number] = 255  # red, then green, then blue
        np.savez(tmp_path / f"colour_{part}.npz", x=colour, y=np.full(3, number))
    return tmp_path


def test_one_file_and_series(folder):
    domains = load_digit_folder(folder, ["colour", "grey"], size=4)
    assert list(domains) == ["colour", "grey"]
    train, test = domains["grey"]
    assert (len(train), len(test)) == (5, 2)
    assert torch.allclose(train.tensors[0], (torch.arange(80.0) / 127.5 - 1).view(5, 1, 4, 4).expand(-1, 3, -1, -1))
    assert train.tensors[1].tolist() == [0, 1, 2, 3, 4]
    train, test = domains["colour"]
    assert train.tensors[0].shape == (6, 3, 4, 4)  # both sides of the 2x3 images are resized
    assert train.tensors[1].tolist() == [0, 0, 0, 1, 1, 1]
    assert test.tensors[0].mean(dim=(0, 2, 3)).tolist() == pytest.approx([-1, -1, 1], abs=1e-6)


def test_colours_become_luminance(folder):
    (train, test) = load_digit_folder(folder, ["colour"], size=2, channels=1)["colour"]
    assert train.tensors[0].shape == (6, 1, 2, 2)
    values = [part.tensors[0][i].mean().item() for part, i in ((train, 0), (train, 5), (test, 0))]
    assert values == pytest.approx([2 * 0.299 - 1, 2 * 0.587 - 1, 2 * 0.114 - 1], abs=1e-6)


def test_only_one_side_fits(folder):
    assert load_digit_folder(folder, ["colour"], size=3)["colour"][0].tensors[0].shape == (6, 3, 3, 3)


def test_limit_takes_the_first(folder):
    domains = load_digit_folder(folder, ["grey", "colour"], size=4, limit=4)
    assert [(len(train), len(test)) for train, test in domains.values()] == [(4, 2), (4, 3)]
    assert domains["colour"][0].tensors[1].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"x_train": np.zeros((2, 4, 4), np.uint8)},
            r"grey\.npz must hold arrays 'x_train' and 'y_train', got: .*y_train",
        ),
        (
            {"x_train": np.zeros((2, 4, 4)), "y_train": np.zeros(2)},
            r"must hold uint8 images .* got float64 \(2, 4, 4\)",
        ),
        ({"x_train": np.zeros((2, 4), np.uint8), "y_train": np.zeros(2)}, r"got uint8 \(2, 4\) and \(2,\)"),
        (
            {"x_train": np.zeros((2, 4, 4, 4), np.uint8), "y_train": np.zeros(2)},
            r"\(N, H, W\[, 3\]\) .* \(2, 4, 4, 4\)",
        ),
        ({"x_train": np.zeros((2, 4, 4), np.uint8), "y_train": np.zeros(3)}, r"and N labels, got .* and \(3,\)"),
        ({"x_train": np.zeros((2, 4, 4), np.uint8), "y_train": np.zeros((2, 10))}, r"and \(2, 10\)"),
        ({"x_train": np.array([None, {}]), "y_train": np.zeros(2)}, "got: Object arrays cannot be loaded"),
    ],
)
def test_arrays_of_another_kind(tmp_path, content, message):
    np.savez(tmp_path / "grey.npz", **content)
    with pytest.raises(DatasetError, match=message):
        load_digit_folder(tmp_path, ["grey"])


def test_damaged_files(folder):
    whole = (folder / "grey.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[120] ^= 255
    for content in (b"", b"no archive", whole[: len(whole) // 2], bytes(flipped)):
        (folder / "grey.npz").write_bytes(content)
        with pytest.raises(DatasetError, match=r"grey\.npz must hold arrays 'x_train' and 'y_train', got: "):
            load_digit_folder(folder, ["grey"])


def test_missing_files(folder):
    with pytest.raises(
        DatasetError, match=r"`path` must hold svhn\.npz or svhn_train\*\.npz, got neither in .*right\?"
    ):
        load_digit_folder(folder, ["grey", "svhn"])
    (folder / "colour_test.npz").unlink()
    with pytest.raises(DatasetError, match=r"colour\.npz or colour_test\*\.npz, got neither"):
        load_digit_folder(folder, ["colour"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "`limit` must be at least 1, got 0"),
        ({"channels": 4}, "`channels` must be 1 or 3, got 4"),
        ({"size": -1}, "`size` must be at least 1, got -1"),
    ],
)
def test_wrong_numbers(folder, options, message):
    with pytest.raises(ValueError, match=message):
        load_digit_folder(folder, ["grey"], **options)


@REAL
def test_the_real_folder():
    domains = load_digit_folder(FOLDER, limit=300)
    assert list(domains) == ["mnist", "mnistm", "usps", "svhn"]
    for train, test in domains.values():
        for part in (train, test):
            images, labels = part.tensors
            assert images.shape == (300, 3, 32, 32)
            assert images.min() >= -1
            assert images.max() <= 1
            assert labels.unique().tolist() == list(range(10))
    grey = [domains[name][0].tensors[0] for name in ("mnist", "usps")]
    assert all(torch.equal(images[:, 0], images[:, 2]) for images in grey)
    colour = [domains[name][0].tensors[0] for name in ("mnistm", "svhn")]
    assert not any(torch.equal(images[:, 0], images[:, 2]) for images in colour)
    stream = TaskStream.domains(domains, clients=8, partition="label_dirichlet")
    assert sum(stream.num_examples(3, client) for client in stream.clients(3)) == 300


@REAL
def test_the_real_folder_whole():
    (train, test) = load_digit_folder(FOLDER, ["svhn"], channels=1)["svhn"]
    assert train.tensors[0].shape == (len(train), 1, 32, 32)
    assert len(train) > 2 * len(test) > 1000
