"""Metrics over the continual figures: the same numbers as the functions, on one rank and on two."""

import importlib
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from lightning_fcl import functional, metrics
from lightning_fcl.exceptions import MissingExtraError
from lightning_fcl.metrics import (
    AccuracyMatrix,
    AverageAccuracy,
    AverageScore,
    BackwardTransfer,
    Forgetting,
    ForwardTransfer,
    LastScore,
    RoundsToTarget,
    TopKMean,
    WorstDrop,
)

WORKED = torch.tensor([[80.0, 5.0, 2.0], [60.0, 85.0, 4.0], [50.0, 70.0, 90.0]], dtype=torch.float64)
BASELINE = torch.tensor([10.0, 8.0, 6.0], dtype=torch.float64)
FIGURES = [
    (AverageAccuracy, {}, 70.0),
    (LastScore, {}, 70.0),
    (AverageScore, {}, 74.166667),
    (BackwardTransfer, {}, -22.5),
    (ForwardTransfer, {}, 4.5),
    (ForwardTransfer, {"baseline": BASELINE}, -2.5),
    (WorstDrop, {}, -30.0),
    (Forgetting, {}, 22.5),
]
CURVE = [0.10, 0.30, 0.55, 0.52, 0.60, 0.62, 0.61, 0.65]


def fed(metric, rows=WORKED):
    for task, row in enumerate(rows):
        metric.update(task, row)
    return metric


@pytest.mark.parametrize(("cls", "options", "value"), FIGURES)
def test_each_figure_has_its_worked_value(cls, options, value):
    result = fed(cls(num_tasks=3, **options)).compute()
    assert result.dtype == torch.float64
    assert result.shape == ()
    assert result.item() == pytest.approx(value)


@pytest.mark.parametrize(("cls", "options", "value"), FIGURES)
def test_figures_survive_reset_pickle_and_clone(cls, options, value):
    metric = fed(cls(num_tasks=3, **options), rows=torch.zeros(3, 3))
    metric.reset()
    for other in (pickle.loads(pickle.dumps(metric)), metric.clone(), metric):
        assert fed(other).compute().item() == pytest.approx(value)


@pytest.mark.parametrize("cls", [AverageAccuracy, LastScore, AverageScore, BackwardTransfer, WorstDrop, Forgetting])
def test_an_unfinished_run_has_no_figure(cls):
    assert math.isnan(fed(cls(num_tasks=3), rows=WORKED[:2]).compute())


def test_better_points_where_the_figure_says():
    assert not Forgetting.higher_is_better
    assert not RoundsToTarget.higher_is_better
    assert all(cls.higher_is_better for cls in (AverageAccuracy, BackwardTransfer, WorstDrop, TopKMean))


def test_a_collection_reads_all_figures_from_one_row():
    collection = MetricCollection([AverageAccuracy(3), BackwardTransfer(3), Forgetting(3), WorstDrop(3)])
    for task, row in enumerate(WORKED):
        collection.update(task, row)
    values = {name: value.item() for name, value in collection.compute().items()}
    assert values == pytest.approx(
        {"AverageAccuracy": 70.0, "BackwardTransfer": -22.5, "Forgetting": 22.5, "WorstDrop": -30.0}
    )


