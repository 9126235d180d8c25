"""What routing costs at inference: a layer with 8 subspaces against one LoRA of the same total rank, in pairs.

    python recipes/bench/subspaces.py                  # d = 768, 64 tokens and single tokens, forward and backward
    python recipes/bench/subspaces.py --pairs 31 --out docs/results/bench_subspaces.json

Timed one after another, in turns: the block form of this library, one plain LoRA of the same total rank (the routed
layer should take at most 1.10 of its time), the base layer alone (at most 1.35), and a loop over subspaces (at most
1/1.4, with backward 1/1.9). The block form must agree with the loop to 1e-5, or the command fails. Prints medians of
the ratios, and writes them.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fcl._recipes import save_bench
from lightning_fcl.models import SubspaceLinear

SLOTS, RANK, SCALING = 8, 8, 2.0


class Case(NamedTuple):
    """One workload: a batch of inputs of a square layer."""

    batch: int
    tokens: int
    width: int
    backward: bool = False


CASES = {
    "forward, 64 tokens": Case(8, 64, 768),
    "forward, 1 token": Case(8, 1, 768),
    "forward + backward, 64 tokens": Case(8, 64, 768, backward=True),
}


def bank_of(width: int) -> tuple[list[Tensor], list[Tensor]]:
    """Random down- and up-projections."""
    return [torch.randn(RANK, width) for _ in range(SLOTS)], [torch.randn(width, RANK) for _ in range(SLOTS)]


def contenders(case: Case) -> tuple[Tensor, dict[str, Callable[[Tensor], Tensor]]]:
    """The input, and the layer in three forms."""
    torch.manual_seed(0)
    base = nn.Linear(case.width, case.width)
    down, up = bank_of(case.width)
    routed = SubspaceLinear(base, rank=RANK, scaling=SCALING)
    routed.set_bank(down, up)
    factors = torch.softmax(torch.randn(case.batch, SLOTS), dim=1)
    routed.activate(factors)
    plain = SubspaceLinear(base, rank=SLOTS * RANK, scaling=SCALING)
    with torch.no_grad():
        plain.lora_A.copy_(torch.cat(down))
        plain.lora_B.copy_(torch.cat(up, dim=1))

    def loop(x: Tensor) -> Tensor:
        y: Tensor = base(x)
        for slot in range(SLOTS):
            y = y + factors[:, slot, None, None] * SCALING * F.linear(F.linear(x, down[slot]), up[slot])
        return y

    x = torch.randn(case.batch, case.tokens, case.width, requires_grad=case.backward)
    torch.testing.assert_close(routed(x), loop(x), rtol=1e-5, atol=1e-3)
    return x, {"routed": routed, "one LoRA": plain, "base layer": base, "loop": loop}


def seconds(run: Callable[[Tensor], Tensor], x: Tensor, repeats: int, *, backward: bool) -> float:
    """Time of so many passes."""
    started = time.perf_counter()
    for _ in range(repeats):
        with torch.set_grad_enabled(backward):
            y = run(x)
        if backward:
            torch.autograd.grad(y.sum(), x)
    return time.perf_counter() - started


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Minimum, median and maximum of the routed layer's time over the others', measured in turns."""
    case = CASES[name]
    x, runs = contenders(case)
    repeats = max(1, round(0.05 / max(seconds(runs["routed"], x, 3, backward=case.backward) / 3, 1e-6)))
    ratios: dict[str, list[float]] = {other: [] for other in runs if other != "routed"}
    for pair in range(pairs):
        order = ["routed", *ratios] if pair % 2 else [*ratios, "routed"]
        clock = {one: seconds(runs[one], x, repeats, backward=case.backward) for one in order}
        for other, found in ratios.items():
            found.append(clock["routed"] / clock[other])
    three = {f"routed / {other}": [min(took), statistics.median(took), max(took)] for other, took in ratios.items()}
    print(f"{name:30}", *(f"{other} {found[1]:.3f}" for other, found in three.items()), sep="   ")
    return {"case": name, **three}


def main(pairs: int = 15, out: Path | None = None) -> dict[str, Any]:
    """Time all cases on one thread.

    Args:
        pairs: Measurements per case.
        out: JSON file to write the ratios to.
    """
    torch.set_num_threads(1)
    return save_bench(
        [measure(name, pairs) for name in CASES], f"python recipes/bench/subspaces.py --pairs {pairs}", out
    )


if __name__ == "__main__":
    auto_cli(main)
