"""Many runs in one table: methods by mean and standard deviation over their seeds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from lightning_fcl.reports.files import explain_write_errors, write_text
from lightning_fcl.reports.html import HEADLINES, SIGNED, document
from lightning_fcl.reports.published import PublishedTable
from lightning_fcl.reports.run_report import REPORT, RunReport
from lightning_fcl.reports.tables import html_table, markdown_table, number, text_table

Statistics = dict[str, tuple[float, float]]

# What must be the same in all runs of a fair table. Seeds draw their own partition, so the plan is compared per seed.
_SAME_STREAM: Final = ("stages", "clients", "names", "partition", "train_examples", "eval_examples")
_SAME_TRAINER: Final = ("rounds", "clients_per_round", "local_epochs", "local_steps", "limit_train_batches")
_MARK: Final = "*"


Run = RunReport | str | PathLike[str]


def compare(runs: Run | Iterable[Run], published: PublishedTable | None = None) -> "Comparison":
    """Group finished runs by method.

    Args:
        runs: Reports, run folders, or folders that hold run folders at any depth.
        published: A paper's figures, to stand below and labelled as theirs.

    Returns:
        The comparison; print it, or use :meth:`Comparison.markdown`, :meth:`Comparison.html`, :meth:`Comparison.save`.

    Raises:
        FileNotFoundError: If a folder holds no finished run.
        ValueError: If a ``report.json`` is not a report, or there is no run.
    """
    several = [runs] if isinstance(runs, RunReport | str | PathLike) else list(runs)
    given = [run for run in several if isinstance(run, RunReport)]
    folders = dict.fromkeys(found for run in several if not isinstance(run, RunReport) for found in _runs_in(Path(run)))
    return Comparison((*given, *map(RunReport.load, folders)), published)


@dataclass(frozen=True)
class Comparison:
    """Runs grouped by method; runs of one method are its seeds.

    Args:
        runs: The runs; methods are shown in the order in which they come.
        published: A paper's figures, or ``None``.

    Raises:
        ValueError: If there is no run.

    Example:
        >>> import torch
        >>> runs = [
        ...     RunReport(run_dir="a", method="FedAvg", accuracy=torch.tensor([[acc]]), names=["x"], seed=seed)
        ...     for seed, acc in enumerate((0.5, 0.7))
        ... ]
        >>> mean, std = Comparison(tuple(runs)).statistics("FedAvg")["acc"]
        >>> round(mean, 3), round(std, 3)
        (0.6, 0.141)
    """

    runs: tuple[RunReport, ...]
    published: PublishedTable | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("`runs` must hold at least one run, got none.")

    @property
    def methods(self) -> dict[str, list[RunReport]]:
        """Runs by method."""
        groups: dict[str, list[RunReport]] = {}
        for run in self.runs:
            groups.setdefault(run.method, []).append(run)
        return groups

    @property
    def scale(self) -> float:
        """What scores are multiplied by to be shown: 100 (percent) if all runs have fractions, else 1."""
        return min(run.scale for run in self.runs)

    def statistics(self, method: str) -> Statistics:
        """Mean and standard deviation over the runs of a method.

        Args:
            method: A key of :attr:`methods`.

        Returns:
            By figure of :attr:`RunReport.summary`, the mean and the standard deviation with ``n - 1`` in the
            denominator. Both are NaN if a run lacks the figure; the deviation of a single run is NaN.
        """
        runs = [run.summary for run in self.methods[method]]
        return {figure: _mean_and_std([run[figure] for run in runs]) for figure in runs[0]}

    def final_scores(self, method: str) -> Statistics:
        """The same for the score on each evaluation set after the last stage, by its name."""
        names = self.runs[0].names
        last = [dict(zip(run.names, run.accuracy[-1].tolist(), strict=True)) for run in self.methods[method]]
        return {name: _mean_and_std([scores.get(name, math.nan) for scores in last]) for name in names}

    @property
    def notes(self) -> list[str]:
        """Why the table may not be fair: runs on another stream, with other rounds, or with other seeds."""
        return [note for notes in self._flagged().values() for note in notes] + self._seed_notes()

    def __str__(self) -> str:
        return "\n".join([self._unit(), text_table(*self._headlines()), "", *self._footnotes()])

    def markdown(self) -> str:
        """Two tables, of the summary figures and of the scores per evaluation set, and the notes."""
        notes = [f"- {escape(note, quote=False)}" for note in self._footnotes()]
        tables = [markdown_table(*table) for table in (self._headlines(), self._columns())]
        return "\n\n".join([escape(self._unit(), quote=False), *tables, "\n".join(notes)]) + "\n"

    def html(self) -> str:
        """One self-contained page with the same tables and every single run."""
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._footnotes())
        sections = {
            "Methods": html_table(*self._headlines()) + notes,
            "Scores after the last stage": html_table(*self._columns()),
            "Runs": html_table(*self._single_runs()),
        }
        body = "\n".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections.items())
        title = f"{len(self.methods)} methods, {len(self.runs)} runs"
        return document(title, f"<h1>{title}</h1>\n<p>{escape(self._unit())}</p>\n{body}")

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write ``comparison.md`` and ``comparison.html``.

        Args:
            folder: Made if it is not there.

        Returns:
            The page.

        Raises:
            OSError: If the folder cannot be written; the message names the file.
        """
        path = Path(folder)
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        write_text(path / "comparison.md", self.markdown())
        write_text(path / "comparison.html", self.html())
        return path / "comparison.html"

    def _repr_html_(self) -> str:
        return html_table(*self._headlines()) + "".join(f"<p>{escape(note)}</p>" for note in self._footnotes())

    # -- tables ------------------------------------------------------------------------------------------------------

    def _headlines(self) -> tuple[list[str], list[list[str]]]:
        header, rows = self._table({key: label for key, (label, _) in HEADLINES.items()}, self.statistics)
        for method, figures in self.published.rows.items() if self.published else ():
            cells = [self._cell(figures.get(key, math.nan), math.nan, sign=key in SIGNED) for key in HEADLINES]
            rows.append([f"{method} (paper)", "-", *cells])
        return header, rows

    def _columns(self) -> tuple[list[str], list[list[str]]]:
        return self._table({name: name for name in self.runs[0].names}, self.final_scores)

    def _table(
        self, labels: Mapping[str, str], statistics: Callable[[str], Statistics]
    ) -> tuple[list[str], list[list[str]]]:
        flagged = {run.method for run in self._flagged()}
        rows = []
        for method, runs in self.methods.items():
            found = statistics(method)
            cells = [self._cell(*found[key], sign=key in SIGNED) for key in labels]
            rows.append([method + _MARK * (method in flagged), _seeds(runs), *cells])
        return ["method", "seeds", *labels.values()], rows

    def _single_runs(self) -> tuple[list[str], list[list[str]]]:
        flagged = self._flagged()
        rows = [
            [
                run.method + _MARK * (run in flagged),
                str(run.seed),
                *(number(run.summary[key], self.scale, sign=key in SIGNED) for key in HEADLINES),
                str(run.run_dir),
            ]
            for run in self.runs
        ]
        return ["method", "seed", *(label for label, _ in HEADLINES.values()), "run folder"], rows

    def _cell(self, mean: float, std: float, *, sign: bool) -> str:
        spread = f" ± {number(std, self.scale)}" if math.isfinite(std) else ""
        return number(mean, self.scale, sign=sign) + spread

    def _unit(self) -> str:
        scores = ", ".join(dict.fromkeys(run.score for run in self.runs))
        spread = "; mean ± standard deviation over seeds" if len(self.runs) > len(self.methods) else ""
        return f"{scores}{' in %' if self.scale > 1 else ''}{spread}"

    def _footnotes(self) -> list[str]:
        counts = ", ".join(f"{len(runs)} of {method}" for method, runs in self.methods.items())
        lines = [f"runs: {counts}", *(f"{_MARK} {note}" for note in self.notes)]
        if (paper := self.published) is not None:
            lines.append(f"(paper): theirs, on other data ({paper.data}): {paper.source}, {paper.url}")
        return lines

    # -- fairness ----------------------------------------------------------------------------------------------------

    def _flagged(self) -> dict[RunReport, list[str]]:
        """Runs that differ from the first run, or from the first of the same seed, in what must be the same."""
        first_of_seed: dict[int, RunReport] = {}
        flagged = {}
        for run in self.runs:
            first, peer = self.runs[0], first_of_seed.setdefault(run.seed, run)
            pairs = {**_pairs(_conditions(run), _conditions(first)), **_pairs(_plan(run), _plan(peer))}
            if notes := [f"{_name(run)}: {key} is {mine}, elsewhere {theirs}" for key, (mine, theirs) in pairs.items()]:
                flagged[run] = notes
        return flagged

    def _seed_notes(self) -> list[str]:
        seeds = {method: sorted(run.seed for run in runs) for method, runs in self.methods.items()}
        doubled = [f"{method}: a seed occurs twice" for method, found in seeds.items() if len(found) > len({*found})]
        return doubled + (
            ["the methods were run with different seeds"] if len({*map(tuple, seeds.values())}) > 1 else []
        )