def test_the_matrix_fills_cell_by_cell():
    matrix = AccuracyMatrix(num_tasks=2, num_columns=3)
    matrix.update(0, 0, 0.5)
    matrix.update(1, 2, torch.tensor(0.25))
    matrix.update(1, 1, math.nan)  # not measured
    expected = torch.tensor([[0.5, math.nan, math.nan], [math.nan, math.nan, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(matrix.compute(), expected, rtol=0, atol=0, equal_nan=True)


def test_scores_of_one_cell_are_averaged_by_examples():
    matrix = AccuracyMatrix(num_tasks=1)
    matrix.update(0, 0, 0.5, num_examples=30)
    matrix.update(0, 0, 1.0, num_examples=10)
    assert matrix.compute().item() == 0.625


def test_seen_says_what_counts_in_a_wide_matrix():
    seen = torch.tensor([[True, True, False], [True, True, True]])
    metric = AverageScore(num_tasks=2, num_columns=3, seen=seen)
    fed(metric, torch.tensor([[80.0, 60.0, math.nan], [60.0, 70.0, 20.0]]))
    assert metric.compute().item() == pytest.approx(60.0)


def test_curves():
    target, never = (RoundsToTarget(num_rounds=8, target=target) for target in (0.4, 0.5))
    best = TopKMean(num_rounds=8, k=2)
    for index, score in enumerate(CURVE):
        for metric in (target, never, best):
            metric.update(index, score)
    assert target.compute().item() == 6
    assert math.isnan(never.compute())
    assert best.compute().item() == pytest.approx((0.65 + 0.62) / 2)


def test_every_function_of_the_matrix_has_a_metric():
    for name in (
        "average_accuracy",
        "last_score",
        "average_score",
        "backward_transfer",
        "forward_transfer",
        "forgetting",
        "worst_drop",
        "top_k_mean",
        "rounds_to_target",
    ):
        assert hasattr(functional, name)
        assert "".join(part.capitalize() for part in name.split("_")) in vars(metrics), name


def one_rank_of_two():
    """Each rank evaluated its own share of the examples: 30 of them on rank 0, 10 on rank 1."""
    share = (30, 10)[dist.get_rank()]
    metric, matrix = AverageAccuracy(num_tasks=1, num_columns=2), AccuracyMatrix(num_tasks=2)
    metric.update(0, torch.tensor([0.5, 1.0]) + dist.get_rank() * 0.5, num_examples=share)
    matrix.update(1, dist.get_rank(), 0.1 * (1 + dist.get_rank()))
    return metric.compute().item(), matrix.compute()


@pytest.mark.distributed
def test_ranks_add_up(ranks):
    expected = torch.tensor([[math.nan, math.nan], [0.1, 0.2]], dtype=torch.float64)
    for value, matrix in ranks.run(one_rank_of_two):
        assert value == pytest.approx((0.5 * 30 + 1.0 * 10 + 1.0 * 30 + 1.5 * 10) / 80)
        torch.testing.assert_close(matrix, expected, rtol=0, atol=0, equal_nan=True)


def test_the_heat_map_shows_what_was_measured_and_only_that(tmp_path):
    matrix = AccuracyMatrix(num_tasks=2)
    matrix.update(0, 0, 0.875)
    matrix.update(1, 1, 0.5)
    figure, axes = matrix.plot(names=["usps", "svhn"])
    assert sorted(text.get_text() for text in axes.texts) == ["0.5", "0.875"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["usps", "svhn"]
    figure.savefig(tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").stat().st_size > 5_000
    assert matrix.plot(WORKED, ax=figure.add_subplot())[0] is figure
    with pytest.raises(ValueError, match="`names` must name 2 evaluation sets, got 1"):
        matrix.plot(names=["usps"])


def test_an_empty_heat_map_can_be_drawn(tmp_path):
    figure, axes = AccuracyMatrix(num_tasks=2).plot(torch.full((2, 2), math.nan))
    figure.savefig(tmp_path / "empty.png")
    assert not axes.texts


def test_every_figure_can_be_drawn():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    _, axes = fed(WorstDrop(num_tasks=3)).plot()
    assert axes.get_title() or axes.get_ylabel() or axes.lines
    plt.close("all")


@pytest.mark.parametrize("metric", [AccuracyMatrix(2), AverageAccuracy(2), TopKMean(2)], ids=lambda m: type(m).__name__)
def test_without_matplotlib_the_pip_line_is_named(metric, monkeypatch):
    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return original(name, *args, **kwargs)

    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(MissingExtraError, match=r"pip install 'lightning-fcl\[plot\]'"):
        metric.plot(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AccuracyMatrix(0), "A score table must have at least one row and one column, got 0 and 0"),
        (lambda: AccuracyMatrix(2).update(2, 0, 0.5), "got row 2 and column 0"),
        (lambda: AccuracyMatrix(2).update(-1, 0, 0.5), "got row -1 and column 0"),
        (lambda: AccuracyMatrix(2).update(0, 5, 0.5), "got row 0 and column 5"),
        (lambda: AccuracyMatrix(2).update(0, 0, torch.ones(2)), r"The scores must have shape \(\), got \(2,\)"),
        (lambda: AverageAccuracy(2).update(0, torch.ones(3)), r"The scores must have shape \(2,\), got \(3,\)"),
        (lambda: TopKMean(2).update(0, 0.5, num_examples=0), "`num_examples` must be positive, got 0"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
