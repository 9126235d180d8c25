"""What a training step must leave alone if it belongs to several clients."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class StepState:
    """Global generators, and the numbers and tensors that a module's layers hold beside parameters and buffers.

    Args:
        module: The module whose step runs next.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._generators = _generators()
        self._own = [(vars(child), _own(child)) for child in module.modules()]

    def change(self) -> str | None:
        """What has changed since, in words; ``None`` if nothing."""
        if _generators() != self._generators:
            return "the step draws random numbers"
        for child, (_, before) in zip(self._module.modules(), self._own, strict=True):
            now = _own(child)
            for name in now.keys() | before.keys():
                if not _same(now.get(name), before.get(name)):
                    return f"the step changes `{name}` of the module, which is no buffer"
        return None

    def restore(self) -> None:
        """Put the module's numbers and tensors back."""
        for child, (table, before) in zip(self._module.modules(), self._own, strict=True):
            for name in _own(child).keys() - before.keys():
                del table[name]
            table.update(before)


def _own(child: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(child).items() if isinstance(value, int | float | Tensor)}


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))


def _generators() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    torch_states = [bytes(state.numpy()) for state in states]
    return random.getstate(), kind, bytes(keys), tuple(rest), torch_states  # type: ignore[arg-type]
