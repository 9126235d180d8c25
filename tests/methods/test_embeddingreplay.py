"""EmbeddingReplay: the paper's figures, where its gradient goes, what leaves a client, and that it helps."""

import csv
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fcl import EmbeddingReplay, FaultInjector
from lightning_fcl.callbacks import ContinualCallback
from lightning_fcl.exceptions import MisconfigurationError
from lightning_fcl.functional import Rehearsal, balanced_counts, generator_losses, soft_cross_entropy, soft_labels
from lightning_fcl.mixins import EmbeddingForwardMixin
from lightning_fcl.models import EmbeddingGenerator, EventClassifier, TwoTower, fit_generator
from tests.helpers.penalty import loader, make_trainer
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, state_of, toy_data, toy_stream, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class Toy(EmbeddingForwardMixin, ToyModule):
    """A plain classifier that declares its feature layer by being one."""


def posts(count=12, seed=0):
    draw = torch.Generator().manual_seed(seed)
    pictures, tokens = torch.randn(count, 3, 8, 8, generator=draw), torch.randint(0, 9, (count, 5), generator=draw)
    return pictures, tokens, torch.arange(count) % 3


def two_tower(rank=2, cls=EventClassifier):
    torch.manual_seed(0)
    return cls(TwoTower(3, image_size=8, vocabulary=9, width=6, rank=rank))


# -- oracle -----------------------------------------------------------------------------------------------------------


def test_budget_of_100_over_three_events():
    assert balanced_counts(3, 100) == [34, 33, 33]


def test_soft_label_and_its_loss():
    soft = soft_labels(torch.tensor([0]), torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64), 0.1)
    torch.testing.assert_close(soft, torch.tensor([[0.97, 0.02, 0.01]], dtype=torch.float64))
    log_q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert soft_cross_entropy(log_q, soft).item() == pytest.approx(0.712527, abs=1e-6)
    hard = soft_labels(torch.tensor([0]), torch.zeros(1, 3, dtype=torch.float64), 0.0)
    assert soft_cross_entropy(log_q, hard).item() == pytest.approx(0.693147, abs=1e-6)


def oracle_losses(generated, real, spread, logits, teacher, labels):
    """The four terms, example by example."""
    totals = [0.0] * 4
    for n in range(len(labels)):
        for mine, other, unit in zip(generated, real, spread, strict=True):
            totals[0] += sum(((a - b) / u) ** 2 for a, b, u in zip(mine[n], other[n], unit, strict=True)) / len(unit)
        dot = sum(a * b for a, b in zip(generated[0][n], generated[-1][n], strict=True))
        lengths = [math.sqrt(sum(a * a for a in one[n])) for one in (generated[0], generated[-1])]
        totals[1] += 1 - dot / (lengths[0] * lengths[1]) if len(generated) > 1 else 0.0
        norm = sum(math.exp(one) for one in logits[n])
        p = [math.exp(one) / norm for one in logits[n]]
        totals[2] += sum(t * math.log(t / q) for t, q in zip(teacher[n], p, strict=True))
        totals[3] -= math.log(p[labels[n]])
    return [total / len(labels) for total in totals]


@given(seed=st.integers(0, 1000), modalities=st.integers(1, 2))
def test_losses_are_the_papers(seed, modalities):
    draw = torch.Generator().manual_seed(seed)
    generated, real = torch.randn(2, modalities, 4, 3, generator=draw, dtype=torch.float64)
    spread = 0.5 + torch.rand(modalities, 3, generator=draw, dtype=torch.float64)
    logits, beliefs = torch.randn(2, 4, 5, generator=draw, dtype=torch.float64)
    labels, teacher = torch.randint(0, 5, (4,), generator=draw), beliefs.softmax(1)
    found = generator_losses(*map(list, (generated, real, spread)), logits, teacher, labels)
    wanted = oracle_losses(*(one.tolist() for one in (generated, real, spread, logits, teacher, labels)))
    assert [term.item() for term in found] == pytest.approx(wanted)


def test_two_terms_and_no_union():
    """The loss is that of the batch plus strength times that of the rehearsal, not the mean of one union of both."""
    module = make_toy(cls=Toy)
    features, labels = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    module.rehearsal = Rehearsal((features,), nn.functional.one_hot(labels, 3).float(), 2.0)
    term = module.loss_terms(None, None)["replay"]
    torch.testing.assert_close(term, 2.0 * nn.functional.cross_entropy(module.net[-1](features), labels))


