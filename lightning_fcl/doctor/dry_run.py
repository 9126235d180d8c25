"""A dry run: two clients, two rounds, two steps each, in copies of all objects and in a folder that is thrown away."""

import copy
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import yaml
from torch import Tensor, nn

from lightning_fcl.aggregators.rows import RowReducer
from lightning_fcl.doctor.probe import Probe, ServerProbe
from lightning_fcl.exceptions import MisconfigurationError

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer

CLIENTS, ROUNDS, STEPS = 2, 2, 2


@dataclass
class DryRun:
    """What was seen.

    Args:
        probe: In client jobs.
        server: Between rounds.
        choices: What the run folder says of engine and ranks.
        files: Bytes on disk: ``"commit"``, and ``"client"`` for one client's state.
        error: What was raised.
        phase: What was going on then.
    """

    probe: Probe
    server: ServerProbe
    choices: dict[str, Any]
    files: dict[str, int]
    error: Exception | None = None
    phase: str = ""

    @property
    def message(self) -> str:
        """The error with its place, in one line."""
        assert self.error is not None
        text = (str(self.error).strip().splitlines() or ["no message"])[0]
        frames = traceback.extract_tb(self.error.__traceback__)
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        return f"{type(self.error).__name__}: {text}{place}"


def dry_run(trainer: "FederatedTrainer", module: L.LightningModule, stream: "TaskStream") -> DryRun:
    """Run two short rounds of what ``trainer.fit(module, stream)`` would run.

    Two rounds, since some methods send more from the second on; two steps on one batch, since some parameters get no
    gradient in the first one (LoRA's first factor, while the second is zero). Frozen weights are shared with the copy.

    Args:
        trainer: Not run; its Fabric is launched.
        module: Not touched.
        stream: Of its first stage, clients are taken that have data.

    Returns:
        What was seen, with the error if one was raised.
    """
    probe = Probe()
    seen = DryRun(probe, ServerProbe(probe), {}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            probe.phase = "starting Fabric"
            fabric = trainer.fabric
            probe.phase = "copying the module"
            with _copies(trainer, module) as (dry, twin), _folder(fabric) as folder:
                _make_short(dry, folder, seen)
                probe.phase = "setting up the module"
                dry.fit(twin, _first_stage(stream, dry.clients_per_round))
                seen.files = _files(folder)
                seen.choices = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["choices"]
        except Exception as error:
            seen.error, seen.phase = error, probe.phase
    return seen


@contextmanager
def _copies(
    trainer: "FederatedTrainer", module: L.LightningModule
) -> Iterator[tuple["FederatedTrainer", L.LightningModule]]:
    """Trainer and module to spoil; frozen parameters are the module's own, and hold afterwards what they held."""
    frozen = [p for p in module.parameters() if not p.requires_grad] if isinstance(module, nn.Module) else []
    held: list[tuple[nn.Parameter, Tensor]] = [(p, p.data) for p in frozen]
    memo: dict[int, Any] = {id(p): p for p in frozen}
    dry = copy.copy(trainer)
    parts = (module, trainer.callbacks, trainer.server_callbacks, trainer.chain)
    try:
        twin, dry.callbacks, dry.server_callbacks, dry.chain = copy.deepcopy(parts, memo)
    except Exception as error:
        raise MisconfigurationError(
            f"`module`, callbacks and rules must be copyable (`copy.deepcopy`), so that a dry run leaves them as they "
            f"are: {type(error).__name__}: {error}"
        ) from error
    try:
        yield dry, twin
    finally:
        for parameter, data in held:
            parameter.data = data


def _make_short(dry: "FederatedTrainer", folder: Path, seen: DryRun) -> None:
    dry.run_dir = folder
    dry.rounds = ROUNDS
    dry.engine = "sequential"  # the probe looks at one client at a time
    if not isinstance(dry.chain.reducer, RowReducer):  # robust rules may need all
        dry.clients_per_round = min(dry.clients_per_round, CLIENTS)
    dry.local_epochs, dry.local_steps = 1, STEPS
    dry.limit_train_batches = dry.limit_eval_batches = 1
    dry.eval_every = None if dry.eval_every is None else 1
    dry.checkpoint_every = dry.keep_checkpoints = dry.min_completed = 1
    dry.measure_baseline = dry.fast_dev_run = dry.enable_progress_bar = False
    dry.on_client_error = "raise"
    dry.loggers = []
    dry.callbacks = [*dry.callbacks, seen.probe]
    dry.server_callbacks = [*dry.server_callbacks, seen.server]


def _first_stage(stream: "TaskStream", clients: int) -> "TaskStream":
    """The stream's first stage with a few of its clients."""
    chosen = stream.clients(0)[:clients] if len(stream) else []
    if not chosen:
        raise MisconfigurationError("`stream` must have clients with data in its first stage, got none.")
    short = stream._with(replace(stream.plan, schedule=stream.plan.schedule[:1]))
    vars(short)["clients"] = lambda task: chosen
    return short


@contextmanager
def _folder(fabric: Any) -> Iterator[Path]:
    """One temporary folder for all ranks."""
    with tempfile.TemporaryDirectory(prefix="fcl-doctor-") as own:
        yield Path(fabric.broadcast(own))
        fabric.barrier()


def _files(folder: Path) -> dict[str, int]:
    states = [path.stat().st_size for path in (folder / "clients").glob("*/*.safetensors")]
    commits = [sum(f.stat().st_size for f in path.iterdir()) for path in (folder / "checkpoints").glob("round_*")]
    return {"commit": max(commits, default=0), "client": max(states, default=0)}
