"""Work per round does not grow with the number of clients: calls are counted, nothing is timed."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from lightning_fcl.callbacks import SCAFFOLD
from lightning_fcl.data.stream import TaskStream
from lightning_fcl.federated.client_store import ClientStore
from tests.helpers.toy import make_toy, toy_stream, toy_trainer


def count(monkeypatch, owner, name):
    """Counts calls of a method from here on."""
    calls, original = [], getattr(owner, name)
    monkeypatch.setattr(
        owner, name, lambda self, *args, **kwargs: calls.append(name) or original(self, *args, **kwargs)
    )
    return calls


def test_a_round_asks_for_sampled_clients_only(tmp_path, monkeypatch):
    asked = []
    for clients in (6, 60):
        stream = toy_stream(tasks=1, clients=clients, examples=240)
        calls = count(monkeypatch, TaskStream, "_sources_of")
        toy_trainer(tmp_path / str(clients), rounds=3, clients_per_round=2).fit(make_toy(), stream)
        asked.append(len(calls))
    assert 0 < min(asked) <= max(asked) <= 3 * 2 * 2  # rounds, clients of a round, their number of examples and loader


def test_a_commit_opens_the_folders_of_clients_that_changed(tmp_path, monkeypatch):
    """After ten rounds 20 clients have a state; a commit looks at those of the rounds that its checkpoints hold."""
    opened = []
    original = Path.glob

    def glob(self, pattern, **options):
        if self.parent.name == "clients":
            opened.append(self.name)
        return original(self, pattern, **options)

    monkeypatch.setattr(Path, "glob", glob)
    options = {"rounds": 10, "clients_per_round": 2, "callbacks": [SCAFFOLD()], "keep_checkpoints": 2}
    toy_trainer(tmp_path, **options).fit(make_toy(), toy_stream(tasks=1, clients=40, examples=160))
    with_state = list(original(tmp_path / "clients", "client_*"))
    assert len(with_state) > 12
    assert len(opened) <= 10 * 2 * 3  # each round's two clients, and those of the two commits before it


def test_files_of_a_killed_process_are_swept_once(tmp_path):
    folder = tmp_path / "clients"
    store = ClientStore(folder, budget_bytes=1 << 20)
    store.put(3, {"t": torch.ones(2)})
    store.put(5, {"t": torch.ones(2)})
    store.flush()
    again = ClientStore(folder, budget_bytes=1 << 20)  # resumed from a commit that knows of client 5 alone
    again.prune([{5: 0}])
    assert [path.name for path in sorted(folder.glob("*/*"))] == ["round_000000.safetensors"]
    assert list(folder.glob("client_000005/*"))


def test_a_version_stays_as_long_as_a_checkpoint_needs_it(tmp_path):
    store = ClientStore(tmp_path, budget_bytes=1 << 20)
    store.prune([])
    for value in range(3):
        store.put(0, {"t": torch.full((2,), float(value))})
        store.versions.update(store.flush())
        store.touch([0])
        store.prune([store.versions, {0: max(0, value - 1)}])
    assert {path.name for path in tmp_path.glob("*/*")} == {"round_000001.safetensors", "round_000002.safetensors"}
    store.prune([store.versions])  # nobody was touched since, but the client had two files
    assert {path.name for path in tmp_path.glob("*/*")} == {"round_000002.safetensors"}


@pytest.mark.parametrize("budget", [0, 100, 1 << 20])
def test_the_cache_keeps_its_books(tmp_path, budget):
    store = ClientStore(tmp_path, budget_bytes=budget)
    for turn in range(3):
        for client in range(6):
            if store.get(client) is not None and client % 2:
                store.discard(client)
            store.put(client, {"t": torch.full((client + 1,), float(turn))})
        store.versions.update(store.flush())
        held = sum(4 * (client + 1) for client in store._cache)
        assert store._cached_bytes == held <= max(budget, 0)
        assert store._changed_bytes == 0
    assert [store.get(client)["t"].tolist() for client in range(6)] == [[2.0] * (c + 1) for c in range(6)]


def test_owners_are_those_with_data():
    stream = toy_stream(tasks=2, clients=4).stages([[0, 1, (), (0, 1)], [(), 0, 1, ()]])
    assert [stream.clients(task) for task in range(2)] == [[0, 1, 3], [1, 2]]
    stream.clients(0).append(99)  # a copy
    assert stream.clients(0) == [0, 1, 3]
    with pytest.raises(IndexError, match="`task` must be from 0 to 1, got 2"):
        stream.clients(2)


def test_the_bench_of_scale(tmp_path):
    """In this process, at a size of seconds; the doctor foretells the bytes exactly."""
    path = Path(__file__).resolve().parents[2] / "recipes" / "bench" / "scale.py"
    spec = importlib.util.spec_from_file_location("bench_scale", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)

    class Answers(list):
        put = list.append

    rows = Answers()
    threads = torch.get_num_threads()
    for clients in (10, 40):
        bench.run(clients, 3, rows)
    torch.set_num_threads(threads)
    assert json.dumps(rows)
    for row in rows:
        assert row["MB sent"] == row["MB foretold"] > 0
    assert rows[1]["plan MB"] > rows[0]["plan MB"]
