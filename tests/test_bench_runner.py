"""The bench's runner does the work that a bench folder describes, and prints its line."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

COMMON = """
import json, time
import torch
from torch import nn
T_PROC = time.time()
SIZES = {"X": dict(clients=4, cohort=2, samples=7, batch=3, rounds=3, lr=0.1, shape=(1, 2, 3))}
class Walls(list):
    pids = ()
    def user(self):
        return 0.0
def cpu_user():
    return 0.0
def build_model(size):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 10))
def client_data(cfg):
    torch.manual_seed(1)
    sizes = range(5, 5 + cfg["clients"]) if cfg["ragged"] else [cfg["samples"]] * cfg["clients"]
    return [(torch.randn(n, *cfg["shape"]), torch.randint(0, 10, (n,))) for n in sizes]
def schedule(cfg):
    return [[3, 1], [0, 2], [1, 2]][:cfg["rounds"]]
def flat_of(params):
    return torch.cat([p.detach().reshape(-1) for p in params])
def report(name, cfg, ready, walls, flat, cpu_rounds):
    print("JSON " + json.dumps(dict(name=name, rounds=len(walls), norm=float(flat.double().norm()))))
"""


def by_hand(common, cfg):
    """FedAvg over the schedule, from the definition, in float64."""
    net, data = common.build_model("X").double(), common.client_data(cfg)
    glob = {name: value.clone() for name, value in net.state_dict().items()}
    for cohort in common.schedule(cfg):
        mean = {name: torch.zeros_like(value) for name, value in glob.items()}
        total = sum(len(data[client][1]) for client in cohort)
        for client in cohort:
            net.load_state_dict(glob)
            x, y = data[client]
            for start in range(0, len(y), cfg["batch"]):
                part = slice(start, start + cfg["batch"])
                net.zero_grad()
                F.cross_entropy(net(x[part].double()), y[part]).backward()
                with torch.no_grad():
                    for p in net.parameters():
                        p.sub_(cfg["lr"] * p.grad)
            for name, value in net.state_dict().items():
                mean[name] += value * len(y) / total
        glob = mean
    return torch.cat([value.reshape(-1) for value in glob.values()]).norm().item()


@pytest.fixture
def runner():
    path = Path(__file__).resolve().parents[1] / "recipes" / "bench" / "runner.py"
    spec = importlib.util.spec_from_file_location("bench_runner", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("engine", "ragged"), [("sequential", False), ("stacked", True)])
def test_the_runner_does_the_folders_work(engine, ragged, runner, tmp_path, capsys):
    (tmp_path / "common.py").write_text(COMMON)
    runner.main(tmp_path, size="X", engine=engine, ragged=ragged, hooks=engine == "sequential")
    found = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("JSON "))
    common = runner.load_script(tmp_path, "common.py")
    wanted = by_hand(common, {**common.SIZES["X"], "ragged": ragged})
    assert found["name"] == f"fcl-{engine}"
    assert found["rounds"] == 3
    assert found["norm"] == pytest.approx(wanted, rel=1e-6)


def test_a_folder_without_common_is_refused(runner, tmp_path):
    with pytest.raises(SystemExit, match="must hold common"):
        runner.main(tmp_path)
