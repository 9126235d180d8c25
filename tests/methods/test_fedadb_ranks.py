"""FedADB where ranks share a client: the same as in one process."""

import pytest
import torch

from lightning_fcl import ClassAnchors, DualBranchMixin
from tests.federated.test_strategies_trainer import PlainNet, fit

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class DualNet(DualBranchMixin, PlainNet):
    pass


class LocalNet(DualBranchMixin, PlainNet):
    """The local heads stay with their clients."""

    def __init__(self):
        super().__init__(dual_share_local=False)


def options():
    return {"server_callbacks": ClassAnchors(steps=5, lr=0.2, mean=None, gate=0), "gradient_clip_val": 1.0}


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
