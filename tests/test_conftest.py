import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CONFTEST = "from tests.conftest import _no_leaks, _seeded\n"
LEAKY = f"""
import os, random, threading
from pathlib import Path
import numpy as np
import torch, torch.distributed as dist

ROOT = Path({str(ROOT)!r})
draws = []

def draw():
    draws.append((random.random(), np.random.rand(), torch.rand(()).item()))

def test_draw_once(): draw()
def test_draw_again(): draw(); assert draws[0] == draws[1]
def test_file_of_its_own(): Path("runs").mkdir(); assert os.listdir() == ["runs"]
def test_folder_starts_empty(): assert os.listdir() == []
def test_tolerated_variable(): os.environ["PL_GLOBAL_SEED"] = "1"
def test_tolerated_variable_is_undone(): assert "PL_GLOBAL_SEED" not in os.environ
def test_leak_variable(): os.environ["LEAKED"] = "1"; del os.environ["HOME"]
def test_leak_settings(): torch.set_num_threads(3); torch.set_default_dtype(torch.float64)
def test_leak_thread(): threading.Thread(target=lambda: threading.Event().wait(3), name="sleeper").start()
def test_leak_group(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def test_all_undone():
    assert "LEAKED" not in os.environ and "HOME" in os.environ and torch.get_num_threads() == 1
    assert torch.get_default_dtype() == torch.float32 and not dist.is_initialized()
"""


def test_the_leak_police_finds_undoes_and_reports(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    run = subprocess.run([*command, tmp_path], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "11 passed, 4 errors" in run.stdout, run.stdout + run.stderr
    for leak in (
        "variable HOME; variable LEAKED",
        "torch.set_num_threads; torch.set_default_dtype",
        "thread sleeper",
        "a process group",
    ):
        assert f"The test left behind: {leak}." in run.stdout