# -- where the gradient goes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_encoder_and_projector_get_no_gradient_from_replay(rank):
    module = two_tower(rank)
    embeddings = tuple(one.detach() for one in module.embeddings_of(posts()))
    module.rehearsal = Rehearsal(embeddings, torch.full((12, 3), 1 / 3), 1.0)
    module.loss_terms(None, None)["replay"].backward()
    groups = {"vision": 0.0, "projector": 0.0, "language": 0.0}
    for name, p in module.named_parameters():
        if p.requires_grad:
            groups[name.split(".")[1]] += 0.0 if p.grad is None else p.grad.abs().sum().item()
    assert groups["vision"] == groups["projector"] == 0.0
    assert groups["language"] > 0


def test_embeddings_and_the_way_in_make_the_forward_pass():
    module, batch = two_tower(), posts()
    assert torch.equal(module.forward_embeddings(*module.embeddings_of(batch)), module(batch[0], batch[1]))
    toy, x = make_toy(cls=Toy), torch.randn(5, 6)
    torch.testing.assert_close(toy.forward_embeddings(*toy.embeddings_of((x, None))), toy(x))


def test_fitting_leaves_the_classifier_and_the_global_draws_alone():
    module = make_toy(cls=Toy, dropout=0.5)
    batches = list(loader())
    before, random = state_of(module), torch.get_rng_state()
    fitted(module, batches)
    assert_same_bits(before, state_of(module))
    assert module.training
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert torch.equal(random, torch.get_rng_state())


# -- the generator ----------------------------------------------------------------------------------------------------


def fitted(module, data=None, **options):
    """A callback after the end of a task with these data."""
    callback = EmbeddingReplay(**options)
    data = loader() if data is None else data
    as_it_is = SimpleNamespace(convert_input=lambda batch: batch)
    trainer = SimpleNamespace(train_dataloader=data, num_training_batches=len(data), precision_plugin=as_it_is)
    callback.on_task_end(trainer, module)
    return callback


def clusters(mode, epochs=100):
    """A generator fitted to two events, whose examples lie on lines through their means."""
    draw = torch.Generator().manual_seed(0)
    events = torch.arange(200) % 2
    along = torch.randn(200, 1, generator=draw)
    real = [torch.cat([4.0 * events[:, None], along, along], dim=1), torch.cat([along, -along, along], dim=1)]
    means = [torch.stack([one[events == event].mean(0) for event in (0, 1)]) for one in real]
    teacher = nn.functional.one_hot(events, 2).float()
    torch.manual_seed(1)
    generator = EmbeddingGenerator(means, [torch.ones(3)] * 2, torch.tensor([0, 1]), torch.eye(2), latent=4)

    def classify(visual, text):
        return torch.stack([2 - visual[:, 0], visual[:, 0] - 2], dim=1)

    settings = {"mode": mode, "epochs": epochs, "lr": 3e-3, "weights": (1, 0, 0.1, 0.1)}
    losses = fit_generator(generator, real, events, teacher, classify, draw, **settings)
    return losses, generator.sample([300, 300], torch.Generator().manual_seed(2))


def test_cvae_learns_the_spread_and_how_modalities_belong_together():
    losses, ((visual, text), targets) = clusters("cvae")
    assert losses[-1] < 0.5 * losses[0]
    assert visual[:300, 0].mean() == pytest.approx(0, abs=0.3)
    assert visual[300:, 0].mean() == pytest.approx(4, abs=0.3)
    assert visual[:, 1].std() > 0.5
    assert torch.corrcoef(torch.stack([visual[:, 1], text[:, 0]]))[0, 1] > 0.8
    assert torch.equal(targets[[0, 300]], torch.eye(2))


def test_literal_falls_together_to_the_means():
    _, ((visual, _), _) = clusters("literal")
    assert visual[:, 1].std() < 0.2


def test_state_makes_the_same_generator_and_draws_follow_the_seed():
    callback = fitted(make_toy(cls=Toy))
    first, second = (EmbeddingGenerator.from_state(callback.generators[0]) for _ in range(2))
    draws = [one.sample([2, 3, 1], torch.Generator().manual_seed(5)) for one in (first, second)]
    assert torch.equal(draws[0][0][0], draws[1][0][0])
    assert draws[0][0][0].shape == (6, 8)
    torch.testing.assert_close(draws[0][1].sum(1), torch.ones(6))


@pytest.mark.parametrize("mode", ["cvae", "literal"])
def test_an_event_with_one_example_and_no_other_event(mode):
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(1, 6), torch.tensor([2])))
    callback = fitted(make_toy(cls=Toy), data, mode=mode)
    assert callback.generators[0]["labels"].tolist() == [2]
    assert all(value.isfinite().all() for value in callback.generators[0].values())


