import importlib.util
import os
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from lightning_fcl.testing import RankPool, run_on_ranks

pytestmark = pytest.mark.distributed


@dataclass
class Point:
    x: float


def where(*args):
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.getpid(), args


def total(point):
    value = torch.tensor([point.x + dist.get_rank()])
    dist.all_reduce(value)
    return Point(value.item())


def fabric_facts():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return fabric.global_rank, fabric.world_size, fabric.all_reduce(torch.tensor(float(fabric.global_rank))).item()


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise KeyError("lost")


def fail_while_the_other_waits():
    if dist.get_rank() == 1:
        raise ValueError("no good")
    dist.barrier()


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def fail_oddly():
    raise OddError(1, 2)


def sleep(seconds):
    time.sleep(seconds)


def die():
    os._exit(3)


def test_a_pool_keeps_its_processes_between_calls(ranks):
    first, second = ranks.run(where, 1, "two"), ranks.run(where)
    assert [answer[:3] for answer in first] == [(0, 2, 1), (1, 2, 1)]
    assert first[0][4] == (1, "two")
    assert [answer[3] for answer in first] == [answer[3] for answer in second]


def test_arguments_and_results_may_be_of_the_test_modules_own_classes(ranks):
    assert ranks.run(total, Point(1.5)) == [Point(4.0), Point(4.0)]


def test_fabric_joins_the_group(ranks):
    assert ranks.run(fabric_facts) == [(0, 2, 0.5), (1, 2, 0.5)]


def test_the_original_error_returns_with_rank_and_traceback(ranks):
    before = ranks.run(where)
    with pytest.raises(KeyError, match="lost") as caught:
        ranks.run(fail_on_rank_one)
    (note,) = caught.value.__notes__
    assert note.startswith("Raised on rank 1:")
    assert "in fail_on_rank_one" in note
    assert ranks.run(where) == before, "an error that no rank waits on must not cost the pool"


def test_an_error_that_cannot_travel_is_still_told(ranks):
    with pytest.raises(RuntimeError, match="Rank 0 failed") as caught:
        ranks.run(fail_oddly)
    assert "OddError: 1" in caught.value.__notes__[0]


def test_a_function_of_a_file_that_cannot_be_imported_is_found(ranks, tmp_path, monkeypatch):
    file = tmp_path / "odd-name.py"
    file.write_text("def answer(x):\n    return x + 1\n")
    spec = importlib.util.spec_from_file_location("no.such.package.odd", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert ranks.run(module.answer, 1) == [2, 2]


def test_a_function_without_a_name_in_a_module_is_refused(ranks):
    with pytest.raises(ValueError, match=r"`fn` must be a function at the top level of a module, got .*lambda"):
        ranks.run(lambda: 0)


@pytest.mark.parametrize(("arguments", "message"), [({"world_size": 0}, "`world_size`"), ({"timeout": 0}, "`timeout`")])
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        RankPool(**arguments)


def test_run_on_ranks_is_a_pool_for_one_call():
    assert [answer[:2] for answer in run_on_ranks(where, world_size=1)] == [(0, 1)]


def test_a_late_call_kills_the_pool_and_the_next_call_gets_a_new_one():
    with RankPool(1) as pool:
        with pytest.raises(TimeoutError, match=r"Ranks \[0\] did not answer within 0\.2 s\. The pool was killed\."):
            pool.run(sleep, 60, timeout=0.2)
        with pytest.raises(RuntimeError, match="Rank 0 died with exit code 3 before it answered"):
            pool.run(die)


@pytest.mark.slow
def test_a_rank_that_waits_for_a_failed_one_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("lightning_fcl.testing.pool._GRACE", 0.5)
    with RankPool(2) as pool:
        before = [answer[3] for answer in pool.run(where)]
        with pytest.raises(ValueError, match="no good"):
            pool.run(fail_while_the_other_waits)
        after = [answer[3] for answer in pool.run(where)]
    assert not set(before) & set(after)
