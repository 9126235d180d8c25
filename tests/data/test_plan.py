"""The plan: its figures by hand, its JSON there and back, damage found by its hash, its picture."""

import json
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.data import LabelDirichlet, NaturalClients, PartitionPlan, TaskStream
from lightning_fcl.exceptions import DatasetError, MissingExtraError
from tests.helpers.partition import ten_classes


def labelled(size, seed=0):
    return [(0.0, int(label)) for label in ten_classes(size, seed)]


def by_ids(*ids, classes=True, **options):
    """A stream of one task whose example i belongs to client ``ids[i]`` and has label ``i % 2``."""
    data = [(0.0, i % 2) if classes else (0.0,) for i in range(len(ids))]
    labels = [[i % 2 for i in range(len(ids))]] if classes else None
    partition = NaturalClients(ids, **options)
    return TaskStream.from_datasets([data], [data], clients=max(ids) + 1, partition=partition, labels=labels)


def plan_of(**changes):
    fields = {
        "names": ("a",),
        "sizes": (4,),
        "parts": ((np.array([0, 2]), np.array([1, 3])),),
        "schedule": (((0,), (0,)),),
    }
    return PartitionPlan(**{**fields, **changes})


def skewed_plan(seed=0):
    data = [labelled(60), labelled(40, seed=1)]
    partition = LabelDirichlet(0.1, min_examples=5)
    stream = TaskStream.from_datasets(data, data, clients=5, partition=partition, seed=seed, names=["dawn", "dusk"])
    return stream.plan


def assert_equal_plans(first, second):
    assert first.hash == second.hash
    assert first.to_dict() == second.to_dict()
    for field in ("names", "sizes", "schedule", "partition", "seed", "moved", "classes", "counts"):
        assert getattr(first, field) == getattr(second, field)
    for one, other in zip(first.parts, second.parts, strict=True):
        assert [part.tolist() for part in one] == [part.tolist() for part in other]
        assert all(part.dtype == np.int64 for part in other)


def test_figures_by_hand():
    plan = by_ids(0, 0, 0, 1, 1, 0, 0, 0, 0, 0, min_examples=4).plan
    assert plan.moved == (2,)
    assert plan.deviation == 0.2  # two of ten examples moved
    assert [len(part) for part in plan.parts[0]] == [6, 4]
    assert plan.classes == (0, 1)
    assert np.sum(plan.counts[0], axis=0).tolist() == [5, 5]
    data = [labelled(10), labelled(30)]
    ids = NaturalClients([[0] * 9 + [1], [0, 1] * 15], min_examples=4)
    two = TaskStream.from_datasets(data, data, clients=2, partition=ids).plan
    assert (two.moved, two.deviation) == ((3, 0), 3 / 40)
    assert plan_of().deviation == 0.0


def test_counts_by_hand():
    plan = by_ids(0, 1, 1, 0, 0, 3).plan
    assert plan.counts == (((2, 1), (1, 1), (0, 0), (0, 1)),)
    assert plan.to_dict()["parts"] == [["0 3-4", "1-2", "", "5"]]


def test_unknown_labels_are_not_looked_up_for_the_counts():
    plan = by_ids(0, 1, 1, classes=False).plan
    assert plan.classes is None
    assert plan.counts is None


def test_the_hash_tells_plans_apart():
    plan = skewed_plan()
    assert plan.hash == skewed_plan().hash
    assert plan.hash.startswith("sha256:")
    assert len(plan.hash) == len("sha256:") + 64
    others = [skewed_plan(seed=1), plan.with_schedule("het"), plan.with_schedule("hom", lag=0.4)]
    assert len({plan.hash, *(other.hash for other in others)}) == 4


def thirds(examples, clients, rng, shift):
    return (np.arange(len(examples)) + shift) % 3


def test_functions_have_names_without_addresses():
    data = labelled(12)
    plans = [
        TaskStream.from_datasets([data], [data], clients=3, partition=partition).plan
        for partition in (partial(thirds, shift=1), partial(thirds, shift=1), lambda e, c, r: thirds(e, c, r, 0))
    ]
    assert plans[0].partition == "functools.partial(<function thirds>, shift=1)"
    assert plans[0].hash == plans[1].hash
    assert "<lambda>" in plans[2].partition


def test_round_trip(tmp_path):
    plan = skewed_plan().with_schedule([[0, 1, (0, 1), (), 1], [1, 0, (), (1, 0), 0]])
    path = plan.save(tmp_path / "new" / "plan.json")
    assert path == tmp_path / "new" / "plan.json"
    assert_equal_plans(plan, PartitionPlan.load(path))
    assert_equal_plans(plan, PartitionPlan.from_dict(json.loads(json.dumps(plan.to_dict()))))
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_round_trip_of_any_parts(ids):
    plan = by_ids(*ids).plan
    assert_equal_plans(plan, PartitionPlan.from_dict(plan.to_dict()))


