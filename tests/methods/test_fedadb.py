"""FedADB: both branches, anchors from the server, what travels, other methods beside it, and bad input."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl import TSGA, ClassAnchors, DualBranchMixin, FedProx, ServerProximal, TaskStream
from lightning_fcl.aggregators import Chain, FedAvg
from lightning_fcl.callbacks import ContinualCallback
from lightning_fcl.data.balanced import BalancedBatches
from lightning_fcl.functional import AnchorSet, local_branch_weight
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_data, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
STEPS = {"steps": 5, "lr": 0.2, "mean": None, "gate": 0}


class Dual(DualBranchMixin, ToyModule):
    pass


def skewed_stream(tasks=1, clients=3, **options):
    """Client k holds class k alone."""
    owner = [toy_data(60, seed=t).tensors[1] % clients for t in range(tasks)]
    return toy_stream(tasks=tasks, clients=clients, partition=by_label(owner), **options)


def by_label(owners):
    def assign(examples, clients, rng):
        return owners[examples.task].numpy()

    return assign


def run(tmp_path, module, stream=None, anchors=True, name="run", **options):
    server = [ClassAnchors(**STEPS)] if anchors is True else [anchors] if anchors else []
    trainer = toy_trainer(tmp_path / name, server_callbacks=server, **options)
    report = trainer.fit(module, stream or skewed_stream())
    return report, state_of(module)


def log_of(tmp_path, name="run"):
    from lightning_fcl.reports.files import read_table

    return read_table(tmp_path / name / "metrics.csv")[1]


# -- the two branches --------------------------------------------------------------------------------------------------


class Scalars(L.LightningModule):
    """Features ``(t1 + t2) x``; a head of one number; the loss is the mean output."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.classifier = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.classifier(self.parts.sum() * x)

    def training_step(self, batch):
        return self(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class DualScalars(DualBranchMixin, Scalars):
    pass


class Gradients(L.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.seen = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def step_once(module, data, **options):
    callback = Gradients()
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback, *options.pop("callbacks", [])], **quiet)
    trainer.fit(module, DataLoader(data, batch_size=options.pop("batch_size", 4)))
    return callback.seen, trainer.callback_metrics


def test_each_head_learns_from_its_own_branch():
    """Heads 3 and 5 on features 3, weight .25: the extractor gets 3 + .25 * 5, each head its own part."""
    module = DualScalars(dual_weight=0.25)
    with torch.no_grad():
        module.classifier.weight.fill_(3)
        module.dual_local_head.weight.fill_(5)
    ones = TensorDataset(torch.ones(4, 1), torch.zeros(4, dtype=torch.long))
    grads, _ = step_once(module, ones)
    assert grads["parts"].tolist() == [4.25, 4.25]
    assert grads["classifier.weight"].item() == 3.0
    assert grads["dual_local_head.weight"].item() == 0.75


def test_loss_is_global_plus_weighted_local():
    """1.2 + 0.7320428 * 0.8 = 1.785634."""

    class Two(DualScalars):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.total = outputs["loss"].item()

    module = Two(dual_weight=local_branch_weight(0.5, 0.5, 0.9))
    with torch.no_grad():
        module.classifier.weight.fill_(0.4)
        module.dual_local_head.weight.fill_(0.8 / 3)
    step_once(module, TensorDataset(torch.ones(4, 1), torch.zeros(4, dtype=torch.long)))
    assert module.total == pytest.approx(1.785634, abs=1e-6)


def test_equal_branches_double_the_extractors_gradient():
    data = toy_data(8)
    plain, _ = step_once(make_toy(lr=0.0), data, batch_size=8)
    both, _ = step_once(make_toy(cls=Dual, lr=0.0, dual_weight=1.0, dual_balanced=False), data, batch_size=8)
    assert torch.equal(both["net.0.weight"], 2 * plain["net.0.weight"])
    assert torch.equal(both["net.2.weight"], plain["net.2.weight"])
    assert torch.equal(both["dual_local_head.weight"], plain["net.2.weight"])


