"""SI: path integrals by hand, what spoils them and must not, both trainers, and the optimum it is pulled to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fcl import SI
from lightning_fcl.exceptions import MisconfigurationError, ParamMismatchError
from lightning_fcl.functional import path_integral, si_importance, si_penalty
from tests.helpers.penalty import SETTINGS, InLoss, largest_difference, loader, make_trainer
from tests.helpers.quadratics import Parabola, client_states, fit
from tests.helpers.toy import assert_same_bits, make_toy, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
number = st.floats(-4, 4)


def one(value):
    return {"w": torch.tensor([value], dtype=torch.float64)}


@given(gradient=number, before=number, after=number, old=st.floats(0, 4), xi=st.floats(0.01, 1))
def test_path_and_importance_by_hand(gradient, before, after, old, xi):
    path = path_integral(one(gradient), one(before), one(after))["w"].item()
    assert path == pytest.approx(-gradient * (after - before))
    found = si_importance(one(path), one(before), one(after), xi, one(old))["w"].item()
    assert found == pytest.approx(max(0.0, old + path / ((after - before) ** 2 + xi)))
    assert si_penalty(one(after), one(before), one(old), 0.5).item() == pytest.approx(0.5 * old * (after - before) ** 2)


class Bowl(Parabola):
    """Loss w^2, from 1, in steps so small that the path integral is the loss's drop (baselines 5.2)."""

    def __init__(self):
        super().__init__(lr=2e-2)
        nn.init.ones_(self.net.weight)

    def training_step(self, batch, batch_idx):
        return self.net.weight.square().sum()


@pytest.mark.parametrize("damping", [1e-9, 0.1])
def test_importance_of_a_bowl(damping):
    module, callback = Bowl(), SI(1.0, damping=damping)
    make_trainer([callback], max_epochs=25).fit(module, loader())
    assert module.weight == pytest.approx(0.0, abs=1e-3)
    assert callback.importance["net.weight"].item() == pytest.approx(1.0 / (1.0 + damping), abs=3e-2)


def path_of(module, callback, **options):
    """The path after a fit, read before the task's end turns it into an importance."""
    kept = {}
    callback.on_task_end = lambda *_: kept.update({n: v.clone() for n, v in callback.path.items()})
    make_trainer([callback], max_epochs=1, **options).fit(module, loader())
    return kept


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.05}, {"scaler": 1024.0}], ids=str
)
def test_path_takes_the_whole_gradient_and_the_true_move(options, optimizer):
    """Against a loop by hand: unclipped gradient of the window's mean loss times what the optimiser really did."""
    found = path_of(make_toy(optimizer=optimizer, lr=0.02), SI(1.0), **options)
    module = make_toy(optimizer=optimizer, lr=0.02)
    stepper = module.configure_optimizers()
    batches, window = list(loader()), options.get("accumulate_grad_batches", 1)
    wanted = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for start in range(0, len(batches), window):
        stepper.zero_grad()
        for x, y in batches[start : start + window]:
            (nn.functional.cross_entropy(module(x), y) / window).backward()
        gradients = {n: p.grad.clone() for n, p in module.named_parameters()}
        before = {n: p.detach().clone() for n, p in module.named_parameters()}
        if "gradient_clip_val" in options:
            nn.utils.clip_grad_norm_(module.parameters(), options["gradient_clip_val"])
        stepper.step()
        for n, p in module.named_parameters():
            wanted[n] -= gradients[n] * (p.detach() - before[n])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_pull_equals_the_same_penalty_in_the_loss(setting):
    module, callback = make_toy(cls=InLoss), SI(2.0)
    make_trainer([callback], max_epochs=1).fit(module, loader())
    importance, anchor = dict(callback.importance), dict(callback.anchor)
    assert_same_bits(anchor, state_of(module))
    difference = largest_difference(
        module, [callback], lambda params: si_penalty(params, anchor, importance, 2.0), **SETTINGS[setting]
    )
    assert difference < 1e-5


def test_the_path_does_not_see_its_own_pull():
    """With a pull so strong that it fills the gradient, the path of a task that asks for nothing stays empty."""

    class Still(Parabola):
        def training_step(self, batch, batch_idx):
            return 0.0 * self.net.weight.sum()

    module, callback = Still(lr=0.01), SI(1.0)
    callback.load_state_dict(
        {"importance": {"net.weight": torch.ones(1, 1)}, "anchor": {"net.weight": torch.ones(1, 1)}}
    )
    path = path_of(module, callback)
    assert module.weight > 0.1
    assert path["net.weight"].item() == 0.0


def test_protects_an_earlier_task():
    losses = []
    for callbacks in ([], [SI(5.0)]):
        module = make_toy(lr=0.02)
        for shift in (0.0, -4.0):
            make_trainer(callbacks, max_epochs=10).fit(module, loader(shift=shift))
        x, y = loader().dataset.tensors
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(module(x), y).item())
    assert losses[1] < 0.9 * losses[0]


def oracle(curves, targets, tasks, rounds, *, strength, damping, lr, steps):
    """All clients in every round, plain numbers; start, end and anchor are the global weights."""
    weight, importance, path = 0.0, [0.0] * len(curves), []
    anchor = None
    for _ in range(tasks):
        start, done = weight, [0.0] * len(curves)
        for _ in range(rounds):
            ends = []
            for i, (a, b) in enumerate(zip(curves, targets, strict=True)):
                y = weight
                for _ in range(steps):
                    gradient = a * (y - b)
                    pull = 0.0 if anchor is None else 2 * strength * importance[i] * (y - anchor)
                    move = -lr * (gradient + pull)
                    done[i] -= gradient * move
                    y += move
                ends.append(y)
            weight = sum(ends) / len(ends)
            path.append(weight)
        importance = [
            max(0.0, w + d / ((weight - start) ** 2 + damping)) for w, d in zip(importance, done, strict=True)
        ]
        anchor = weight
    return path, importance


def test_equals_the_papers_loop_in_a_federation(tmp_path):
    options = {"curves": (1.0, 2.0, 0.5), "targets": (0.0, 1.0, -1.0)}
    module = Parabola(lr=0.02)
    records, _ = fit(tmp_path, SI(0.3, damping=0.05), **options, tasks=3, rounds=2, module=module)
    path, importance = oracle(*options.values(), 3, 2, strength=0.3, damping=0.05, lr=0.02, steps=10)
    assert records.weights == pytest.approx(path, abs=1e-10)
    found = {c: state["importance"]["net.weight"].item() for c, state in client_states(tmp_path).items()}
    assert found == pytest.approx(dict(enumerate(importance)), abs=1e-10)


def test_hooks_leave_with_the_fit():
    callback = SI(1.0)
    trainer = make_trainer([callback])
    trainer.fit(make_toy(), loader())
    assert not callback._handles
    assert all(not optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)


def test_bad_arguments_and_strategies():
    with pytest.raises(MisconfigurationError, match="`damping` must be positive"):
        SI(damping=0.0)
    with pytest.raises(MisconfigurationError, match="`strength` must be finite"):
        SI(-1.0)
    with pytest.raises(ParamMismatchError, match="lacks 'w'"):
        path_integral(one(1.0), {}, one(1.0))

    class DeepSpeedLike:
        strategy = type("DeepSpeedStrategy", (), {})()

    with pytest.raises(MisconfigurationError, match="keep copies of"):
        SI().setup(DeepSpeedLike(), None, "fit")
