"""Diagonal Fisher: worked values, batch independence, and no trace left on the module."""

import warnings
from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fcl.functional import classification_log_likelihood, fisher_diagonal
from tests.helpers import oracles

METHODS = ["closed_form", "vmap", "loop"]


class Net(nn.Module):
    """A small convolutional net with everything that could be disturbed: BatchNorm, dropout, a frozen child."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(3 * 16, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Counting(Net):
    """Writes into a buffer in forward, also in eval mode."""

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def data(n=11):
    return torch.randn(n, 1, 6, 6), torch.randint(3, (n,))


def warmed(net):
    """The net after a forward and backward pass, so that buffers and ``.grad`` are not at their defaults."""
    net.train()
    F.cross_entropy(net(data()[0]), data()[1]).backward()
    net.features.eval()  # a child whose mode differs from its parent's
    return net


def assert_close(fisher, reference):
    """Equal to 1e-6 of the largest value of each parameter."""
    for name, expected in reference.items():
        torch.testing.assert_close(fisher[name], expected, rtol=0, atol=1e-6 * expected.max().item())


def logistic(module, batch):
    x, y = batch
    return -F.binary_cross_entropy_with_logits(module(x)[:, 0], y, reduction="none")


def logistic_fisher(w, xs, ys, method="auto", **options):
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, w)
    batch = torch.tensor(xs, dtype=torch.float64)[:, None], torch.tensor(ys, dtype=torch.float64)
    return fisher_diagonal(layer, logistic, [batch], method=method, dtype=torch.float64, **options)["weight"].item()


@pytest.mark.parametrize("method", METHODS)
def test_opposite_gradients_do_not_cancel(method):
    layer = nn.Linear(1, 1, bias=False)
    batch = torch.tensor([[1.0], [-1.0]])
    fisher = fisher_diagonal(layer, lambda module, x: module(x)[:, 0], [batch], method=method)
    assert fisher["weight"].item() == 1.0


@pytest.mark.parametrize("method", METHODS)
def test_worked_values_of_the_logistic_model(method):
    assert logistic_fisher(0.0, [1.0, 2.0], [1.0, 0.0], method) == pytest.approx(0.625, abs=1e-15)
    assert logistic_fisher(1.0, [1.0, 2.0], [1.0, 1.0], method) == pytest.approx(0.064583, abs=1e-6)


@given(st.floats(-3, 3), st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=6))
def test_matches_loops(w, samples):
    xs, ys = [x for x, _ in samples], [float(y) for _, y in samples]
    assert logistic_fisher(w, xs, ys) == pytest.approx(oracles.logistic_fisher(w, xs, ys), rel=1e-10, abs=1e-14)


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_sample_weighted_mean_of_client_fishers_is_the_pooled_fisher(clients):
    labels = lambda xs: [float(x > 0) for x in xs]  # noqa: E731
    pooled = [x for xs in clients for x in xs]
    mean = sum(len(xs) * logistic_fisher(0.5, xs, labels(xs)) for xs in clients) / len(pooled)
    assert mean == pytest.approx(logistic_fisher(0.5, pooled, labels(pooled)), rel=1e-10, abs=1e-14)


def test_vmap_equals_the_loop_and_the_batch_size_changes_nothing():
    net, (x, y) = warmed(Net()), data()
    reference = fisher_diagonal(net, classification_log_likelihood, [(x, y)], method="loop")
    assert {name: f.shape for name, f in reference.items()} == {name: p.shape for name, p in net.named_parameters()}
    assert all(f.dtype == torch.float32 and f.sum() > 0 for f in reference.values())
    for size in (1, 4, 11):
        for options in ({"method": "loop"}, {"method": "vmap"}, {"method": "vmap", "chunk_size": 3}, {}):
            loader = DataLoader(TensorDataset(x, y), batch_size=size)
            fisher = fisher_diagonal(net, classification_log_likelihood, loader, **options)
            assert_close(fisher, reference)


@pytest.mark.parametrize("method", METHODS)
def test_leaves_no_trace(method):
    net = warmed(Net())
    modes = {name: child.training for name, child in net.named_modules()}
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    random = torch.get_rng_state()
    loader = DataLoader(TensorDataset(*data()), batch_size=4, shuffle=True)  # draws from the global generator
    torch.set_rng_state(random)
    with torch.no_grad():
        fisher_diagonal(net, classification_log_likelihood, loader, method=method)
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: child.training for name, child in net.named_modules()} == modes
    torch.testing.assert_close(dict(net.state_dict()), state, rtol=0, atol=0)
    torch.testing.assert_close({name: p.grad for name, p in net.named_parameters()}, grads, rtol=0, atol=0)
    assert all(p.requires_grad for p in net.parameters())


def test_the_mode_comes_back_after_an_error():
    net = Net().train()
    with pytest.raises(ZeroDivisionError):
        fisher_diagonal(net, lambda module, batch: 1 / 0, [data()])
    assert net.training


def test_the_module_runs_in_eval_mode():
    net, batch = Net().train(), data()
    one = fisher_diagonal(net, classification_log_likelihood, [batch])
    torch.testing.assert_close(fisher_diagonal(net.eval(), classification_log_likelihood, [batch]), one, rtol=0, atol=0)


def test_auto_falls_back_to_the_loop_and_says_why():
    net, batch = Net(), data(4)

    def branching(module, sample):
        value = classification_log_likelihood(module, sample)
        return value if value.item() < 0 else -value

    expected = fisher_diagonal(net, classification_log_likelihood, [batch], method="loop")
    with pytest.warns(UserWarning, match=r"sample by sample, since vmap failed: .*item") as caught:
        fisher = fisher_diagonal(net, branching, [batch, batch])
    assert len(caught) == 1
    torch.testing.assert_close(fisher, expected)
    with pytest.raises(RuntimeError, match="item"):
        fisher_diagonal(net, branching, [batch], method="vmap")


@pytest.mark.parametrize("method", METHODS)
def test_writes_into_buffers_reach_a_copy_only(method):
    net = Counting()
    fisher = fisher_diagonal(net, classification_log_likelihood, [data(3)], method=method)
    assert net.calls.item() == 0
    assert fisher["head.weight"].sum() > 0


def test_large_trees_run_sample_by_sample(monkeypatch):
    monkeypatch.setattr("lightning_fcl.functional._squares._VMAP_ELEMENTS", 10)
    monkeypatch.setattr("lightning_fcl.functional._squares.Squares._vmap", None)
    monkeypatch.setattr("lightning_fcl.functional._squares.Squares._closed_form", lambda *_: {})
    assert fisher_diagonal(Net(), classification_log_likelihood, [data(2)])["head.bias"].sum() > 0


def test_only_trainable_parameters_unless_named():
    net, batch = Net(), data(3)
    net.features.requires_grad_(False)
    everything = fisher_diagonal(
        net, classification_log_likelihood, [batch], params=[n for n, _ in net.named_parameters()]
    )
    trainable = fisher_diagonal(net, classification_log_likelihood, [batch])
    assert set(trainable) == {"head.weight", "head.bias"}
    assert everything["features.0.weight"].sum() > 0
    torch.testing.assert_close(everything["head.weight"], trainable["head.weight"])
    assert not net.features[0].weight.requires_grad


@pytest.mark.parametrize("method", METHODS)
def test_an_unused_parameter_does_not_matter(method):
    net = nn.ModuleDict({"used": nn.Linear(2, 3), "spare": nn.Linear(2, 3)})
    fisher = fisher_diagonal(
        net,
        lambda module, batch: classification_log_likelihood(module["used"], batch),
        [(torch.randn(4, 2), torch.randint(3, (4,)))],
        method=method,
    )
    assert not fisher["spare.weight"].any()
    assert fisher["used.weight"].any()


@pytest.mark.parametrize("method", METHODS)
def test_tied_weights_collect_both_uses(method):
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    batch = torch.randn(3, 2), torch.randint(2, (3,))
    fisher = fisher_diagonal(net, classification_log_likelihood, [batch], method=method)
    squares = []
    for x, y in zip(*batch, strict=True):
        loss = F.cross_entropy(net(x[None]), y[None])
        squares.append(torch.autograd.grad(loss, net[0].weight)[0].square())
    torch.testing.assert_close(fisher["0.weight"], torch.stack(squares).mean(0))


def test_num_samples_takes_the_first_and_reads_no_further():
    net, (x, y) = Net(), data(7)

    def batches():
        yield x[:3], y[:3]
        yield x[3:], y[3:]
        pytest.fail("read on")

    first = fisher_diagonal(net, classification_log_likelihood, batches(), num_samples=5)
    torch.testing.assert_close(first, fisher_diagonal(net, classification_log_likelihood, [(x[:5], y[:5])]))


@pytest.mark.parametrize("container", [dict, UserDict])
@pytest.mark.parametrize("method", METHODS)
def test_batches_may_be_mappings_with_values_that_are_not_samples(container, method):
    x, y = data(4)
    batch = container(x=x, y=y, scale=torch.tensor(1.0), domain="digits", nothing=None)

    def log_likelihood(module, batch):
        assert batch["domain"] == "digits"
        assert batch["x"].shape[1:] == (1, 6, 6)
        return classification_log_likelihood(module, (batch["x"], batch["y"])) * batch["scale"]

    net = Net()
    fisher = fisher_diagonal(net, log_likelihood, [batch], method=method)
    torch.testing.assert_close(fisher, fisher_diagonal(net, classification_log_likelihood, [(x, y)], method=method))


def test_half_precision_gradients_do_not_underflow():
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    for method in METHODS:
        fisher = fisher_diagonal(layer, lambda m, x: m(x)[:, 0], [torch.full((2, 1), 1e-4).half()], method=method)
        assert fisher["weight"].item() == pytest.approx(1e-8, rel=1e-2)  # below the smallest half


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize(
    ("log_likelihood", "message"),
    [
        (lambda m, b: classification_log_likelihood(m, b).mean(), r"must return shape \(B,\).* got \(\) for B = "),
        (
            lambda m, b: classification_log_likelihood(m, b)[:, None],
            r"must return shape \(B,\).* got \(\d, 1\) for B = ",
        ),
        (lambda m, b: classification_log_likelihood(m, b).detach(), "must depend on the parameters"),
        (lambda m, b: classification_log_likelihood(m, b) * torch.inf, "must have finite gradients, got NaN or inf"),
    ],
    ids=["mean", "column", "detached", "infinite"],
)
def test_bad_log_likelihoods_are_refused(log_likelihood, message, method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="`log_likelihood` " + message):
            fisher_diagonal(Net(), log_likelihood, [data(3)], method=method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "`batches` must hold at least one sample"),
        ({"batches": [(torch.ones(2, 1), torch.ones(3))]}, r"`batches` must yield tensors .* got sizes \[2, 3\]"),
        ({"batches": [("text", 1)]}, r"`batches` must yield tensors .* got sizes \[\]"),
        ({"num_samples": 0}, "`num_samples` must be at least 1, got 0"),
        ({"chunk_size": -1}, "`chunk_size` must be at least 1, got -1"),
        ({"method": "hooks"}, "`method` must be one of 'auto', 'closed_form', 'vmap', 'loop', got 'hooks'"),
        ({"params": ["head.wait"]}, r"`params` must name parameters of `module`, got \['head\.wait'\]"),
        ({"module": nn.ReLU()}, "`module` must have a parameter to measure"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    arguments = {"module": Net(), "log_likelihood": classification_log_likelihood, "batches": [data(2)]} | options
    with pytest.raises(ValueError, match=message):
        fisher_diagonal(**arguments)


def test_classification_needs_one_row_of_logits_per_sample():
    with pytest.raises(ValueError, match=r"`module` must return logits of shape \(B, C\), got \(2, 3, 4\)"):
        classification_log_likelihood(nn.Identity(), (torch.ones(2, 3, 4), torch.ones(2, 4)))
