"""What a pass over single samples needs: the module as a function of its weights, chunks, and no traces left."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fcl.functional.likelihood import LogLikelihood
from lightning_fcl.types import Params


class PerSample(nn.Module):
    """``log_likelihood(module, batch)`` as a function of the weights.

    ``functional_call`` swaps weights inside a module; as a child of this one, ``module`` is what it swaps them in, and
    ``log_likelihood`` may use it in any way (methods, children, several calls) and still sees the swapped weights.
    Buffers are copies, so a forward that counts or averages leaves the user's module alone.
    """

    def __init__(self, module: nn.Module, log_likelihood: LogLikelihood) -> None:
        super().__init__()
        self.module = module
        self.log_likelihood = log_likelihood
        self.copies = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def forward(self, batch: Any, count: int = 1) -> Tensor:
        """The checked log-likelihoods of a batch, shape ``(count,)``."""
        value = self.log_likelihood(self.module, batch)
        if value.shape != (count,):
            raise ValueError(
                f"`log_likelihood` must return shape (B,), one value per sample, got {tuple(value.shape)} for "
                f"B = {count}. Do not average over the batch."
            )
        if not value.requires_grad:
            raise ValueError(
                "`log_likelihood` must depend on the parameters, got a result without gradient. "
                "Does it detach or run under `torch.no_grad()`?"
            )
        return value

    def values(self, weights: Params, buffers: Params, batch: Any, count: int) -> Tensor:
        """Log-likelihoods of ``count`` samples under other weights and buffers, named as in ``module``."""
        tensors = {f"module.{name}": tensor for name, tensor in (*weights.items(), *buffers.items())}
        values: Tensor = torch.func.functional_call(self, tensors, (batch, count))
        return values

    def value(self, weights: Params, buffers: Params, sample: Any) -> Tensor:
        """The log-likelihood of one sample under other weights and buffers, named as in ``module``: a scalar."""
        return self.values(weights, buffers, sample, 1)[0]


def is_batched(leaf: Any) -> bool:
    """Whether the first dimension of ``leaf`` counts samples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def chunks(batches: Iterable[Any], size: int, limit: int | None, device: torch.device) -> Iterator[tuple[int, Any]]:
    """Cut batches into ``(count, chunk)`` with ``count <= size``, whose tensors have shape ``[count, 1, ...]``."""
    left = sys.maxsize if limit is None else limit
    for batch in batches:
        batch = dict(batch) if isinstance(batch, Mapping) else batch  # e.g. a tokenizer's own mapping class
        sizes = {len(leaf) for leaf in tree_leaves(batch) if is_batched(leaf)}
        if len(sizes) != 1:
            raise ValueError(
                f"`batches` must yield tensors that share their first dimension, got sizes {sorted(sizes)}. "
                "Wrap a lone tensor in the batch's container, with a leading dimension of samples."
            )
        total = min(sizes.pop(), left)
        for start in range(0, total, size):
            end = min(start + size, total)
            yield end - start, tree_map(lambda leaf, s=start, e=end: _cut(leaf, s, e, device), batch)
        left -= total
        if not left:
            return


def _cut(leaf: Any, start: int, end: int, device: torch.device) -> Any:
    if is_batched(leaf):
        return leaf[start:end].unsqueeze(1).to(device)  # [count, ...] -> [count, 1, ...]
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


@contextmanager
def undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode and gradients on; afterwards every child's mode and torch's random state are as before."""
    modes = {child: child.training for child in module.modules()}
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked), torch.enable_grad():
        try:
            module.eval()
            yield
        finally:
            for child, mode in modes.items():
                child.training = mode
