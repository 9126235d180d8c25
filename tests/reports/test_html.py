"""report.html: one file that holds everything, asks nobody, and believes no text of the run."""

import base64

import pytest

from lightning_fcl.reports import RunReport
from tests.helpers.reports import HOSTILE, NAN, Page, make_report

FAILURES = f"""global_round,task,round,client,phase,reason,detail
0,0,0,10,train,exception,"{HOSTILE.replace('"', '""')}"
1,0,1,2,train,exception,again
1,0,1,3,guard,non_finite,weight
"""
TIMING = """global_round,seconds,train,aggregate,evaluate,commit
0,2.0,1.5,0.1,0.2,0.1
1,2.0,0.5,0.1,0.2,0.1
"""


@pytest.fixture
def report(tmp_path):
    (tmp_path / "failures.csv").write_text(FAILURES)
    (tmp_path / "timing.csv").write_text(TIMING)
    return make_report(
        tmp_path, names=["plain", HOSTILE], method=HOSTILE, score=HOSTILE, config={"k": HOSTILE}, wall_seconds=75
    )


@pytest.fixture
def page(report):
    report.save()
    return Page((report.run_dir / "report.html").read_text())


def test_it_asks_no_server_and_runs_no_script(page):
    page.assert_self_contained()


def test_hostile_text_is_shown_as_it_is(page):
    assert page.text.count(HOSTILE) >= 5  # title, heading, column, score, first detail of a failure


def test_the_curves_are_inside(page, report):
    pictures = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    drawn = (report.run_dir / "curves.png").read_bytes()
    assert [base64.b64decode(picture.partition(",")[2]) for picture in pictures] == [drawn]


def test_it_tells_the_figures_of_the_run(page):
    for text in ("72.5", "-20.0", "1 min 15 s", "80.0", "85.0"):
        assert text in page.texts
    assert "NaN" not in page.text


def test_failures_are_grouped_by_reason_and_the_most_frequent_is_first(page):
    table = page.texts[page.texts.index("Failures") :]
    cells = [text for text in table if text.strip()]
    assert cells[1:13] == [
        *("reason", "clients", "rounds", "first detail"),
        *("2x exception", "2, 10", "0 to 1", HOSTILE),
        *("1x non_finite", "3", "1 to 1", "weight"),
    ]


def test_times_add_up(page):
    table = page.texts[page.texts.index("Time") :]
    cells = [text for text in table if text.strip()]
    assert cells[5:9] == ["all", "4.00 s", "2.00 s", "100.0 %"]
    assert cells[9:13] == ["train", "2.00 s", "1.00 s", "50.0 %"]
    assert cells[29:33] == ["other", "1.20 s", "600 ms", "30.0 %"]


def test_a_run_without_tables_says_so(tmp_path):
    make_report(tmp_path, [[NAN]]).save()
    page = Page((tmp_path / "report.html").read_text())
    assert "None." in page.texts
    assert "Not measured." in page.texts


def test_a_notebook_shows_the_matrix(report):
    fragment = Page(report._repr_html_())
    fragment.assert_self_contained()
    assert {"80.0", "5.0", "60.0", "85.0"} <= set(fragment.texts)


def test_drawing_anew_gives_the_same_page(report):
    report.save()
    first = (report.run_dir / "report.html").read_bytes()
    RunReport.load(report.run_dir).save()
    assert (report.run_dir / "report.html").read_bytes() == first
