"""EWC: the paper's optimum, exactness of the pull, task ends in both trainers, state and memory."""

import copy
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl.callbacks import EWC
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import ewc_penalty
from lightning_fcl.serialize import load_tree
from tests.helpers.penalty import QUIET, SETTINGS, InLoss, largest_difference, loader, make_trainer
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_data, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


def trained_ewc(module, **options):
    callback = EWC(**options)
    make_trainer([callback], max_epochs=1).fit(module, loader())
    return callback


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_same_penalty_in_the_loss(setting):
    module = make_toy(cls=InLoss)
    callback = trained_ewc(module, strength=20.0)
    importance, anchor = dict(callback.importance), dict(callback.anchor)
    difference = largest_difference(
        module, [callback], lambda params: ewc_penalty(params, anchor, importance, 20.0), **SETTINGS[setting]
    )
    assert difference < 1e-6


@pytest.mark.distributed
def test_equals_the_penalty_in_the_loss_under_ddp(ranks):
    assert max(ranks.run(difference_under_ddp)) < 1e-6


def difference_under_ddp() -> float:
    module = make_toy(cls=InLoss)
    callback = trained_ewc(module, strength=20.0)
    importance, anchor = dict(callback.importance), dict(callback.anchor)
    return largest_difference(
        module,
        [callback],
        lambda params: ewc_penalty(params, anchor, importance, 20.0),
        strategy="ddp",
        devices=2,
    )


class Quadratic(ToyModule):
    """log p = -curvature (w - target)^2 / 2 per example: a scalar Gaussian with known precision."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, target = batch
        return 0.5 * (x.squeeze(1) * (self.net.weight.squeeze() - target).square()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def quadratic_task(curvature, target):
    data = TensorDataset(torch.full((8, 1), curvature), torch.full((8,), target))
    return DataLoader(data, batch_size=8)


def test_two_quadratics_end_at_their_joint_optimum():
    """Half 2 (w-1)^2, then half 3 (w-4)^2, strength 1, exact importance: 2.8 (baselines 5.1)."""
    module, callback = Quadratic(), EWC(1.0)
    make_trainer([], max_epochs=300).fit(module, quadratic_task(2.0, 1.0))
    callback.load_state_dict({"importance": {"net.weight": torch.full((1, 1), 2.0)}, "anchor": state_of(module)})
    callback.on_task_end = lambda *_: None
    make_trainer([callback], max_epochs=300).fit(module, quadratic_task(3.0, 4.0))
    assert module.net.weight.item() == pytest.approx(2.8, abs=1e-3)


def test_fisher_is_per_sample_and_its_mean():
    """A slow loop over single examples in float64 gives the same importance, whatever the batch size."""
    module, callback = make_toy(), EWC(1.0)
    make_trainer([callback], max_epochs=1).fit(module, loader())
    twin = copy.deepcopy(module).double().eval()
    data = loader().dataset
    squares = {n: torch.zeros_like(p) for n, p in twin.named_parameters()}
    for x, y in data:
        twin.zero_grad()
        nn.functional.cross_entropy(twin(x.double()[None]), y[None]).backward()
        for n, p in twin.named_parameters():
            squares[n] += p.grad.square()
    for n, square in squares.items():
        torch.testing.assert_close(callback.importance[n].double(), square / len(data), rtol=1e-4, atol=1e-8)
    assert_same_bits(callback.anchor, state_of(module))


def test_memory_all_is_the_sum_of_all_quadratics():
    """At any point, the pull is the sum of the pulls of all tasks; ``"last"`` keeps only the newest."""
    pulls = {}
    for memory in ("all", "last"):
        module, callback, tasks = make_toy(), EWC(1e-9, memory=memory), []
        for shift in (0.0, 2.0, 4.0):
            make_trainer([], max_epochs=1).fit(module, loader(shift=shift))
            alone = EWC(1.0)
            context = make_context(loader(shift=shift), module)
            for measured in (alone, callback):
                measured.on_task_end(context, module)
            tasks.append((alone.importance, alone.anchor))
        pulls[memory] = callback, tasks
    probe = {n: torch.randn_like(p) for n, p in module.named_parameters()}
    for memory, count in (("all", 3), ("last", 1)):
        callback, tasks = pulls[memory]
        for n, point in probe.items():
            expected = sum(f[n].double() * (point.double() - a[n].double()) for f, a in tasks[-count:])
            actual = callback.importance[n].double() * (point.double() - callback.anchor[n].double())
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def make_context(train_dataloader, module):
    """As much of a client job's context as measuring a task needs."""
    weights = lambda: {n: p.detach() for n, p in module.named_parameters()}  # noqa: E731
    precision = SimpleNamespace(convert_input=lambda batch: batch)
    facts = {"num_training_batches": len(train_dataloader), "precision_plugin": precision}
    return SimpleNamespace(train_dataloader=train_dataloader, weights=weights, **facts)


def accuracy(module, shift):
    x, y = toy_data(200, seed=5, shift=shift).tensors
    with torch.no_grad():
        return (module(x).argmax(1) == y).float().mean().item()