class Tokens(EventClassifier):
    """The same with a sequence of four visual tokens and one of five words, as a language model has them."""

    def embeddings_of(self, batch):
        visual, text = super().embeddings_of(batch)
        return torch.stack([visual + step for step in range(4)], 1), text.unsqueeze(1).expand(-1, 5, -1)

    def forward_embeddings(self, visual, text):
        return super().forward_embeddings(visual.mean(1), text.mean(1))


def test_sequences_keep_their_positions():
    module = two_tower(cls=Tokens)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*posts()), batch_size=5)
    state = fitted(module, batches).generators[0]
    (visual, text), _ = EmbeddingGenerator.from_state(state).sample([1, 1, 1], torch.Generator())
    assert text.shape == (3, 5, 6)
    torch.testing.assert_close(visual - visual[:, :1], torch.arange(4.0).reshape(1, 4, 1).expand(3, 4, 6))


def test_embeddings_that_are_not_finite_are_an_error():
    bad = [(torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.long))]
    with pytest.raises(FloatingPointError, match="diverged"):
        fitted(make_toy(cls=Toy), bad)


# -- in a stock Trainer -----------------------------------------------------------------------------------------------


def test_rehearses_in_a_stock_trainer_and_keeps_its_state(tmp_path):
    module, callback = make_toy(cls=Toy), EmbeddingReplay(budget=10)
    make_trainer([callback], max_epochs=1).fit(module, loader())
    assert len(callback.generators) == 1
    callback.save(tmp_path)
    again = EmbeddingReplay(budget=10)
    again.load(tmp_path)
    assert_same_bits(again.generators[0], callback.generators[0])
    plain, rehearsed = make_toy(cls=Toy), make_toy(cls=Toy)
    for net, callbacks in ((plain, []), (rehearsed, [again])):
        L.seed_everything(3, verbose=False)
        make_trainer(callbacks, max_epochs=1).fit(net, loader())
    assert not torch.equal(plain.net[-1].weight, rehearsed.net[-1].weight)
    assert rehearsed.rehearsal is None
    assert len(again.generators) == 2


def test_memory_of_the_last_task_alone():
    module, callback = make_toy(cls=Toy), EmbeddingReplay(memory="last")
    for _ in range(2):
        make_trainer([callback], max_epochs=1).fit(module, loader())
    assert len(callback.generators) == 1


# -- in a federation --------------------------------------------------------------------------------------------------


def run(folder, *callbacks, stream=None, momentum=0.0, **options):
    module = make_toy(cls=Toy, momentum=momentum)
    report = toy_trainer(folder, callbacks=list(callbacks), **options).fit(module, stream or toy_stream())
    return module, report


def test_first_task_is_plain_training(tmp_path):
    """Without generators there is nothing to rehearse: bit for bit FedAvg."""
    stream = toy_stream(tasks=1)
    plain, _ = run(tmp_path / "plain", stream=stream)
    held, _ = run(tmp_path / "held", EmbeddingReplay(), stream=stream)
    assert_same_bits(state_of(plain), state_of(held))


def test_switched_off_it_is_fedavg_and_on_it_is_not(tmp_path):
    plain, _ = run(tmp_path / "plain")
    off, _ = run(tmp_path / "off", EmbeddingReplay(**EmbeddingReplay.card.neutral))
    on, _ = run(tmp_path / "on", EmbeddingReplay(**EmbeddingReplay.card.smoke))
    assert_same_bits(state_of(plain), state_of(off))
    assert not torch.equal(state_of(plain)["net.2.weight"], state_of(on)["net.2.weight"])


class Payloads(ContinualCallback):
    """Reads all that leaves a client."""

    def __init__(self):
        self.sent = []

    def on_upload(self, trainer, pl_module, update):
        self.sent.append((set(update.tensors), dict(update.extra), dict(update.metrics)))
        return update


def test_nothing_but_weights_and_logged_numbers_leaves_a_client(tmp_path):
    spy, replay = Payloads(), EmbeddingReplay()
    module, _ = run(tmp_path, replay, spy)
    names = {name for name, p in module.named_parameters() if p.requires_grad}
    assert len(spy.sent) == 12
    assert all(tensors == names and extra == {} for tensors, extra, _ in spy.sent)
    assert {key for *_, metrics in spy.sent for key in metrics} == {"train_loss", "loss/replay"}
    commits = list((tmp_path / "checkpoints").rglob("*.safetensors"))
    assert commits
    assert not [path for path in commits if b"decoder" in path.read_bytes()]  # what the server keeps
    with (tmp_path / "metrics.csv").open() as file:
        assert not [tag for tag in next(csv.reader(file)) if "generator" in tag]


