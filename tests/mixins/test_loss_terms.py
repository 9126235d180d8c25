"""The base of the loss mixins: what it catches, adds and keeps, in a stock Trainer and in a federation."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.mixins import LossTermsMixin
from lightning_fcl.types import MethodCard
from tests.helpers.toy import (
    ManualModule,
    ToyModule,
    assert_same_bits,
    make_toy,
    state_of,
    toy_data,
    toy_stream,
    toy_trainer,
)

QUIET = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class Small(LossTermsMixin):
    def loss_terms(self, outputs, batch):
        return {**super().loss_terms(outputs, batch), "small": 0.1 * outputs.logits.square().mean()}


class Spread(LossTermsMixin):
    def loss_terms(self, outputs, batch):
        return {**super().loss_terms(outputs, batch), "spread": 0.2 * outputs.features.var(0).sum()}


class Both(Small, Spread, ToyModule):
    pass


class Plain(LossTermsMixin, ToyModule):
    pass


class ByHand(ToyModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.net[:-1](x)
        logits = self.net[-1](features)
        loss = nn.functional.cross_entropy(logits.float(), y)
        self.log("train_loss", loss)
        return loss + 0.2 * features.var(0).sum() + 0.1 * logits.square().mean()


def federation(cls, run_dir, **options):
    module = make_toy(cls=cls, **options)
    report = toy_trainer(run_dir).fit(module, toy_stream())
    return module, report


def stock(module, **options):
    trainer = L.Trainer(**{"max_epochs": 1, "accelerator": "cpu", **QUIET, **options})
    trainer.fit(module, DataLoader(toy_data(24), batch_size=8))
    return trainer


def test_without_terms_nothing_changes(tmp_path):
    plain, _ = federation(ToyModule, tmp_path / "plain", batch_norm=True, dropout=0.2)
    mixed, _ = federation(Plain, tmp_path / "mixed", batch_norm=True, dropout=0.2)
    assert_same_bits(state_of(mixed), state_of(plain))


@pytest.mark.parametrize("shell", ["federation", "stock"])
def test_two_mixins_add_what_a_hand_written_loss_adds(shell, tmp_path):
    made = []
    for cls in (Both, ByHand):
        if shell == "federation":
            module, _ = federation(cls, tmp_path / cls.__name__)
        else:
            module = make_toy(cls=cls)
            stock(module)
        made.append(state_of(module))
    for name, value in made[0].items():
        torch.testing.assert_close(value, made[1][name], rtol=1e-5, atol=1e-6)


def test_terms_are_logged(tmp_path):
    _, report = federation(Both, tmp_path)
    header = (report.run_dir / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"loss/small", "loss/spread", "client/train_loss"} <= set(header)


class Skips(ToyModule):
    """Leaves out short batches, and takes no batch index."""

    def training_step(self, batch):
        return super().training_step(batch, 0) if len(batch[0]) == 8 else None


class SaysMore(Skips):
    def training_step(self, batch):
        loss = super().training_step(batch)
        return None if loss is None else {"loss": loss, "more": 1}


class SmallSkips(Small, Skips):
    pass


class SmallSaysMore(Small, SaysMore):
    pass


def test_a_step_may_return_a_dictionary_or_nothing(tmp_path):
    short, _ = federation(SmallSkips, tmp_path / "tensor")  # 15 examples per client: one full batch, one of seven
    more, _ = federation(SmallSaysMore, tmp_path / "dictionary")
    plain, _ = federation(Skips, tmp_path / "plain")
    assert_same_bits(state_of(more), state_of(short))
    assert not torch.equal(short.net[0].weight, plain.net[0].weight)


class Remembers(LossTermsMixin):
    uses_task_anchor = uses_round_anchor = True

    def on_train_start(self):
        super().on_train_start()
        self.anchors = [*getattr(self, "anchors", []), self.task_anchor()]
        self.at_start = {n: p.detach().clone() for n, p in self.named_parameters()}

    def loss_terms(self, outputs, batch):
        anchor = self.round_anchor()
        assert all(torch.equal(anchor[name], value) for name, value in self.at_start.items())
        return {}


class Student(Remembers, ToyModule):
    pass


def test_task_anchor_is_the_end_of_the_last_fit():
    module = make_toy(cls=Student, batch_norm=True)
    stock(module)
    end = state_of(module)
    stock(module)
    first, second = module.anchors
    assert first is None
    assert {n for n in end if n not in second} == {"net.1.num_batches_tracked"}
    assert all(torch.equal(second[name], end[name]) for name in second)


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"max_epochs": 0}], ids=["fast_dev_run", "no step"])
def test_a_fit_that_is_no_task_leaves_no_anchor(options):
    module = make_toy(cls=Student)
    stock(module, **options)
    assert module._own_task_anchor is None


def test_task_anchor_survives_a_lightning_checkpoint(tmp_path):
    module = make_toy(cls=Student)
    trainer = stock(module)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = make_toy(seed=1, cls=Student)
    again.on_load_checkpoint(torch.load(tmp_path / "end.ckpt", weights_only=True))
    assert_same_bits(again._own_task_anchor, module._own_task_anchor)


def test_task_anchor_in_a_federation_is_the_global_model(tmp_path):
    module = make_toy(cls=Student)
    toy_trainer(tmp_path / "one", rounds=2).fit(module, toy_stream(tasks=1))
    first = state_of(module)
    module = make_toy(cls=Student)
    toy_trainer(tmp_path / "two", rounds=2).fit(module, toy_stream(tasks=2))
    assert [anchor is None for anchor in module.anchors] == [True] * 6 + [False] * 6
    assert_same_bits({name: module.anchors[-1][name] for name in first}, first)


def test_frozen_outputs_leave_no_trace():
    module = make_toy(cls=Student, batch_norm=True, dropout=0.5)
    batch = toy_data(16)[:]
    other = {n: torch.randn_like(p) for n, p in module.named_parameters()}
    before, random_state = state_of(module), torch.get_rng_state()
    outputs = module.frozen_outputs(other, batch)
    assert_same_bits(state_of(module), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert module.training
    assert not outputs.logits.requires_grad
    twin = make_toy(cls=Student, batch_norm=True, dropout=0.5).eval()
    twin.load_state_dict({**twin.state_dict(), **other})
    assert torch.equal(outputs.logits, twin(batch[0]))


def test_labels_and_inputs_of_a_dictionary():
    module = make_toy(cls=Plain)
    batch = {"x": torch.zeros(2, 6), "labels": torch.tensor([0, 1])}
    assert module.targets_of(batch).tolist() == [0, 1]
    assert list(module.inputs_of(batch)) == ["x"]
    assert module.frozen_outputs({}, batch).logits.shape == (2, 3)
    with pytest.raises(MisconfigurationError, match="must hold its labels under one of"):
        module.targets_of({"x": torch.zeros(2)})


class Headless(Plain):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(6, 3, 1))

    def forward(self, x):
        return self.net(x[..., None])[..., 0]


class Twice(Plain):
    def forward(self, x):
        return super().forward(x) + super().forward(-x)


class Misnamed(Plain):
    feature_module = "nets.3"


class Manual(LossTermsMixin, ManualModule):
    pass


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Headless, "has no `nn.Linear`"),
        (Twice, "must run once in `training_step`, but it ran 2 times"),
        (Misnamed, "`feature_module` must name a submodule"),
        (Manual, "must use automatic optimization"),
    ],
)
def test_bad_modules_are_refused(cls, message, tmp_path):
    with pytest.raises(MisconfigurationError, match=message):
        federation(cls, tmp_path)


def test_older_weights_need_a_forward():
    class Forwardless(Remembers, ByHand):
        forward = L.LightningModule.forward

    with pytest.raises(MisconfigurationError, match="must have a `forward`, by which older weights are asked"):
        stock(make_toy(cls=Forwardless))


def test_a_named_head_is_caught():
    class Named(Small, ToyModule):
        feature_module = "net.0"

    module = make_toy(cls=Named)
    assert module.find_head() is module.net[0]


class Counts(L.Callback):
    def __init__(self, log=None):
        self.steps = 0

    def on_train_batch_end(self, *args):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Brings(ToyModule):
    def __init__(self):
        super().__init__()
        self.own = Counts()

    def configure_callbacks(self):
        return self.own

    def on_train_end(self):
        self.counted = [c.steps for c in self.trainer.callbacks]


def test_callbacks_of_the_module_join_and_replace_those_of_their_type(tmp_path):
    module, passed = Brings(), Counts()
    trainer = toy_trainer(tmp_path, clients_per_round=1, callbacks=[passed])
    trainer.fit(module, toy_stream(clients=1, tasks=1))
    assert module.counted == [16]  # two rounds of eight batches: it has a state per client
    assert passed.steps == 0
    assert trainer.callbacks == [passed]


def test_mixins_give_the_run_its_name(tmp_path):
    class Named(Small):
        card = MethodCard(name="Small", acts_on="loss", paper="p", url="u")

    class Other(Spread):
        card = MethodCard(name="Spread", acts_on="loss", paper="p", url="u")

    class Module(Named, Other, ToyModule):
        pass

    _, report = federation(Module, tmp_path)
    assert report.method == "Small + Spread"


def test_a_step_that_hides_the_mixins_is_refused():
    with pytest.raises(MisconfigurationError, match="that of `ToyModule` is found first"):

        class WrongOrder(ToyModule, Small):
            pass

    with pytest.raises(MisconfigurationError, match="`OwnStep` must reach the `training_step` of its mixins"):

        class OwnStep(Small):
            def training_step(self, batch, batch_idx):
                return self(batch[0]).sum()


def test_common_names_of_attributes_stay_the_users():
    class Usual(Small, ToyModule):
        def __init__(self):
            super().__init__()
            self.head, self.loss_weight = self.net[-1], 0.5

    stock(make_toy(cls=Usual))
