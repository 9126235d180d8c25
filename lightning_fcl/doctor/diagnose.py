"""A run examined before it starts."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import lightning as L

from lightning_fcl.doctor.costs import add_memory, add_time, add_traffic
from lightning_fcl.doctor.diagnosis import Diagnosis
from lightning_fcl.doctor.dry_run import DryRun, dry_run
from lightning_fcl.doctor.multimodal import check_multimodal
from lightning_fcl.doctor.parameters import add_parameters
from lightning_fcl.doctor.probe import few
from lightning_fcl.exceptions import MisconfigurationError

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer

LINKS = (10.0, 100.0, 1000.0)
_ENGINES = {
    "ReplicaEngine": "each process trains whole clients, one after another, in one persistent copy of the module",
    "StrategyEngine": "parallel='model': all processes train the same client by the strategy",
    "DeepSpeedEngine": "parallel='model' with a DeepSpeed strategy: one DeepSpeed engine serves all clients",
}


def diagnose(
    trainer: "FederatedTrainer",
    module: L.LightningModule,
    stream: "TaskStream",
    *,
    link_mbit: Sequence[float] = LINKS,
) -> Diagnosis:
    """Examine what ``trainer.fit(module, stream)`` would do, by a dry run of two clients in two short rounds.

    Nothing is written to ``trainer.run_dir``, and ``module``, callbacks and rules stay as they are.

    Args:
        trainer: Its settings, callbacks and rules are used.
        module: As for ``fit``.
        stream: As for ``fit``.
        link_mbit: Speeds of links to print times for, megabits per second.

    Returns:
        Tables of parameters, traffic, memory and time, and what was checked. An error of the dry run is a finding that
        names the phase; then there are no tables that need its figures.

    Raises:
        MisconfigurationError: If ``link_mbit`` holds a speed that is none.
    """
    for mbit in link_mbit:
        if not 0 < mbit < math.inf:
            raise MisconfigurationError(f"`link_mbit` must hold positive speeds, got {mbit}.")
    found = Diagnosis()
    seen = dry_run(trainer, module, stream)
    found.error = seen.error
    if seen.error is None:
        _note_run(found, seen, trainer.engine)
    else:
        found.add("error", f"dry run, {seen.phase}", seen.message)
    _check_gradients(found, seen)
    if seen.probe.layout is not None:
        add_parameters(found, module, seen.probe)
    if seen.error is None:
        add_traffic(found, trainer, stream, seen, link_mbit)
        add_memory(found, trainer, module, stream, seen)
        add_time(found, trainer, stream, seen)
    check_multimodal(found, module, stream)
    return found


def _note_run(found: Diagnosis, seen: DryRun, wanted: str) -> None:
    layout, engine = seen.probe.layout, seen.choices["engine"]
    assert layout is not None
    found.add("ok", "dry run", "two rounds of a few clients, evaluation and commits went through")
    why = _ENGINES.get(engine, "see config.yaml")
    if engine == "ReplicaEngine":
        why += (
            "; parameters are views of one vector" if layout.uniform else "; its dtypes differ, so tensors are copied"
        )
    if wanted != "sequential":
        why += f"; engine={wanted!r} was examined in sequence, and the run may stack clients"
    found.add("note", "engine", f"{engine}, {seen.choices['world_size']} process(es): {why}")


def _check_gradients(found: Diagnosis, seen: DryRun) -> None:
    probe = seen.probe
    if not probe.batch_seconds and not probe.broken:
        return
    dead, still = set(probe.trained) - probe.arrived, probe.arrived - probe.moved - probe.broken
    if dead:
        found.add(
            "warning",
            "gradients",
            f"{len(dead)} of {len(probe.trained)} trainable parameters got none: {few(dead)}. They take no part in the "
            "loss, and yet travel. Freeze them (`requires_grad_(False)`), or use them.",
        )
    if still:
        found.add(
            "warning",
            "gradients",
            f"all zero in {len(still)} trainable parameters: {few(still)}. A dead activation, a zero factor or a "
            "mask may block them.",
        )
    if probe.broken:
        found.add(
            "note" if probe.scales_loss else "error",
            "gradients",
            f"NaN or infinite in {len(probe.broken)} parameters: {few(probe.broken)}. "
            + (
                "The loss scale is still falling, as it does at first in 16-mixed."
                if probe.scales_loss
                else "Lower the learning rate, clip gradients, or look for a division by zero or log of zero."
            ),
        )
    if not dead and not still and not probe.broken:
        found.add("ok", "gradients", f"all {len(probe.trained)} trainable parameters got finite ones")
