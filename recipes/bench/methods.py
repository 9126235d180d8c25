"""What each method costs over FedAvg: compute of a whole run, and bytes sent.

    python recipes/bench/methods.py                      # some minutes; writes docs/results/bench_methods.json
    python recipes/bench/methods.py --methods "[EWC]"

Every method of the suites' table makes the same short run (the suite ``fedcmm`` with two rounds per task), each time
right after one of FedAvg. Compute is user CPU time of the process; evaluation and commits, which all methods share, are
part of it. Traffic is bytes up and down. Both are ratios to FedAvg's.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from lightning_fcl._recipes import library_commit
from lightning_fcl.exceptions import FCLError
from lightning_fcl.reports import RunReport
from lightning_fcl.suites import METHODS, SUITES, Sizes, run_suite

BASE = "FedAvg"


def measure(name: str, seed_folder: Path) -> tuple[RunReport, float]:
    """One run of a method: its report, and user CPU seconds."""
    started = os.times().user
    comparison = run_suite(SUITES["fedcmm"], seed_folder, sizes=Sizes(rounds=2), seeds=1, methods=[name])
    return comparison.runs[0], os.times().user - started


def main(
    methods: list[str] | None = None, repeats: int = 3, out: Path = Path("docs/results/bench_methods.json")
) -> None:
    """Measure, print and write.

    Args:
        methods: Names of the suites' table; by default all that train in a federation.
        repeats: Runs per method.
        out: File for the figures.
    """
    names = methods or [name for name, make in METHODS.items() if make().data == "federated" and name != BASE]
    runs: list[dict[str, Any]] = []
    versions: Mapping[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        measure(BASE, Path(folder) / "warm-up")
        for repeat in range(repeats):
            for name in names:
                base = measure(BASE, Path(folder) / f"{BASE} {name} {repeat}")
                try:
                    own = measure(name, Path(folder) / f"{name} {repeat}")
                except FCLError as error:
                    print(f"{name}: left out, {error}")
                    continue
                costs = {"compute": own[1] / base[1], "traffic": _bytes(own[0]) / _bytes(base[0])}
                versions = own[0].versions
                runs.append({"method": name, "seed": repeat, "wall_seconds": own[0].wall_seconds, "summary": costs})
                print(name, {key: round(value, 2) for key, value in costs.items()}, flush=True)
    results = {
        "command": "python recipes/bench/methods.py",
        "commit": library_commit(),
        "versions": versions,
        "columns": ["compute", "traffic"],
        "percent": [],
        "runs": runs,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def _bytes(report: RunReport) -> int:
    return report.bytes_up + report.bytes_down


if __name__ == "__main__":
    auto_cli(main)
