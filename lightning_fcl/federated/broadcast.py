"""What server callbacks send to the clients of a round, beside the weights."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fcl.callbacks.base import ServerCallback

if TYPE_CHECKING:
    from lightning_fcl.federated.trainer import FederatedTrainer

Broadcasts = dict[str, dict[str, Tensor]]
"""By ``state_key`` of the sender, tensors by name."""


def collect(callbacks: Iterable[ServerCallback], trainer: "FederatedTrainer") -> Broadcasts:
    """What the server callbacks send down in the round that starts.

    Args:
        callbacks: The run's server callbacks.
        trainer: Handed to each.

    Returns:
        What each sends; those that send nothing are left out.

    Raises:
        TypeError: If one sends something else than tensors.
    """
    sent = {callback.state_key: callback.broadcast(trainer) for callback in callbacks}
    for key, tensors in sent.items():
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"`broadcast` of {key!r} must return tensors, got {type(value).__name__} for {name!r}.")
    return {key: tensors for key, tensors in sent.items() if tensors}
