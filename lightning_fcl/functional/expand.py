"""Old values in a model that has grown."""

import torch
from torch import Tensor

from lightning_fcl.exceptions import ParamMismatchError
from lightning_fcl.types import Params


def expand_like(tree: Params, like: Params) -> dict[str, Tensor]:
    """Grow ``tree`` to the names and shapes of ``like``; old values keep their place, new ones are zero.

    A grown anchor and a grown importance together leave new weights free: zero importance, no pull.

    Args:
        tree: Values saved when the model was smaller.
        like: The model's tensors now; every dimension at least as large as in ``tree``.

    Returns:
        Fresh tensors shaped as in ``like``, with the dtypes of ``tree`` (of ``like`` for new names).

    Raises:
        ParamMismatchError: If ``like`` lacks a name of ``tree``, or a dimension shrank or vanished.

    Example:
        >>> expand_like({"head": torch.tensor([5.0])}, {"head": torch.ones(2), "new": torch.ones(1)})
        {'head': tensor([5., 0.]), 'new': tensor([0.])}
    """
    if lost := tree.keys() - like.keys():
        raise ParamMismatchError(
            f"`like` must name every parameter of `tree`, but it lacks {sorted(lost)[:3]}. Drop them from `tree` first."
        )
    grown = {name: torch.zeros_like(tensor, dtype=tree.get(name, tensor).dtype) for name, tensor in like.items()}
    for name, old in tree.items():
        new = grown[name]
        if old.dim() != new.dim() or any(a > b for a, b in zip(old.shape, new.shape, strict=True)):
            raise ParamMismatchError(
                f"`like` must be at least as large as `tree` in every dimension, got {tuple(new.shape)} for {name!r} "
                f"of shape {tuple(old.shape)}. Values cannot be cut silently."
            )
        new[tuple(slice(size) for size in old.shape)] = old.detach()
    return grown
