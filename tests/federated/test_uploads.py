"""What callbacks upload: exact sums on any number of ranks, their bytes, their server side, and the boundary pass."""

from dataclasses import replace

import pytest
import torch

from lightning_fcl.aggregators import Chain, FedAvg, Reducer, ServerStep
from lightning_fcl.callbacks import EWC, SCAFFOLD, ContinualCallback, FedCurv, FedDyn
from lightning_fcl.exceptions import FCLError, MisconfigurationError
from lightning_fcl.federated.uploads import Uploads
from tests.helpers.quadratics import client_states, server_tree
from tests.helpers.toy import ToyModule, assert_same_bits, make_toy, toy_stream, toy_trainer

CLIENTS = 19  # more than two slabs, and not the same number on both ranks


class Sends(ContinualCallback):
    """Sends what only float64 can add without loss, and remembers what it got."""

    def __init__(self, reduction="sum", phase="train", silent=()):
        self.upload_reduction, self.upload_phase, self.silent = reduction, phase, silent
        self.got, self.stats = [], []

    @property
    def state_key(self):
        return f"{self.upload_reduction}-{self.upload_phase}"

    def on_task_end(self, trainer, pl_module):
        pass

    def upload(self, trainer):
        if trainer.client in self.silent:
            return {}
        return sent_by(trainer.client, trainer.global_round)

    def serve(self, merged, previous, stats):
        self.stats.append((stats.task, stats.round, len(stats.clients), stats.total_clients))
        count = previous.get("count", torch.zeros(()))
        return {**merged, "count": count + 1}

    def download(self, merged):
        self.got.append({name: value.clone() for name, value in merged.items()})


def sent_by(client, round_=0):
    generator = torch.Generator().manual_seed(100 * round_ + client)
    return {
        "wide": torch.randn(3, 4, generator=generator) * 10.0 ** (client % 7),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "one": torch.tensor(1.0),
    }


def run(run_dir, callbacks, devices=1, **options):
    stream = toy_stream(tasks=1, clients=CLIENTS, examples=120)
    settings = {"clients_per_round": CLIENTS, "rounds": 2, "devices": devices, "measure_baseline": False}
    trainer = toy_trainer(run_dir, callbacks=callbacks, **{**settings, **options})
    return trainer.fit(make_toy(), stream)


def received(run_dir, devices, silent=()):
    callbacks = [Sends("sum", silent=silent), Sends("mean", silent=silent), Sends("sum", "boundary")]
    report = run(run_dir, callbacks, devices)
    got = [dict(c.got[-1]) for c in callbacks[:2]]
    return got, report.bytes_up, report.bytes_down, [c.stats for c in callbacks]


def test_equal_the_float64_sum_rounded_once(tmp_path):
    (total, mean), _, _, _ = received(tmp_path, 1)
    stream = toy_stream(tasks=1, clients=CLIENTS, examples=120)
    weights = [stream.num_examples(0, client) for client in range(CLIENTS)]
    for name, like in sent_by(0).items():
        sent = [sent_by(client, 1)[name].double() for client in range(CLIENTS)]
        assert (
            torch.equal(total[name], sum(sent).to(like.dtype)) or name == "wide"
        )  # float64 sums differ in the last bit
        torch.testing.assert_close(total[name], sum(sent).to(like.dtype), rtol=1e-7, atol=0)
        weighted = sum(w * value for w, value in zip(weights, sent, strict=True)) / sum(weights)
        torch.testing.assert_close(mean[name], weighted.to(like.dtype), rtol=1e-6, atol=1e-6)
        assert total[name].dtype == mean[name].dtype == like.dtype
    assert total["count"] == 2.0


@pytest.mark.distributed
@pytest.mark.parametrize("silent", [(), tuple(range(10)), (3, 18)], ids=["all", "a whole rank", "some"])
def test_two_ranks_equal_one(silent, ranks, tmp_path):
    alone = received(tmp_path / "one", 1, silent)
    for rank in ranks.run(received, tmp_path / "two", 2, silent):
        for one, two in zip(alone[0], rank[0], strict=True):
            assert_same_bits(one, two)
        assert rank[1:] == alone[1:]


def test_order_and_slabs_do_not_matter():
    """The sum of many clients on one rank is that of two halves, and memory is one slab whatever their number."""
    callback = Sends()

    class Alone:
        world, rank = 1, 0

        def gather_json(self, value):
            return [value]

        def gather_nodes(self, nodes, like):
            return dict(nodes)

    uploads = Uploads([callback], Alone(), torch.device("cpu"))
    uploads.start(1000, range(1000))
    for client in range(1000):
        uploads.add(client, client, {callback.state_key: sent_by(client)}, 1.0)
    channel = uploads.channels[callback.state_key]
    assert channel._sum._slab.shape == (8, 18)
    assert len(channel._sum._nodes) < 12
    merged = uploads.merge({}, stats=type("Stats", (), {"task": 0, "round": 0, "clients": (), "total_clients": 1})())
    wanted = sum(sent_by(client)["wide"].double() for client in range(1000))
    torch.testing.assert_close(merged[callback.state_key]["wide"].double(), wanted, rtol=1e-6, atol=0.1)


