"""Plain SGD without the ceremony of ``torch.optim``, bit for bit the same.

``Optimizer.step`` and ``zero_grad`` open a profiler range, look for hooks and sort tensors by device each time; for a
small net that is a quarter of the step. What is here applies only where nothing of that can matter, by rules that look
at the optimiser as it is at that step.
"""

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer

_OFF = ("momentum", "weight_decay", "maximize", "differentiable", "fused")


def clear_gradients(optimizer: Optimizer) -> None:
    """What ``optimizer.zero_grad()`` does."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether anybody listens to the steps of ``optimizer``."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Whether a step of ``optimizer`` is ``w -= lr * grad`` and nothing else: no state, no hook, no wrapped ``step``.

    A learning rate scheduler wraps ``step`` to see that it was called, so it leads to torch's own.
    """
    return (
        type(optimizer) is SGD
        and "step" not in vars(optimizer)
        and not has_step_hooks(optimizer)
        and all(
            not isinstance(group["lr"], Tensor)
            and group["foreach"] is not False
            and not any(group[name] for name in _OFF)
            for group in optimizer.param_groups
        )
    )


@torch.no_grad()
def plain_sgd_step(optimizer: Optimizer) -> None:
    """The step of an optimiser that :func:`is_plain_sgd`; as in torch, a parameter without a gradient stays."""
    for group in optimizer.param_groups:
        parameters, gradients = [], []
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                parameters.append(parameter)
                gradients.append(gradient)
        if parameters:
            torch._foreach_add_(parameters, gradients, alpha=-group["lr"])
