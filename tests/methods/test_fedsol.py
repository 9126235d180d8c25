"""FedSOL: the divergence's gradient, the offsets, the step against its definition, and where it starts."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fcl import FedSOL
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import distillation_pull, fedsol_offset
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.toy import assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
logits = st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4)


@given(student=logits, teacher=logits, temperature=st.floats(0.5, 4))
def test_pull_has_the_divergences_gradient(student, teacher, temperature):
    size = min(len(student), len(teacher))
    z = torch.tensor(student[:size], dtype=torch.float64, requires_grad=True)
    target = torch.tensor(teacher[:size], dtype=torch.float64)
    p, q = (z / temperature).log_softmax(1), (target / temperature).log_softmax(1)
    divergence = (q.exp() * (q - p)).sum(1).mean()
    (wanted,) = torch.autograd.grad(divergence, z)
    (found,) = torch.autograd.grad(distillation_pull(z, target, temperature), z)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)


def test_pull_is_exactly_nothing_where_both_agree():
    z = torch.randn(8, 5, requires_grad=True)
    distillation_pull(z, z.detach().clone()).backward()
    assert not z.grad.any()
    with pytest.raises(ValueError, match="must have one shape"):
        distillation_pull(z, torch.zeros(8, 4))


def oracle_share(distance):
    """|w - anchor|, scaled to norm 1 along the first dimension."""
    return distance.abs() / distance.norm(dim=0, keepdim=True).clamp(min=1e-12)


@given(seed=st.integers(0, 10**6), radius=st.floats(0, 2))
def test_offsets_are_no_longer_than_the_radius(seed, radius):
    generator = torch.Generator().manual_seed(seed)
    gradient, weights, anchor = (
        {n: torch.randn(*s, generator=generator, dtype=torch.float64) for n, s in {"w": (3, 2), "b": (3,)}.items()}
        for _ in range(3)
    )
    length = sum(g.square().sum() for g in gradient.values()).sqrt()
    plain = fedsol_offset(gradient, radius)
    adaptive = fedsol_offset(gradient, radius, weights, anchor)
    for name in gradient:
        torch.testing.assert_close(plain[name], radius * gradient[name] / length)
        share = oracle_share(weights[name] - anchor[name])
        torch.testing.assert_close(adaptive[name], radius * share * gradient[name] / length)
    assert sum(value.square().sum() for value in adaptive.values()) <= radius**2 + 1e-9


def test_offsets_of_nothing():
    zero = {"w": torch.zeros(2), "scale": torch.tensor(0.0)}
    ones = {"w": torch.ones(2), "scale": torch.tensor(1.0)}
    assert not any(value.any() for value in fedsol_offset(zero, 1.0).values())
    assert not any(value.any() for value in fedsol_offset(ones, 1.0, ones, ones).values())


def train_by_hand(module, batches, method, window=1):
    """The definition, with the teacher as a module of its own."""
    teacher, optimizer = copy.deepcopy(module), torch.optim.SGD(module.parameters(), lr=0.1)
    names = [name for name, _ in module.named_parameters()]
    anchor = dict(teacher.named_parameters())
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        with torch.no_grad():
            targets = [(teacher(x) / method.temperature).softmax(1) for x, _ in part]
        kl = sum(
            nn.functional.kl_div((module(x) / method.temperature).log_softmax(1), t, reduction="batchmean")
            for (x, _), t in zip(part, targets, strict=True)
        ) / len(part)
        proximal = dict(zip(names, torch.autograd.grad(kl, list(module.parameters())), strict=True))
        length = sum(g.square().sum() for g in proximal.values()).sqrt()
        before = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if start and length > 1e-7:  # at the start both agree, up to rounding
                    share = oracle_share(parameter - anchor[name]) if method.adaptive else 1.0
                    parameter.add_(method.radius * share * proximal[name] / length)
        loss = sum(nn.functional.cross_entropy(module(x), y) for x, y in part) / window
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, old, gradient in zip(module.parameters(), before, gradients, strict=True):
                parameter.copy_(old)
                parameter.grad = gradient
        optimizer.step()
    return state_of(module)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("adaptive", [True, False])
def test_equals_the_definition(adaptive, window):
    module, method = make_toy(), FedSOL(0.5, adaptive=adaptive)
    wanted = train_by_hand(copy.deepcopy(module), list(loader()), method, window)
    make_trainer([method], max_epochs=1, accumulate_grad_batches=window).fit(module, loader())
    torch.testing.assert_close(state_of(module), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"batch_norm": True}, {"dropout": 0.5}], ids=str)
def test_the_first_step_is_fedavgs(options, tmp_path):
    """Model and teacher agree there, with BatchNorm and dropout too."""
    states = []
    for name, callbacks in {"plain": [], "sol": [FedSOL(1.0, adaptive=False)]}.items():
        module = make_toy(**options)
        trainer = toy_trainer(tmp_path / name, rounds=1, local_steps=1, callbacks=callbacks)
        trainer.fit(module, toy_stream(tasks=1, examples=64))
        states.append(state_of(module))
    assert_same_bits(*states)


def test_bad_arguments():
    with pytest.raises(MisconfigurationError, match="`radius` must be finite"):
        FedSOL(-1.0)
    with pytest.raises(MisconfigurationError, match="`temperature` must be positive"):
        FedSOL(temperature=0.0)