def test_batch_norm_remembers_real_data_only():
    data = toy_data(8)
    anchors = AnchorSet(torch.full((3, 6), 100.0), torch.arange(3), torch.ones(3), 1.0)
    states = []
    for cls, options in ((ToyModule, {}), (Dual, {}), (Dual, {"dual_local_branch": False})):
        module = make_toy(cls=cls, batch_norm=True, lr=0.0, **options)
        module.anchors = anchors
        step_once(module, data, batch_size=8)
        states.append({name: t for name, t in state_of(module).items() if "running" in name or "num_batches" in name})
    assert_same_bits(states[0], states[1])
    assert_same_bits(states[0], states[2])
    assert states[0]["net.1.num_batches_tracked"] == 1


def test_evaluation_uses_the_global_head_and_the_other_one_is_at_hand():
    module = make_toy(cls=Dual)
    x = torch.randn(4, 6)
    with torch.no_grad():
        module.dual_local_head.bias += 1
        plain = module(x)
        with module.local_branch():
            local = module(x)
    torch.testing.assert_close(local, plain + 1)
    assert torch.equal(module(x), plain)


def test_anchors_teach_a_class_that_a_client_lacks():
    """In a stock Trainer with anchors given: data of classes 0 and 1, an anchor in the middle of class 2."""
    x, y = toy_data(200).tensors
    few = TensorDataset(x[y < 2][:64], y[y < 2][:64])
    centre = torch.stack([x[y == c].mean(0) for c in range(3)])
    right = {}
    for name, anchors in [("with", AnchorSet(centre, torch.arange(3), torch.ones(3), 1.0)), ("without", None)]:
        module = make_toy(cls=Dual)
        module.anchors = anchors
        for _ in range(2):
            step_once(module, few, batch_size=8)
        right[name] = (module.eval()(x[y == 2]).argmax(1) == 2).float().mean().item()
    assert right["with"] > 0.9
    assert right["without"] < 0.1


def test_what_is_logged_is_the_balanced_branchs():
    module = make_toy(cls=Dual)
    _, logged = step_once(module, toy_data(8), batch_size=8)
    assert {"train_loss", "loss/local", "local_weight"} <= logged.keys()
    assert logged["local_weight"] == 1.0  # the last epoch of one


def test_a_batch_may_be_smaller_than_the_number_of_classes():
    module = make_toy(cls=Dual)
    module.anchors = AnchorSet(torch.zeros(3, 6), torch.arange(3), torch.ones(3), 1.0)
    grads, _ = step_once(module, toy_data(5), batch_size=2)
    assert all(g.isfinite().all() for g in grads.values())


# -- in a federation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anchors", [True, False])
def test_all_parts_off_equals_fedavg(tmp_path, anchors):
    _, plain = run(tmp_path, make_toy(), anchors=False, name="plain")
    module = make_toy(cls=Dual, **DualBranchMixin.card.neutral)
    _, off = run(tmp_path, module, anchors=anchors, name="off")
    assert_same_bits(plain, off)


def test_each_part_changes_the_weights(tmp_path):
    results = [run(tmp_path, make_toy(), anchors=False, name="plain")[1]]
    for name, anchors, options in [
        ("all", True, {}),
        ("no anchors", False, {}),
        ("no local branch", True, {"dual_local_branch": False}),
        ("fixed", True, {"dual_weight": 0.1}),
        ("personal", True, {"dual_share_local": False}),
    ]:
        results.append(run(tmp_path, make_toy(cls=Dual, **options), anchors=anchors, name=name)[1])
    firsts = [state["net.0.weight"] for state in results]
    assert not any(torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])


