"""DISCO in the real loop: slots are found, kept apart, averaged as the paper writes it, and survive a kill."""

import pytest
import torch

from lightning_fcl.aggregators import Chain, FedAvg, Route, Router, ServerProximal, ServerStep, SubspaceRouter
from lightning_fcl.callbacks import FaultInjector, ServerCallback
from lightning_fcl.exceptions import FCLError, MisconfigurationError
from lightning_fcl.models import subspace_layers
from tests.helpers.subspaces import PROMPT, LitNet, SubspaceNet, make_net, subspace_stream, task_data
from tests.helpers.toy import assert_same_bits, toy_trainer

BANK = "body.0.lora_A"


class Keep(ServerCallback):
    """Keeps every round's slots."""

    def __init__(self):
        self.slots, self.metrics, self.bytes = [], [], []

    def on_round_end(self, trainer, pl_module):
        self.slots.append(trainer.state.slots)
        self.metrics.append(dict(trainer.state.metrics))
        self.bytes.append((trainer.state.bytes_up, trainer.state.bytes_down))


class Spy(FaultInjector):
    """Keeps every update that was sent, in float64."""

    def __init__(self):
        super().__init__("drop", task=99)
        self.sent = []

    def on_upload(self, trainer, pl_module, update):
        values = {name: tensor.double().clone() for name, tensor in update.tensors.items()}
        self.sent.append((update.task, update.round, update.client, update.num_examples, values))
        return update


def fit(run_dir, aggregator, *, net=None, stream=None, keep=None, ckpt_path=None, **options):
    net = make_net(**(net or {})) if not isinstance(net, torch.nn.Module) else net
    servers = [keep] if keep is not None else []
    trainer = toy_trainer(run_dir, aggregator=aggregator, server_callbacks=servers, **{"rounds": 2, **options})
    stream = subspace_stream(**{"examples": 80, **(stream or {})})
    return trainer.fit(net, stream, ckpt_path), net


def table(run_dir):
    return (run_dir / "metrics.csv").read_text()


# -- what it is for ---------------------------------------------------------------------------------------------------


def test_contradicting_tasks_get_subspaces_of_their_own_and_nothing_is_forgotten(tmp_path):
    options = {"stream": {"examples": 160}, "rounds": 3, "local_epochs": 4}
    keep = Keep()
    disco, net = fit(tmp_path / "disco", SubspaceRouter(0.9), keep=keep, **options)
    plain, _ = fit(tmp_path / "plain", FedAvg(), **options)
    assert [len(slots.weights) for slots in keep.slots] == [1] * 3 + [2] * 3 + [3] * 3  # one per task, found unaided
    assert disco.accuracy[-1].min() > 0.85
    assert disco.accuracy[-1].mean() > plain.accuracy[-1].mean() + 0.05
    assert disco.summary["bwt"] == 0.0
    x = task_data(1, 40, 7).tensors[0]
    assert net.factors((x, None))[:, 1].min() > 0.99  # selective activation: task 1's prompts wake subspace 1
    assert keep.metrics[-1]["task/task_1/slot/1"] > 0.99
    assert {"cosine/0/1", "cosine/0/2", "cosine/1/2"} <= keep.metrics[-1].keys()


def test_het_stage_with_two_unseen_tasks_opens_two_subspaces_before_anybody_trains(tmp_path):
    stream = subspace_stream(tasks=2, clients=4, examples=80).stages([[0, 0, 1, 1], [1, 1, 0, 0]])
    keep = Keep()
    trainer = toy_trainer(tmp_path, clients_per_round=4, aggregator=SubspaceRouter(), server_callbacks=[keep])
    trainer.fit(make_net(), stream)
    assert [len(slots.weights) for slots in keep.slots] == [2] * 4
    assert keep.slots[-1].router["counts"] == [160.0, 160.0]


def test_a_threshold_from_held_out_prompts_separates_tasks():
    net, stream = make_net(), subspace_stream(tasks=3, examples=80)
    proposal = net.propose_threshold([stream.eval_loader(0), stream.eval_loader(1)])
    assert proposal.between < proposal.threshold < proposal.within
    assert proposal.within > 0.9


# -- against slow references ------------------------------------------------------------------------------------------


