"""House rules of every test: fixed seeds, a working folder of its own, and nothing left behind."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.helpers.ranks import ranks

__all__ = ["ranks"]

ROOT = Path(__file__).resolve().parents[1]
SEED = 7

# Set by what we call or import: Lightning's `seed_everything` and its look for GPUs, OpenMP, torch's compiler. Undone,
# not punished.
TOLERATED_VARIABLES = ("KMP_", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTEST_", "PYTORCH_NVML", "TORCHINDUCTOR_")
TOOL_FILES = {".coverage", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}

settings.register_profile("house", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("house")


def _torch_settings() -> dict[str, object]:
    return {
        "set_num_threads": torch.get_num_threads(),
        "set_default_dtype": torch.get_default_dtype(),
        "set_grad_enabled": torch.is_grad_enabled(),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _no_leaks(tmp_path: Path) -> Iterator[None]:
    """Run in an empty folder; undo what the test changed in the process, and fail it if it should have known."""
    variables, torch_settings = os.environ.copy(), _torch_settings()
    threads, files, here = set(threading.enumerate()), set(os.listdir(ROOT)), os.getcwd()
    os.chdir(tmp_path)
    yield
    os.chdir(here)
    leaks = [
        *_restore_environment(variables),
        *_restore_torch(torch_settings),
        *_leave_process_group(),
        *(f"thread {thread.name}" for thread in _left_running(threads)),
        *(f"file {name}" for name in sorted(set(os.listdir(ROOT)) - files - TOOL_FILES)),
    ]
    if leaks:
        pytest.fail(f"The test left behind: {'; '.join(leaks)}.", pytrace=False)


def _restore_environment(before: dict[str, str]) -> list[str]:
    changed = sorted(name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"variable {name}" for name in changed if not name.startswith(TOLERATED_VARIABLES)]


def _restore_torch(before: dict[str, object]) -> list[str]:
    changed = [name for name, value in _torch_settings().items() if value != before[name]]
    for name in changed:
        getattr(torch, name)(before[name])
    return [f"torch.{name}" for name in changed]


def _leave_process_group() -> list[str]:
    if not dist.is_initialized():
        return []
    dist.destroy_process_group()
    return ["a process group"]


def _left_running(before: set[threading.Thread]) -> list[threading.Thread]:
    new = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    for thread in new:
        thread.join(timeout=1.0)
    return [thread for thread in new if thread.is_alive()]