def test_generators_are_the_clients_own_and_spill_to_disk(tmp_path):
    """With no memory for client states the run is the same, and each client has its file."""
    kept, _ = run(tmp_path / "kept", EmbeddingReplay())
    spilt, _ = run(tmp_path / "spilt", EmbeddingReplay(), client_state_mb=0)
    assert_same_bits(state_of(kept), state_of(spilt))
    files = sorted((tmp_path / "spilt" / "clients").rglob("*.safetensors"))
    assert {path.parent.name for path in files} == {f"client_{client:06d}" for client in range(4)}
    assert all(b"decoder" in path.read_bytes() for path in files)
    assert len({path.read_bytes() for path in files}) == len(files)


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    whole, _ = run(tmp_path / "whole", EmbeddingReplay())
    with pytest.raises(RuntimeError, match="injected fault"):
        run(tmp_path / "broken", EmbeddingReplay(), FaultInjector("exception", task=1, round=1))
    resumed = make_toy(cls=Toy)
    trainer = toy_trainer(tmp_path / "broken", callbacks=[EmbeddingReplay()])
    trainer.fit(resumed, toy_stream(), ckpt_path="last")
    assert_same_bits(state_of(whole), state_of(resumed))


def test_a_client_without_data_of_a_task_keeps_what_it_has(tmp_path):
    from lightning_fcl import TaskStream
    from lightning_fcl.data import NaturalClients

    data = [toy_data(24, seed=task) for task in range(3)]
    ids = [[0, 1] * 12, [0] * 24, [0, 1] * 12]
    stream = TaskStream.from_datasets(data, data, clients=2, partition=NaturalClients(ids), batch_size=8)
    seen = {}

    class Look(ContinualCallback):
        def on_train_end(self, trainer, pl_module):
            seen[trainer.task, trainer.client] = len(replay.generators)

    replay = EmbeddingReplay()
    run(tmp_path, replay, Look(), stream=stream, clients_per_round=2)
    assert seen == {(0, 0): 0, (0, 1): 0, (1, 0): 1, (2, 0): 2, (2, 1): 1}


def test_old_classes_survive_where_plain_training_forgets_them(tmp_path):
    from lightning_fcl import TaskStream

    train, test = toy_data(240, seed=1), toy_data(120, seed=2)
    stream = TaskStream.split_classes(train, test, tasks=[2, 1], clients=3, batch_size=8)
    settings = {"stream": stream, "rounds": 4, "clients_per_round": 3, "momentum": 0.9}
    _, plain = run(tmp_path / "plain", **settings)
    _, held = run(tmp_path / "held", EmbeddingReplay(), **settings)
    assert held.accuracy[0, 0] == plain.accuracy[0, 0] > 0.8
    assert held.summary["bwt"] > plain.summary["bwt"] + 0.15
    assert held.accuracy[1, 1] > 0.8


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": -1.0}, "`strength` must be finite and not negative"),
        ({"strength": math.nan}, "`strength` must be finite"),
        ({"memory": "none"}, '`memory` must be "all" or "last"'),
        ({"mode": "gan"}, '`mode` must be "cvae" or "literal"'),
        ({"budget": 0}, "`budget` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"smoothing": 1.5}, "`smoothing` must lie in"),
        ({"weights": (1, 1)}, "`weights` must be four finite numbers"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(MisconfigurationError, match=message):
        EmbeddingReplay(**options)


def test_a_module_without_a_way_in_is_refused_before_training(tmp_path):
    with pytest.raises(MisconfigurationError, match=r"Write `class Net\(EmbeddingForwardMixin, ToyModule\)`"):
        make_trainer([EmbeddingReplay()], max_epochs=1).fit(make_toy(), loader())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: soft_labels(torch.tensor([3]), torch.ones(1, 3) / 3), "`labels` must be from 0 to 2, got up to 3"),
        (lambda: soft_labels(torch.tensor([0]), torch.ones(1, 3) / 3, 2.0), "`smoothing` must lie"),
        (lambda: soft_cross_entropy(torch.zeros(1, 2), torch.ones(1, 3)), "at most 2 columns"),
        (lambda: balanced_counts(0, 5), "`parts` must be at least 1"),
        (
            lambda: generator_losses(*[[torch.ones(1, 2), torch.ones(1, 3)]] * 3, *[torch.ones(1, 2)] * 3),
            "`generated` must be of one width",
        ),
        (
            lambda: generator_losses(*[[torch.ones(1, width)] for width in (2, 3, 2)], *[torch.ones(1, 2)] * 3),
            "must have the same shapes",
        ),
    ],
)
def test_malformed_tensors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
