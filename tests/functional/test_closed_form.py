"""Closed-form squares: the loop's numbers for every layer, every way to use it, and no others where it cannot know."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_fcl.functional import _closed_form as closed
from lightning_fcl.functional import classification_log_likelihood, fisher_diagonal


class Around(nn.Module):
    """A layer between others, so that both its inputs and the gradients of its outputs vary."""

    def __init__(self, layer, before=None, after=torch.tanh):
        super().__init__()
        self.before, self.layer, self.after = before or nn.Identity(), layer, after
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.after(self.layer(self.before(x))).flatten(1))


def batch_of(x, classes=3):
    return x, torch.randint(classes, (len(x),))


def fishers(net, x, log_likelihood=classification_log_likelihood, methods=("closed_form", "vmap"), **options):
    """The result of every method, in float64."""
    net = net.double().eval()
    batch = batch_of(x.double() if x.is_floating_point() else x)
    with torch.no_grad():
        log_likelihood(net, batch)  # lazy layers find their size
    arguments = {"dtype": torch.float64, **options}
    loop = fisher_diagonal(net, log_likelihood, [batch], method="loop", **arguments)
    return loop, [fisher_diagonal(net, log_likelihood, [batch], method=method, **arguments) for method in methods]


def assert_same(net, x, *arguments, **options):
    loop, others = fishers(net, x, *arguments, **options)
    assert sum(bool(value.any()) for value in loop.values()) >= 1
    for other in others:
        for name, value in loop.items():
            torch.testing.assert_close(other[name], value, rtol=1e-12, atol=1e-12 * value.max().item(), msg=name)
    return loop


IMAGE, SEQUENCE = (5, 4, 7, 6), (5, 6, 4)
LAYERS = {
    "linear on vectors": (nn.Linear(4, 3), (5, 4)),
    "linear on two positions": (nn.Linear(4, 3), (5, 2, 4)),
    "linear on many positions": (nn.Linear(4, 3, bias=False), SEQUENCE),
    "linear on a grid": (nn.Linear(6, 2), IMAGE),
    "conv": (nn.Conv2d(4, 6, 3), IMAGE),
    "conv with everything": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)), IMAGE),
    "conv of groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), IMAGE),
    "conv by channel": (nn.Conv2d(4, 4, 3, groups=4, bias=False), IMAGE),
    "conv of one pixel": (nn.Conv2d(4, 6, 1, stride=2), IMAGE),
    "conv to few positions": (nn.Conv2d(4, 6, 3, stride=4), IMAGE),
    "conv padded to the same size": (nn.Conv2d(4, 6, (4, 3), padding="same"), IMAGE),
    "conv padded by reflection": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv of a sequence": (nn.Conv1d(6, 2, 3, padding=1, stride=2), SEQUENCE),
    "layer norm": (nn.LayerNorm(4), SEQUENCE),
    "layer norm of a grid": (nn.LayerNorm((7, 6)), IMAGE),
    "rms norm": (nn.RMSNorm(4), SEQUENCE),
    "group norm": (nn.GroupNorm(2, 4), IMAGE),
    "group norm of vectors": (nn.GroupNorm(2, 4), (5, 4)),
    "batch norm": (nn.BatchNorm2d(4), IMAGE),
    "batch norm of vectors": (nn.BatchNorm1d(4), (5, 4)),
    "another layer": (nn.PReLU(4), IMAGE),
    "a transposed conv": (nn.ConvTranspose2d(4, 2, 3), IMAGE),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("limit", [closed._HELD_ELEMENTS, 1, 50], ids=["at once", "one by one", "in parts"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name, limit, monkeypatch):
    monkeypatch.setattr(closed, "_HELD_ELEMENTS", limit)
    layer, shape = LAYERS[name]
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        nn.init.uniform_(layer.running_mean)
        nn.init.uniform_(layer.running_var, 0.5, 2.0)
    mix = nn.Linear(shape[-1], shape[-1])
    assert_same(Around(layer, mix), torch.randn(shape))


@settings(max_examples=15)
@given(count=st.integers(1, 5), positions=st.integers(1, 9), rows=st.integers(1, 4), columns=st.integers(1, 4))
def test_positions_add_up_before_the_square(count, positions, rows, columns):
    g, a = torch.randn(count, positions, rows).double(), torch.randn(count, positions, columns).double()
    use = closed.Use(nn.Linear(columns, rows), "weight", a, g)
    expected = sum((sum(torch.outer(g[n, t], a[n, t]) for t in range(positions))).square() for n in range(count))
    torch.testing.assert_close(closed.sum_of_squares([use], expected.shape), expected, rtol=1e-10, atol=1e-12)


def test_cancelling_positions_leave_no_negative_square():
    a = torch.randn(50, 1, 8).expand(50, 2, 8)
    g = torch.randn(50, 1, 8) * torch.tensor([[[1.0], [-1.0]]])
    use = closed.Use(nn.Linear(8, 8), "weight", a, g)
    assert closed.sum_of_squares([use], torch.Size((8, 8))).min() >= 0


class Reader(nn.Module):
    """Embeds, and by ``tied`` also reads out with the embedding's weight."""

    def __init__(self, tied, **options):
        super().__init__()
        self.words = nn.Embedding(7, 4, **options)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.mix(self.words(ids)) + self.words(ids.flip(1)))).mean(1)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_called_twice_padded_and_tied(tied):
    ids = torch.randint(1, 7, (5, 6))
    ids[0, 3:] = 0
    loop = assert_same(Reader(tied, padding_idx=0), ids)
    if not tied:
        assert not loop["words.weight"][0].any()


