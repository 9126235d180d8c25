"""Does SPECIAL end above FedAvg, with less forgetting? A study over its strength, its step of 1/i and BatchNorm.

    python recipes/special_study.py --data-dir DIR                     # an hour on one core
    python recipes/special_study.py --data-dir DIR --method order      # one part
    python recipes/special_study.py --collect                          # tables of the runs that have ended

Runs ``special_digits.py`` at the paper's protocol (8 clients, 4 sampled, 20 rounds of 5 local epochs, batches of 32,
Dirichlet 0.1) and writes one file of results per part, as docs/make_tables.py reads them. Parts: ``study``, the
frontier over the strength, with and without the step of 1/i; ``batchnorm``, a net whose BatchNorm statistics the anchor
blends or leaves alone; ``order``, the paper's order of domains (with MNIST-M where the paper has EMNIST).
"""

import json
import runpy
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_fcl._recipes import chosen_methods, command_line, library_commit, real_data
from lightning_fcl.exceptions import DatasetError
from lightning_fcl.reports import SPECIAL_DIGIT10, RunReport, installed_versions
from lightning_fcl.reports.files import read_table

Options = dict[str, Any]
PROTOCOL: Options = {"alpha": 0.1, "epochs": 5, "limit": 1600, "batch_size": 32}
ORDER: Options = {"domains": ["usps", "svhn", "mnistm", "mnist"]}
BOTH_STEPS = ["special", "special-lr1"]
# By part and folder, options of special_digits.py.
PARTS: dict[str, dict[str, list[Options]]] = {
    "study": {
        "small": [
            {"method": ["fedavg", "fedavg-1/i", "fedprox", "special-c"]},
            {"method": BOTH_STEPS, "strength": [0.02, 0.05, 0.1, 0.25]},
        ]
    },
    "batchnorm": {
        "bn-blend": [{"method": ["fedavg", "special"], "strength": 0.1, "net": "small-bn"}],
        "bn-current": [{"method": "special", "strength": 0.1, "net": "small-bn", "bn_stats": "current"}],
    },
    "order": {
        "order": [{"method": ["fedavg", "fedavg-1/i"], **ORDER}, {"method": BOTH_STEPS, "strength": 0.05, **ORDER}]
    },
}
NOTES = {"bn-blend": ", statistics blended", "bn-current": ", statistics left alone"}


def main(
    out: Path = Path("runs/special_study"),
    seed: int = 0,
    seeds: int = 3,
    method: str | list[str] = "all",
    data_dir: Path | None = None,
    smoke: bool = False,
    collect: bool = False,
) -> dict[str, int]:
    """Run what is missing of the study and write its results.

    Args:
        out: Folder for run folders and results.
        seed: The first seed.
        seeds: How many seeds, counted from ``seed``.
        method: Parts of the study: ``study``, ``batchnorm``, ``order``, or ``all``.
        data_dir: Folder with real digits.
        smoke: End in minutes: the smoke settings of ``special_digits.py`` and one seed.
        collect: Run nothing; gather the runs that have ended.

    Returns:
        Number of runs by part.
    """
    parts = chosen_methods(method, PARTS)
    if not collect and real_data(data_dir, "digits") is None and not smoke:
        raise DatasetError("`data_dir` must name the folder of real digits, got none. Set it or FCL_DATA.")
    run = runpy.run_path(str(Path(__file__).with_name("special_digits.py")))["main"]
    counts = {}
    for part in parts:
        runs = []
        for folder, several in PARTS[part].items():
            for options in [] if collect else several:
                number = 1 if smoke else seeds
                run(out=out / folder, seed=seed, seeds=number, data_dir=data_dir, smoke=smoke, **PROTOCOL, **options)
            runs += [entry(RunReport.load(path.parent), NOTES.get(folder, "")) for path in finished(out / folder)]
        counts[part] = len(runs)
        path = out / f"special_digits_{part}.json"
        path.write_text(json.dumps(results(part, runs), indent=1) + "\n", encoding="utf-8")
        print(f"{part}: {len(runs)} runs, {path}")
    return counts


def finished(folder: Path) -> list[Path]:
    """Reports of the runs that have ended: methods as the recipe lists them, strengths rising, then seeds."""
    known = ["fedavg-seed", "fedavg-1i", "fedprox", "special-c", "special-0", "special-lr1"]
    rank = {path: [path.parent.name.startswith(name) for name in known] for path in folder.glob("*/report.json")}
    return sorted(rank, key=lambda path: ([not hit for hit in rank[path]], path))


def entry(run: RunReport, note: str) -> dict[str, Any]:
    """One run: the usual figures, domains when just learned, how much of that came late, and domains at the end."""
    summary = {key: run.summary[key] for key in ("acc", "bwt")}
    summary["learned"] = float(run.accuracy.diagonal().mean())
    summary["late gain"] = fmean(map(late_gain, [run] * len(run.names), range(len(run.names))))
    summary |= dict(zip(run.names, run.accuracy[-1].tolist(), strict=True))
    return {"method": run.method + note, "seed": run.seed, "wall_seconds": run.wall_seconds, "summary": summary}


def late_gain(run: RunReport, task: int) -> float:
    """What a domain gained over the last quarter of its own rounds; near zero if it had converged."""
    key = f"task/{run.names[task]}/{run.score}"
    rows = read_table(run.run_dir / "metrics.csv")[1]
    points = [(int(row["round"]) + 1, float(row[key])) for row in rows if row["task"] == str(task) and key in row]
    rounds, last = points[-1]
    return last - [score for number, score in points if number <= 0.75 * rounds][-1]


def results(part: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The contents of a file of docs/results."""
    theirs = [
        {"method": f"{name} (paper, other data)", "summary": dict(row)} for name, row in SPECIAL_DIGIT10.rows.items()
    ]
    return {
        "command": f"python recipes/special_study.py --data-dir DIR --method {part}",
        "commit": library_commit(),
        "versions": installed_versions(),
        "columns": list(runs[0]["summary"]) if runs else [],
        "theirs": theirs if part == "study" else [],
        "runs": runs,
    }


if __name__ == "__main__":
    command_line(main)