def test_anchors_travel_and_are_counted(tmp_path):
    """Three anchors of six floats, their labels and confidences, the quality and the class list."""
    report, _ = run(tmp_path, make_toy(cls=Dual))
    plain, _ = run(tmp_path, make_toy(cls=Dual), anchors=False, name="plain")
    size = 3 * (6 * 4 + 8 + 4) + 8 + 3 * 8
    assert report.bytes_down - plain.bytes_down == size * 3 * 2  # three clients, two rounds
    assert report.bytes_up == plain.bytes_up
    rows = log_of(tmp_path)
    assert [float(row["anchors/bytes"]) for row in rows] == [size, size]
    assert 0 < float(rows[0]["anchors/quality"]) < 1
    assert float(rows[1]["client/local_weight"]) == 1.0
    assert float(rows[0]["client/local_weight"]) == pytest.approx(
        0.5 ** (2 / 3 * float(rows[0]["anchors/quality"])), rel=1e-6
    )
    assert report.method == "FedADB"


def test_the_local_head_may_stay_with_its_client(tmp_path):
    shared, _ = run(tmp_path, make_toy(cls=Dual), name="shared")
    personal, state = run(tmp_path, make_toy(cls=Dual, dual_share_local=False), name="personal")
    assert shared.bytes_up - personal.bytes_up == (8 * 3 + 3) * 4 * 6  # one head, six uploads
    fresh = make_toy(cls=Dual, dual_share_local=False)
    assert torch.equal(state["dual_local_head.weight"], fresh.dual_local_head.weight)  # the server never saw another
    from lightning_fcl.serialize import load_tree

    files = (tmp_path / "personal" / "clients").rglob("*.safetensors")
    heads = [load_tree(path)["local"]["dual_local_head.weight"] for path in files]
    assert len(heads) >= 3
    assert not torch.equal(heads[0], heads[1])


@pytest.mark.parametrize("options", [{"warm_steps": 3}, {"uint8": True}, {"per_class": 2}, {"classes": "all"}])
def test_options_of_the_anchors(tmp_path, options):
    anchors = ClassAnchors(**{**STEPS, "mean": 0.5, "std": 0.1, **options})
    report, _ = run(tmp_path, make_toy(cls=Dual), anchors=anchors)
    values = anchors.state_dict()["inputs"]
    assert len(values) == 3 * options.get("per_class", 1)
    assert values.abs().max() <= 5  # the box of pixels
    if "uint8" in options:
        assert report.bytes_down < run(tmp_path, make_toy(cls=Dual), name="floats")[0].bytes_down


def test_a_byte_per_value_costs_half_a_step_of_the_grid():
    from lightning_fcl.callbacks.class_anchors import unpack_anchors

    anchors = ClassAnchors(uint8=True, gate=0)
    made = AnchorSet(torch.rand(4, 1, 2, 2) * 2 - 1, torch.arange(4), torch.ones(4), 0.5)
    back = unpack_anchors(anchors._pack(made, (0, 1, 2, 3)), torch.device("cpu"), torch.float32)
    assert (back.inputs - made.inputs).abs().max() <= 1 / 255 + 1e-6
    assert back.quality == 0.5


def test_classes_that_the_model_does_not_know_are_not_sent():
    made = AnchorSet(torch.zeros(4, 2), torch.arange(4), torch.tensor([0.1, 0.49, 0.51, 0.9]), 0.5)
    kept = {gate: ClassAnchors(gate=gate)._pack(made, (0, 1, 2, 3))["targets"].tolist() for gate in (0, 2.0)}
    assert kept == {0: [0, 1, 2, 3], 2.0: [2, 3]}
    two = AnchorSet(torch.zeros(2, 2), torch.arange(2), torch.tensor([0.7, 0.8]), 0.75)
    assert ClassAnchors()._pack(two, (0, 1))["targets"].tolist() == [1]  # 2 / C would be certainty


def test_warm_anchors_go_on_where_they_were(tmp_path):
    cold, warm = ClassAnchors(**STEPS), ClassAnchors(**STEPS, warm_steps=1)
    for name, anchors in [("cold", cold), ("warm", warm)]:
        run(tmp_path, make_toy(cls=Dual), anchors=anchors, name=name, rounds=4)
    qualities = {name: [float(r["anchors/quality"]) for r in log_of(tmp_path, name)] for name in ("cold", "warm")}
    assert qualities["warm"][0] == qualities["cold"][0]
    assert qualities["warm"][3] > qualities["warm"][0]


