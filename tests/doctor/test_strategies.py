"""The dry run where two ranks train the same client: what each strategy does with gradients, and nothing is spoilt."""

import pytest
import torch
from torch import nn

from lightning_fcl.doctor import diagnose
from lightning_fcl.federated.engines.fsdp2 import fsdp2
from lightning_fcl.testing import CPUDeepSpeedStrategy
from tests.helpers.toy import ToyModule, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.distributed


class HalfUsed(ToyModule):
    """One layer is left out."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(6, 4)


def strategy(name):
    if name.startswith("zero"):
        return CPUDeepSpeedStrategy(stage=int(name[4:]))
    return fsdp2() if name == "fsdp2" else "ddp_find_unused_parameters_true"


def examine(name, run_dir):
    """Findings, numbers, and whether the module is as it was."""
    trainer = toy_trainer(run_dir, parallel="model", devices=2, strategy=strategy(name))
    module = make_toy(cls=HalfUsed)
    before = state_of(module)
    found = diagnose(trainer, module, toy_stream(tasks=1))
    after = module.state_dict()
    same = all(torch.equal(before[n], after[n]) for n in before) and {type(p) for p in module.parameters()}
    return [(f.level, f.subject, f.text) for f in found.findings], found.numbers, same == {nn.Parameter}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero2")]


@pytest.mark.parametrize("name", ["fsdp2", "zero3", *SLOW])
def test_dead_gradients_are_seen_under_every_strategy(ranks, name, tmp_path):
    for findings, numbers, same in ranks.run(examine, name, tmp_path / "run"):
        assert "error" not in [level for level, *_ in findings], findings
        (dead,) = [text for level, _, text in findings if level == "warning"]
        assert dead.startswith("2 of 6 trainable parameters got none: unused.bias, unused.weight.")
        assert numbers["round_up"] == numbers["bytes_travels"] > 0
        assert same
        assert (name == "ddp") != any(subject == "memory" for _, subject, _ in findings)
    assert not (tmp_path / "run").exists()
