"""The two figures: what they show, in numbers read back from the axes, and the run without matplotlib."""

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_fcl.reports import figures
from tests.helpers.reports import NAN, Page, make_report

METRICS = """global_round,task,round,phase,client/loss,task/task_0/val_acc,task/task_1/val_acc
0,0,0,train,1.0,0.5,
1,0,1,train,0.9,0.7,0.1
2,0,2,boundary,,0.7,0.1
3,1,0,train,0.8,0.6,0.4
"""


def rows_of(run_dir):
    from lightning_fcl.reports.files import read_table

    return read_table(run_dir / "metrics.csv")[1]


def pixels(path):
    image = pytest.importorskip("matplotlib.image").imread(path)
    return image[..., :3]


def test_both_are_written_and_not_blank(tmp_path):
    (tmp_path / "metrics.csv").write_text(METRICS)
    make_report(tmp_path).save()
    for name in ("accuracy.png", "curves.png"):
        picture = pixels(tmp_path / name)
        assert min(picture.shape[:2]) > 300
        assert 0.02 < (picture < 0.9).any(axis=2).mean() < 0.9


def test_the_heat_map_shows_the_matrix_in_percent(tmp_path):
    axes = figures.heat_map(make_report(tmp_path, [[0.8, NAN], [0.6, 0.85]])).axes[0]
    shown = axes.images[0].get_array()
    np.testing.assert_array_equal(np.ma.filled(shown, np.nan), [[80, np.nan], [60, 85]])
    assert [text.get_text() for text in axes.texts] == ["80.0", "60.0", "85.0"]
    assert [label.get_text().strip() for label in axes.get_xticklabels()] == ["task_0", "task_1"]


def test_many_tasks_get_no_numbers(tmp_path):
    axes = figures.heat_map(make_report(tmp_path, torch.rand(20, 20))).axes[0]
    assert list(axes.texts) == []


def test_the_curves_show_every_task_over_the_global_rounds(tmp_path):
    (tmp_path / "metrics.csv").write_text(METRICS)
    axes = figures.curves(make_report(tmp_path, score="val_acc"), rows_of(tmp_path)).axes[0]
    first, second, *starts = axes.lines
    np.testing.assert_allclose(first.get_xydata(), [(0, 50), (1, 70), (2, 70), (3, 60)])
    np.testing.assert_allclose(second.get_xydata(), [(1, 10), (2, 10), (3, 40)])
    assert [line.get_xdata()[0] for line in starts] == [-0.5, 2.5]  # where the tasks start


@pytest.mark.parametrize("tasks", [4, 8, 16, 31])
def test_marks_of_tasks_do_not_run_into_each_other(tmp_path, tasks):
    rows = [{"global_round": str(at), "task": str(at // 3), "task/task_0/val_acc": "0.5"} for at in range(3 * tasks)]
    figure = figures.curves(make_report(tmp_path, torch.rand(tasks, tasks), score="val_acc"), rows)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    assert len(boxes) == (tasks if tasks < 31 else 0)
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def test_without_scores_per_round_the_curves_follow_the_stages(tmp_path):
    axes = figures.curves(make_report(tmp_path), []).axes[0]
    np.testing.assert_allclose([line.get_ydata() for line in axes.lines], [(80, 60), (5, 85)])
    assert axes.get_xlabel() == "stage"


@pytest.mark.parametrize("name", ["_hidden", "$x_1$", "\\frac{", "x" * 200, "数字", "a\nb"])
def test_any_name_can_be_drawn(tmp_path, name):
    make_report(tmp_path, names=[name, "other"], method=name).save()
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_same_run_draws_the_same_bytes(tmp_path):
    drawn = [figures.draw(make_report(tmp_path)) for _ in range(2)]
    assert all(one == other for one, other in pairwise(drawn))


def test_without_matplotlib_a_warning_and_no_figures(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"no figures: .*pip install 'lightning-fcl\[plot\]'"):
        make_report(tmp_path).save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accuracy.csv", "report.html", "report.json"]
    page = Page((tmp_path / "report.html").read_text())
    assert [tag for tag, _ in page.tags if tag == "img"] == []
    assert "85.0" in page.texts


def test_a_run_with_subspaces_shows_which_answer_which_task(tmp_path):
    from lightning_fcl.reports.subspace_figure import activation_map, activation_matrix

    columns = "task/task_0/slot/0,task/task_1/slot/0,task/task_0/slot/1,task/task_1/slot/1"
    (tmp_path / "metrics.csv").write_text(
        f"global_round,task,round,phase,{columns}\n0,0,0,train,1.0,1.0,,\n1,1,0,train,0.9,0.2,0.1,0.8\n2,1,1,train,,,,\n"
    )
    report = make_report(tmp_path, [[0.8, NAN], [0.6, 0.85]])
    matrix = activation_matrix(report.names, rows_of(tmp_path))
    torch.testing.assert_close(matrix, torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    axes = activation_map(report, matrix).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.90", "0.10", "0.20", "0.80"]
    assert [label.get_text().strip() for label in axes.get_yticklabels()] == ["task_0", "task_1"]
    report.save()
    assert min(pixels(tmp_path / "subspaces.png").shape[:2]) > 300
    assert "Which subspaces answer which task" in (tmp_path / "report.html").read_text()
    assert activation_matrix(report.names, rows_of(tmp_path)[:0]) is None
