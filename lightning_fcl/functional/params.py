"""Trees of parameters: the few operations that methods share."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_fcl.exceptions import ParamMismatchError
from lightning_fcl.types import Params


def check_same_names(**trees: Params) -> None:
    """Raise unless all trees hold the same parameter names.

    Args:
        trees: The trees; their keywords appear in the message, and the first one is the reference.

    Raises:
        ParamMismatchError: If a tree lacks or adds a name.

    Example:
        >>> weight = {"weight": torch.zeros(2)}
        >>> check_same_names(params=weight, anchor=weight)
        >>> check_same_names(params=weight, anchor={})
        Traceback (most recent call last):
        ...
        lightning_fcl.exceptions.ParamMismatchError: `anchor` must name the same parameters as `params`, but it \
lacks 'weight'. Did the model gain a head since `anchor` was saved? Grow it with `expand_like(anchor, params)`.
    """
    (first, expected), *others = trees.items()
    for name, tree in others:
        missing, extra = expected.keys() - tree.keys(), tree.keys() - expected.keys()
        if missing or extra:
            found = "; ".join(f"{verb} {_few(names)}" for verb, names in (("lacks", missing), ("adds", extra)) if names)
            raise ParamMismatchError(
                f"`{name}` must name the same parameters as `{first}`, but it {found}. "
                f"Did the model gain a head since `{name}` was saved? Grow it with `expand_like({name}, {first})`."
            )


def check_same_shapes(**trees: Params) -> None:
    """Raise unless all trees hold the same names and shapes; broadcasting would give a wrong number silently.

    Args:
        trees: As for :func:`check_same_names`.

    Raises:
        ParamMismatchError: If a name or a shape differs.

    Example:
        >>> check_same_shapes(params={"w": torch.zeros(3)}, anchor={"w": torch.zeros(2)})
        Traceback (most recent call last):
        ...
        lightning_fcl.exceptions.ParamMismatchError: `anchor` must have the shapes of `params`, got (2,) instead of \
(3,) for 'w'. Did the layer grow since `anchor` was saved? Grow it with `expand_like(anchor, params)`.
    """
    check_same_names(**trees)
    (first, expected), *others = trees.items()
    for name, tree in others:
        for key, tensor in tree.items():
            if tensor.shape != expected[key].shape:
                raise ParamMismatchError(
                    f"`{name}` must have the shapes of `{first}`, got {tuple(tensor.shape)} instead of "
                    f"{tuple(expected[key].shape)} for {key!r}. Did the layer grow since `{name}` was saved? "
                    f"Grow it with `expand_like({name}, {first})`."
                )


def zeros_like(tree: Params) -> dict[str, Tensor]:
    """Zeros with the names, shapes, dtypes and devices of ``tree``.

    Example:
        >>> zeros_like({"w": torch.ones(2)})
        {'w': tensor([0., 0.])}
    """
    return {name: torch.zeros_like(tensor) for name, tensor in tree.items()}


def axpy(scale: float, x: Params, y: Params) -> dict[str, Tensor]:
    """The tree ``scale * x + y``.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> axpy(2.0, {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])})
        {'w': tensor([5.])}
    """
    check_same_shapes(x=x, y=y)
    return {name: scale * x[name] + y[name] for name in x}


def dot(x: Params, y: Params) -> Tensor:
    """Inner product of two trees: a scalar, formed in float64.

    Raises:
        ParamMismatchError: If names or shapes differ.

    Example:
        >>> dot({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})
        tensor(11., dtype=torch.float64)
    """
    check_same_shapes(x=x, y=y)
    return total((x[name].double() * y[name].double()).sum() for name in x)


def norm(x: Params) -> Tensor:
    """Euclidean norm of a tree as one long vector: a scalar, formed in float64.

    Example:
        >>> norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        tensor(5., dtype=torch.float64)
    """
    return dot(x, x).sqrt()


def total(terms: Iterable[Tensor]) -> Tensor:
    """Sum of scalar tensors; no terms, as of an empty tree, give a float32 zero.

    Example:
        >>> total([torch.tensor(1.0), torch.tensor(2.0)])
        tensor(3.)
    """
    terms = list(terms)
    return torch.stack(terms).sum() if terms else torch.zeros(())


def _few(names: Iterable[str]) -> str:
    """At most three names, quoted, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more
