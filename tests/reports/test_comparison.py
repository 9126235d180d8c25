"""Comparison: mean and standard deviation over seeds, and what makes a table unfair."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fcl.reports import Comparison, PublishedTable, RunReport, compare
from tests.helpers.reports import HOSTILE, NAN, Page, config_of, make_report

SCORES = st.lists(st.floats(0, 1), min_size=2, max_size=6)
PAPER = PublishedTable(
    source="A Paper, table 1", url="https://example.org", data="their data", rows={"EWC": {"acc": 0.5}}
)


def runs_of(accuracies, method="FedAvg", **options):
    return [make_report(f"run{s}", [[a]], method=method, seed=s, **options) for s, a in enumerate(accuracies)]


def slow_mean_and_std(values):
    """Sample mean and sample standard deviation, as a textbook writes them."""
    total = 0.0
    for value in values:
        total += value
    mean, squares = total / len(values), 0.0
    for value in values:
        squares += (value - mean) ** 2
    return mean, math.sqrt(squares / (len(values) - 1))


@given(SCORES)
def test_mean_and_standard_deviation_over_seeds(accuracies):
    found = compare(runs_of(accuracies)).statistics("FedAvg")["acc"]
    assert found == pytest.approx(slow_mean_and_std(accuracies), abs=1e-12)


@given(SCORES)
def test_the_order_of_the_runs_does_not_matter(accuracies):
    runs = runs_of(accuracies)
    assert compare(runs).statistics("FedAvg")["acc"] == compare(runs[::-1]).statistics("FedAvg")["acc"]


def test_scores_per_evaluation_set_are_those_after_the_last_stage():
    runs = [make_report("run", [[0.9, 0.1], [last, 0.8]], seed=seed) for seed, last in enumerate((0.2, 0.4))]
    scores = compare(runs).final_scores("FedAvg")
    assert scores["task_0"] == pytest.approx((0.3, math.sqrt(0.02)))
    assert scores["task_1"] == pytest.approx((0.8, 0.0))


def test_one_run_has_no_deviation_and_a_missing_figure_no_mean():
    comparison = compare(runs_of([0.5]))
    mean, std = comparison.statistics("FedAvg")["acc"]
    assert mean == 0.5
    assert math.isnan(std)
    assert "±" not in str(comparison)
    assert all(math.isnan(value) for value in compare(runs_of([0.5, NAN])).statistics("FedAvg")["acc"])


def test_methods_stand_in_the_order_in_which_they_come_with_their_seeds():
    comparison = compare([*runs_of([0.5, 0.7], "EWC"), *runs_of([0.6, 0.6])])
    assert str(comparison).splitlines() == [
        "accuracy in %; mean ± standard deviation over seeds",
        "method  seeds          ACC  BWT  FWT          Avg  Forgetting  Worst drop",
        "EWC      0, 1  60.0 ± 14.1    -    -  60.0 ± 14.1           -           -",
        "FedAvg   0, 1   60.0 ± 0.0    -    -   60.0 ± 0.0           -           -",
        "",
        "runs: 2 of EWC, 2 of FedAvg",
    ]


def test_markdown_is_two_tables_and_a_list():
    assert compare(runs_of([0.5], "a|b")).markdown().splitlines() == [
        "accuracy in %",
        "",
        "| method | seeds | ACC | BWT | FWT | Avg | Forgetting | Worst drop |",
        "|:---|---:|---:|---:|---:|---:|---:|---:|",
        "| a\\|b | 0 | 50.0 | - | - | 50.0 | - | - |",
        "",
        "| method | seeds | task_0 |",
        "|:---|---:|---:|",
        "| a\\|b | 0 | 50.0 |",
        "",
        "- runs: 1 of a|b",
    ]


def test_the_page_is_self_contained_and_shows_hostile_text_as_it_is():
    page = Page(compare(runs_of([0.5, 0.7], HOSTILE, names=[HOSTILE], score=HOSTILE)).html())
    page.assert_self_contained()
    assert page.text.count(HOSTILE) >= 5
    assert {"60.0 ± 14.1", "run0", "run1"} <= set(page.texts)


def test_fair_runs_have_no_notes():
    runs = [make_report(f"{m}{s}", method=m, seed=s, config=config_of(plan=f"p{s}")) for m in "ab" for s in (0, 1)]
    assert compare(runs).notes == []


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"config": config_of(rounds=3)}, "b, seed 0: trainer.rounds is 3, elsewhere 2"),
        ({"config": config_of(plan="q")}, "b, seed 0: stream.plan is q, elsewhere a"),
        ({"config": config_of(clients=9)}, "b, seed 0: stream.clients is 9, elsewhere None"),
        ({"config": {}}, "b, seed 0: trainer.rounds is None, elsewhere 2"),
        ({"config": config_of(), "score": "val_f1"}, "b, seed 0: score is val_f1, elsewhere accuracy"),
        ({"config": config_of(), "seed": 5}, "the methods were run with different seeds"),
    ],
)
def test_an_unfair_run_is_flagged(change, note):
    runs = [make_report("a", method="a", config=config_of()), make_report("b", **{"method": "b", "seed": 0, **change})]
    comparison = compare(runs)
    assert note in comparison.notes
    assert f"* {note}" in str(comparison).splitlines()
    assert note in Page(comparison.html()).text
    if note.startswith("b, "):
        assert [row.split()[0] for row in str(comparison).splitlines()[2:4]] == ["a", "b*"]


def test_a_seed_that_occurs_twice_is_no_second_seed():
    assert compare([make_report("x"), make_report("y")]).notes == ["FedAvg: a seed occurs twice"]


def test_a_papers_figures_are_labelled_as_theirs():
    lines = str(compare(runs_of([0.25]), PAPER)).splitlines()
    assert lines[3].split() == ["EWC", "(paper)", "-", "50.0", "-", "-", "-", "-", "-"]
    assert lines[-1] == "(paper): theirs, on other data (their data): A Paper, table 1, https://example.org"


def test_folders_are_searched_and_each_run_counts_once(tmp_path):
    for method in ("EWC", "FedAvg"):
        for seed in (0, 1):
            make_report(tmp_path / "all" / method / f"seed{seed}", method=method, seed=seed).save()
    comparison = compare([tmp_path / "all" / "FedAvg", tmp_path / "all"])
    assert {method: len(runs) for method, runs in comparison.methods.items()} == {"FedAvg": 2, "EWC": 2}
    assert compare(str(tmp_path / "all" / "EWC" / "seed0")).runs[0].method == "EWC"


def test_loaded_runs_compare_like_those_in_memory(tmp_path):
    run = make_report(tmp_path, config=config_of(names=("a", "b")))
    run.save()
    assert compare([run, tmp_path]).notes == ["FedAvg: a seed occurs twice"]
    assert str(compare(RunReport.load(tmp_path))) == str(compare(run))


def test_save_writes_both_files(tmp_path):
    comparison = compare(runs_of([0.5, 0.7]))
    page = comparison.save(tmp_path / "new" / "folder")
    assert page.read_text() == comparison.html()
    assert (page.parent / "comparison.md").read_text() == comparison.markdown()


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"`run_dirs` must hold report\.json, got"):
        compare([tmp_path])
    with pytest.raises(ValueError, match="`runs` must hold at least one run, got none"):
        Comparison(())
