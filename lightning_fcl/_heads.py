"""The classifier at the end of a module: where it is, what comes out of it, and how to run it on the side."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_fcl.exceptions import MisconfigurationError


def find_head(module: nn.Module, name: str | None = None) -> tuple[str, nn.Module]:
    """Dotted name and module of the classifier: the named one, else the last ``nn.Linear``.

    Raises:
        MisconfigurationError: If there is no such module, or no linear layer.
    """
    if name is None:
        linear = [found for found, child in module.named_modules() if isinstance(child, nn.Linear)]
        if not linear:
            raise MisconfigurationError(
                f"`feature_module` must name the layer that turns features into logits, since {type(module).__name__} "
                "has no `nn.Linear`. Build the net in `__init__`, or set `feature_module`."
            )
        name = linear[-1]
    try:
        return name, module.get_submodule(name)
    except AttributeError as error:
        names = ", ".join(found for found, _ in list(module.named_modules())[1:6])
        raise MisconfigurationError(
            f"`feature_module` must name a submodule of {type(module).__name__}, got {name!r}. Names look like: "
            f"{names}."
        ) from error


@contextmanager
def outputs_of(layer: nn.Module) -> Iterator[list[Any]]:
    """Collects what ``layer`` gives in every call, oldest first."""
    seen: list[Any] = []
    handle = layer.register_forward_hook(lambda _, __, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def replaced_output(layer: nn.Module, rule: Any) -> Iterator[None]:
    """Inside, calls of ``layer`` give ``rule(inputs, output)``; ``inputs`` is the tuple of its arguments."""
    handle = layer.register_forward_hook(lambda _, inputs, output: rule(inputs, output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def modes_kept(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode inside; afterwards every submodule is as it was."""
    modes = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """Inside, ``module.log`` does nothing."""
    own = vars(module).get("log")
    object.__setattr__(module, "log", lambda *_, **__: None)
    try:
        yield
    finally:
        if own is None:
            object.__delattr__(module, "log")
        else:
            object.__setattr__(module, "log", own)


def call(module: L.LightningModule, inputs: Any) -> Any:
    """``forward`` of a batch's inputs: a tensor, or a mapping of keyword arguments."""
    return module(**inputs) if isinstance(inputs, Mapping) else module(inputs)


def inputs_and_targets(batch: Any) -> tuple[Any, Tensor]:
    """The two parts of a batch: ``(inputs, targets, ...)``, or a mapping with ``"labels"`` or ``"label"``.

    Raises:
        MisconfigurationError: If it is neither.
    """
    if isinstance(batch, Mapping):
        key = next((key for key in ("labels", "label") if key in batch), None)
        if key is not None:
            return {name: value for name, value in batch.items() if name != key}, batch[key]
    elif isinstance(batch, list | tuple) and len(batch) >= 2:
        return batch[0], batch[1]
    raise MisconfigurationError(
        f"Batches must be (inputs, labels) or a mapping with 'labels', got {type(batch).__name__}. Change `collate_fn`."
    )
