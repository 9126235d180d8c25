"""What the command line's tests name in their configurations."""

from pathlib import Path

from torch.utils.data import TensorDataset

from lightning_fcl.callbacks import ServerCallback
from lightning_fcl.data import TaskStream
from lightning_fcl.mixins import FedNTD, LwF
from tests.helpers.toy import ToyModule, toy_data, toy_stream


def blobs(seed: int = 0, examples: int = 60) -> TensorDataset:
    return toy_data(examples, seed=seed)


def small_stream(tasks: int = 2, clients: int = 4) -> TaskStream:
    return toy_stream(tasks=tasks, clients=clients)


class Taught(LwF, FedNTD, ToyModule):
    """A module with two loss mixins."""


class StopOnce(ServerCallback):
    """Presses Ctrl-C once, before a round."""

    def __init__(self, global_round: int, done: str) -> None:
        self.global_round, self.done = global_round, done

    def on_round_start(self, trainer, pl_module):
        if trainer.state.global_round == self.global_round and not Path(self.done).exists():
            Path(self.done).touch()
            raise KeyboardInterrupt


class Refuses(ServerCallback):
    """Its constructor fails as a user's may."""

    def __init__(self, number: int = 1) -> None:
        raise ZeroDivisionError(f"cannot divide {number} by nothing")
