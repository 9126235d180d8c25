"""Handwritten digits in several domains: offline from scikit-learn, or real data sets from a folder."""

import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fcl._imports import optional_import
from lightning_fcl.data.partition import check_at_least
from lightning_fcl.exceptions import DatasetError

Domains: TypeAlias = dict[str, tuple[TensorDataset, TensorDataset]]
"""Training and evaluation set by name of the domain, in the order of the tasks."""

_UNREADABLE = (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def digit_domains(
    names: Sequence[str] = ("clean", "inverted", "turned", "textured"),
    *,
    size: int = 16,
    channels: int = 1,
    test_share: float = 0.2,
    seed: int = 0,
) -> Domains:
    """Real digits (UCI optdigits, 1,797 images of 8x8 pixels, inside scikit-learn) seen in four ways.

    The labels mean the same in every domain and the pixels do not, so a model that moves on forgets: ``"inverted"``
    swaps ink and paper, ``"turned"`` turns the page by a quarter, ``"textured"`` writes over a smooth random background
    with ink of the opposite brightness.

    Args:
        names: The domains, in the order of the tasks.
        size: Height and width of the images in pixels; 8x8 pixels are enlarged bilinearly.
        channels: 1, or 3 equal ones.
        test_share: Share of the images, in (0, 1), kept for evaluation; the same images in every domain, so that no
            domain trains on what another is evaluated on.
        seed: Seeds the split and the backgrounds.

    Returns:
        By domain, ``TensorDataset`` pairs for training and evaluation: images ``(N, channels, size, size)``, float32 in
        [-1, 1], and labels ``(N,)``, int64.

    Raises:
        ValueError: If a domain is unknown or a number is out of range.
        MissingExtraError: If scikit-learn is not installed (extra ``recipes``).
    """
    if not names or len(set(names)) < len(names) or not set(names) <= set(_VIEWS):
        raise ValueError(f"`names` must name some of {list(_VIEWS)}, each once, got {list(names)}.")
    _check(size, channels)
    if not 0 < test_share < 1:
        raise ValueError(f"`test_share` must lie in (0, 1), got {test_share}.")
    digits = optional_import("sklearn.datasets", extra="recipes").load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    held_out = round(test_share * len(order))
    small = torch.from_numpy(digits.images[order].astype(np.float32) / 16).unsqueeze(1)  # [N, 1, 8, 8]
    labels = torch.from_numpy(digits.target[order].astype(np.int64))
    ink = F.interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
    domains = {}
    for name in names:
        images = _finish(_VIEWS[name](ink, np.random.default_rng([seed, *name.encode()])), size, channels)
        train = TensorDataset(images[held_out:], labels[held_out:])
        domains[name] = (train, TensorDataset(images[:held_out], labels[:held_out]))
    return domains


def load_digit_folder(
    path: str | Path,
    domains: Sequence[str] = ("mnist", "mnistm", "usps", "svhn"),
    *,
    size: int = 32,
    channels: int = 3,
    limit: int | None = None,
) -> Domains:
    """Real digit data sets from ``.npz`` files.

    A domain is one file ``<name>.npz`` with ``x_train``, ``y_train``, ``x_test`` and ``y_test``, or a series
    ``<name>_train*.npz`` and ``<name>_test*.npz`` with ``x`` and ``y``. Images are uint8, ``(N, H, W)`` or
    ``(N, H, W, 3)``. Nothing is unpickled.

    Args:
        path: The folder.
        domains: Names of the data sets, in the order of the tasks.
        size: Height and width in pixels to which the images are resized bilinearly.
        channels: 1 (luminance) or 3 (grey images get three equal channels).
        limit: Most images of each set; the first ones. By default all.

    Returns:
        By domain, ``TensorDataset`` pairs for training and evaluation: images ``(N, channels, size, size)``, float32 in
        [-1, 1], and labels ``(N,)``, int64.

    Raises:
        DatasetError: If a file is missing or does not hold such arrays.
        ValueError: If a number is out of range.
    """
    _check(size, channels)
    if limit is not None:
        check_at_least("limit", limit, 1)
    folder = Path(path)
    loaded: Domains = {}
    for name in domains:
        train, test = (_load(folder, name, part, limit) for part in ("train", "test"))
        loaded[name] = (_as_dataset(*train, size, channels), _as_dataset(*test, size, channels))
    return loaded


def _load(folder: Path, name: str, part: str, limit: int | None) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    whole = folder / f"{name}.npz"
    files, suffix = ([whole], f"_{part}") if whole.is_file() else (sorted(folder.glob(f"{name}_{part}*.npz")), "")
    if not files:
        raise DatasetError(
            f"`path` must hold {name}.npz or {name}_{part}*.npz, got neither in {str(folder)!r}. Is the folder right?"
        )
    images, labels = [], []
    for file in files:
        try:
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                images.append(arrays[f"x{suffix}"][:limit])
                labels.append(arrays[f"y{suffix}"][:limit])
        except _UNREADABLE as error:
            raise DatasetError(f"{file} must hold arrays 'x{suffix}' and 'y{suffix}', got: {error}") from error
    x, y = np.concatenate(images)[:limit], np.concatenate(labels)[:limit].astype(np.int64)
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or x.shape[3:] not in ((), (3,)) or y.shape != x.shape[:1]:
        raise DatasetError(
            f"{files[0]} must hold uint8 images (N, H, W[, 3]) and N labels, got {x.dtype} {x.shape} and {y.shape}."
        )
    return x, y


def _as_dataset(x: NDArray[np.uint8], y: NDArray[np.int64], size: int, channels: int) -> TensorDataset:
    images = torch.from_numpy(x).float() / 255
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)  # [N, 1 or 3, H, W]
    return TensorDataset(_finish(images, size, channels), torch.from_numpy(y))


def _check(size: int, channels: int) -> None:
    check_at_least("size", size, 1)
    if channels not in (1, 3):
        raise ValueError(f"`channels` must be 1 or 3, got {channels}.")


def _finish(images: Tensor, size: int, channels: int) -> Tensor:
    """Images in [0, 1], ``(N, 1 or 3, H, W)``, in the size and channels asked for, from -1 to 1."""
    if channels < images.shape[1]:
        images = (images * torch.tensor(_LUMA).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    if images.shape[2:] != (size, size):
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=True)
    return (2 * images.expand(-1, channels, -1, -1) - 1).contiguous()


def _clean(ink: Tensor, rng: np.random.Generator) -> Tensor:
    return ink


def _inverted(ink: Tensor, rng: np.random.Generator) -> Tensor:
    return 1 - ink


def _turned(ink: Tensor, rng: np.random.Generator) -> Tensor:
    return ink.rot90(1, dims=(2, 3))


def _textured(ink: Tensor, rng: np.random.Generator) -> Tensor:
    coarse = torch.from_numpy(rng.random((len(ink), 1, 4, 4), dtype=np.float32))
    paper = F.interpolate(coarse, size=ink.shape[2:], mode="bicubic", align_corners=False).clamp(0, 1)
    return (paper - ink).abs()


_VIEWS: dict[str, Callable[[Tensor, np.random.Generator], Tensor]] = {
    "clean": _clean,
    "inverted": _inverted,
    "turned": _turned,
    "textured": _textured,
}
