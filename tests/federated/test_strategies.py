"""Engines of ``parallel="model"`` on two ranks, against the same maths written out by hand."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.distributed.tensor import DTensor

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.federated.engines.deepspeed import DeepSpeedEngine, _set_clipping
from lightning_fcl.federated.engines.fsdp2 import fsdp2
from lightning_fcl.federated.engines.strategy import StrategyEngine
from tests.helpers.data_parallel import ALL, Case, Net, load_start, make_engine, new_net, run_job, train_plainly

pytestmark = pytest.mark.distributed


# -- what runs on the ranks -----------------------------------------------------------------------------------------


def compare(name, case, each=False):
    engine = make_engine(name, case)
    result = run_job(engine, 3, case)
    engine.teardown()
    assert not case.tied or engine.module.body[2].bias is engine.module.heads[0].bias
    return result, train_plainly(3, case, world=2, each=each), train_plainly(3, case)


def switch(name, case):
    """Clients 1, 2, 1 in one engine, with an evaluation and a failed job between; then 2 in a fresh engine."""
    engine = make_engine(name, case)
    first = run_job(engine, 1, case)
    x = torch.ones(2, 5)
    with engine.evaluating():
        scores = engine.validation_step((x, None), 0)
    with pytest.raises(ArithmeticError):
        run_job(engine, 5, case, fail_at=1)
    module = engine.module
    with engine.unwrapped(), torch.no_grad():
        load_start(engine, case)
        assert torch.equal(module.temperature, new_net(case).temperature)
        assert not isinstance(module.temperature, DTensor)
    second, again = run_job(engine, 2, case), run_job(engine, 1, case)
    engine.teardown()
    with torch.no_grad():
        after_teardown = module.eval()(x) + module.temperature
    other = make_engine(name, case, module)  # the same module, wrapped a second time
    fresh = run_job(other, 2, case)
    other.teardown()
    return (first, second, again), fresh, (scores.clone(), after_teardown), type(module).__name__


def batch_norm(name):
    case = Case(norm=True, steps=1)
    engine = make_engine(name, case)
    result = run_job(engine, 3, case)
    own = dict(engine.module.named_buffers())["body.1.running_mean"].clone()
    dist.all_reduce(own)
    counter = engine.get_tensors(["body.1.num_batches_tracked"])
    engine.teardown()
    return result["body.1.running_mean"], own / 2, counter


def roundtrip(name):
    """Frozen and trainable tensors by name, before and after the backend has started."""
    case = Case(steps=1)
    engine = make_engine(name, case)
    names = ["heads.1.weight", "heads.0.bias", "temperature"]
    before = engine.get_tensors(names)
    run_job(engine, 1, case)
    changed = {n: torch.full_like(before[n], 0.3) for n in names[1:]}
    engine.set_tensors(changed)
    result = engine.get_tensors(names)
    engine.teardown()
    return before, result, dict(new_net(case).named_parameters())


def try_deepspeed(case, options, kind):
    module = {"net": Net, "backward": NetWithBackward, "two": NetWithTwoOptimizers}[kind](case)
    engine = make_engine("zero2", case, module, **options)
    configured = module.configure_optimizers()
    engine.attach_optimizers(configured if isinstance(configured, list) else [configured])
    engine.clip_gradients(None, 1.0, "norm")


class NetWithBackward(Net):
    def backward(self, loss):
        loss.backward()


class NetWithTwoOptimizers(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.body.parameters(), 0.1), torch.optim.SGD(self.heads.parameters(), 0.1)]


def try_fsdp(engine_class):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=fsdp2(lambda module, mesh: module))
    fabric.launch()
    engine_class(fabric).setup(Net(Case()))


# -- the tests ------------------------------------------------------------------------------------------------------


def bits(one, two):
    assert one.keys() == two.keys()
    differ = {n: (one[n] - two[n]).abs().max().item() for n in one if not torch.equal(one[n], two[n])}
    assert not differ


def close(one, two):
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ALL)
def test_equals_hand_made_data_parallel_bit_for_bit(ranks, name, optimizer):
    (one, hand, alone), (two, _, _) = ranks.run(compare, name, Case(optimizer, scheduler=True))
    bits(one, two)
    bits(one, hand)
    close(one, alone)


@pytest.mark.parametrize("name", ALL)
def test_accumulation_and_a_penalty_equal_hand_made_data_parallel_bit_for_bit(ranks, name):
    case = Case(accumulate=3, pull=0.5)
    one, hand, alone = ranks.run(compare, name, case, name in ("zero2", "zero3"))[0]
    bits(one, hand)
    close(one, alone)


@pytest.mark.parametrize("name", ALL)
def test_clipping(ranks, name):
    """Bit for bit where torch clips the whole gradients; otherwise the norm is summed in another order."""
    case = Case("sgd", clip=0.5)
    one, hand, alone = ranks.run(compare, name, case)[0]
    (bits if name == "ddp" else close)(one, hand)
    close(one, alone)
    free = ranks.run(compare, name, replace(case, clip=None))[0][0]
    assert (free["body.0.weight"] - one["body.0.weight"]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ALL)
def test_switching_clients_leaves_no_trace(ranks, name):
    case = Case("adamw", accumulate=2)
    (first, second, again), fresh, (scores, after_teardown), class_name = ranks.run(switch, name, case)[0]
    bits(first, again)
    bits(second, fresh)
    assert not torch.equal(first["body.0.weight"], second["body.0.weight"])
    assert class_name == "Net"
    assert scores.shape == after_teardown.shape == (2, 3)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_an_optimizer_that_fills_its_state_when_built(ranks, name):
    (first, second, again), fresh, _, _ = ranks.run(switch, name, Case("adagrad"))[0]
    bits(first, again)
    bits(second, fresh)
    one, hand, _ = ranks.run(compare, name, Case("adagrad"))[0]
    bits(one, hand)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1", "zero3"])
def test_tied_weights_stay_tied(ranks, name):
    one, hand, _ = ranks.run(compare, name, Case(tied=True))[0]
    bits(one, hand)


@pytest.mark.parametrize("name", ALL)
def test_batch_statistics_leave_as_the_mean_over_ranks(ranks, name):
    (one, mean, counter), (two, _, _) = ranks.run(batch_norm, name)
    assert torch.equal(one, two)
    torch.testing.assert_close(one, mean)
    assert counter == {"body.1.num_batches_tracked": torch.tensor(1)}


@pytest.mark.parametrize("name", ALL)
def test_tensors_by_name_are_whole(ranks, name):
    before, result, start = ranks.run(roundtrip, name)[1]
    for key, value in before.items():
        assert torch.equal(value, start[key])
    assert torch.equal(result["heads.1.weight"], start["heads.1.weight"])
    assert torch.equal(result["heads.0.bias"], torch.full((3,), 0.3))
    assert torch.equal(result["temperature"], torch.tensor([0.3]))


@pytest.mark.parametrize(
    ("config", "value", "clips"), [({}, None, 0.0), ({}, 0.5, 0.5), ({"gradient_clipping": 0.25}, None, 0.25)]
)
def test_deepspeed_clips_only_if_the_user_says_so(config, value, clips):
    _set_clipping(config, value, "norm")
    assert config == {"gradient_clipping": clips}


def test_two_clipping_options_that_disagree_are_refused():
    with pytest.raises(MisconfigurationError, match=r"`gradient_clip_val` must agree .* got 0\.5 and 0\.25"):
        _set_clipping({"gradient_clipping": 0.25}, 0.5, "norm")


@pytest.mark.parametrize(
    ("case", "options", "kind", "message"),
    [
        (Case(clip=1.0), {"gradient_clip_algorithm": "value"}, "net", "`gradient_clip_algorithm` must be 'norm'"),
        (Case(), {}, "backward", "`backward` must not be overridden under DeepSpeed"),
        (Case(), {}, "two", "`configure_optimizers` must return one optimiser under DeepSpeed, got 2"),
        (Case(), {}, "net", "`clip_gradients` must not be called under DeepSpeed"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(ranks, case, options, kind, message):
    with pytest.raises(MisconfigurationError, match=message):
        ranks.run(try_deepspeed, case, options, kind)


def test_a_strategy_that_does_not_suit_is_refused(ranks):
    with pytest.raises(MisconfigurationError, match="`strategy` must suit DeepSpeedEngine, got _FSDP2"):
        ranks.run(try_fsdp, DeepSpeedEngine)
    with pytest.raises(MisconfigurationError, match=r"must shard every trainable parameter .* leaves out temperature"):
        ranks.run(try_fsdp, StrategyEngine)