def test_a_run_equals_a_slow_server_written_from_the_paper(tmp_path):
    """Tokens, matching at .9, and factor-wise means weighted by examples, on the updates that a real run sent."""
    keep, spy = Keep(), Spy()
    stream = subspace_stream(tasks=3, clients=5, examples=90, partition="quantity_dirichlet")
    trainer = toy_trainer(tmp_path, aggregator=SubspaceRouter(0.9), server_callbacks=[keep], callbacks=[spy])
    trainer.fit(make_net(), stream)
    tokens, counts, slots = [], [], []
    for index, kept in enumerate(keep.slots):
        sent = [u for u in spy.sent if (u[0], u[1]) == (index // 2, index % 2)]
        groups = {}
        for _, _, client, count, values in sent:
            data = stream.train_loader(index // 2, client).dataset
            token = sum(x[:PROMPT].double() for x, _ in data) / len(data)
            cosines = [float(token @ g / (token.norm() * g.norm())) for g in tokens]
            slot = max(range(len(cosines)), key=cosines.__getitem__) if max(cosines, default=-1) >= 0.9 else len(slots)
            groups.setdefault(slot, []).append((count, token, values))
        for slot, members in groups.items():
            total = sum(count for count, _, _ in members)
            mean = {name: sum(c * values[name] for c, _, values in members) / total for name in members[0][2]}
            token = sum(c * one for c, one, _ in members) / total
            if slot == len(slots):
                slots, tokens, counts = [*slots, mean], [*tokens, token], [*counts, total]
            else:
                tokens[slot] = (counts[slot] * tokens[slot] + total * token) / (counts[slot] + total)
                counts[slot] += total
                slots[slot] = mean
        layout = {name: getattr(subspace_layers(make_net())[name[:6]], name[7:]).shape for name in slots[0]}
        assert kept.router["counts"] == counts
        torch.testing.assert_close(kept.router["tokens"].double(), torch.stack(tokens), rtol=1e-6, atol=1e-7)
        for vector, wanted in zip(kept.weights, slots, strict=True):
            for name, shape in layout.items():
                start = next(s.start for s in _slots(trainer) if s.name == name)
                found = vector[start : start + shape.numel()].view(shape)
                torch.testing.assert_close(found.double(), wanted[name], rtol=1e-6, atol=1e-7)


def _slots(trainer):
    from lightning_fcl.federated.layout import build_layout

    return build_layout(make_net()).slots


class FromTemplate(SubspaceRouter):
    """New subspaces start as the module does."""

    def reset(self, pl_module):
        pass


def test_one_subspace_for_all_is_plain_federated_lora_bit_for_bit(tmp_path):
    keep = Keep()
    one, net = fit(tmp_path / "a", FromTemplate(-1.0), keep=keep)
    plain, other = fit(tmp_path / "b", FedAvg())
    assert one.accuracy.equal(plain.accuracy)
    for name, layer in subspace_layers(other).items():
        down, up = subspace_layers(net)[name].bank
        assert torch.equal(down[0], layer.lora_A)
        assert torch.equal(up[0], layer.lora_B)


def test_each_slot_has_its_own_server_steps(tmp_path):
    """A step sees its slot's weights, its slot's clients and a state that no other slot touches."""
    seen = []

    class Count(ServerStep):
        def init(self, params):
            return {"rounds": 0}

        def apply(self, params, delta, stats, state):
            seen.append((stats.task, stats.clients, state["rounds"]))
            return delta, {"rounds": state["rounds"] + 1}

    stream = subspace_stream(tasks=2, clients=4, examples=80).stages([[0, 0, 1, 1], [0, 0, 1, 1]])
    trainer = toy_trainer(tmp_path, clients_per_round=4, aggregator=Chain(SubspaceRouter(), FedAvg(), Count()))
    trainer.fit(make_net(), stream)
    assert seen == [(r // 2, group, r) for r in range(4) for group in ((0, 1), (2, 3))]


def test_two_phase_traffic_is_one_subspace_and_a_token(tmp_path):
    keep = Keep()
    fit(tmp_path, SubspaceRouter(), keep=keep, clients_per_round=2)
    slot = sum(2 * (p.in_features + p.out_features) * 4 for p in (make_net().body[0].base, make_net().body[2].base))
    assert keep.bytes[0] == (2 * (slot + 4 * PROMPT + 8), 2 * slot)
    assert keep.bytes[-1] == (6 * keep.bytes[0][0], 6 * keep.bytes[0][1])  # with three subspaces, still one each


def test_shared_tensors_are_averaged_over_all_clients(tmp_path):
    stream = subspace_stream(tasks=2, clients=4, examples=80).stages([[0, 0, 1, 1]])
    keep, spy = Keep(), Spy()
    router = SubspaceRouter(shared="head.*")
    trainer = toy_trainer(
        tmp_path, rounds=1, clients_per_round=4, aggregator=router, server_callbacks=[keep], callbacks=[spy]
    )
    net = make_net(head=True)
    trainer.fit(net, stream)
    mean = sum(values["head.weight"] for *_, values in spy.sent) / 4
    torch.testing.assert_close(net.head.weight.double(), mean, rtol=1e-6, atol=1e-7)
    layout = {slot.name: slot for slot in _layout(net).slots}["head.weight"]
    for vector in keep.slots[-1].weights:
        assert torch.equal(vector[layout.start : layout.stop], net.head.weight.flatten())


def _layout(net):
    from lightning_fcl.federated.layout import build_layout

    return build_layout(net)


# -- laws of the loop -------------------------------------------------------------------------------------------------

LAW = {"local_epochs": 1, "stream": {"clients": 6, "examples": 90}, "clients_per_round": 4, "net": {"dropout": 0.2}}


def law_run(run_dir, devices=1, **options):
    rule = Chain(SubspaceRouter(0.9), FedAvg(), ServerProximal(0.1, lr=1.0))
    report, net = fit(run_dir, rule, devices=devices, **{**LAW, **options})
    return report.accuracy, bank_of(net)


def bank_of(net):
    return {f"{n}.{i}": t.clone() for n, layer in subspace_layers(net).items() for i, t in enumerate(layer.bank)} | {
        "tokens": net.subspace_tokens
    }


class KilledError(Exception):
    pass


class KillAt(ServerCallback):
    def __init__(self, round):
        self._when = round  # under another name than the argument, which would be a setting of the run

    def on_round_end(self, trainer, pl_module):
        if trainer.state.global_round == self._when:
            raise KilledError


@pytest.mark.parametrize("round", [3, *(pytest.param(r, marks=pytest.mark.slow) for r in (0, 1, 5))])
def test_a_resumed_run_gives_the_same_bits(tmp_path, round):
    whole, bank = law_run(tmp_path / "whole")
    with pytest.raises(KilledError):
        law_run(tmp_path / "cut", keep=KillAt(round))
    accuracy, again = law_run(
        tmp_path / "cut", ckpt_path="auto", keep=KillAt(99)
    )  # nothing was committed before round 0 ended
    assert accuracy.equal(whole)
    assert_same_bits(bank, again)
    assert table(tmp_path / "cut") == table(tmp_path / "whole")


@pytest.mark.distributed
def test_two_processes_equal_one(ranks, tmp_path):
    accuracy, bank = law_run(tmp_path / "one")
    for matrix, found in ranks.run(law_run, tmp_path / "two", 2):
        assert matrix.equal(accuracy)
        assert_same_bits(bank, found)
    assert table(tmp_path / "one") == table(tmp_path / "two")


def test_the_module_predicts_with_its_subspaces(tmp_path):
    _, net = fit(tmp_path / "a", SubspaceRouter(), local_epochs=3)
    data = task_data(0, 20, 5)
    trainer = toy_trainer(tmp_path / "b")
    loader = torch.utils.data.DataLoader(data, batch_size=20)
    (found,) = trainer.predict(net, loader)
    with net.routed(data.tensors), torch.no_grad():
        assert torch.equal(net(data.tensors[0]), found)
    with torch.no_grad():
        assert not torch.allclose(net(data.tensors[0]), found)  # outside of it, the template speaks: the base model


# -- what can go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_subspace_whose_clients_all_fail_does_not_come_to_be(tmp_path):
    keep = Keep()
    faults = [FaultInjector("nan", task=1, round=0)]
    options = {"callbacks": faults, "on_client_error": "skip", "max_empty_rounds": 2}
    report, _ = fit(tmp_path, SubspaceRouter(), keep=keep, **options)
    assert [len(slots.weights) for slots in keep.slots] == [1, 1, 1, 2, 3, 3]
    assert report.accuracy.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_a_nan_client_is_left_out_of_its_subspace(tmp_path):
    keep = Keep()
    stream = {"tasks": 1}
    options = {"callbacks": [FaultInjector("nan", clients=[1])], "on_client_error": "skip", "clients_per_round": 4}
    fit(tmp_path, SubspaceRouter(), keep=keep, stream=stream, rounds=1, **options)
    assert keep.slots[0].router["counts"] == [60.0]
    assert keep.slots[0].weights[0].isfinite().all()


class Broken(SubspaceNet):
    """Client 1's tokens are ``fault``."""

    fault = staticmethod(lambda features: features)

    def identity_features(self, batch):
        features = super().identity_features(batch)
        return self.fault(features) if getattr(self.trainer, "client", -1) == 1 else features


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda features: features[:, :2], "refused,its identity token has 2 numbers, the others 4"),
        (lambda features: features / 0.0 * 0.0, "`features` must be finite"),
        (lambda features: features[:0], "`features` must have shape"),
    ],
    ids=["another encoder", "nan", "empty"],
)
def test_a_client_with_a_bad_token_sits_out(tmp_path, fault, reason):
    net = make_net(Broken)
    net.fault = fault
    keep = Keep()
    options = {"clients_per_round": 4, "on_client_error": "skip", "stream": {"tasks": 1}, "rounds": 1}
    fit(tmp_path, SubspaceRouter(), net=net, keep=keep, **options)
    assert keep.slots[0].router["counts"] == [60.0]
    failures = (tmp_path / "failures.csv").read_text()
    assert reason in failures.replace('"', "")
    assert len(failures.splitlines()) == 2


def test_more_tasks_than_subspaces(tmp_path):
    keep = Keep()
    fit(tmp_path / "nearest", SubspaceRouter(capacity=2), keep=keep)
    assert [len(slots.weights) for slots in keep.slots] == [1, 1, 2, 2, 2, 2]
    assert sum(keep.slots[-1].router["counts"]) == 6 * 60.0  # all tasks were trained
    with pytest.raises(FCLError, match=r"all 2 are taken. Raise `capacity`"):
        fit(tmp_path / "raise", SubspaceRouter(capacity=2, at_capacity="raise"))


@pytest.mark.filterwarnings("ignore:.*dropped")
def test_without_room_clients_can_sit_out(tmp_path):
    keep = Keep()
    skip = SubspaceRouter(capacity=2, at_capacity="skip")
    fit(tmp_path, skip, keep=keep, max_empty_rounds=9)
    assert sum(keep.slots[-1].router["counts"]) == 4 * 60.0
    assert "and all 2 are taken" in (tmp_path / "failures.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"threshold": 2.0}, "`threshold`"), ({"capacity": 0}, "`capacity`"), ({"at_capacity": "drop"}, "`at_capacity`")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(MisconfigurationError, match=message):
        SubspaceRouter(**arguments)


def test_modules_that_do_not_fit(tmp_path):
    cases = (
        (make_net(LitNet), "needs a `SubspaceRoutingMixin`"),
        (make_net(head=True), "head.weight, head.bias would travel too"),
    )
    for place, (net, message) in enumerate(cases):
        with pytest.raises(MisconfigurationError, match=message):
            fit(tmp_path / str(place), SubspaceRouter(), net=net)


def test_a_router_comes_first():
    with pytest.raises(MisconfigurationError, match="router in first place"):
        Chain(FedAvg(), SubspaceRouter())
    assert isinstance(Chain(SubspaceRouter()).reducer, FedAvg)
    assert Chain(SubspaceRouter(), ServerProximal(0.1)).reducer.weighting == "uniform"


# -- another router ---------------------------------------------------------------------------------------------------


def test_any_router_can_group_clients(tmp_path):
    """Even and odd clients learn apart, in an ordinary module, without a probe."""

    class Parity(Router):
        def route(self, probes, num_slots, state, *, task):
            return {probe.client: Route(probe.client % 2) for probe in probes}

        def install(self, pl_module, slots, state):
            pl_module.slots = [{name: tensor.clone() for name, tensor in slot.items()} for slot in slots]

    def run(name, clients, aggregator):
        stream = subspace_stream(tasks=1, clients=4, examples=80).stages(
            [[0 if c in clients else () for c in range(4)]]
        )
        net = make_net(LitNet)
        toy_trainer(tmp_path / name, clients_per_round=4, aggregator=aggregator).fit(net, stream)
        return net

    both = run("both", [0, 1, 2, 3], Parity())
    for parity in (0, 1):
        alone = run(str(parity), [parity, parity + 2], FedAvg())
        trained = {name: p.detach() for name, p in alone.named_parameters() if p.requires_grad}
        assert_same_bits(both.slots[parity], trained)
