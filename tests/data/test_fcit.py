import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lightning_fcl.data.drawn_instructions import DRAWN_TASKS
from lightning_fcl.data.fcit import FCIT_PRESET, HET, fcit_stream, general_rows
from lightning_fcl.data.instructions import row_problem
from lightning_fcl.exceptions import DatasetError

REAL = Path(os.environ.get("FCL_DATA", "nowhere")) / "visual_instruction"
SMALL = {"train_size": 60, "test_size": 5}


def test_the_preset_is_that_of_the_paper():
    assert FCIT_PRESET == {"clients": 50, "clients_per_round": 5, "rounds": 10}


def test_hom_task_related_has_eight_stages_and_skewed_sizes():
    stream = fcit_stream(beta=0.5, **SMALL)
    assert stream.names == tuple(DRAWN_TASKS)[:8]
    assert [len(stream), stream.num_clients] == [8, 50]
    assert all(len(set(row)) == 1 for row in stream.plan.schedule)
    sizes = [stream.num_examples(0, client) for client in range(50)]
    assert min(sizes) >= 1
    assert sum(sizes) == 60


def test_beta_makes_sizes_even():
    def spread(beta):
        stream = fcit_stream(beta=beta, tasks=["odd"], train_size=300, test_size=1)
        return np.std([stream.num_examples(0, client) for client in range(50)])

    assert spread(0.5) > spread(1.0) > spread(5.0)


def test_het_follows_the_benchmarks_table():
    stream = fcit_stream("het", **SMALL)
    for stage, row in enumerate(stream.plan.schedule):
        held = Counter(entry[0] for entry in row)
        assert held == {task: 10 * count for task, count in Counter(HET["task"][stage]).items()}
    assert stream.seen(0) == (1, 2, 4, 5, 6)


def test_het_with_other_sets_goes_round():
    stream = fcit_stream("het", tasks=["odd", "box"], clients=4, **SMALL)
    assert all(Counter(row) == {(0,): 2, (1,): 2} for row in stream.plan.schedule)


@pytest.mark.parametrize(("scenario", "seen"), [("hom", (0,)), ("het", (0, 1, 3))])
def test_capability_related_has_four_groups_of_three_tasks(scenario, seen):
    stream = fcit_stream(scenario, "capability", clients=10, **SMALL)
    assert stream.names == ("general", "chart", "math", "other")
    assert stream.seen(0) == seen
    assert Counter(row["task"] for batch in stream.eval_loader(3) for row in batch) == {
        "caption": 5,
        "box": 5,
        "reading": 5,
    }


def test_label_skew_skews_answers():
    stream = fcit_stream(beta=0.5, skew="label", tasks=["parity"], clients=4, train_size=200, test_size=1)
    shares = []
    for client in range(4):
        answers = Counter(row["answer"] for batch in stream.train_loader(0, client) for row in batch)
        shares.append(answers["even"] / answers.total())
    assert max(shares) - min(shares) > 0.3


def test_batches_are_lists_of_rows():
    batch = next(iter(fcit_stream(clients=2, batch_size=7, **SMALL).train_loader(3, 0)))
    assert len(batch) == 7
    assert {row["metric"] for row in batch} == {"rouge"}


def test_general_rows_are_sound():
    rows = general_rows(20)
    assert [row_problem(row) for row in rows] == [None] * 20
    assert len({row["task"] for row in rows}) > 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "mixed"}, "`scenario` must be 'hom' or 'het', got 'mixed'"),
        ({"skew": "size"}, "`skew` must be 'quantity' or 'label', got 'size'"),
        ({"beta": 0.0}, "`alpha` must be above 0"),
        (
            {"setting": "capability", "groups": {"all": ["smell"]}},
            "`groups` must name tasks that there are .*got 'smell'",
        ),
        ({"data_dir": "nowhere"}, "`data_dir` must hold train.jsonl in a folder for each of the tasks, got"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((ValueError, DatasetError), match=message):
        fcit_stream(**SMALL | arguments)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs $FCL_DATA/visual_instruction")
def test_six_real_tasks():
    stream = fcit_stream(data_dir=REAL, clients=5, train_size=20, test_size=3)
    assert set(stream.names) == {"easyvqa", "iconqa", "imagenette", "nlvr", "puzzlevqa", "scienceqa"}
    grouped = fcit_stream("het", "capability", data_dir=REAL, clients=6, train_size=20, test_size=3)
    assert grouped.names == ("general", "math", "other")
    assert next(iter(grouped.eval_loader(1)))[0]["image"].mode == "RGB"
