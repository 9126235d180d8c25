"""One forward and one backward pass over a batch, watched layer by layer: what the closed form is fed with."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fcl.functional._closed_form import Use
from lightning_fcl.functional._per_sample import PerSample, is_batched


@dataclass
class _Call:
    """What one layer did in one forward pass."""

    layer: nn.Module
    inputs: Tensor
    edge: GradientEdge
    version: int


@dataclass
class Seen:
    """One pass over a batch."""

    uses: dict[str, list[Use]]
    """By parameter name; a parameter without one was not reached."""
    lost: set[str]
    """Parameters that one of their layers used in a way that cannot be watched."""
    gradients: dict[str, Tensor]
    """Of the sum over the batch, by parameter name, if they were asked for."""


class Watch:
    """Forward hooks on the layers that own the wanted parameters.

    A layer can be watched if it is called with one tensor and returns one, both with a row per sample: then the sum of
    squares of its parameters follows from its inputs and from the gradients of its outputs.

    Args:
        module: The user's module.
        names: Of the wanted parameters.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        wanted, ids = set(names), {}
        for name, parameter in module.named_parameters():
            if name in wanted:
                ids[id(parameter)] = name
        self.owners: dict[nn.Module, dict[str, str]] = {}
        """Layer to ``{own name of the parameter: its name in the module}``."""
        for layer in module.modules():
            own = {part: ids[id(p)] for part, p in layer._parameters.items() if p is not None and id(p) in ids}
            if own:
                self.owners[layer] = own

    def observe(self, call: PerSample, leaves: dict[str, Tensor], chunk: Any, *, gradients: bool = False) -> Seen:
        """Run one batch forward and backward.

        Args:
            call: The log-likelihood as a function of weights.
            leaves: The wanted weights, requiring gradients.
            chunk: ``n`` samples, of shape ``[n, 1, ...]``.
            gradients: Whether to take the ordinary gradients of the weights too.

        Returns:
            What was seen.
        """
        batch = tree_map(lambda leaf: leaf[:, 0] if is_batched(leaf) else leaf, chunk)
        count = next(len(leaf) for leaf in tree_leaves(batch) if is_batched(leaf))
        calls: list[_Call] = []
        refused: set[nn.Module] = set()
        with self._hooks(calls, refused, count):
            values = call.values(leaves, call.copies, batch, count)
        lost = {name for layer in refused for name in self.owners[layer].values()}
        called = {name for one in calls for name in self.owners[one.layer].values()}
        # Those that no layer has shown are not reached, or used behind their layer's back.
        wanted = list(leaves) if gradients else [name for name in leaves if name not in called | lost]
        targets: Any = [*(one.edge for one in calls), *(leaves[name] for name in wanted)]
        found = torch.autograd.grad(values.sum(), targets, allow_unused=True)
        own = {name: grad for name, grad in zip(wanted, found[len(calls) :], strict=True) if grad is not None}
        lost |= own.keys() - called
        lost |= {n for one in calls if one.inputs._version != one.version for n in self.owners[one.layer].values()}
        uses: dict[str, list[Use]] = {}
        for one, grad in zip(calls, found, strict=False):
            if grad is not None:
                for part, name in self.owners[one.layer].items():
                    uses.setdefault(name, []).append(Use(one.layer, part, one.inputs, grad))
        return Seen(uses, lost, own)

    @contextmanager
    def _hooks(self, calls: list[_Call], refused: set[nn.Module], count: int) -> Iterator[None]:
        def watch(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if isinstance(output, Tensor) and not output.requires_grad:
                return  # run under `no_grad`: no gradient comes back
            plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            if plain and all(t.dim() > 0 and len(t) == count for t in (args[0], output)) and _is_per_sample(layer):
                # The edge, since an activation may overwrite the output in place.
                calls.append(_Call(layer, args[0].detach(), get_gradient_edge(output), args[0]._version))
            else:
                refused.add(layer)

        handles = [layer.register_forward_hook(watch, prepend=True, with_kwargs=True) for layer in self.owners]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_per_sample(layer: nn.Module) -> bool:
    """Whether no setting of the layer lets the samples of a batch influence each other."""
    return getattr(layer, "running_mean", 0) is not None and not getattr(layer, "scale_grad_by_freq", False)
