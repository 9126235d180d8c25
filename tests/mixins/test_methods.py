"""Loss mixins together on one module; what holds for each alone is in tests/methods/."""

import copy

import pytest
import torch

from lightning_fcl.callbacks import FaultInjector
from lightning_fcl.exceptions import MisconfigurationError, ResumeMismatchError
from lightning_fcl.functional import distillation_loss, not_true_distillation
from lightning_fcl.mixins import MOON, FedDecorr, FedGELA, FedLMD, FedNTD, FLwF2T, LwF
from lightning_fcl.serialize import load_tree
from tests.helpers.mixins import Teacher, assert_close, differ, federate, fit, twins
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
ODD = {"batch_norm": True, "dropout": 0.3}


class TwoTeachers(LwF, FedNTD, ToyModule):
    pass


class Teachers(MOON, FedLMD, LwF, FLwF2T, FedDecorr, FedNTD, ToyModule):
    """All that add terms."""


class Everything(MOON, FedLMD, LwF, FLwF2T, FedDecorr, FedNTD, FedGELA, ToyModule):
    """All seven."""


def test_two_on_one_module_add_up():
    module, twin = twins(TwoTeachers, lwf_strength=0.5, ntd_strength=0.3)

    def total(loss, x, y, _, logits):
        ntd = 0.3 * not_true_distillation(logits, start.logits(x), y)
        return loss + ntd if end is None else loss + ntd + 0.5 * distillation_loss(logits, end.logits(x), 2.0)

    twin.total, end = total, None
    for shift in (0.0, 1.0):
        start = Teacher(twin)
        fit(module, shift, max_epochs=1)
        fit(twin, shift, max_epochs=1)
        end = Teacher(twin)
    assert_close(module, twin)


def test_teachers_neither_travel_nor_stay_in_the_module(tmp_path):
    plain, module = make_toy(**ODD), make_toy(cls=Teachers, **ODD)
    sent = [federate(one, tmp_path / type(one).__name__).bytes_up for one in (plain, module)]
    assert sent[0] == sent[1]
    assert state_of(module).keys() == state_of(plain).keys()


def resumed(run_dir, **options):
    """Stopped in the second task, and resumed in another module."""
    with pytest.raises(RuntimeError, match="injected fault"):
        federate(make_toy(cls=Everything, **ODD), run_dir, callbacks=[FaultInjector("exception", task=1, round=1)])
    module = make_toy(cls=Everything, **ODD, **options)
    return module, toy_trainer(run_dir).fit(module, toy_stream(), "last")


def test_all_on_one_module_resume_bit_for_bit(tmp_path):
    whole = make_toy(cls=Everything, **ODD)
    reports = [federate(whole, tmp_path / "whole")]
    module, report = resumed(tmp_path / "parts")
    assert_same_bits(state_of(module), state_of(whole))
    metrics = [(r.run_dir / "metrics.csv").read_text() for r in (*reports, report)]
    assert metrics[0] == metrics[1]
    assert report.method == "MOON + FedLMD + LwF + FLwF-2T + FedDecorr + FedNTD + FedGELA"
    terms = {name.rpartition("/")[2] for name in metrics[0].splitlines()[0].split(",") if "loss/" in name}
    assert terms == {"moon", "lmd", "lwf", "flwf2t", "decorr", "ntd"}
    client = next((tmp_path / "whole" / "clients").glob("*/*"))
    assert load_tree(client)["callbacks"].keys() == {"PreviousModel"}  # all that a client keeps


def test_another_setting_is_another_run(tmp_path):
    """Settings that ``**kwargs`` hands on are part of what a resumed run must have."""
    with pytest.raises(ResumeMismatchError, match=r"ntd_strength: 1.0 -> 2.0"):
        resumed(tmp_path, ntd_strength=2.0)


def test_a_copy_of_a_trained_module_goes_on_alone():
    module = make_toy(cls=Everything, batch_norm=True)
    fit(module, max_epochs=1)
    twin, before = copy.deepcopy(module), state_of(module)
    fit(twin, 1.0, max_epochs=1)
    assert differ(twin, module)
    assert_same_bits(state_of(module), before)
    fit(module, 1.0, max_epochs=1)
    assert_same_bits(state_of(module), state_of(twin))


class PerExample(MOON, FedLMD, LwF, FLwF2T, FedNTD, ToyModule):
    """Terms that are means over examples, which ranks may share."""


def on_ranks(run_dir: str, devices: int, cls=Everything, parallel="clients", strategy="auto"):
    module = make_toy(cls=cls, **(ODD if cls is Everything else {}))
    federate(module, run_dir, toy_stream(clients=5), devices=devices, parallel=parallel, strategy=strategy)
    return state_of(module)


@pytest.mark.distributed
def test_two_processes_equal_one(ranks, tmp_path):
    one = on_ranks(str(tmp_path / "one"), 1)
    for state in ranks.run(on_ranks, str(tmp_path / "two"), 2):
        assert_same_bits(one, state)


@pytest.mark.distributed
def test_two_ranks_that_share_a_client_equal_one(ranks, tmp_path):
    one = on_ranks(str(tmp_path / "one"), 1, PerExample)
    for state in ranks.run(on_ranks, str(tmp_path / "two"), 2, PerExample, "model", "ddp"):
        for name, value in one.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


def refused_under_fsdp2(run_dir: str) -> str:
    from lightning_fcl import fsdp2

    with pytest.raises(MisconfigurationError) as refusal:
        on_ranks(run_dir, 2, PerExample, "model", fsdp2())
    return str(refusal.value)


@pytest.mark.distributed
def test_a_teacher_must_be_whole(ranks, tmp_path):
    for message in ranks.run(refused_under_fsdp2, str(tmp_path)):
        assert "must be whole on every rank, but this strategy keeps them in shards. Use DDP" in message


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions(precision, tmp_path):
    module = make_toy(cls=Everything, batch_norm=True)
    report = federate(module, tmp_path, precision=precision)
    assert torch.isfinite(report.accuracy).all()
