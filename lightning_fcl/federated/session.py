"""Around a run: launching Fabric, starting or resuming in a run folder, describing and reporting."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
import yaml
from lightning.fabric import Fabric
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_fcl.aggregators.chain import chain_of
from lightning_fcl.callbacks.base import ServerCallback
from lightning_fcl.exceptions import CheckpointError, MisconfigurationError
from lightning_fcl.federated.checkpoint import Checkpoint, CheckpointFolder, load_checkpoint
from lightning_fcl.federated.checks import method_name
from lightning_fcl.federated.describe import describe, digest
from lightning_fcl.federated.engines.base import Engine
from lightning_fcl.federated.engines.select import make_engine
from lightning_fcl.federated.hooks import HookTable, check_callbacks, with_module_callbacks
from lightning_fcl.federated.layout import named_tensors
from lightning_fcl.federated.persist import restore
from lightning_fcl.federated.run import Run
from lightning_fcl.federated.run_folder import RunFolder
from lightning_fcl.federated.stackable import stack
from lightning_fcl.reports.run_report import REPORT, RunReport

if TYPE_CHECKING:
    from lightning_fcl.data.stream import TaskStream
    from lightning_fcl.federated.trainer import FederatedTrainer

# What may differ between a run and its resumption, since no result depends on it.
_FREE = {
    *(
        "accelerator",
        "devices",
        "num_nodes",
        "strategy",
        "parallel",
        "loggers",
        "run_dir",
        "method",
        "enable_progress_bar",
    ),
    *("checkpoint_every", "keep_checkpoints", "preload_mb", "client_state_mb", "client_timeout"),
}
_NO_SETTING = {"chain", "should_stop", "stream"}


def launch(trainer: "FederatedTrainer") -> Fabric:
    """Make and launch the trainer's one Fabric.

    Raises:
        MisconfigurationError: If the accelerator would silently get another precision than asked for.
    """
    fabric = Fabric(
        accelerator=trainer.accelerator,
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=trainer.strategy,
        precision=trainer.precision,
    )
    found = str(fabric.strategy.precision.precision)
    if str(trainer.precision) in ("16-mixed", "16") and found != "16-mixed":
        raise MisconfigurationError(
            f"`precision={trainer.precision!r}` needs a GPU; on this accelerator it would silently become {found!r}. "
            "Use precision='bf16-mixed'."
        )
    if "LT_CLI_USED" not in os.environ:  # `fabric run` has started the processes already
        fabric.launch()
    started = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else fabric.world_size
    if started != fabric.world_size:
        raise MisconfigurationError(
            f"`devices` (times `num_nodes`) must be the number of processes that torchrun started, {started}, got "
            f"{fabric.world_size}: each process would make a run of its own."
        )
    trainer.run_dir = Path(fabric.broadcast(str(trainer.run_dir)))  # the default holds the time: each rank has its own
    return fabric


@contextlib.contextmanager
def working_on(trainer: "FederatedTrainer", module: L.LightningModule, stage: str) -> Iterator[Engine]:
    """An engine with ``module`` in it; afterwards the module is an ordinary one again.

    Args:
        trainer: Its ``callbacks`` are joined by the module's own while this lasts.
        module: Any module.
        stage: ``"fit"``, ``"validate"`` or ``"predict"``.
    """
    engine = make_engine(
        trainer.fabric,
        trainer.parallel,
        gradient_clip_val=trainer.gradient_clip_val,
        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        channels_last=trainer.channels_last,
    )
    own, chain = trainer.callbacks, trainer.chain
    with one_thread_per_client(trainer), isolate_rng():
        trainer.callbacks = with_module_callbacks(own, module)
        trainer.chain = chain_of(chain, [callback for callback in trainer.callbacks if callback not in own])
        try:
            check_callbacks(trainer.callbacks, trainer.server_callbacks)
            module.setup(stage)
            module.configure_model()
            engine.setup(module, trainer.payload, share_buffers=trainer.share_buffers)
            try:
                yield engine
            finally:
                engine.teardown()
        finally:
            trainer.callbacks, trainer.chain = own, chain


@contextlib.contextmanager
def one_thread_per_client(trainer: "FederatedTrainer") -> Iterator[None]:
    """One intra-op thread where each process trains its own clients on CPU: no result may depend on their number."""
    before = torch.get_num_threads()
    if trainer.parallel == "clients" and trainer.fabric.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start_run(
    trainer: "FederatedTrainer",
    engine: Engine,
    stream: "TaskStream",
    ckpt_path: str | PathLike[str] | None,
    *,
    strict: bool,
) -> Run:
    """A run at its first unit, or at the one after the commit to resume.

    Args:
        trainer: Settings and callbacks.
        engine: Set up.
        stream: Tasks and clients.
        ckpt_path: As in ``FederatedTrainer.fit``.
        strict: Whether other settings than the run was started with are an error.

    Returns:
        The run.

    Raises:
        CheckpointError: If there is nothing valid to resume, or the folder holds another run.
        ResumeMismatchError: If settings differ and ``strict`` is set.
    """
    checkpoint = _find_checkpoint(trainer, ckpt_path)
    engine.fabric.barrier()  # nobody writes before all have looked
    folder = RunFolder(trainer.run_dir, enabled=trainer.is_global_zero)
    run = Run(trainer, engine, stream, folder, _fingerprint(trainer, engine, stream))
    run.rounds.stack = stack(run)
    engine.stacked = run.rounds.stack is not None
    if checkpoint is not None:
        for line in restore(run, checkpoint, strict=strict):
            engine.fabric.print(f"resumed with another setting: {line}", file=sys.stderr)
    elif trainer.is_global_zero:
        folder.cut(dict.fromkeys(folder.lengths(), 0))  # rows of a run that was killed before its first commit
    if trainer.enable_progress_bar:
        from lightning_fcl.federated.progress import ProgressBar

        run.server_hooks = HookTable([*trainer.server_callbacks, ProgressBar()], ServerCallback)
    if trainer.is_global_zero:
        config = run_config(trainer, engine, stream)
        (trainer.run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        stream.plan.save(trainer.run_dir / "plan.json")
        for logger in trainer.loggers:
            logger.log_hyperparams(config)
    return run


def _find_checkpoint(trainer: "FederatedTrainer", ckpt_path: str | PathLike[str] | None) -> Checkpoint | None:
    commits = CheckpointFolder(trainer.run_dir / "checkpoints", keep=trainer.keep_checkpoints)
    started = bool(commits.numbers())
    used = started or (trainer.run_dir / REPORT).exists()
    if ckpt_path == "auto":
        ckpt_path = "last" if started else None
    if ckpt_path is None and used:
        raise CheckpointError(
            f"`run_dir` {str(trainer.run_dir)!r} already holds a run. Resume it with fit(..., ckpt_path='last'), or "
            "choose another `run_dir`."
        )
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        return commits.newest()
    if Path(ckpt_path).resolve().parent != commits.path.resolve():
        raise CheckpointError(
            f"`ckpt_path` must be a commit of this run, in {str(commits.path)!r}, got {str(ckpt_path)!r}. To go on "
            "from another run's weights, load its model.safetensors into the module."
        )
    return load_checkpoint(Path(ckpt_path))


def settings_of(trainer: "FederatedTrainer") -> dict[str, Any]:
    """The trainer's arguments as plain data."""
    names = [name for name in vars(trainer) if not name.startswith("_") and name not in _NO_SETTING]
    rules = [describe(rule) for rule in trainer.chain.rules]
    return {"aggregator": rules, **{name: describe(getattr(trainer, name)) for name in names}}


