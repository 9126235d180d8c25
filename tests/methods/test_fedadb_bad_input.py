"""FedADB's refusals: arguments, modules without features, inputs that cannot be descended on."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fcl import ClassAnchors, DualBranchMixin, TaskStream
from lightning_fcl.exceptions import DatasetError, MisconfigurationError
from tests.helpers.toy import ToyModule, make_toy, state_of, toy_stream, toy_trainer

STEPS = {"steps": 5, "lr": 0.2, "mean": None, "gate": 0}


class Dual(DualBranchMixin, ToyModule):
    pass


def by_label(owners):
    def assign(examples, clients, rng):
        return owners[examples.task].numpy()

    return assign


def run(tmp_path, module, stream=None, anchors=None, name="run", **options):
    trainer = toy_trainer(tmp_path / name, server_callbacks=anchors or ClassAnchors(**STEPS), **options)
    report = trainer.fit(module, stream or toy_stream(tasks=1))
    return report, state_of(module)


def test_a_module_without_features_is_refused():
    class Empty(DualBranchMixin, L.LightningModule):
        pass

    with pytest.raises(MisconfigurationError, match=r"`feature_module` must name the layer .* no `nn.Linear`"):
        Empty()

    class Misnamed(Dual):
        feature_module = "net.9"

    with pytest.raises(MisconfigurationError, match=r"`feature_module` must name a submodule .* got 'net.9'"):
        Misnamed()


@pytest.mark.parametrize(
    ("cls", "options", "text"),
    [
        (ClassAnchors, {"lr": 10, "l2": 1}, r"`lr \* l2` must be below 1"),
        (ClassAnchors, {"per_class": 0}, "`per_class` and `warm_steps` must be at least 1, got 0"),
        (ClassAnchors, {"gate": -1}, "`gate` must be finite and not negative"),
        (ClassAnchors, {"std": 0.0}, "`std` must be positive"),
        (Dual, {"dual_weight": -1.0}, "`dual_weight` must be finite and not negative"),
    ],
)
def test_arguments_are_checked_at_construction(cls, options, text):
    with pytest.raises(MisconfigurationError, match=text):
        cls(**options)


def test_a_local_head_that_nobody_trains_is_refused(tmp_path):
    class Named(Dual):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    with pytest.raises(MisconfigurationError, match="`configure_optimizers` must cover the local head"):
        run(tmp_path, make_toy(cls=Named), measure_baseline=False)


def test_no_local_head_to_switch_to():
    with (
        pytest.raises(MisconfigurationError, match="`dual_local_branch` must be True"),
        Dual(dual_local_branch=False).local_branch(),
    ):
        pass


class Tokens(ToyModule):
    """Five tokens out of eleven, embedded, averaged, classified."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, tokens):
        return self.net(self.embedding(tokens).mean(1))


class DualTokens(DualBranchMixin, Tokens):
    pass


def token_stream():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    tokens = torch.where(torch.rand(60, 5, generator=generator) < 0.7, labels.unsqueeze(1), 5)
    data = TensorDataset(tokens, labels)
    return TaskStream.from_datasets([data], [data], clients=3, batch_size=8, partition=by_label([labels]))


def test_tokens_cannot_be_descended_on_but_embeddings_can(tmp_path):
    with pytest.raises(MisconfigurationError, match=r"`input_module` must name the embedding, .* torch.int64"):
        run(tmp_path, make_toy(cls=DualTokens), token_stream())
    module = make_toy(cls=DualTokens)
    module.input_module = "embedding"
    anchors = ClassAnchors(**STEPS, input_module="embedding", uint8=True)
    report, state = run(tmp_path, module, token_stream(), anchors=anchors, name="embedded")
    assert anchors.state_dict()["inputs"].shape == (3, 5, 6)
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert report.accuracy.isfinite().all()


def test_a_head_too_small_for_the_labels_is_named(tmp_path):
    data = TensorDataset(torch.randn(12, 6), torch.arange(12) % 4)
    stream = TaskStream.from_datasets([data], [data], clients=2)
    with pytest.raises(MisconfigurationError, match=r"`classes` must name outputs of the head \(below 3\)"):
        run(tmp_path, make_toy(cls=Dual), stream, measure_baseline=False)


def test_a_module_without_forward_is_refused(tmp_path):
    class Silent(ToyModule):
        forward = L.LightningModule.forward

        def validation_step(self, batch, batch_idx):
            self.log("val_acc", 0.0)

    with pytest.raises(MisconfigurationError, match="`forward` must give logits"):
        run(tmp_path, Silent())


def test_labels_are_needed(tmp_path):
    data = TensorDataset(torch.randn(12, 6), torch.randn(12))
    with pytest.raises((DatasetError, MisconfigurationError)):
        run(tmp_path, make_toy(cls=Dual), TaskStream.from_datasets([data], [data], clients=2), measure_baseline=False)


def test_a_class_that_nobody_has_is_made_up_but_not_sent(tmp_path):
    """Head of three, data of two classes: by default the third is no class; asked for, its anchor fails the gate."""
    x, y = torch.randn(48, 6), torch.arange(48) % 2
    data = TensorDataset(x + 3 * y.unsqueeze(1), y)
    stream = TaskStream.from_datasets([data], [data], clients=3, batch_size=8)
    for classes, made in [("seen", [0, 1]), ("all", [0, 1, 2])]:
        anchors = ClassAnchors(steps=30, lr=0.1, mean=None, l2=0.01, classes=classes)
        options = {"name": classes, "rounds": 3, "local_epochs": 3}
        report, state = run(tmp_path, make_toy(cls=Dual), stream, anchors, **options)
        assert anchors.state_dict()["targets"].tolist() == made
        assert all(value.isfinite().all() for value in state.values())
        assert report.accuracy[0, 0] > 0.8
