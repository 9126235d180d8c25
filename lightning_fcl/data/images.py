"""Small image sets from ``.npz`` files, and scikit-learn's digits enlarged: all in [-1, 1], one call each."""

import io
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from lightning_fcl._imports import optional_import
from lightning_fcl.data.digits import _UNREADABLE, _as_dataset, digit_domains
from lightning_fcl.data.partition import check_at_least
from lightning_fcl.exceptions import DatasetError

_Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


class ImageSets(NamedTuple):
    """One classification task.

    Args:
        train: Images ``(N, channels, size, size)``, float32 in [-1, 1], and labels ``(N,)``, int64.
        test: The same for evaluation.
        num_classes: Labels are in ``[0, num_classes)``.
        owners: Natural client of each training example, shape ``(N,)``; ``None`` if the set knows none.
    """

    train: TensorDataset
    test: TensorDataset
    num_classes: int
    owners: NDArray[np.int64] | None = None


def load_images(
    path: str | Path | None = None, *, size: int = 28, limit: int | None = None, seed: int = 0
) -> ImageSets:
    """Read an image set by the files that its folder holds.

    Known are ``train.npz`` with ``test.npz`` (``x``, ``y``); ``<name>.npz`` with ``train_images``, ``train_labels``,
    ``test_images``, ``test_labels`` (MedMNIST); ``train_*.npz`` with ``test_*.npz`` (``blob``, ``offsets``, ``label``:
    encoded pictures one after another; needs Pillow); and ``small*.npz`` (``x``, ``char``, ``chars``, ``drawer``:
    Omniglot, whose drawers are clients; the last quarter of them is for evaluation).

    Args:
        path: The folder; ``None`` for scikit-learn's 1,797 digits.
        size: Height and width in pixels, to which images are resized bilinearly.
        limit: Most images for training; the first ones. Evaluation is not cut.
        seed: Of the digits' split.

    Returns:
        The sets.

    Raises:
        DatasetError: If a file is missing or holds something else.
        MissingExtraError: If scikit-learn or Pillow is needed and not installed (extra ``recipes``).
    """
    if limit is not None:
        check_at_least("limit", limit, 1)
    if path is None:
        train, test = digit_domains(["clean"], size=size, seed=seed)["clean"]
        return ImageSets(TensorDataset(*(t[:limit] for t in train.tensors)), test, 10)
    folder = Path(path)
    try:
        train_arrays, test_arrays, owners = _read(folder)
    except DatasetError:
        raise
    except _UNREADABLE as error:
        raise DatasetError(f"`path` must hold an image set that `load_images` knows, got {error!r}.") from error
    (x, y), (tx, ty) = train_arrays, test_arrays
    channels = 3 if x.ndim == 4 else 1
    classes = int(max(y.max(), ty.max())) + 1
    train, test = _as_dataset(x[:limit], y[:limit], size, channels), _as_dataset(tx, ty, size, channels)
    return ImageSets(train, test, classes, None if owners is None else owners[:limit])


def _read(folder: Path) -> tuple[_Arrays, _Arrays, NDArray[np.int64] | None]:
    if (folder / "train.npz").is_file():
        train, test = (_arrays(folder / f"{part}.npz", "x", "y") for part in ("train", "test"))
        return train, test, None
    if files := sorted(folder.glob("small*.npz")):
        return _omniglot(files)
    if parts := sorted(folder.glob("train_*.npz")):
        return _pictures(parts), _pictures(sorted(folder.glob("test_*.npz"))), None
    whole = sorted(folder.glob("*.npz"))
    if len(whole) != 1:
        raise DatasetError(
            f"`path` must hold train.npz, train_*.npz, small*.npz or one .npz of MedMNIST, got none of them in "
            f"{str(folder)!r}. Is the folder right?"
        )
    train, test = (_arrays(whole[0], f"{part}_images", f"{part}_labels") for part in ("train", "test"))
    return train, test, None


def _arrays(file: Path, images: str, labels: str) -> _Arrays:
    with np.load(file, allow_pickle=False) as content:
        x, y = content[images], content[labels].reshape(-1).astype(np.int64)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or len(x) != len(y):
        raise ValueError(f"{file.name} must hold uint8 images and as many labels, got {x.dtype} {x.shape}")
    return x, y


def _pictures(files: list[Path]) -> _Arrays:
    image = optional_import("PIL.Image", extra="recipes")
    decoded, labels = [], []
    for file in files:
        with np.load(file, allow_pickle=False) as content:
            offsets, blob = content["offsets"], content["blob"].tobytes()
            labels.append(content["label"].astype(np.int64))
        for start, stop in pairwise(offsets):
            decoded.append(np.asarray(image.open(io.BytesIO(blob[start:stop])).convert("RGB")))
    return np.stack(decoded), np.concatenate(labels)


def _omniglot(files: list[Path]) -> tuple[_Arrays, _Arrays, NDArray[np.int64]]:
    images, names, drawers = [], [], []
    for file in files:
        with np.load(file, allow_pickle=False) as content:
            images.append(content["x"])
            names += content["chars"].astype(str)[content["char"]].tolist()
            drawers.append(content["drawer"].astype(np.int64))
    x, drawer = np.concatenate(images), np.concatenate(drawers)
    label = np.unique(np.array(names), return_inverse=True)[1]
    # The two files share alphabets: the same drawer's same character counts once.
    _, first = np.unique(label * (drawer.max() + 1) + drawer, return_index=True)
    x, drawer, label = x[first], drawer[first], label[first].astype(np.int64)
    held = drawer >= drawer.max() + 1 - (drawer.max() + 1) // 4
    return (x[~held], label[~held]), (x[held], label[held]), drawer[~held]
