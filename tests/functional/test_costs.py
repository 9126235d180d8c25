import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.functional import (
    Traffic,
    exact_mean_bytes,
    link_seconds,
    run_traffic,
    sharded_memory,
)

counts = st.integers(0, 10**9)


@given(down=counts, up=counts, clients=st.integers(0, 100), rounds=st.integers(0, 100))
def test_traffic_adds_up_client_by_client(down, up, clients, rounds):
    one = [(down, up) for _ in range(rounds) for _ in range(clients)]
    assert run_traffic(Traffic(down, up), clients, rounds) == (sum(d for d, _ in one), sum(u for _, u in one))


@given(down=counts, up=counts, clients=st.integers(1, 100), rounds=st.integers(1, 100), mbit=st.floats(0.1, 1e5))
def test_links_are_bits_over_speed_and_the_server_serves_all(down, up, clients, rounds, mbit):
    seconds = link_seconds(Traffic(down, up), clients, rounds, mbit)
    assert math.isclose(seconds.client * mbit * 1e6, (down + up) * 8 * rounds, rel_tol=1e-9)
    assert math.isclose(seconds.server, clients * seconds.client, rel_tol=1e-9)


@given(size=st.integers(0, 10**9), slabs=st.integers(1, 10**6))
def test_memory_of_the_mean_grows_by_one_node_when_clients_double(size, slabs):
    grown = exact_mean_bytes(size, 4, 16 * slabs) - exact_mean_bytes(size, 4, 8 * slabs)
    assert grown == 8 * size


@given(
    sizes=st.tuples(counts, counts, counts, counts),
    stage=st.integers(0, 3),
    devices=st.integers(1, 64),
)
def test_shards_hold_everything_once(sizes, stage, devices):
    share = sharded_memory(*sizes, stage=stage, devices=devices)
    for part, (whole, cut_from) in zip(share, [(sizes[0] + sizes[1], 3), (sizes[2], 2), (sizes[3], 1)], strict=True):
        ranks = devices if stage >= cut_from else 1
        assert whole <= part * ranks < whole + ranks


def test_the_example_of_the_zero_paper():
    """Figure 1: 7.5 billion parameters on 64 devices, 16-bit weights and gradients, K = 12: 31.4, 16.6 and 1.9 GB."""
    count = 7_500_000_000
    sizes = [sum(sharded_memory(0, 2 * count, 2 * count, 12 * count, stage=s, devices=64)) / 1e9 for s in (1, 2, 3)]
    assert [round(size, 1) for size in sizes] == [31.4, 16.6, 1.9]


@pytest.mark.parametrize(
    "call",
    [
        lambda: run_traffic(Traffic(-1, 0), 1, 1),
        lambda: run_traffic(Traffic(0, 0), 1, -1),
        lambda: link_seconds(Traffic(1, 1), 1, 1, 0.0),
        lambda: link_seconds(Traffic(1, 1), 1, 1, math.nan),
        lambda: exact_mean_bytes(1, 4, 0),
        lambda: sharded_memory(1, 1, 1, 1, stage=4, devices=1),
        lambda: sharded_memory(1, 1, 1, 1, stage=3, devices=0),
    ],
)
def test_numbers_that_mean_nothing_are_refused(call):
    with pytest.raises(ValueError, match="`"):
        call()
