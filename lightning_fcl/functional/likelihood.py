"""Log-likelihoods of single samples, which Fisher information is made of."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

LogLikelihood: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""``(module, batch) -> [B]``: the log-likelihood of every sample, in nats."""


def classification_log_likelihood(module: nn.Module, batch: Any) -> Tensor:
    r"""Log-likelihood of the labels, :math:`\log p(y_n | x_n)`, of a classifier whose forward gives logits.

    Args:
        module: ``module(x)`` returns logits of shape ``(B, C)``.
        batch: ``(x, y)`` with integer labels ``y`` of shape ``(B,)``.

    Returns:
        Shape ``(B,)``, in nats; gradients flow.

    Raises:
        ValueError: If the logits are not of shape ``(B, C)``.

    Example:
        >>> import torch
        >>> even = torch.zeros(1, 2), torch.tensor([1])
        >>> classification_log_likelihood(nn.Identity(), even)  # log(1/2)
        tensor([-0.6931])

    Source: the categorical log-likelihood.

    Deviation: None.
    """
    inputs, labels = batch
    logits = module(inputs)
    if logits.dim() != 2:
        raise ValueError(f"`module` must return logits of shape (B, C), got {tuple(logits.shape)}.")
    return -F.cross_entropy(logits, labels, reduction="none")