def test_the_file_is_readable(tmp_path):
    plan = by_ids(0, 1, 1, 0, 0, 3).plan
    lines = plan.save(tmp_path / "plan.json").read_text().splitlines()
    assert f' "hash": "{plan.hash}",' in lines
    assert '   "0 3-4",' in lines  # a client's examples on a line of their own
    assert len(lines) < 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, r"must match its hash 'sha256:.*', got 'sha256:.*It was edited or damaged"),
        ({"names": ["dusk", "dawn"]}, "must match its hash"),
        ({"hash": "sha256:0"}, "must match its hash 'sha256:0'"),
        ({"version": 2}, "must be of version 1, got 2"),
        ({"format": "other"}, "must have the format 'lightning_fcl.partition_plan'. Was the file written by"),
        ({"parts": [["0-3"] * 5] * 2}, "damaged .DatasetError: `parts` of 'dawn' must give each of its 60 examples"),
        ({"parts": [["0-60"] * 5] * 2}, "damaged .ValueError: indices must lie between 0 and 59"),
        ({"parts": [["3-1"] * 5] * 2}, "damaged .ValueError: indices must lie"),
        ({"parts": [[[0, 1]]] * 2}, "damaged .AttributeError"),
        ({"sizes": None}, "damaged .TypeError.*Draw it again"),
        ({"schedule": [[7] * 5]}, "damaged .DatasetError: `schedule.0.` must name training sets from 0 to 1"),
    ],
)
def test_tampering_is_found(tmp_path, change, message):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**skewed_plan().to_dict(), **change}))
    with pytest.raises(DatasetError, match=message):
        PartitionPlan.load(path)


def test_one_moved_example_is_found(tmp_path):
    path = by_ids(0, 1, 1, 0, 0, 3).plan.save(tmp_path / "plan.json")
    path.write_text(path.read_text().replace('"0 3-4"', '"0 3"').replace('"5"', '"4-5"'))
    with pytest.raises(DatasetError, match=r"plan\.json: The plan must match its hash"):
        PartitionPlan.load(path)


def test_files_that_are_no_plan(tmp_path):
    with pytest.raises(
        DatasetError, match=r"`path` must be a plan that `plan.save` wrote, got no file .*missing\.json"
    ):
        PartitionPlan.load(tmp_path / "missing.json")
    for content in (b'{"format": ', b"\xff\xfe\x00"):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(DatasetError, match="`path` must hold JSON, got"):
            PartitionPlan.load(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DatasetError, match="must have the format"):
        PartitionPlan.load(tmp_path / "list.json")
    whole = skewed_plan().to_dict()
    del whole["counts"]
    with pytest.raises(DatasetError, match=r"damaged .KeyError: 'counts'"):
        PartitionPlan.from_dict(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ("a", "b")}, "must have one entry per training set, got 2, 1 and 1"),
        ({"sizes": (5,)}, "`parts` of 'a' must give each of its 5 examples to exactly one of 2 clients, got 4 entries"),
        ({"parts": ((np.array([0, 1]), np.array([1, 3])),)}, "each of its 4 examples to exactly one"),
        ({"schedule": ()}, "`schedule` must hold at least one stage"),
        ({"schedule": (((0,),),)}, "`schedule.0.` must hold an entry for each of 2 clients, got 1"),
    ],
)
def test_plans_that_are_none(changes, message):
    with pytest.raises(DatasetError, match=message):
        plan_of(**changes)


@pytest.mark.parametrize("classes", [True, False])
def test_plot(classes, tmp_path):
    import matplotlib
    from matplotlib.figure import Figure

    backend = matplotlib.get_backend()
    figure = by_ids(0, 1, 1, 0, 0, 3, classes=classes).plan.plot()
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    table = figure.axes[0].images[0].get_array().tolist()
    assert table == ([[2, 1], [1, 1], [0, 0], [0, 1]] if classes else [[3], [2], [0], [1]])
    assert matplotlib.get_backend() == backend
    if "matplotlib.pyplot" in sys.modules:
        assert figure not in map(
            sys.modules["matplotlib.pyplot"].figure, sys.modules["matplotlib.pyplot"].get_fignums()
        )


def test_plot_of_two_tasks():
    figure = skewed_plan().plot()
    assert [axis.get_title() for axis in figure.axes[:2]] == ["dawn", "dusk"]
    assert "deviation" in figure.get_suptitle()
    assert sum(image.get_array().sum() for axis in figure.axes[:2] for image in axis.images) == 100


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-fcl\[plot\]'"):
        skewed_plan().plot()
