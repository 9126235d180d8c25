"""What a run has shown: the score matrix, its summary, and the files that tell it to others."""

import json
import math
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_fcl.exceptions import MissingExtraError
from lightning_fcl.reports.files import accuracy_lines, explain_write_errors, write_bytes, write_text
from lightning_fcl.reports.tables import number, score_scale, text_table

REPORT: Final = "report.json"
PACKAGES: Final = ("lightning-fcl", "torch", "lightning", "torchmetrics", "numpy", "transformers", "peft", "deepspeed")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result may depend on; those not installed are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@dataclass(kw_only=True, eq=False, repr=False)
class RunReport:
    """The result of one run; prints as a table, shows as a table in a notebook, and saves as a page.

    Args:
        run_dir: The run folder; ``metrics.csv``, ``timing.csv`` and ``failures.csv`` are read from there.
        method: Name of the method, e.g. ``"SPECIAL"``; runs with the same name are seeds of one method.
        accuracy: Scores, shape ``(T, T)``: row = after which stage, column = evaluation set, NaN where not measured.
            Kept as float64 on the CPU.
        names: Names of the evaluation sets, one per column.
        seed: Seed of the run.
        score: Key of the logged score that the matrix holds, e.g. ``"val_acc"``.
        seen: Which columns had been trained on up to and including each stage, bool of shape ``(T, T)``; by default all
            up to the diagonal.
        baseline: Scores before any training, shape ``(T,)``, for the forward transfer; or ``None``.
        config: Settings of the run; what is no plain value is stored by its class name.
        versions: Versions by package.
        wall_seconds: Duration in seconds.
        bytes_up: Bytes that clients sent to the server.
        bytes_down: Bytes that clients received.
        peak_memory_bytes: Largest memory of the process, or of the accelerator where there is one; ``None`` if unknown.

    Raises:
        ValueError: If ``accuracy`` has not one column per name.

    Example:
        >>> matrix = torch.tensor([[0.80, 0.05], [0.60, 0.85]])
        >>> report = RunReport(run_dir="run", method="FedAvg", accuracy=matrix, names=["a", "b"], seed=0)
        >>> round(report.summary["acc"], 3), round(report.summary["bwt"], 3)
        (0.725, -0.2)
    """

    run_dir: Path
    method: str
    accuracy: Tensor
    names: tuple[str, ...]
    seed: int
    score: str = "accuracy"
    seen: Tensor | None = None
    baseline: Tensor | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    wall_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        self.run_dir, self.names = Path(self.run_dir), tuple(self.names)
        self.accuracy = self.accuracy.detach().to("cpu", torch.float64)
        if self.accuracy.ndim != 2 or self.accuracy.shape[1] != len(self.names):
            raise ValueError(
                f"`accuracy` must have a column for each of {len(self.names)} names, got {list(self.accuracy.shape)}."
            )

    @property
    def summary(self) -> dict[str, float]:
        """The figures of the field, NaN where the matrix does not give them.

        Keys: ``acc`` (mean score at the end), ``bwt`` (change of earlier tasks since they were learned), ``fwt``
        (score of tasks before they were learned, less ``baseline``), ``last``, ``avg`` (mean over stages of the mean
        over the tasks seen), ``forgetting`` (drop from each task's best), ``worst_drop`` (lowest of the changes).
        """
        from lightning_fcl import functional as F

        matrix, nan = self.accuracy, math.nan
        square = matrix.shape[0] == matrix.shape[1]
        return {
            "acc": F.average_accuracy(matrix),
            "bwt": F.backward_transfer(matrix) if square else nan,
            "fwt": F.forward_transfer(matrix, self.baseline) if square else nan,
            "last": F.last_score(matrix),
            "avg": F.average_score(matrix, self.seen) if square or self.seen is not None else nan,
            "forgetting": F.forgetting(matrix) if square else nan,
            "worst_drop": F.worst_drop(matrix) if square else nan,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values of strict JSON; ``None`` for NaN."""
        content = {
            "method": self.method,
            "summary": self.summary,
            "accuracy": self.accuracy,
            "names": self.names,
            "score": self.score,
            "seen": self.seen,
            "baseline": self.baseline,
            "seed": self.seed,
            "wall_seconds": self.wall_seconds,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "peak_memory_bytes": self.peak_memory_bytes,
            "versions": self.versions,
            "config": self.config,
        }
        return {key: _plain(value) for key, value in content.items()}

    @rank_zero_only
    def save(self) -> None:
        """Write ``report.json``, ``accuracy.csv``, the figures and ``report.html`` into the run folder, on rank 0.

        Without matplotlib the page has no figures, and one warning says how to get them.

        Raises:
            OSError: If the folder cannot be written; the message names the file.
        """
        from lightning_fcl.reports import figures, html

        with explain_write_errors(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        write_text(self.run_dir / REPORT, json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
        write_text(self.run_dir / "accuracy.csv", "".join(accuracy_lines(self.names, self.accuracy)))
        try:
            pictures = figures.draw(self)
        except MissingExtraError as error:
            warnings.warn(f"The report has no figures: {error}", stacklevel=3)
            pictures = {}
        for name, png in pictures.items():
            write_bytes(self.run_dir / name, png)
        found = {path.name: path.read_bytes() for path in sorted((self.run_dir / "analysis").glob("*.png"))}
        write_text(self.run_dir / "report.html", html.page(self, {**pictures, **found}))

    @classmethod
    def load(cls, run_dir: str | Path) -> "RunReport":
        """Read what :meth:`save` wrote.

        Args:
            run_dir: A run folder, wherever it lies now.

        Raises:
            FileNotFoundError: If there is no ``report.json``: the run has not ended yet.
            ValueError: If ``report.json`` is not a report.
        """
        path = Path(run_dir) / REPORT
        if not path.is_file():
            raise FileNotFoundError(
                f"`run_dir` must hold {REPORT}, got {str(run_dir)!r}. A run writes it when it ends; "
                "resume it with `fit(..., ckpt_path='last')`."
            )
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            del content["summary"]  # follows from the matrix
            names, matrix = content.pop("names"), content.pop("accuracy")
            for name in ("seen", "baseline"):
                content[name] = None if content.get(name) is None else _tensor(content[name])
            content["seen"] = None if content["seen"] is None else content["seen"].bool()
            accuracy = _tensor(matrix).reshape(len(matrix), len(names))
            return cls(run_dir=Path(run_dir), accuracy=accuracy, names=names, **content)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(f"`{path}` must be a report of this version, got {error!r}. Was it edited?") from error

    @property
    def scale(self) -> float:
        """What scores are multiplied by to be shown: 100 (percent) for fractions, else 1."""
        return score_scale(self.accuracy)

    def __str__(self) -> str:
        scale = self.scale
        rows = [
            [f"after {stage}", *(number(x, scale) for x in scores)]
            for stage, scores in enumerate(self.accuracy.tolist())
        ]
        unit = f"{self.score} in %" if scale > 1 else self.score
        figures = {name: number(value, scale) for name, value in self.summary.items()}
        return "\n".join(
            [
                f"{self.method}, seed {self.seed}: {unit}",
                text_table(["", *self.names], rows),
                "  ".join(f"{name} {value}" for name, value in figures.items()),
                f"run folder: {self.run_dir}",
            ]
        )

    def __repr__(self) -> str:
        acc = number(self.summary["acc"], self.scale)
        return f"RunReport(method={self.method!r}, seed={self.seed}, acc={acc}, run_dir={str(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        from lightning_fcl.reports import html

        return html.fragment(self)


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case Tensor():
            return _plain(value.tolist())
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Path():
            return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _tensor(values: Any) -> Tensor:
    def numbers(value: Any) -> Any:
        return [numbers(item) for item in value] if isinstance(value, list) else math.nan if value is None else value

    return torch.tensor(numbers(values), dtype=torch.float64)
