"""FedADB where ranks share a client: the same as in one process; and the bench of what it costs runs."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from lightning_fcl import ClassAnchors, DualBranchMixin
from tests.federated.test_strategies_trainer import PlainNet, fit

pytestmark = pytest.mark.slow


class DualNet(DualBranchMixin, PlainNet):
    pass


class LocalNet(DualBranchMixin, PlainNet):
    """The local heads stay with their clients."""

    def __init__(self):
        super().__init__(dual_share_local=False)


def options():
    return {"server_callbacks": ClassAnchors(steps=5, lr=0.2, mean=None, gate=0), "gradient_clip_val": 1.0}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2"])
@pytest.mark.parametrize("kind", [DualNet, LocalNet])
def test_ranks_that_share_a_client_equal_one_process(ranks, name, kind, tmp_path):
    alone, accuracy, _ = fit("alone", tmp_path / "alone", 2, 2, kind, options())
    plain, _, _ = fit("alone", tmp_path / "plain", 2, 2, PlainNet)
    one, two = ranks.run(fit, name, tmp_path / name, 2, 2, kind, options())
    assert not [n for n in one[0] if not torch.equal(one[0][n], two[0][n])]
    torch.testing.assert_close(one[0], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(one[1], accuracy)
    assert max((alone[n] - plain[n]).abs().max().item() for n in plain) > 1e-3


def test_the_bench_of_anchors_has_a_row_for_cold_and_warm(tmp_path):
    path = Path(__file__).resolve().parents[2] / "recipes" / "bench" / "anchors.py"
    spec = importlib.util.spec_from_file_location("bench_anchors", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.CASES["lenet-320"] = bench.Case("lenet", 40, 4, 2, 2, 1, 8)
    bench.main(case="lenet-320", pairs=1, out=tmp_path / "out.json")
    cold, warm = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (cold["steps a round"], warm["steps a round"]) == (100, 60)
    assert all(0 < row["anchors"][1] < 1 < row["client"][1] for row in (cold, warm))
