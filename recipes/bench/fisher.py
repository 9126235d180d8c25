"""Diagonal Fisher by the closed form against a hand-written loop over samples, measured in pairs in one process.

    python recipes/bench/fisher.py                          # three cases, some minutes
    python recipes/bench/fisher.py --case lora --pairs 9

``lenet``, ``resnet18`` (GroupNorm), ``resnet18-batch`` (BatchNorm in eval mode) and ``lora``, a transformer of GPT-2's
kind with 4 layers of width 128, LoRA of rank 8 and 32 tokens. On one thread. Both sides must agree to 1e-5 of each
parameter's largest value, or the command fails. Prints the ratio of each pair (loop / closed form, by wall clock and by
CPU time) and writes them as JSON.
"""

import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fcl._imports import optional_import
from lightning_fcl._recipes import save_bench
from lightning_fcl.functional import classification_log_likelihood, fisher_diagonal
from lightning_fcl.models import LeNet, ResNet18

Case = tuple[nn.Module, Callable[[Any, Any], Tensor], tuple[Tensor, Tensor]]
SAMPLES = {"lenet": 512, "resnet18": 64, "resnet18-batch": 64, "lora": 128}
COLUMNS = ["samples", "times faster (wall)", "times faster (CPU)", "goal", "us per sample", "largest error"]
GOALS = {"lenet": 4.0, "resnet18": 4.0, "resnet18-batch": 4.0, "lora": 3.0}


def transformer() -> nn.Module:
    """The LoRA case; its B factors are away from zero, as after training."""
    transformers, peft = optional_import("transformers", extra="mllm"), optional_import("peft", extra="mllm")
    config = transformers.GPT2Config(
        vocab_size=1000, n_positions=64, n_embd=128, n_layer=4, n_head=4, num_labels=10, pad_token_id=0
    )
    options = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "task_type": "SEQ_CLS"}
    net: nn.Module = peft.get_peft_model(
        transformers.GPT2ForSequenceClassification(config), peft.LoraConfig(r=8, lora_alpha=16, **options)
    )
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return net


def of_tokens(module: Any, batch: Any) -> Tensor:
    """Log-likelihood of a sequence classifier's labels."""
    return -F.cross_entropy(module(input_ids=batch[0]).logits, batch[1], reduction="none")


def build(name: str, samples: int) -> Case:
    """Module, log-likelihood and data of one case."""
    labels = torch.randint(10, (samples,))
    if name == "lora":
        return transformer(), of_tokens, (torch.randint(1, 1000, (samples, 32)), labels)
    if name == "lenet":
        return LeNet(), classification_log_likelihood, (torch.randn(samples, 1, 28, 28), labels)
    net = ResNet18(norm="batch" if name.endswith("batch") else "group", stem="7x7")
    return net, classification_log_likelihood, (torch.randn(samples, 3, 32, 32), labels)


def by_hand(module: nn.Module, log_likelihood: Callable[[Any, Any], Tensor], data: Any) -> dict[str, Tensor]:
    """What everybody writes: one backward pass per sample, squares added up in place."""
    module.eval()
    own = {name: p for name, p in module.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in own.items()}
    for i in range(len(data[0])):
        value = log_likelihood(module, (data[0][i : i + 1], data[1][i : i + 1])).sum()
        for total, grad in zip(sums.values(), torch.autograd.grad(value, list(own.values())), strict=True):
            total.addcmul_(grad, grad)
    return {name: total / len(data[0]) for name, total in sums.items()}


def clocked(case: Case, closed: bool) -> tuple[dict[str, Tensor], float, float]:
    """The Fisher, wall and CPU seconds."""
    cpu, wall = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()
    found = fisher_diagonal(case[0], case[1], [case[2]]) if closed else by_hand(*case)
    return found, time.perf_counter() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu


def measure(name: str, samples: int, pairs: int) -> dict[str, Any]:
    """Ratios of one case, after a pair that warms up and is checked."""
    torch.manual_seed(0)
    case = build(name, samples)
    (found, *_), (expected, *_) = clocked(case, True), clocked(case, False)
    worst = max(((found[n] - e).abs().max() / e.max().clamp(min=1e-30)).item() for n, e in expected.items())
    if worst > 1e-5:
        raise SystemExit(f"{name}: the closed form is off by {worst:.1e} of the largest value.")
    rows = [(clocked(case, False)[1:], clocked(case, True)[1:]) for _ in range(pairs)]
    wall, cpu = ([f(slow[i] / fast[i] for slow, fast in rows) for f in (min, statistics.median, max)] for i in range(2))
    each = 1e6 * statistics.median(fast[0] for _, fast in rows) / samples
    print(f"{name}: {wall[1]:.2f}x by wall, {cpu[1]:.2f}x by CPU, off {worst:.0e}")
    figures = {"times faster (wall)": wall, "times faster (CPU)": cpu, "goal": GOALS[name], "us per sample": each}
    return {"case": name, "samples": samples, **figures, "largest error": worst}


def main(
    case: Literal["all", "lenet", "resnet18", "resnet18-batch", "lora"] = "all",
    pairs: int = 5,
    samples: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure how much faster the closed form is.

    Args:
        case: Which workload.
        pairs: Repetitions.
        samples: Samples of each pass; by default what suits the case.
        out: JSON file for the figures.
    """
    torch.set_num_threads(1)
    names = list(SAMPLES) if case == "all" else [case]
    rows = [measure(name, samples or SAMPLES[name], pairs) for name in names]
    return save_bench(rows, f"python recipes/bench/fisher.py --pairs {pairs}", out, COLUMNS)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
