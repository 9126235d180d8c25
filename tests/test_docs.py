"""The docs keep their word: every code block runs, every YAML is a valid configuration, every table is generated."""

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from lightning_fcl.reports.run_report import RunReport

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
KNOWN = {"python", "python no-run", "yaml", "yaml config", "bash", "text", "markdown", "console", "json", "toml"}


@dataclass(frozen=True)
class Block:
    info: str
    body: str
    line: int


def blocks(text, info=None):
    """The fenced blocks of a page, or those of one kind; a block inside a longer fence belongs to that fence."""
    found = [Block(m["info"].strip(), m["body"], text.count("\n", 0, m.start("body"))) for m in FENCE.finditer(text)]
    return [block for block in found if info in (None, block.info)]


def pages(info):
    found = [page for page in PAGES if blocks(page.read_text(), info)]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_blocks_say_what_they_are(page):
    assert {block.info for block in blocks(page.read_text())} <= KNOWN


@pytest.mark.parametrize("page", pages("python"))
def test_code_runs(page, monkeypatch):
    """All blocks of a page in one namespace; a traceback points into the page."""
    name = f"page_{page.stem.replace('-', '_').lower()}"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses and typed command lines look a class's module up
    for block in blocks(page.read_text(), "python"):
        exec(compile("\n" * block.line + block.body, page, "exec"), vars(module))


@pytest.mark.parametrize("page", pages("yaml config"))
def test_configurations_parse(page, monkeypatch, capsys):
    from lightning_fcl.cli import main

    for number, block in enumerate(blocks(page.read_text(), "yaml config")):
        path = Path(f"config_{number}.yaml")
        path.write_text(block.body)
        monkeypatch.setattr(sys, "argv", ["lightning-fcl", "fit", "--config", str(path), "--print_config"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code
        assert leaves(yaml.safe_load(block.body)) <= leaves(yaml.safe_load(capsys.readouterr().out))


def leaves(tree, path=()):
    """Every value of a tree with the keys that lead to it."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return set().union(*(leaves(value, (*path, key)) for key, value in items))
    return {(path, str(tree))}


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_what_their_results_say(tables, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def project(tmp_path):
    """A project with one card and three finished runs."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "card.md").write_text("# Card\n\n<!-- table: digits -->\n<!-- /table -->\n")
    for name, method, seed, last in [("a", "EWC", 0, 0.5), ("b", "EWC", 1, 0.7), ("c", "FedAvg", 0, 0.25)]:
        matrix = torch.tensor([[0.8, torch.nan], [last, 0.9]])
        report = RunReport(run_dir=tmp_path / name, method=method, accuracy=matrix, names=["x", "y"], seed=seed)
        report.run_dir.mkdir()
        content = {**report.to_dict(), "wall_seconds": 60.0, "versions": {"torch": "2.13.0"}}
        (report.run_dir / "report.json").write_text(json.dumps(content))
    return tmp_path


def collect(tables, project, *extra):
    runs = [str(project / name) for name in "abc"]
    return tables.main(["--root", str(project), "--collect", "digits", "--command", "python x.py", *runs, *extra])


def test_tables_hold_mean_and_deviation_over_seeds(tables, project):
    """ACC of EWC is 70 and 80: mean 75, sample deviation 10 / sqrt(2); its BWT is -30 and -10."""
    assert collect(tables, project) == 0
    lines = (project / "docs" / "card.md").read_text().splitlines()
    assert lines[2:5] == ["<!-- table: digits | python x.py -->", "`python x.py`", ""]
    assert lines[5].startswith("| method | ACC | BWT | last | avg |")  # no FWT: nobody measured it
    assert lines[7].startswith("| EWC | 75.0 ± 7.1 | -20.0 ± 14.1 |")
    assert lines[8].startswith("| FedAvg | 57.5 | -55.0 |")
    assert re.fullmatch(r"\*Mean .* over seeds 0, 1, in %, 3 min in all, commit \S+; torch 2.13.0\*", lines[10])
    assert lines[11] == "<!-- /table -->"


def test_figures_beside_a_report_come_along(tables, project):
    for name, score, rounds in [("a", 0.5, 12.0), ("b", 0.7, None), ("c", 0.25, 20.0)]:
        (project / name / "figures.json").write_text(json.dumps({"top5": score, "rounds to 0.5": rounds}))
    assert collect(tables, project) == 0
    lines = (project / "docs" / "card.md").read_text().splitlines()
    assert lines[5].startswith("| method | ACC % | BWT % |")
    assert lines[5].endswith("| best five rounds % | rounds to 0.5 |")
    assert lines[7].endswith("| 60.0 ± 14.1 | 12.0 |")
    assert lines[8].endswith("| 25.0 | 20.0 |")


def test_the_papers_own_row_is_told_apart_and_kept(tables, project):
    collect(tables, project)
    results = project / "docs" / "results" / "digits.json"
    theirs = [{"method": "EWC, their paper", "summary": {"acc": 0.9}}]
    results.write_text(json.dumps({**json.loads(results.read_text()), "columns": ["acc", "bwt"], "theirs": theirs}))
    collect(tables, project)
    assert "| *EWC, their paper* | *90.0* | *-* |" in (project / "docs" / "card.md").read_text().splitlines()


def test_check_fails_on_drift_and_changes_nothing(tables, project, capsys):
    collect(tables, project)
    assert tables.main(["--root", str(project), "--check"]) == 0
    card = project / "docs" / "card.md"
    edited = card.read_text().replace("75.0", "85.0")
    card.write_text(edited)
    assert tables.main(["--root", str(project), "--check"]) == 1
    assert "docs/card.md differ: run `python docs/make_tables.py`" in capsys.readouterr().out
    assert card.read_text() == edited
    assert tables.main(["--root", str(project)]) == 0
    assert "| EWC | 75.0" in card.read_text()


def test_a_table_in_a_code_fence_is_left_alone(tables, project):
    text = "```markdown\n<!-- table: NAME -->\n<!-- /table -->\n```\n"
    assert tables.fill(text, project) == text


def test_a_table_without_results_is_an_error(tables, project):
    collect(tables, project)
    (project / "docs" / "card.md").write_text("<!-- table: lost -->\n<!-- /table -->\n")
    with pytest.raises(SystemExit, match="must name a file of docs/results, got 'lost'; there are: digits"):
        tables.main(["--root", str(project), "--check"])


def test_runs_of_different_versions_do_not_mix(tables, project):
    report = project / "b" / "report.json"
    report.write_text(report.read_text().replace("2.13.0", "2.14.0"))
    with pytest.raises(SystemExit, match="must come from one set of versions"):
        collect(tables, project)