def test_protects_an_earlier_task_in_a_stock_trainer():
    scores = []
    for callbacks in ([], [EWC(200.0)]):
        module = make_toy(lr=0.02)
        make_trainer(callbacks, max_epochs=40).fit(module, loader(shift=0.0))
        before = accuracy(module, 0.0)
        make_trainer(callbacks, max_epochs=40).fit(module, loader(shift=-4.0))
        scores.append((before, accuracy(module, 0.0)))
    assert scores[0][0] == scores[1][0] > 0.8
    assert scores[1][1] > scores[0][1]


# -- when a task ends -------------------------------------------------------------------------------------------------


def test_a_dry_run_is_no_task():
    callback = EWC(1.0)
    L.Trainer(fast_dev_run=True, accelerator="cpu", callbacks=[callback], **dict.fromkeys(QUIET, False)).fit(
        make_toy(), loader()
    )
    assert callback.importance == {}


@pytest.mark.filterwarnings("ignore:.*max_epochs")
def test_a_second_fit_that_trains_nothing_is_no_task():
    module, callback = make_toy(), EWC(1.0)
    trainer = make_trainer([callback], max_epochs=1)
    trainer.fit(module, loader())
    kept = dict(callback.importance)
    trainer.fit(module, loader(shift=5.0))
    assert_same_bits(callback.importance, kept)


def test_an_interrupted_fit_is_no_task():
    class Stops(ToyModule):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise KeyboardInterrupt

    callback = EWC(1.0)
    with pytest.raises(SystemExit):
        make_trainer([callback]).fit(make_toy(cls=Stops), loader())
    assert callback.importance == {}


# -- state ------------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    callback = trained_ewc(make_toy(), strength=3.0)
    path = callback.save(tmp_path)
    assert path.name == "EWC.safetensors"
    fresh = EWC(3.0)
    fresh.load(tmp_path)
    assert_same_bits(fresh.importance, callback.importance)
    assert_same_bits(fresh.anchor, callback.anchor)
    with pytest.raises(FileNotFoundError, match="must be a file written by this library"):
        fresh.load(tmp_path / "elsewhere")


def test_which_lightning_checkpoint_holds_the_fisher(tmp_path):
    """ModelCheckpoint's file of the last step is from before the task ended; ``save_checkpoint`` afterwards has it."""
    callback = EWC(3.0)
    keeper = ModelCheckpoint(tmp_path, filename="last-step", save_last=False)
    options = {**QUIET, "enable_checkpointing": True}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=[callback, keeper], **options)
    trainer.fit(make_toy(), loader())
    early = torch.load(tmp_path / "last-step.ckpt", weights_only=True)["callbacks"]
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    late = torch.load(tmp_path / "after.ckpt", weights_only=True)["callbacks"]
    assert early.get(callback.state_key, {}) == {}
    assert_same_bits(late[callback.state_key]["importance"], callback.importance)


def test_two_settings_do_not_share_a_state():
    assert EWC(1.0).state_key != EWC(2.0).state_key
    assert EWC(1.0).state_key == EWC(1.0).state_key


# -- in a federation --------------------------------------------------------------------------------------------------


def test_clients_keep_their_own_fisher_at_the_global_anchor(tmp_path):
    module = make_toy()
    toy_trainer(tmp_path, callbacks=[EWC(0.0001)], rounds=2, keep_checkpoints=9).fit(module, toy_stream(tasks=1))
    states = [load_tree(p)["callbacks"] for p in sorted((tmp_path / "clients").glob("*/*"))]
    assert len(states) == 4  # all clients with data, sampled in the last round or not
    first, second = (next(iter(s.values())) for s in states[:2])
    assert_same_bits(first["anchor"], state_of(module))
    assert_same_bits(first["anchor"], second["anchor"])
    assert any(not torch.equal(first["importance"][n], second["importance"][n]) for n in first["importance"])


def test_strength_zero_equals_fedavg(tmp_path):
    states = []
    for callbacks in ([], [EWC(0.0)]):
        module = make_toy()
        toy_trainer(tmp_path / str(len(callbacks)), callbacks=callbacks).fit(module, toy_stream())
        states.append(state_of(module))
    assert_same_bits(*states)


def test_protects_in_a_federation(tmp_path):
    reports = []
    for callbacks in ([], [EWC(20.0)]):
        module = make_toy(lr=0.05)
        options = {"rounds": 6, "local_epochs": 3, "clients_per_round": 4, "callbacks": callbacks}
        stream = toy_stream(tasks=2, examples=160)
        reports.append(toy_trainer(tmp_path / str(len(callbacks)), **options).fit(module, stream))
    assert reports[1].summary["bwt"] >= reports[0].summary["bwt"]
    distance = [r.accuracy[0, 0].item() for r in reports]
    assert distance[0] == distance[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"strength": -1.0}, "`strength` must be finite"), ({"memory": "some"}, '`memory` must be "all" or "last"')],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        EWC(**arguments)
