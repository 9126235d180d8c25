"""FedSAM and FedASAM: offsets by hand, the step against two closures, accumulation, clipping, and no traces."""

import copy

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fcl import FedASAM, FedProx, FedSAM
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import asam_offset, sam_offset
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.toy import ManualModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
METHODS = {"sam": FedSAM(0.3), "asam": FedASAM(0.5, 0.1)}
pairs = st.lists(st.tuples(*[st.floats(-5, 5).map(lambda v: round(v, 3))] * 2), min_size=1, max_size=4)


def tree(name, values):
    return {name: torch.tensor(values, dtype=torch.float64)}


def oracle(weights, gradient, radius, offset, scaled):
    sizes = [abs(w) + offset if scaled else 1.0 for w in weights]
    length = sum((t * g) ** 2 for t, g in zip(sizes, gradient, strict=True)) ** 0.5
    return [radius * t * t * g / length if length > 1e-12 else 0.0 for t, g in zip(sizes, gradient, strict=True)]


@given(values=pairs, radius=st.floats(0, 2), offset=st.floats(0, 1))
def test_offsets_are_the_papers(values, radius, offset):
    weights, gradient = map(list, zip(*values, strict=True))
    sam = sam_offset(tree("weight", gradient), radius)["weight"]
    assert sam.tolist() == pytest.approx(oracle(weights, gradient, radius, offset, False), abs=1e-9)
    for name in ("weight", "bias"):
        found = asam_offset(tree(name, weights), tree(name, gradient), radius, offset)[name]
        assert found.tolist() == pytest.approx(oracle(weights, gradient, radius, offset, name == "weight"), abs=1e-9)


def test_oracle_values():
    """Baselines 4.1."""
    gradient, weight = tree("weight", [3.0, 4.0]), tree("weight", [1.0, -2.0])
    assert sam_offset(gradient, 0.1)["weight"].tolist() == pytest.approx([0.06, 0.08])
    assert asam_offset(weight, gradient, 0.1)["weight"].tolist() == pytest.approx([0.0351, 0.1873], abs=1e-4)


@given(values=pairs, factor=st.floats(0.1, 10))
def test_asam_does_not_see_a_layers_scale(values, factor):
    weights, gradient = map(list, zip(*values, strict=True))
    plain = asam_offset(tree("weight", weights), tree("weight", gradient), 0.1)["weight"]
    twin = [[w * factor for w in weights], [g / factor for g in gradient]]
    scaled = asam_offset(tree("weight", twin[0]), tree("weight", twin[1]), 0.1)["weight"]
    torch.testing.assert_close(scaled, factor * plain, rtol=1e-9, atol=1e-9)


