"""What the doctor found: tables, findings and the numbers behind them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_fcl.reports.tables import text_table

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Args:
        level: ``"ok"``, ``"note"`` (worth knowing), ``"warning"`` (the run works, but perhaps not as meant) or
            ``"error"``.
        subject: What was looked at, e.g. ``"gradients"`` or ``"training_step"``.
        text: What was found, and unless it is well, what to do.
    """

    level: Level
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<7}  {self.subject}: {self.text}"


@dataclass(frozen=True)
class Table:
    """One table of the diagnosis.

    Args:
        title: What it shows.
        header: Its columns.
        rows: Cells as text.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.title}\n{text_table(self.header, self.rows)}"


@dataclass
class Diagnosis:
    """What :func:`~lightning_fcl.doctor.diagnose` and :func:`~lightning_fcl.doctor.estimate` found.

    Args:
        tables: In the order of printing.
        findings: In the order in which things were checked.
        numbers: The figures of the tables by name, in bytes and seconds.
        error: What the dry run raised, with its traceback; ``None`` if it went through.
    """

    tables: list[Table] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; warnings are not."""
        return all(finding.level != "error" for finding in self.findings)

    def add(self, level: Level, subject: str, text: str) -> None:
        """Note one finding."""
        self.findings.append(Finding(level, subject, text))

    def __str__(self) -> str:
        checks = ["checks", *map(str, self.findings)] if self.findings else []
        return "\n\n".join([*map(str, self.tables), "\n".join(checks)]).strip()