class Shared(nn.Module):
    """One layer called twice, on vectors; a child that nothing reaches; activations in place."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.spare, self.head = nn.Linear(4, 4), layer, nn.Linear(2, 2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.relu(self.layer(F.relu(self.layer(self.first(x)), inplace=True)), inplace=True))


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.LayerNorm(4), nn.PReLU()], ids=["linear", "norm", "other"])
def test_a_layer_called_twice_and_one_that_is_not_reached(layer):
    loop = assert_same(Shared(layer), torch.randn(6, 4))
    assert not loop["spare.weight"].any()


class Gate(nn.Linear):
    """A layer of two tensors."""

    def forward(self, x, gate):
        return super().forward(x) * gate


class Functional(nn.Module):
    """A weight that is used outside its layer too, a bare parameter, and a layer of several tensors."""

    def __init__(self):
        super().__init__()
        self.layer, self.other, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.pair, self.head = Gate(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        y = torch.tanh(self.layer(x)) * self.scale
        return self.head(self.pair(y, x) + F.linear(y, self.other.weight))


def test_what_no_hook_can_see_is_left_to_vmap():
    net, x = Functional(), torch.randn(5, 4)
    loop, (auto,) = fishers(net, x, methods=["auto"])
    torch.testing.assert_close(auto, loop, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match=r"'closed_form' cannot measure .*'other.weight'"):
        fishers(net, x, methods=["closed_form"])


class Hidden(Functional):
    def forward(self, x):
        return self.head(torch.tanh(self.layer(x)) + F.linear(x, self.layer.weight))


class Mixing(nn.Module):
    """Samples of a batch influence each other."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x) - self.layer(x).mean(0, keepdim=True) / 2)


class TimeFirst(nn.Module):
    """The first dimension counts positions; as many as samples in the first call."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(0))


@pytest.mark.parametrize("kind", [Hidden, Mixing, TimeFirst])
def test_what_a_hook_would_see_wrong_is_found_out(kind):
    """With as many positions as samples too, where rows of positions look like rows of samples."""
    x = torch.randn(5, 5, 4) if kind is TimeFirst else torch.randn(5, 4)
    loop, (auto,) = fishers(kind(), x, methods=["auto"])
    torch.testing.assert_close(auto, loop, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="differs from a single sample"):
        fishers(kind(), x, methods=["closed_form"])


def test_a_likelihood_that_draws_is_left_to_the_others():
    def drawing(module, batch):
        logits = module(batch[0])
        return -F.cross_entropy(logits, torch.distributions.Categorical(logits=logits).sample(), reduction="none")

    net, batch = nn.Linear(4, 3), batch_of(torch.randn(40, 4))
    assert fisher_diagonal(net, drawing, [batch])["weight"].sum() > 0


def test_float32_agrees_to_a_millionth():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(128, 3))
    batch = batch_of(torch.randn(20, 3, 6, 6))
    loop = fisher_diagonal(net, classification_log_likelihood, [batch], method="loop")
    found = fisher_diagonal(net, classification_log_likelihood, [batch], method="closed_form")
    for name, value in loop.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6 * value.max().item())


def transformer(trainable):
    """A tiny Llama that classifies, its LoRA factors away from zero."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, num_key_value_heads=1, num_labels=3, pad_token_id=0, **sizes)
    net = transformers.LlamaForSequenceClassification(config)
    if trainable == "lora":
        net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return net.eval()


def of_tokens(module, batch):
    logits = module(input_ids=batch[0], attention_mask=(batch[0] != 0).long()).logits
    return -F.cross_entropy(logits, batch[1], reduction="none")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("trainable", ["lora", "all"])
def test_a_transformer_with_padded_inputs(trainable):
    ids = torch.randint(1, 40, (5, 7))
    ids[1, 4:] = 0
    loop = assert_same(transformer(trainable), ids, of_tokens, methods=["closed_form"])
    assert any("lora_A" in name for name in loop) == (trainable == "lora")


def test_the_bench_finds_both_the_same(tmp_path):
    """Which is faster is measured on a quiet machine."""
    path = Path(__file__).resolve().parents[2] / "recipes" / "bench" / "fisher.py"
    spec = importlib.util.spec_from_file_location("bench_fisher", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    (row,) = bench.main(case="lenet", pairs=1, samples=64, out=tmp_path / "fisher.json")["rows"]
    assert row["largest error"] < 1e-6
    assert (tmp_path / "fisher.json").is_file()
