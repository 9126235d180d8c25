"""Which client trains on which training set in which stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.data import NaturalClients, TaskStream
from lightning_fcl.data.schedule import make_schedule
from tests.helpers.toy import toy_stream

TASKS = st.integers(1, 6)
CLIENTS = st.integers(1, 12)
SEEDS = st.integers(0, 1000)


def trains_on(stream, task, client):
    """The training sets whose examples the client's loader holds; each set has features of its own."""
    examples = [
        stream.train_loader(task, client).dataset[i][0].tolist() for i in range(stream.num_examples(task, client))
    ]
    sets = [[x.tolist() for x, _ in source.dataset] for source in stream._train]
    return sorted({number for number, members in enumerate(sets) for x in examples if x in members})


@given(tasks=TASKS, clients=CLIENTS, seed=SEEDS)
def test_hom_everyone_trains_on_task_j_in_stage_j(tasks, clients, seed):
    assert make_schedule("hom", tasks, clients, seed=seed) == tuple(((task,),) * clients for task in range(tasks))


@given(tasks=TASKS, clients=CLIENTS, seed=SEEDS)
def test_het_each_client_sees_each_task_once_and_tasks_are_even_in_each_stage(tasks, clients, seed):
    rows = make_schedule("het", tasks, clients, seed=seed)
    assert len(rows) == tasks
    for client in range(clients):
        assert sorted(row[client] for row in rows) == [(task,) for task in range(tasks)]
    for row in rows:
        holders = [row.count((task,)) for task in range(tasks)]
        assert max(holders) - min(holders) <= 1
    assert rows == make_schedule("het", tasks, clients, seed=seed)


def test_het_order_follows_the_seed():
    assert len({make_schedule("het", 4, 8, seed=seed) for seed in range(10)}) == 10


@given(
    tasks=TASKS,
    clients=CLIENTS,
    seed=SEEDS,
    lag=st.floats(0, 1, exclude_max=True),
    kind=st.sampled_from(["hom", "het"]),
)
def test_lag_the_same_clients_are_one_stage_behind(tasks, clients, seed, lag, kind):
    on_time = make_schedule(kind, tasks, clients, seed=seed)
    rows = make_schedule(kind, tasks, clients, lag=lag, seed=seed)
    assert rows[0] == on_time[0]
    behind = [c for c in range(clients) if any(rows[t][c] != on_time[t][c] for t in range(tasks))]
    assert len(behind) == (min(round(lag * clients), clients - 1) if tasks > 1 else 0)
    for stage in range(1, tasks):
        for client in range(clients):
            assert rows[stage][client] == on_time[stage - (client in behind)][client]


def test_a_table_is_taken_as_it_is():
    assert make_schedule([[0, (1, 2), ()]], tasks=3, clients=3) == (((0,), (1, 2), ()),)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("both", {}, "`schedule` must be 'hom', 'het' or a table by stage and client, got 'both'"),
        ([], {}, "`schedule` must hold at least one stage, got none"),
        ([[0, 1]], {}, r"`schedule\[0\]` must hold an entry for each of 3 clients, got 2"),
        ([[0, 0, 0], [0, 2, -1]], {}, r"`schedule\[1\]` must name training sets from 0 to 1, got \[-1, 2\]"),
        ([[0, 0, (1, 1)]], {}, r"`schedule\[0\]` must name a training set once per client"),
        ("hom", {"lag": 1.0}, r"`lag` must be a share of the clients in \[0, 1\), got 1\.0"),
        ("hom", {"lag": float("nan")}, "`lag` must be a share"),
    ],
)
def test_malformed_schedules(schedule, options, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(schedule, 2, 3, **options)
    with pytest.raises(ValueError, match=message):
        toy_stream(tasks=2, clients=3).stages(schedule, **options)


def test_stream_trains_each_client_on_what_the_schedule_says():
    stream = toy_stream(tasks=3, clients=4)
    streams = [stream, stream.stages("het"), stream.stages(lag=0.5), stream.stages([[0, (0, 2), (), 1], [2, 1, 0, 0]])]
    for one in streams:
        for stage, row in enumerate(one.plan.schedule):
            assert one.clients(stage) == [client for client, entry in enumerate(row) if entry]
            for client in one.clients(stage):
                assert trains_on(one, stage, client) == list(row[client])


def test_stages_keep_the_owners_and_leave_the_stream_alone():
    stream = toy_stream(tasks=3, clients=4)
    before = stream.plan.hash
    het = stream.stages("het")
    assert het.plan.parts is stream.plan.parts
    assert het.plan.hash != before == stream.plan.hash
    assert het.stages("hom").plan.hash == before


def test_seen():
    stream = toy_stream(tasks=3, clients=4)
    assert [stream.seen(stage) for stage in range(3)] == [(0,), (0, 1), (0, 1, 2)]
    assert [stream.stages("het").seen(stage) for stage in range(3)] == [(0, 1, 2)] * 3
    assert [stream.stages(lag=0.5).seen(stage) for stage in range(3)] == [(0,), (0, 1), (0, 1, 2)]
    table = stream.stages([[2, 2, (), ()], [2, (), 0, ()], [(), (), (), ()], [1, 1, 1, 1]])
    assert len(table) == 4
    assert table.names == ("task_0", "task_1", "task_2")
    assert [table.seen(stage) for stage in range(4)] == [(2,), (0, 2), (0, 2), (0, 1, 2)]
    assert table.clients(2) == []


def test_a_set_that_nobody_scheduled_holds_is_not_seen():
    data = [[0.0, 0]] * 2
    ids = NaturalClients([[0, 0], [1, 1]])
    stream = TaskStream.from_datasets([data, data], [data, data], clients=2, partition=ids)
    assert [stream.clients(stage) for stage in range(2)] == [[0], [1]]
    swapped = stream.stages([[1, 0], [0, 1]])
    assert [swapped.clients(stage) for stage in range(2)] == [[], [0, 1]]
    assert [swapped.seen(stage) for stage in range(2)] == [(), (0, 1)]