def _runs_in(folder: Path) -> Sequence[Path]:
    if (folder / REPORT).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.rglob(REPORT))
    if not found:
        raise FileNotFoundError(
            f"`run_dirs` must hold {REPORT}, got {str(folder)!r}. A run writes it when it ends; resume it with "
            "`fit(..., ckpt_path='last')`."
        )
    return found


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return fmean(values), stdev(values) if len(values) > 1 else math.nan


def _conditions(run: RunReport) -> dict[str, Any]:
    stream, trainer = _settings(run, "stream"), _settings(run, "trainer")
    return {
        "score": run.score,
        **{f"stream.{key}": stream.get(key) for key in _SAME_STREAM},
        **{f"trainer.{key}": trainer.get(key) for key in _SAME_TRAINER},
    }


def _plan(run: RunReport) -> dict[str, Any]:
    return {"stream.plan": _settings(run, "stream").get("plan")}


def _settings(run: RunReport, part: str) -> Mapping[str, Any]:
    settings = run.to_dict()["config"].get(part)  # plain values; a report made by hand may have any, or none
    return settings if isinstance(settings, Mapping) else {}


def _pairs(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (value, theirs[key]) for key, value in mine.items() if value != theirs[key]}


def _name(run: RunReport) -> str:
    return f"{run.method}, seed {run.seed}"


def _seeds(runs: Sequence[RunReport]) -> str:
    return ", ".join(str(run.seed) for run in runs)
