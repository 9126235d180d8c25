"""Running a suite: a run folder per method and seed; what is finished is read, what was stopped goes on."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities import rank_zero_only

from lightning_fcl.data.stream import TaskStream
from lightning_fcl.exceptions import FCLError, MisconfigurationError
from lightning_fcl.federated.trainer import FederatedTrainer
from lightning_fcl.federated.zero_shot import zero_shot
from lightning_fcl.reports.comparison import Comparison
from lightning_fcl.reports.files import explain_write_errors, write_text
from lightning_fcl.reports.run_report import REPORT, RunReport
from lightning_fcl.suites.methods import METHODS, Method
from lightning_fcl.suites.suite import Suite


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large a suite is run; all runs of one folder share them.

    Args:
        clients: Number of clients; by default the paper's.
        rounds: Rounds per task; by default ``scale`` times the paper's.
        scale: Share of the paper's rounds, positive.

    Raises:
        MisconfigurationError: If a number is out of range.
    """

    clients: int | None = None
    rounds: int | None = None
    scale: float = 0.2

    def __post_init__(self) -> None:
        for name, value in (("clients", self.clients), ("rounds", self.rounds)):
            if value is not None and value < 1:
                raise MisconfigurationError(f"`{name}` must be at least 1, got {value}.")
        if not 0 < self.scale < float("inf"):
            raise MisconfigurationError(f"`scale` must be positive, got {self.scale}.")

    def clients_of(self, suite: Suite) -> int:
        """Number of clients in a suite."""
        return self.clients or suite.clients

    def rounds_of(self, suite: Suite) -> int:
        """Rounds per task in a suite."""
        return self.rounds or max(1, round(self.scale * suite.rounds))

    def sampled_of(self, suite: Suite) -> int:
        """Clients per round in a suite."""
        return max(1, round(suite.sampled * self.clients_of(suite)))


def run_suite(
    suite: Suite,
    out: Path,
    *,
    sizes: Sizes | None = None,
    seeds: int = 3,
    methods: Sequence[str] | None = None,
    data_dir: Path | None = None,
    **options: Any,
) -> Comparison:
    """Run what is missing of a suite, and write ``comparison.md`` and ``comparison.html`` into ``out``.

    A method that the library refuses for this suite (too few clients for Krum, say), or that diverges in one of the
    seeds, is named on standard error and left out of the table.

    Args:
        suite: Which.
        out: Folder for one run folder per method and seed, and for the tables.
        sizes: How large; a folder keeps the sizes that it was begun with.
        seeds: How many seeds, counted from 0. A seed decides the partition, the first weights and all draws.
        methods: Names from :data:`~lightning_fcl.suites.METHODS`; by default all that make sense in the suite.
        data_dir: Real data as :func:`~lightning_fcl.data.load_digit_folder` reads them; by default embedded data.
        options: Further arguments of ``FederatedTrainer``, such as ``devices``.

    Returns:
        The table of all runs.

    Raises:
        MisconfigurationError: If a method is unknown, ``out`` was begun with other sizes, or no method could run.
    """
    sizes = sizes or Sizes()
    names = [name for name in METHODS if name not in suite.leave_out] if methods is None else list(methods)
    if unknown := [name for name in names if name not in METHODS]:
        raise MisconfigurationError(f"`methods` must be some of {', '.join(METHODS)}, got {unknown[0]!r}.")
    if seeds < 1:
        raise MisconfigurationError(f"`seeds` must be at least 1, got {seeds}.")
    _keep_sizes(out, {"suite": suite.name, **asdict(sizes), "data_dir": data_dir and str(data_dir)})
    reports, refused = [], set()
    for seed in range(seeds):
        stream = suite.stream(sizes.clients_of(suite), seed, data_dir)
        for name in (name for name in names if name not in refused):
            run_dir = out / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}-seed{seed}"
            try:
                reports.append(_run(suite, name, stream, sizes, seed, run_dir, data_dir, options))
            except (FCLError, FloatingPointError) as error:  # refused, or diverged
                refused.add(name)
                rank_zero_only(print)(f"{name} was left out: {error}", file=sys.stderr)
    reports = [report for report in reports if report.method not in refused]
    if not reports:
        raise MisconfigurationError(f"`methods` must name one that can run in {suite.name}, got {', '.join(names)}.")
    # The first run is what the others are held against: bounds, which train on other terms, come last.
    place = {name: (METHODS[name]().data != "federated", number) for number, name in enumerate(names)}
    comparison = Comparison(tuple(sorted(reports, key=lambda run: place[run.method])), suite.published)
    rank_zero_only(comparison.save)(out)
    return comparison


def _run(
    suite: Suite,
    name: str,
    stream: TaskStream,
    sizes: Sizes,
    seed: int,
    run_dir: Path,
    data_dir: Path | None,
    options: dict[str, Any],
) -> RunReport:
    """The report of one run: read if it is there, else made, from where it was stopped."""
    if (run_dir / REPORT).is_file():
        return RunReport.load(run_dir)
    method = METHODS[name]()
    alone = method.data in ("joint", "pooled")
    trainer = FederatedTrainer(
        method=name,
        run_dir=run_dir,
        rounds=sizes.rounds_of(suite),
        clients_per_round=1 if alone else sizes.sampled_of(suite),
        local_epochs=suite.local_epochs,
        lr_factor=partial(falling, decay=suite.lr_decay),
        seed=seed,
        aggregator=method.aggregator,
        callbacks=method.callbacks,
        server_callbacks=method.server_callbacks,
        **{"accelerator": "cpu", "devices": 1, **suite.trainer, **options},
    )
    L.seed_everything(seed, verbose=False)
    module = _module(suite, method, data_dir)
    if method.data == "none":
        return zero_shot(trainer, module, stream)
    if method.data != "federated":
        stream = getattr(stream, method.data)()
    return trainer.fit(module, stream, ckpt_path="auto")


def _module(suite: Suite, method: Method, data_dir: Path | None) -> L.LightningModule:
    kind = suite.module
    if method.mixins:
        bases = (*method.mixins, kind)
        kind = type("".join(base.__name__ for base in bases), bases, {})
    return kind(**suite.options(data_dir), **method.options)


def falling(task: int, round: int, *, decay: float) -> float:
    """Factor of the learning rate, from anew in each task."""
    return decay**round


def _keep_sizes(out: Path, sizes: dict[str, Any]) -> None:
    path = out / "suite.json"
    if path.is_file():
        if (found := json.loads(path.read_text(encoding="utf-8"))) != sizes:
            raise MisconfigurationError(
                f"`out` must be a new folder, or be run on with what it was begun with, {found}; got {sizes}."
            )
        return
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(sizes, indent=1) + "\n")