def train_by_hand(module, method, batches, *, window=1, clip=None, epochs=1):
    """The definition: the mean gradient of the window, the offset, the gradient there, a step from where it was."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    names = [name for name, _ in module.named_parameters()]
    for start in list(range(0, len(batches), window)) * epochs:

        def gradients(start=start):
            loss = sum(nn.functional.cross_entropy(module(x), y) for x, y in batches[start : start + window]) / window
            return dict(zip(names, torch.autograd.grad(loss, list(module.parameters())), strict=True))

        first, before = gradients(), [p.detach().clone() for p in module.parameters()]
        weights = {n: p.detach() for n, p in module.named_parameters()}
        if isinstance(method, FedSAM):
            offset = sam_offset(first, method.radius)
        else:
            offset = asam_offset(weights, first, method.radius, method.offset)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.add_(offset[name])
        second = gradients()
        with torch.no_grad():
            for (name, parameter), old in zip(module.named_parameters(), before, strict=True):
                parameter.copy_(old)
                parameter.grad = second[name]
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return state_of(module)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.3}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_definition_in_a_stock_trainer(method, options):
    module = make_toy(momentum=0.9)
    settings = {"window": options.get("accumulate_grad_batches", 1), "clip": options.get("gradient_clip_val")}
    wanted = train_by_hand(copy.deepcopy(module), METHODS[method], list(loader()), epochs=2, **settings)
    make_trainer([METHODS[method]], **options).fit(module, loader())
    torch.testing.assert_close(state_of(module), wanted, rtol=1e-5, atol=1e-6)
    plain = make_toy(momentum=0.9)
    make_trainer([], **options).fit(plain, loader())
    assert any(not torch.allclose(plain.state_dict()[n], value, atol=1e-4) for n, value in wanted.items())


@pytest.mark.parametrize("method", METHODS)
def test_equals_the_definition_in_a_federation(method, tmp_path):
    module = make_toy(momentum=0.9)
    stream = toy_stream(tasks=1, clients=1, shuffle=False, examples=64)
    wanted = train_by_hand(copy.deepcopy(module), METHODS[method], list(stream.train_loader(0, 0)), window=2, clip=0.5)
    options = {"rounds": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "callbacks": [METHODS[method]]}
    toy_trainer(tmp_path, clients_per_round=1, **options).fit(module, stream)
    torch.testing.assert_close(state_of(module), wanted, rtol=1e-5, atol=1e-6)


def test_batch_norm_sees_the_first_pass_only():
    """With a step size of zero the statistics are those of plain training, though every step has two passes."""
    states = []
    for callbacks in ([], [FedSAM(5.0)]):
        module = make_toy(batch_norm=True, lr=0.0)
        make_trainer(callbacks).fit(module, loader())
        states.append(state_of(module))
    assert_same_bits(*states)
    assert states[0]["net.1.num_batches_tracked"] == 16


def test_penalties_behind_it_keep_their_part():
    """FedSAM, then FedProx: the pull is added to the gradient that FedSAM took."""
    module = make_toy()
    make_trainer([FedSAM(0.1), FedProx(100.0)], max_epochs=1, gradient_clip_val=0.1).fit(module, loader())
    assert max((p - q).abs().max() for p, q in zip(module.parameters(), make_toy().parameters(), strict=True)) < 0.1
    with pytest.raises(MisconfigurationError, match="must name FedSAM before FedProx"):
        make_trainer([FedProx(0.1), FedSAM(0.1)]).fit(make_toy(), loader())


def test_what_cannot_be_exact_is_refused(tmp_path):
    with pytest.raises(MisconfigurationError, match="Use automatic optimisation"):
        make_trainer([FedSAM()]).fit(make_toy(cls=ManualModule), loader())
    with pytest.raises(MisconfigurationError, match="gradient scaler"):
        make_trainer([FedASAM()], scaler=1024.0).fit(make_toy(), loader())
    with pytest.raises(MisconfigurationError, match="Use automatic optimisation"):
        toy_trainer(tmp_path, callbacks=[FedSAM()]).fit(make_toy(cls=ManualModule), toy_stream())


def share_a_client(run_dir):
    trainer = toy_trainer(run_dir, callbacks=[FedSAM()], devices=2, strategy="ddp", parallel="model")
    with pytest.raises(MisconfigurationError, match="Use parallel='clients'"):
        trainer.fit(make_toy(), toy_stream())


class Batches(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch)


def under_ddp():
    """Two ranks, each with half of every batch."""
    module, batches = make_toy(momentum=0.9), Batches()
    make_trainer([FedSAM(0.3), batches], max_epochs=1, devices=2, strategy="ddp").fit(module, loader())
    return state_of(module), batches.seen


@pytest.mark.distributed
def test_ranks(ranks, tmp_path):
    """Ranks that share a client are refused; under DDP in a stock Trainer the second gradient is the ranks' mean."""
    ranks.run(share_a_client, tmp_path)
    (one, first), (two, second) = ranks.run(under_ddp)
    assert_same_bits(one, two)
    both = [(torch.cat([x, u]), torch.cat([y, v])) for (x, y), (u, v) in zip(first, second, strict=True)]
    wanted = train_by_hand(make_toy(momentum=0.9), FedSAM(0.3), both)
    torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: FedSAM(-1.0), lambda: FedASAM(0.1, offset=float("inf"))])
def test_bad_arguments(make):
    with pytest.raises(MisconfigurationError, match="must be finite and not negative"):
        make()