def run_config(trainer: "FederatedTrainer", engine: Engine, stream: "TaskStream") -> dict[str, Any]:
    """Everything that went into a run, as plain data."""
    return {
        "trainer": settings_of(trainer),
        "model": describe(engine.module),
        "stream": describe(stream.summary()),
        "choices": {
            "engine": type(engine).__name__,
            "jobs": "stacked" if engine.stacked else "sequential",
            "channels_last": engine.channels_last,
            "world_size": engine.fabric.world_size,
        },
    }


def _fingerprint(trainer: "FederatedTrainer", engine: Engine, stream: "TaskStream") -> dict[str, Any]:
    settings = {key: value for key, value in settings_of(trainer).items() if key not in _FREE}
    settings["callbacks"] = [describe(c) for c in trainer.callbacks if getattr(c, "affects_results", True)]
    return {
        "trainer": settings,
        "module": type(engine.module).__qualname__,
        "hparams": describe(dict(engine.module.hparams)),
        "init_args": describe(engine.module, depth=1),
        "untrained": "sharded" if engine.sharded else digest(_untrained(engine)),
        "tensors": {slot.name: f"{slot.dtype} {list(slot.shape)}" for slot in engine.layout.slots},
        "stream": describe(stream.summary()),
    }


def _untrained(engine: Engine) -> dict[str, Tensor]:
    """Tensors that no commit holds: frozen ones, and the first values of those that stay with the clients."""
    travelling = {slot.name for slot in engine.layout.slots} | set(engine.layout.counters)
    return {name: t for name, t in named_tensors(engine.module).items() if name not in travelling}


def report_of(trainer: "FederatedTrainer", run: Run, seconds: float) -> RunReport:
    """The finished run as a report, not saved yet."""
    seen = torch.zeros(run.matrix.shape, dtype=torch.bool)
    for stage in range(len(seen)):
        seen[stage, list(run.stream.seen(stage))] = True
    peak = _peak_memory(trainer.fabric.device)
    if (earlier := _report_before(trainer.run_dir, run.matrix)) is not None:
        seconds, peak = earlier.wall_seconds, earlier.peak_memory_bytes or peak
    return RunReport(
        run_dir=trainer.run_dir,
        method=trainer.method if trainer._named else method_name(trainer, run.module),
        accuracy=run.matrix,
        names=run.stream.names,
        seed=trainer.seed,
        score=run.score or "score",
        seen=seen,
        baseline=run.baseline,
        config=run_config(trainer, run.engine, run.stream),
        wall_seconds=seconds,
        bytes_up=run.state.bytes_up,
        bytes_down=run.state.bytes_down,
        peak_memory_bytes=peak,
    )


def _report_before(run_dir: Path, matrix: Tensor) -> RunReport | None:
    """The report of a run that had been finished before this call: its costs are those of the training."""
    if not (run_dir / REPORT).is_file():
        return None
    report = RunReport.load(run_dir)
    return report if report.accuracy.nan_to_num(-1).equal(matrix.nan_to_num(-1)) else None


def finalize(loggers: list[Any], status: str) -> None:
    """Let loggers write what they still hold."""
    for logger in loggers:
        logger.finalize(status)


def _peak_memory(device: torch.device) -> int:
    """Largest memory so far: of the accelerator, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
