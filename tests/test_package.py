"""What makes the repository installable: pins, extras, licence, Makefile, and nothing of one machine in it."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"

OF_ONE_MACHINE = re.compile(r"(?<![\w.])/(?:root|home|work|Users)/|pypi[.]org|pythonhoste[d]|download[.]pytorch")

STUB_PYTHON = """#!/bin/sh
echo "$@" >>"$LOG"
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


def tracked():
    """Files of the repository: what git tracks, or all files where there is no git."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listing.stdout.split("\0")[:-1] if listing.returncode == 0 else map(str, ROOT.rglob("*"))
    return [path for path in (ROOT / name for name in names) if path.is_file()]


def test_pins_are_exact_sorted_and_name_no_build():
    pins = [re.fullmatch(r"([a-z0-9-]+)==([0-9.]+)", line) for line in PINS]
    assert None not in pins
    names = [pin[1] for pin in pins]
    assert names == sorted(set(names))


def test_every_direct_dependency_is_pinned_inside_its_range():
    pins = dict(line.split("==") for line in PINS)
    for line in sum(EXTRAS.values(), PROJECT["dependencies"]):
        wanted = Requirement(line)
        if wanted.name != PROJECT["name"]:
            assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), line


def test_an_extra_that_an_error_recommends_exists():
    calls = [
        node
        for path in (ROOT / "lightning_fcl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "optional_import"
    ]
    named = {keyword.value.value for call in calls for keyword in call.keywords if keyword.arg == "extra"}
    assert named <= EXTRAS.keys()


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in (ROOT / "lightning_fcl").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_licence_is_the_unchanged_apache_text():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_the_changelog_knows_the_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[:2] in (["Unreleased"], ["Unreleased", PROJECT["version"]])


def test_nothing_of_one_machine_is_tracked():
    found = {}
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if hits := OF_ONE_MACHINE.findall(text):
            found[str(path.relative_to(ROOT))] = hits
    assert found == {}


@pytest.fixture
def make(tmp_path):
    """Runs a copy of the Makefile, in a folder with a space, on a Python that only notes what it is asked to do."""
    place, log, stub = tmp_path / "a checkout", tmp_path / "log", tmp_path / "python"
    place.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place)
    stub.write_text(STUB_PYTHON)
    stub.chmod(0o755)

    def run(target):
        log.write_text("")
        command = ["make", target, f"PYTHON={stub}"]
        subprocess.run(command, cwd=place, env={**os.environ, "LOG": str(log)}, check=True, capture_output=True)
        return log.read_text().splitlines()

    run.place = place
    return run


def test_make_installs_once_and_again_when_the_pins_change(make):
    environment, install, tests = make("test")
    assert environment == "-m venv .venv"
    assert install.startswith("-m pip install")
    assert install.endswith("-c constraints.txt -e .[dev]")
    assert tests == "-m pytest -n auto --dist loadfile"
    assert make("test") == [tests]
    os.utime(make.place / "constraints.txt", (2**31, 2**31))
    assert make("test") == [environment, install, tests]


def test_make_demo_runs_the_recipe_on_its_own_data(make):
    _, install, recipe = make("demo")
    assert install.endswith("-e .[recipes]")
    script, *arguments = recipe.split()
    assert script == "recipes/fcit_llava.py"
    assert arguments[-2:] == ["--out", "runs/demo"]
    known = re.findall(r"^    (\w+): .* = ", (ROOT / script).read_text(), re.MULTILINE)
    assert {option.removeprefix("--").replace("-", "_") for option in arguments[::2]} <= set(known)


def test_make_lint_checks_style_format_and_types(make):
    assert make("lint")[2:] == ["-m ruff check .", "-m ruff format --check .", "-m mypy"]


@pytest.mark.parametrize("script", ["run", "check_wheel"])
def test_the_ci_scripts_parse(script):
    subprocess.run(["bash", "-n", ROOT / ".ci" / script], check=True)
