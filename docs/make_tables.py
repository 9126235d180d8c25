"""The tables of the docs, made from docs/results/*.json, so that nobody types a number.

python docs/make_tables.py            fill `<!-- table: NAME -->...<!-- /table -->` in README.md and docs/
python docs/make_tables.py --check    change nothing; fail if a table is not what its results say
python docs/make_tables.py --collect NAME --command "python recipes/x.py --out runs/x" runs/x/*/
                                      store finished runs as docs/results/NAME.json
"""

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LABELS = {"acc": "ACC", "bwt": "BWT", "fwt": "FWT", "worst_drop": "worst drop", "top5": "best five rounds"}
COUNTS = re.compile(r"rounds to .*|classes at zero|drift .*")  # figures that are no fractions
FENCE_OR_TABLE = re.compile(
    r"^```.*?^```\s*?$|^<!-- table: (?P<name>[\w.-]+)(?: \|[^\n]*)? -->\n.*?^<!-- /table -->$", re.MULTILINE | re.DOTALL
)

Results = dict[str, Any]


def collect(runs: Sequence[Path], command: str, old: Results) -> Results:
    """Gather the reports of finished runs; runs with one method name are seeds of one method.

    Args:
        runs: Run folders, each with its ``report.json``.
        command: The command line that made them.
        old: Results that these replace; ``columns`` and ``theirs`` (rows quoted from a paper) are kept from there.
    """
    reports = [json.loads((run / "report.json").read_text()) for run in runs]
    if len({json.dumps(report["versions"], sort_keys=True) for report in reports}) != 1:
        raise SystemExit("The runs must come from one set of versions. Run the command again, as a whole.")
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    kept = ("method", "seed", "wall_seconds", "summary")
    for run, report in zip(runs, reports, strict=True):  # a report counts the seconds of its last session alone
        if (timing := run / "timing.csv").is_file():
            rows = csv.DictReader(timing.read_text().splitlines())
            report["wall_seconds"] = sum(float(row["seconds"]) for row in rows)
    figures = [json.loads(path.read_text()) for run in runs if (path := run / "figures.json").is_file()]
    if len(figures) == len(reports):
        single = all(report["summary"]["bwt"] is None for report in reports)
        for report, more in zip(reports, figures, strict=True):
            report["summary"] = more if single else {**report["summary"], **more}
    return {
        "command": command,
        "commit": git.stdout.strip() or "unknown",
        "versions": reports[0]["versions"],
        **{key: old[key] for key in ("columns", "theirs") if key in old},
        **({"percent": [key for key in reports[0]["summary"] if not COUNTS.fullmatch(key)]} if figures else {}),
        "runs": [{key: report[key] for key in kept} for report in reports],
    }


def render(results: Results) -> str:
    """The command, a Markdown table with a row per method, and how the numbers came about."""
    if "rows" in results:
        return render_bench(results)
    methods: dict[str, list[Results]] = {}
    for run in results["runs"]:
        methods.setdefault(run["method"], []).append(run["summary"])
    ours = [run["summary"] for run in results["runs"]]
    columns: list[str] = results.get("columns") or [
        key for key in ours[0] if any(row.get(key) is not None for row in ours)
    ]
    fractions = "percent" not in results and all(abs(row.get(key) or 0) <= 1 for row in ours for key in columns)
    percent = results.get("percent", columns if fractions else [])
    scales = {key: 100 if key in percent else 1 for key in columns}
    labels = [LABELS.get(key, key) + ("" if fractions or key not in percent else " %") for key in columns]
    lines = [["method", *labels], ["---"] * (len(columns) + 1)]
    for name, rows in methods.items():
        lines.append([name, *(spread([row.get(key) for row in rows], scales[key]) for key in columns)])
    for row in results.get("theirs", []):
        cells = [row["method"], *(spread([row["summary"].get(key)], scales[key]) for key in columns)]
        lines.append([f"*{cell}*" for cell in cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"`{results['command']}`\n\n{table}\n\n*{foot(results, 'in %, ' if fractions else '')}*"


def render_bench(results: Results) -> str:
    """The command, a Markdown table with a row per case, and where it was measured."""
    rows = results["rows"]
    columns = results.get("columns") or list(dict.fromkeys(key for row in rows for key in row if key != "case"))
    lines = [["case", *columns], ["---"] * (len(columns) + 1)]
    lines += [[row["case"], *(figure(row.get(key)) for key in columns)] for row in rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    three = any(isinstance(row.get(key), list) for row in rows for key in columns)
    note = "Three figures are minimum / median / maximum. " if three else ""
    where = f"{note}{results['machine']}, commit {results['commit']}; {versions}"
    return f"`{results['command']}`\n\n{table}\n\n*{where}*"


def figure(value: Any) -> str:
    """A figure of a benchmark with three significant digits; several with slashes between; a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " / ".join(figure(one) for one in value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def spread(values: Sequence[float | None], scale: float) -> str:
    """Mean ± sample standard deviation; a single value alone, a dash for none."""
    known = [scale * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{fmean(known):.1f}" + (f" ± {stdev(known):.1f}" if len(known) > 1 else "")


def foot(results: Results, unit: str) -> str:
    """Seeds, time, commit and versions in one line."""
    seeds = sorted({run["seed"] for run in results["runs"]})
    minutes = sum(run["wall_seconds"] for run in results["runs"]) / 60
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    what = "Mean ± standard deviation over seeds" if len(seeds) > 1 else "Seed"
    return (
        f"{what} {', '.join(map(str, seeds))}, {unit}{minutes:.0f} min in all, commit {results['commit']}; {versions}"
    )


def fill(text: str, folder: Path) -> str:
    """``text`` with every table made anew from ``folder``; what stands in a code fence is left alone."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            return match[0]
        path = folder / f"{name}.json"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in folder.glob("*.json"))) or "none"
            raise SystemExit(f"A table must name a file of docs/results, got {name!r}; there are: {known}.")
        results = json.loads(path.read_text())
        return f"<!-- table: {name} | {results['command']} -->\n{render(results)}\n<!-- /table -->"

    return FENCE_OR_TABLE.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail on drift instead of writing")
    parser.add_argument("--collect", metavar="NAME", help="store runs under this name")
    parser.add_argument("--command", help="the command line that made the runs")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders to collect")
    options = parser.parse_args(arguments)
    folder = options.root / "docs" / "results"
    if options.collect:
        if not (options.runs and options.command):
            parser.error("`--collect` needs `--command` and at least one run folder.")
        path = folder / f"{options.collect}.json"
        old = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(collect(options.runs, options.command, old), indent=1, ensure_ascii=False) + "\n")
    drifted = []
    for page in [*options.root.glob("README.md"), *sorted((options.root / "docs").rglob("*.md"))]:
        text = page.read_text()
        if (filled := fill(text, folder)) != text:
            drifted.append(str(page.relative_to(options.root)))
            if not options.check:
                page.write_text(filled)
    if drifted:
        print(*drifted, "differ: run `python docs/make_tables.py`" if options.check else "written")
    return int(options.check and bool(drifted))


if __name__ == "__main__":
    sys.exit(main())
