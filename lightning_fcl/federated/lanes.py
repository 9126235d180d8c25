"""One training step for many clients at once: each tensor has a leading *lane* dimension, one lane per client.

``torch.func.vmap`` does that for nearly any code, but on CPU its dispatch costs more than a small layer. So the usual
layers and losses have rules of their own here, by which the user's step runs on stacked tensors directly; a linear
layer of all clients is one ``baddbmm``. A function without a rule raises :class:`NotStackable`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_fcl.exceptions import FCLError

Rule = Callable[..., Any]


class NotStackable(FCLError):  # noqa: N818 - says what is so, not that something broke
    """A job that has to run on its own; the message says why."""


class LaneMode(TorchFunctionMode):
    """Inside, functions of tensors with lanes act on each lane by itself.

    Args:
        tensors: Those that have lanes: parameters ``[K, ...]`` and batches ``[K, B, ...]``. What is computed from them
            has lanes too, and code sees their shapes without the lane dimension.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._lanes = {id(tensor): tensor for tensor in tensors}

    def has_lanes(self, value: Any) -> bool:
        """Whether ``value`` is a tensor with a lane dimension."""
        return id(value) in self._lanes

    def _any_lanes(self, values: Iterable[Any]) -> bool:
        return any(
            self._any_lanes(value) if isinstance(value, tuple | list) else self.has_lanes(value) for value in values
        )

    def __torch_function__(
        self, func: Rule, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the rule of ``func``."""
        kwargs = kwargs or {}
        if not self._any_lanes(args) and not self._any_lanes(kwargs.values()):
            return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is None:
            raise NotStackable(f"`{getattr(func, '__qualname__', func)}` has no rule for stacked tensors")
        result = rule(self, func, *args, **kwargs)
        if isinstance(result, Tensor):
            self._lanes[id(result)] = result
        return result


def _elementwise(mode: LaneMode, func: Rule, *args: Any, **kwargs: Any) -> Tensor:
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    dims = {tensor.dim() for tensor in tensors if mode.has_lanes(tensor)}
    others = [tensor for tensor in tensors if not mode.has_lanes(tensor) and tensor.dim()]
    if len(dims) > 1 or others or kwargs.get("inplace") or any(arg is True for arg in args):
        raise NotStackable(f"`{func.__name__}` of tensors of unlike dimensions, or in place, has no rule")
    result: Tensor = func(*args, **kwargs)
    return result


def _linear(mode: LaneMode, func: Rule, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (mode.has_lanes(x) and mode.has_lanes(weight)) or (bias is not None and not mode.has_lanes(bias)):
        raise NotStackable("a linear layer that is trained in part has no rule")
    rows = x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])
    turned = weight.transpose(1, 2)
    out = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, turned)
    return out if x.dim() == 3 else out.view(*x.shape[:-1], weight.shape[1])


def _flatten(mode: LaneMode, func: Rule, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    return x.flatten(_dim(start_dim), _dim(end_dim))


def _cross_entropy(
    mode: LaneMode,
    func: Rule,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **deprecated: Any,
) -> Tensor:
    classes = target.dtype == torch.int64 and x.dim() == 3 and target.dim() == 2 and mode.has_lanes(x)
    if not classes or weight is not None or reduction != "mean" or any(v is not None for v in deprecated.values()):
        raise NotStackable("this form of cross-entropy has no rule")
    each = F.cross_entropy(
        x.flatten(0, 1),
        target.flatten(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return each.view_as(target).sum(1) / (target != ignore_index).sum(1)


def _argmax(mode: LaneMode, func: Rule, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim is None:
        raise NotStackable("`argmax` over all dimensions has no rule")
    return x.argmax(_dim(dim), keepdim)


def _mean(mode: LaneMode, func: Rule, x: Tensor) -> Tensor:
    return x.flatten(1).mean(1) if x.dim() > 1 else x


def _shape(mode: LaneMode, func: Rule, x: Tensor, *unused: Any) -> torch.Size:
    return x.shape[1:]


def _size(mode: LaneMode, func: Rule, x: Tensor, dim: int | None = None) -> Any:
    return x.shape[1:] if dim is None else x.shape[1:][dim]


def _length(mode: LaneMode, func: Rule, x: Tensor) -> int:
    return x.shape[1]


def _same(mode: LaneMode, func: Rule, x: Tensor, *args: Any) -> Any:
    return func(x, *args)


def _dim(dim: int) -> int:
    return dim + 1 if dim >= 0 else dim


_RULES: dict[Any, Rule] = {
    F.linear: _linear,
    F.cross_entropy: _cross_entropy,
    torch.flatten: _flatten,
    Tensor.flatten: _flatten,
    torch.argmax: _argmax,
    Tensor.argmax: _argmax,
    torch.mean: _mean,
    Tensor.mean: _mean,
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.__len__: _length,
    **dict.fromkeys((Tensor.detach, Tensor.float, Tensor.double, Tensor.dtype.__get__, Tensor.device.__get__), _same),  # type: ignore[attr-defined]
    **dict.fromkeys(
        (
            *(F.relu, torch.relu, Tensor.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.softplus),
            *(torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid, torch.exp, Tensor.exp, torch.square),
            *(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.sub, Tensor.__sub__, Tensor.__rsub__),
            *(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__),
            *(torch.eq, Tensor.eq, Tensor.__eq__),
        ),
        _elementwise,
    ),
}
