"""What a suite is: a stream, a module, a protocol and the figures that its paper prints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L

from lightning_fcl.data.stream import TaskStream
from lightning_fcl.reports.published import PublishedTable


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One stream with one protocol.

    Args:
        name: Name on the command line.
        about: Which paper's protocol it is, and what was scaled down.
        stream: ``f(clients, seed, data_dir)``; embedded data if ``data_dir`` is ``None``.
        module: The module's class; mixins are put left of it.
        options: ``f(data_dir)``: keyword arguments of the module, made anew for each run.
        clients: The paper's number of clients.
        sampled: The share of them that takes part in a round.
        rounds: The paper's rounds per task.
        local_epochs: The paper's local epochs.
        lr_decay: Factor of the clients' learning rate per round, from anew in each task.
        leave_out: Methods of the table that make no sense here.
        published: The paper's figures.
        trainer: Further arguments of ``FederatedTrainer``.
    """

    name: str
    about: str
    stream: Callable[[int, int, Path | None], TaskStream]
    module: type[L.LightningModule]
    options: Callable[[Path | None], dict[str, Any]]
    clients: int
    sampled: float
    rounds: int
    local_epochs: int
    lr_decay: float
    published: PublishedTable
    leave_out: tuple[str, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