def test_bytes_are_counted(tmp_path):
    plain = run(tmp_path / "plain", [])
    report = run(tmp_path / "sends", [Sends(silent=(0, 1)), Sends("sum", "boundary")])
    sent, served = 4 * 12 + 2 * 5 + 4, 4 * 12 + 2 * 5 + 4 + 4
    assert report.bytes_up - plain.bytes_up == 2 * (CLIENTS - 2) * sent + CLIENTS * sent  # and the boundary pass
    assert report.bytes_down - plain.bytes_down == CLIENTS * served  # there is nothing to get in the first round


def test_the_server_side_sees_the_round(tmp_path):
    train, boundary = Sends(), Sends("mean", "boundary")
    run(tmp_path, [train, boundary], clients_per_round=5)
    assert train.stats == [(0, 0, 5, CLIENTS), (0, 1, 5, CLIENTS)]
    assert boundary.stats == [(0, 2, CLIENTS, CLIENTS)]


def test_what_nobody_sends_stays(tmp_path):
    class Once(Sends):
        def upload(self, trainer):
            return sent_by(0) if trainer.round == 0 else {}

    once = Once()
    run(tmp_path, [once], rounds=3)
    assert [got["count"].item() for got in once.got] == [1.0] * (3 * CLIENTS)  # two rounds and the boundary pass


def test_clients_must_send_alike(tmp_path):
    class Odd(Sends):
        def upload(self, trainer):
            return {"x": torch.zeros(2 if trainer.client == 3 else 1)}

    with pytest.raises(FCLError, match=r"same names, shapes and dtypes on every client.*from client 0 and .*client 3"):
        run(tmp_path, [Odd()])


class Halves(ServerStep):
    def apply(self, params, delta, stats, state):
        return delta.mul_(0.5), state


class Brings(ContinualCallback):
    def server_rules(self):
        return [FedAvg("uniform"), Halves()]


def test_rules_that_a_callback_brings(tmp_path):
    def kinds(**options):
        return [type(rule).__name__ for rule in toy_trainer(tmp_path, **options).chain.rules]

    assert kinds(callbacks=[Brings()]) == ["FedAvg", "Halves"]
    assert toy_trainer(tmp_path, callbacks=[Brings()]).chain.reducer.weighting == "uniform"
    named = toy_trainer(tmp_path, callbacks=[Brings()], aggregator=Chain(FedAvg("samples"), Halves()))
    assert [type(rule).__name__ for rule in named.chain.rules] == ["FedAvg", "Halves", "Halves"]
    assert named.chain.reducer.weighting == "samples"
    assert kinds() == ["FedAvg"]

    class BringsToo(Brings):
        pass

    with pytest.raises(MisconfigurationError, match="reducer in first place"):
        toy_trainer(tmp_path, callbacks=[Brings(), BringsToo()])
    assert issubclass(FedAvg, Reducer)


def test_a_modules_own_callback_brings_no_rules(tmp_path):
    class Own(ToyModule):
        def configure_callbacks(self):
            return [Brings()]

    with pytest.raises(MisconfigurationError, match="must not return Brings, which has a part on the server"):
        toy_trainer(tmp_path).fit(make_toy(cls=Own), toy_stream())


@pytest.mark.parametrize("method", [SCAFFOLD(), SCAFFOLD("I"), FedDyn(0.1), FedCurv(0.01), EWC(1.0, shared=True)])
def test_personal_parameters_take_no_part(method, tmp_path):
    """What stays with the clients has no global value: nothing of it is sent, and no state of it is kept."""
    toy_trainer(tmp_path, payload="net.0.*", callbacks=[method]).fit(make_toy(), toy_stream(tasks=1))
    for tree in (server_tree(tmp_path)["downloads"], *client_states(tmp_path).values()):
        assert "net.0.weight" in str(tree) or not tree
        assert "net.2" not in str(tree)


class Refused(ContinualCallback):
    """Spoils the weights of one client in one round, after its callbacks have done their work."""

    def on_upload(self, trainer, pl_module, update):
        spoilt = trainer.client == 1 and trainer.global_round == 2
        return replace(update, num_examples=-1.0) if spoilt else update


@pytest.mark.filterwarnings("ignore:.*dropped")
@pytest.mark.parametrize("quorum", [1, 4])
@pytest.mark.parametrize("megabytes", [0, 64])
def test_what_the_server_did_not_use_leaves_no_trace_in_the_clients(megabytes, quorum, tmp_path):
    """After a refused update, and after a round below the quorum, the server's variate is still the mean of all."""
    options = {"rounds": 5, "clients_per_round": 4, "min_completed": quorum, "client_state_mb": megabytes}
    toy_trainer(tmp_path, callbacks=[SCAFFOLD(), Refused()], **options).fit(make_toy(), toy_stream(tasks=1))
    served = next(iter(server_tree(tmp_path)["downloads"].values()))
    states = [state["variate"] for state in client_states(tmp_path).values()]
    assert len(states) == 4
    for name, value in served.items():
        torch.testing.assert_close(value, sum(state[name] for state in states) / 4, rtol=1e-4, atol=1e-6)
