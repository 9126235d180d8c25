"""Sums of squared single-sample gradients by the fastest way that is exact: closed form, vmap, or one by one."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_fcl.functional._closed_form import sum_of_squares
from lightning_fcl.functional._layerwise import Seen, Watch
from lightning_fcl.functional._per_sample import PerSample, is_batched
from lightning_fcl.functional.likelihood import LogLikelihood
from lightning_fcl.types import Params

METHODS = ("auto", "closed_form", "vmap", "loop")
_CLOSED_CHUNK = 64
_VMAP_CHUNK = 32
_VMAP_ELEMENTS = 2**23  # of per-sample gradients held at once: 32 MB in float32
_UNLIKE = (
    "`method` 'closed_form' differs from a single sample. Do samples of a batch influence each other, does "
    "`log_likelihood` draw at random, or is the parameter used outside its layer? Use 'auto'."
)


class Squares:
    """Sums of squares over one chunk of samples after another.

    Args:
        module: The user's module.
        log_likelihood: As in ``fisher_diagonal``.
        weights: The wanted parameters by name.
        method: One of ``METHODS``.
        chunk_size: Samples in one pass, or ``None`` for the defaults.
    """

    def __init__(
        self, module: nn.Module, log_likelihood: LogLikelihood, weights: Params, method: str, chunk_size: int | None
    ) -> None:
        self.call = PerSample(module, log_likelihood)
        self.weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        self.must = method if method != "auto" else None
        self.watch = Watch(module, weights) if method in ("auto", "closed_form") else None
        self.checked = False
        fitting = _VMAP_ELEMENTS // max(1, sum(weight.numel() for weight in weights.values()))
        self.vmap_size = chunk_size or min(max(fitting, 1), _VMAP_CHUNK)
        self.vectorised = method == "vmap" or (method != "loop" and self.vmap_size > 1)
        self.chunk_size = chunk_size or (_CLOSED_CHUNK if self.watch else self.vmap_size)

    def __call__(self, count: int, chunk: Any) -> dict[str, Tensor]:
        """Sums over ``count`` samples, of shape ``[count, 1, ...]``, by name."""
        squares: dict[str, Tensor] = {}
        if self.watch is not None and (count > 1 or self.must):
            squares = self._closed_form(self.watch, chunk)
        rest = {name: weight for name, weight in self.weights.items() if name not in squares}
        if rest and self.must == "closed_form":
            raise RuntimeError(
                f"`method` 'closed_form' cannot measure {list(rest)[:3]}: it needs layers that map one tensor to one, "
                "both with a row per sample. Use 'auto'."
            )
        return squares | self._sample_by_sample(rest, count, chunk) if rest else squares

    # -- closed form ----------------------------------------------------------------------------------------------

    def _closed_form(self, watch: Watch, chunk: Any) -> dict[str, Tensor]:
        """The squares it can give; none, and it is not tried again, if it cannot be trusted."""
        try:
            seen = watch.observe(self.call, self.weights, chunk)
            if not self.checked:
                self._check(seen, watch.observe(self.call, self.weights, _part(chunk, 0, 1), gradients=True))
                self.checked = True
            return {
                name: sum_of_squares(seen.uses[name], weight.shape) if name in seen.uses else torch.zeros_like(weight)
                for name, weight in self.weights.items()
                if name not in seen.lost
            }
        except Exception:
            if self.must:
                raise
            self.watch = None
            return {}

    def _check(self, seen: Seen, alone: Seen) -> None:
        """In the batch the first sample must be what it is alone, and alone the closed form must be its gradient."""
        exact = True  # or of half precision
        squares: list[tuple[Tensor, Tensor]] = []
        rows: list[tuple[Tensor, Tensor]] = []
        for name in self.weights.keys() - seen.lost:
            uses, own = seen.uses.get(name, []), alone.uses.get(name, [])
            if name in alone.lost or [use.layer for use in uses] != [use.layer for use in own]:
                raise RuntimeError(_UNLIKE)
            rows += [(use.grads[0], one.grads[0]) for use, one in zip(uses, own, strict=True)]
            rows += [(use.inputs[0], one.inputs[0]) for use, one in zip(uses, own, strict=True)]
            if own and name in alone.gradients:
                gradient = alone.gradients[name]
                wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                squares.append((sum_of_squares(own, gradient.shape), wide.square()))
                exact &= wide.dtype == gradient.dtype
        for pairs, floor in ((rows, 1e-4), (squares, 1e-8)):
            scales = [_largest(expected) for _, expected in pairs]
            for (found, expected), scale in zip(pairs, scales, strict=True):
                close = (torch.finfo(found.dtype).eps ** 0.5 if exact else 0.1) if found.is_floating_point() else 0.0
                if _largest(found - expected) > close * max(scale, floor * max(scales)):  # NaN passes, until the sum
                    raise RuntimeError(_UNLIKE)

    # -- one gradient per sample ----------------------------------------------------------------------------------

    def _sample_by_sample(self, weights: dict[str, Tensor], count: int, chunk: Any) -> dict[str, Tensor]:
        squares = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
        for start in range(0, count, self.vmap_size):
            size = min(self.vmap_size, count - start)
            part = _part(chunk, start, start + size)
            found = self._vmap(weights, part) if self.vectorised else None
            for name, square in (found or self._loop(weights, size, part)).items():
                squares[name] += square
        return squares

    def _vmap(self, weights: dict[str, Tensor], chunk: Any) -> dict[str, Tensor] | None:
        """Sums of squares, or ``None`` and a warning if vmap cannot run the module."""
        in_dims = (None, None, tree_map(lambda leaf: 0 if is_batched(leaf) else None, chunk))
        gradients: Callable[..., dict[str, Tensor]] = torch.func.vmap(
            torch.func.grad(self.call.value), in_dims=in_dims, randomness="different"
        )
        try:
            grads = gradients({name: weight.detach() for name, weight in weights.items()}, self.call.copies, chunk)
        except RuntimeError as error:
            if self.must:
                raise
            self.vectorised, self.watch = False, None  # if some must go one by one, all may come along
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"fisher_diagonal runs sample by sample, since vmap failed: {reason}", stacklevel=5)
            return None
        return {
            name: grad.to(torch.promote_types(grad.dtype, torch.float32)).square().sum(0, dtype=torch.float64)
            for name, grad in grads.items()
        }

    def _loop(self, weights: dict[str, Tensor], count: int, chunk: Any) -> dict[str, Tensor]:
        squares = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
        for i in range(count):
            value = self.call.value(self.weights, self.call.copies, _part(chunk, i))
            grads = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
            for square, grad in zip(squares.values(), grads, strict=True):
                square += grad.double().square()
        return squares


def _part(chunk: Any, start: int, end: int | None = None) -> Any:
    """One sample of shape ``[1, ...]``, or several of shape ``[n, 1, ...]``."""
    place = start if end is None else slice(start, end)
    return tree_map(lambda leaf: leaf[place] if is_batched(leaf) else leaf, chunk)


def _largest(tensor: Tensor) -> float:
    """Largest magnitude; NaN if there is one."""
    low, high = tensor.aminmax() if tensor.numel() else (torch.zeros(()), torch.zeros(()))
    return max(-low.item(), high.item())
