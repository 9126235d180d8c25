"""What a threshold on TSGA's score demands of 3, 5 and 10 clients: who is kept, simulated.

    python recipes/bench/similarity.py --out docs/results/tsga_threshold.json

Honest clients share a direction and add noise of their own, so that any two of their updates have a given cosine; one
client in each round has the shared direction reversed. Counted are honest and reversed clients that the threshold 0.5
keeps, and those that the threshold corrected for the number of clients keeps; where nobody passes, all are kept.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from torch import Tensor

from lightning_fcl._recipes import library_commit
from lightning_fcl.functional import similarity_threshold, tsga


def updates_of(clients: int, cosine: float, size: int, generator: torch.Generator) -> Tensor:
    """Updates with the given pairwise cosine, the first with the shared direction reversed; shape ``(K, P)``."""
    shared = torch.nn.functional.normalize(torch.randn(1, size, generator=generator))
    own = torch.randn(clients, size, generator=generator) / size**0.5
    signs = torch.ones(clients, 1)
    signs[0] = -1.0
    updates: Tensor = signs * cosine**0.5 * shared + (1 - cosine) ** 0.5 * own
    return updates


def measure(clients: int, cosine: float, rounds: int, size: int, seed: int) -> dict[str, float]:
    """Mean score, and share of clients kept, over simulated rounds."""
    generator = torch.Generator().manual_seed(seed)
    rows: dict[str, list[float]] = {}
    for _ in range(rounds):
        updates = updates_of(clients, cosine, size, generator)
        scores = tsga(updates, torch.ones(clients)).scores
        rows.setdefault("score", []).append(scores[1:].mean().item())
        for name, threshold in (("0.5", 0.5), ("auto", similarity_threshold(clients))):
            kept = tsga(updates, torch.ones(clients), threshold).accepted.double()
            rows.setdefault(f"honest kept at {name}", []).append(kept[1:].mean().item())
            rows.setdefault(f"reversed kept at {name}", []).append(kept[0].item())
    return {name: sum(values) / len(values) for name, values in rows.items()}


def main(
    clients: tuple[int, ...] = (3, 5, 10),
    cosines: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5),
    rounds: int = 200,
    size: int = 1000,
    seeds: int = 3,
    out: Path | None = None,
) -> dict[str, Any]:
    """Simulate rounds and print who is kept.

    Args:
        clients: Clients in a round.
        cosines: Pairwise cosines of honest clients' updates.
        rounds: Rounds per setting and seed.
        size: Length of an update.
        seeds: Repetitions.
        out: JSON file for the figures.
    """
    runs = []
    for count in clients:
        for cosine in cosines:
            for seed in range(seeds):
                started = time.perf_counter()
                summary = measure(count, cosine, rounds, size, seed)
                method = f"{count} clients, cosine {cosine:g}"
                seconds = time.perf_counter() - started
                runs.append({"method": method, "seed": seed, "wall_seconds": seconds, "summary": summary})
            print(runs[-1]["method"], *(f"{key} {value:.3f}" for key, value in summary.items()), sep="  ")
    report = {"command": "python recipes/bench/similarity.py --out docs/results/tsga_threshold.json"}
    report |= {"commit": library_commit()}
    results: dict[str, Any] = {**report, "versions": {"torch": torch.__version__}, "runs": runs}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