class Broken(ContinualCallback):
    def on_train_start(self, trainer, module):
        raise RuntimeError("no luck")


def test_anchors_are_kept_where_a_round_changed_nothing(tmp_path):
    seen = []

    class Spy(ClassAnchors):
        def broadcast(self, trainer):
            seen.append(super().broadcast(trainer)["inputs"].clone())
            return super().broadcast(trainer)

    with pytest.warns(UserWarning, match="no luck"):
        run(tmp_path, make_toy(cls=Dual), anchors=Spy(**STEPS), callbacks=Broken(), on_client_error="skip")
    assert torch.equal(*seen)


def test_a_task_stream_replays_classes_without_data(tmp_path):
    """Classes 0 and 1, then class 2: anchors of the old ones come along."""
    stream = TaskStream.split_classes(toy_data(90), toy_data(60, seed=9), tasks=[2, 1], clients=3, batch_size=8)
    assert [stream.classes(task) for task in range(2)] == [(0, 1), (0, 1, 2)]
    options = {"stream": stream, "rounds": 3, "clients_per_round": 3, "local_epochs": 4}
    plain, _ = run(tmp_path, make_toy(momentum=0.9), anchors=False, name="plain", **options)
    anchors = ClassAnchors(steps=50, lr=0.2, mean=None, l2=0.1)
    replay, _ = run(tmp_path, make_toy(cls=Dual, momentum=0.9), anchors=anchors, **options)
    assert plain.accuracy[1, 0] < 0.5
    assert replay.accuracy[1, 0] > plain.accuracy[1, 0] + 0.2
    assert replay.accuracy[1, 1] > 0.9


@pytest.mark.parametrize("size", [7, 8])
def test_shares_of_a_balanced_batch_make_the_whole_one(size):
    anchors = AnchorSet(torch.zeros(2, 6), torch.arange(2), torch.ones(2), 1.0)

    def draw(*share):
        data = DataLoader(toy_data(20), batch_size=4)
        batches = BalancedBatches(data, anchors, 3, torch.Generator().manual_seed(0))
        (inputs, labels), places = batches.draw(*share)
        return torch.cat([inputs, labels[:, None], places[:, None]], dim=1)

    halves = [draw(size, slice(size * rank // 2, size * (rank + 1) // 2)) for rank in range(2)]
    assert torch.equal(torch.cat(halves), draw(size))
    assert torch.equal(draw(size, slice(3, 3)), draw(size)[:1])  # an empty share borrows an example of no weight


# -- beside other methods ----------------------------------------------------------------------------------------------


class Agreeing(FedAvg):
    """Stands in for a filtering reducer; notes how long the updates are that reach it."""

    def add(self, position, row, weight):
        self.length = len(row)
        super().add(position, row, weight)


def test_a_reducer_sees_extractor_and_global_head_only(tmp_path):
    reducer, plain = Agreeing(), Agreeing()
    run(tmp_path, make_toy(cls=Dual, dual_share_local=False), aggregator=reducer)
    run(tmp_path, make_toy(), anchors=False, aggregator=plain, name="plain")
    assert reducer.length == plain.length


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FedProx", {"callbacks": FedProx(0.5)}),
        ("SPECIAL", {"aggregator": Chain(FedAvg(), ServerProximal(1.0))}),
        ("TSGA", {"aggregator": TSGA(0.6, only="net.*")}),
    ],
)
def test_composes(tmp_path, name, options):
    stream = skewed_stream(tasks=2)
    report, both = run(tmp_path, make_toy(cls=Dual), stream, **options)
    _, alone = run(tmp_path, make_toy(cls=Dual), stream, name="alone")
    _, other = run(tmp_path, make_toy(), stream, anchors=False, name="other", **options)
    assert not torch.equal(both["net.0.weight"], alone["net.0.weight"])
    assert not torch.equal(both["net.0.weight"], other["net.0.weight"])
    assert "FedADB" in report.method
    assert name in report.method
