"""A plain description of every object of a run, for ``config.yaml`` and for comparing runs on resume."""

import functools
import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def describe(value: Any, depth: int = 4) -> Any:
    """``value`` as JSON-ready data: objects become their class path and constructor arguments.

    Args:
        value: Anything.
        depth: How deep to follow objects.

    Returns:
        Plain data; the same for two objects made alike.
    """
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return _plain(value)
    if isinstance(value, Path | torch.dtype | torch.device | torch.Size):
        return str(value)
    if isinstance(value, re.Pattern):
        return f"re:{value.pattern}"
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return {str(k): describe(v, depth) for k, v in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [describe(v, depth) for v in value]
    if isinstance(value, functools.partial):
        return {"function": _path(value.func), "init_args": describe(dict(value.keywords), depth)}
    if inspect.isroutine(value) or inspect.isclass(value):
        return _path(value)
    return _describe_object(value, depth)


def _plain(value: Any) -> Any:
    """NumPy's scalars and enums are subclasses of plain types that YAML cannot write."""
    if isinstance(value, np.generic):
        return value.item()
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A short fingerprint of named tensors: equal for equal values, and cheap for large frozen nets.

    Args:
        tensors: Tensors by name, on any device.

    Returns:
        A hexadecimal SHA-256 of names, shapes, sums and sums of squares.
    """
    state = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].detach().flatten()
        sums = [] if not values.numel() else [values.sum(dtype=torch.float64), values.double().square().sum()]
        state.update(repr((name, tuple(tensors[name].shape), [float(x) for x in sums])).encode())
    return state.hexdigest()


def _describe_object(value: Any, depth: int) -> Any:
    described: dict[str, Any] = {"class_path": _path(type(value))}
    if depth == 0:
        return described
    arguments = {}
    attributes = getattr(value, "__dict__", {})
    for name in _argument_names(type(value)):
        if name in attributes:
            arguments[name] = describe(attributes[name], depth - 1)
    if arguments:
        described["init_args"] = arguments
    return described


def _argument_names(kind: type) -> Iterator[str]:
    """Names of the constructor's arguments, also of those that ``**kwargs`` hands on to the next class."""
    for parent in kind.__mro__:
        if inspect.isfunction(init := vars(parent).get("__init__")):
            parameters = inspect.signature(init).parameters.values()
            yield from (p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
            if all(p.kind is not p.VAR_KEYWORD for p in parameters):
                return


def _path(value: Any) -> str:
    module = getattr(value, "__module__", None) or ""
    return f"{module}.{getattr(value, '__qualname__', type(value).__name__)}"


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Readable list of places where two descriptions differ.

    Args:
        old: Description of the run on disk.
        new: Description of the run at hand.
        where: Dotted prefix.

    Returns:
        Lines like ``trainer.seed: 0 -> 1``; empty if they are equal.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            place = f"{where}.{key}" if where else key
            lines += differences(old.get(key, "(absent)"), new.get(key, "(absent)"), place)
        return lines
    return [] if old == new else [f"{where}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
