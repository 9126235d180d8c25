"""The library beside its peers on the same work, started one after another, in turns.

    python recipes/bench/peers.py --bench-dir ../shared/bench --sizes "[X, T, S]" --out docs/results/bench_peers.json

``--bench-dir`` holds the peers' runners (Apple's pfl, Flower, hand-written loops), the driver ``bench_fl.py`` and one
environment per peer; ``runner.py`` beside this file is ours. Every runner starts in a process of its own with one
thread per process, trains the same clients from the same weights, and must end with the same norm of the parameters, or
the command fails. ``ours-stacked`` is ``engine="stacked"``, ``-p2`` means two processes and ``-cl`` channels last. A
ratio is the peer's figure over ours within a turn: above 1, we are faster (or smaller).
"""

import os
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lightning_fcl._recipes import command_line, load_script, save_bench

RUNNER = Path(__file__).with_name("runner.py")
SAME_WORK = 2e-3  # of the norm; M's rounding differences grow that much in 20 rounds, other work differs by more
Figures = dict[str, Any]


class Against(NamedTuple):
    """One comparison: who, against which way of running ours, at which sizes, and the goal by size."""

    peer: str
    ours: str
    goals: dict[str, str]
    figure: str = "wall"


COMPARED = (
    Against("flat2", "ours", {"S": ">= 0.95", "M": ">= 0.95", "L": ">= 0.95"}, "CPU"),
    Against("pfl-p1", "ours-stacked", {"X": ">= 10"}),
    Against("pfl-p1", "ours", {"X": "-", "T": ">= 1.7", "S": "-", "M": "-", "L": "-"}),
    Against("pfl-p2", "ours-p2", {"S": ">= 1.15", "M": "-", "L": "-"}),
    Against("pfl-p2", "ours-p2-cl", {"M": ">= 1.5", "L": ">= 1.05"}),
    Against("pfl-p2", "ours-p2", {"S": ">= 2"}, "memory"),
    Against("pfl-p1", "ours", {"S": "-"}, "start-up and first round"),
    Against("flwr-a2", "ours-p2", {"T": ">= 8", "S": ">= 4", "M": ">= 1.5"}),
    Against("flwr-a2", "ours-p2", {"T": ">= 50", "S": ">= 50", "M": ">= 50"}, "first round"),
)


def commands(driver: ModuleType, bench_dir: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """How each runner is started; hand-written loops run in our own environment."""
    known = {**driver.SETS["one"], **driver.SETS["two"]}
    found = {name: known[name] for name in ("flat2", "pfl-p1", "pfl-p2", "flwr-a2")}
    found["flat2"] = ([sys.executable, *found["flat2"][0][1:]], found["flat2"][1])
    own = [sys.executable, str(RUNNER), "--bench-dir", str(bench_dir.resolve())]
    env = {"PYTHONPATH": str(RUNNER.parents[2])}
    found["ours"] = (own, env)
    found["ours-stacked"] = ([*own, "--engine", "stacked", "--hooks=false"], env)
    found["ours-p2"] = ([*own, "--procs", "2"], env)
    found["ours-p2-cl"] = ([*own, "--procs", "2", "--channels_last"], env)
    return found


def figures_of(driver: ModuleType, answer: Figures) -> dict[str, float]:
    """What is compared, of one run."""
    first = answer["first"]
    return {
        "wall": answer["med"],
        "CPU": driver.cpu(answer),
        "memory": answer["pss"],
        "first round": first,
        "start-up and first round": answer["startup"] + first,
    }


def measure(driver: ModuleType, starts: dict[str, Any], size: str, turns: int, timeout: int) -> list[Figures]:
    """All comparisons of one size."""
    pairs = [one for one in COMPARED if size in one.goals]
    names = list(dict.fromkeys(name for one in pairs for name in (one.ours, one.peer)))
    took: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(turns):
        norms = {}
        for name in names:
            command, env = starts[name]
            answer = driver.once([*command, "--size", size], env, timeout)
            if answer is None:
                raise SystemExit(f"{name} failed at size {size}: {' '.join(command)}")
            norms[name] = answer["norm"]
            took[name].append(figures_of(driver, answer))
        if max(norms.values()) - min(norms.values()) > SAME_WORK * max(norms.values()):
            raise SystemExit(f"size {size}: the runners did different work, their parameters' norms are {norms}")
    rows = []
    for peer, ours, goals, figure in pairs:
        ratios = [a[figure] / b[figure] for a, b in zip(took[peer], took[ours], strict=True)]
        own = statistics.median(one[figure] for one in took[ours])
        three = [min(ratios), statistics.median(ratios), max(ratios)]
        rows.append({"case": f"{size}: {peer} / {ours}, {figure}", "ratio": three, "goal": goals[size], "ours": own})
        print(rows[-1]["case"], "  ".join(f"{x:.2f}" for x in three), "goal", goals[size], flush=True)
    return rows


def main(
    bench_dir: Path,
    sizes: tuple[str, ...] = ("X", "T", "S", "M"),
    turns: int = 3,
    timeout: int = 300,
    envs: Path | None = None,
    out: Path | None = None,
) -> Figures:
    """Compare.

    Args:
        bench_dir: Folder with the peers' runners.
        sizes: Of ``X``, ``T``, ``S``, ``M``, ``L``.
        turns: How often each runner is started.
        timeout: Seconds for one run.
        envs: Folder of the peers' environments; by default ``envs`` in ``bench_dir``.
        out: JSON file for the figures.
    """
    if envs is not None:
        os.environ["BENCH_ENVS"] = str(envs.resolve())
    driver = load_script(bench_dir, "bench_fl.py")
    starts = commands(driver, bench_dir)
    rows = [row for size in sizes for row in measure(driver, starts, size, turns, timeout)]
    names = ", ".join(sizes)
    return save_bench(rows, f'python recipes/bench/peers.py --sizes "[{names}]" --turns {turns}', out)


if __name__ == "__main__":
    command_line(main)
