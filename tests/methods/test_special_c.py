"""SPECIAL-C: oracle values, equality with FedAvg at strength 0, and its place after the optimiser's step."""

import pytest
import torch

from lightning_fcl.callbacks import ClientProximal
from lightning_fcl.exceptions import MisconfigurationError
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class Slope(ToyModule):
    """One weight whose gradient is always -1, with SGD at .1."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return -self.net.weight.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.net.weight.item())


def with_anchor_at_zero(**options):
    callback = ClientProximal(**options)
    callback.load_state_dict({"anchor": {"net.weight": torch.zeros(1, 1)}})
    return callback


def test_unrolled_steps():
    """D-7: .083333, .152778, .210648, in the limit .5."""
    module = Slope()
    make_trainer([with_anchor_at_zero(strength=0.2)], max_epochs=20).fit(module, loader())
    assert module.seen[:3] == pytest.approx([0.083333, 0.152778, 0.210648], abs=1e-6)
    assert module.seen[-1] == pytest.approx(0.5, abs=1e-5)


def test_per_epoch_is_milder():
    module = Slope()
    make_trainer([with_anchor_at_zero(strength=0.2, every="epoch")], max_epochs=1).fit(module, loader())
    assert module.seen == pytest.approx([0.1 * (k + 1) for k in range(8)], abs=1e-6)
    assert module.net.weight.item() == pytest.approx(0.8 / 1.2, abs=1e-6)


def test_clipping_and_accumulation_do_not_touch_the_blend():
    module = Slope()
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4, "max_epochs": 1}
    make_trainer([with_anchor_at_zero(strength=0.2)], **options).fit(module, loader())
    assert module.net.weight.item() == pytest.approx(0.05 / 1.2 / 1.2 + 0.05 / 1.2, abs=1e-6)


def test_stock_trainer_takes_its_anchor_at_the_end_of_each_fit():
    module, callback = make_toy(), ClientProximal(1e6)
    make_trainer([callback]).fit(module, loader())
    first = state_of(module)
    make_trainer([callback]).fit(module, loader(shift=3.0))
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, first[name], rtol=1e-4, atol=1e-5)


def test_hooks_leave_with_the_fit():
    module, callback = make_toy(), with_anchor_at_zero(strength=0.2)
    trainer = make_trainer([callback])
    trainer.fit(module, loader())
    assert not callback._handles
    assert all(not o._optimizer_step_post_hooks for o in trainer.optimizers)


def fit(run_dir, *callbacks, **options):
    module = make_toy()
    toy_trainer(run_dir, callbacks=list(callbacks), **options).fit(module, toy_stream(tasks=3))
    return state_of(module)


def test_strength_zero_equals_fedavg(tmp_path):
    """D-12."""
    assert_same_bits(fit(tmp_path / "a"), fit(tmp_path / "b", ClientProximal(0.0)))


def test_first_task_equals_fedavg_for_any_strength(tmp_path):
    states = []
    for strength in (0.0, 9.0):
        module = make_toy()
        trainer = toy_trainer(tmp_path / str(strength), callbacks=[ClientProximal(strength)])
        trainer.fit(module, toy_stream(tasks=1))
        states.append(state_of(module))
    assert_same_bits(*states)


class SeesAnchor(ClientProximal):
    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        anchor = trainer.task_anchor
        seen.append((trainer.task, None if anchor is None else {n: t.clone() for n, t in anchor.items()}))


seen = []


def test_anchor_is_the_global_model_at_the_end_of_the_task_before(tmp_path):
    seen.clear()
    module = make_toy()
    toy_trainer(tmp_path / "one", rounds=2).fit(module, toy_stream(tasks=1))
    end_of_first = state_of(module)
    module = make_toy()
    toy_trainer(tmp_path / "two", rounds=2, callbacks=[SeesAnchor(0.1)]).fit(module, toy_stream(tasks=2))
    assert [anchor for task, anchor in seen if task == 0] == [None] * 6
    later = [anchor for task, anchor in seen if task == 1]
    assert len(later) == 6
    for anchor in later:
        assert_same_bits(anchor, end_of_first)


def test_strong_anchor_holds_the_later_tasks(tmp_path):
    free, held = fit(tmp_path / "a"), fit(tmp_path / "b", ClientProximal(1000.0))
    assert max((free[n] - held[n]).abs().max().item() for n in free) > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"strength": -0.1}, "`strength` must be finite"), ({"every": "round"}, '`every` must be "step" or "epoch"')],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        ClientProximal(**arguments)
