"""The house itself: exports, documentation, cards, who may import whom, and how long a file may be."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

from lightning_fcl.types import MethodCard

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "lightning_fcl"
STDLIB = sys.stdlib_module_names
NOBODYS_INVENTION = {  # arithmetic and interfaces, without a paper behind them
    "lightning_fcl.aggregators.base",
    "lightning_fcl.aggregators.router",
    "lightning_fcl.aggregators.rows",
    "lightning_fcl.functional.costs",
    "lightning_fcl.functional.distances",
    "lightning_fcl.functional.expand",
    "lightning_fcl.functional.mean",
    "lightning_fcl.functional.params",
}
ROOMS_BELOW_THE_LOOP = {"aggregators", "callbacks", "data", "functional", "metrics", "mixins", "mllm", "models"}


def sources(*folders, pattern="*.py"):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob(pattern))]


def each(name, paths):
    return pytest.mark.parametrize(name, [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths])


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exports(init):
    """``(module, name, alias)`` of each `from module import name as alias`, also where imports are lazy."""
    tree = ast.parse(init.read_text())
    lazy = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    nodes = [node for node in [*tree.body, *lazy] if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if str(node.module).startswith("lightning_fcl.")]
    return [(node.module, alias.name, alias.asname) for node in ours for alias in node.names if alias.name[0] != "_"]


def docstrings(init):
    """Docstring of every class and function that a package exports; what `dataclass` writes by itself is none."""
    package = importlib.import_module(module_of(init))
    things = {name: getattr(package, name) for _, name, _ in exports(init)}
    texts = {name: thing.__doc__ or "" for name, thing in things.items() if isinstance(thing, type | FunctionType)}
    return {name: "" if text.startswith(f"{name}(") else text for name, text in texts.items()}


def runtime_imports(node):
    """Dotted names that a module imports when it runs; what stands under ``if TYPE_CHECKING`` does not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module or "."
        yield from runtime_imports(child)


def methods():
    """Module and name of every class in the house that sets a card."""
    return [
        pytest.param(module_of(path), node.name, id=node.name)
        for path in sources("lightning_fcl")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and "card" in set_by(node)
    ]


def set_by(node):
    """Annotated attributes that a class body gives a value."""
    return {ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign) and line.value}


@each("init", sources("lightning_fcl", pattern="__init__.py"))
def test_exports_are_explicit_sorted_unique_and_documented(init):
    modules, names, aliases = map(list, zip(*exports(init), strict=True)) if exports(init) else ([], [], [])
    assert aliases == names, "write `from module import Name as Name`"
    assert modules == sorted(modules)
    assert len(names) == len(set(names))
    assert [name for name, text in docstrings(init).items() if not text] == []


@pytest.mark.parametrize("folder", ["functional", "aggregators"])
def test_maths_names_its_source(folder):
    package = importlib.import_module(f"lightning_fcl.{folder}")
    results = {name for name, thing in vars(package).items() if isinstance(thing, type) and issubclass(thing, tuple)}
    plain = {name for module, name, _ in exports(HOUSE / folder / "__init__.py") if module in NOBODYS_INVENTION}
    texts = docstrings(HOUSE / folder / "__init__.py")
    assert [name for name, text in texts.items() if "Source:" not in text and name not in results | plain] == []


@pytest.mark.parametrize(("module", "name"), methods())
def test_a_method_has_a_card_and_its_maths(module, name):
    card = getattr(importlib.import_module(module), name).card
    functional = importlib.import_module("lightning_fcl.functional")
    page = ROOT / "docs" / "methods" / f"{card.name.lower().replace(' ', '-')}.md"
    assert isinstance(card, MethodCard)
    assert all([card.name, card.paper, card.url])
    assert card.acts_on in {"gradient", "loss", "weights", "data", "structure", "server"}
    assert [function for function in card.functions if not hasattr(functional, function)] == []
    assert page.is_file(), f"write the card {page.relative_to(ROOT)}"


@each("path", sources("lightning_fcl/functional"))
def test_functional_is_pure_torch(path):
    ours = {("lightning_fcl", room) for room in ("functional", "types", "exceptions")}
    imported = {tuple(name.split(".")) for name in runtime_imports(ast.parse(path.read_text()))}
    assert {name for name in imported if name[:2] not in ours and name[0] not in {"torch", *STDLIB}} == set()


@each("path", sources("lightning_fcl"))
def test_imports_point_one_way(path):
    room = path.relative_to(HOUSE).parts[0]
    above = {"recipes", "tests"}
    if room != "testing":
        above.add("lightning_fcl.testing")
    if room in ROOMS_BELOW_THE_LOOP:
        above |= {"lightning_fcl.cli", "lightning_fcl.federated", "lightning_fcl.reports"}
    if room not in {"cli.py", "suites"}:
        above.add("lightning_fcl.suites")
    imported = {name.split(".")[0] for name in runtime_imports(ast.parse(path.read_text()))}
    imported |= {".".join(name.split(".")[:2]) for name in runtime_imports(ast.parse(path.read_text()))}
    assert imported & above == set()


def fresh(code):
    """What ``code`` prints as JSON in a new interpreter."""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_import_brings_nothing_that_lightning_does_not_bring():
    names = [name for _, name, _ in exports(HOUSE / "__init__.py")]
    extra, seconds = fresh(f"""
import json, sys, time
import lightning
before, start = {{name.split(".")[0] for name in sys.modules}}, time.process_time()
import lightning_fcl
lightning_fcl.FederatedTrainer, lightning_fcl.TaskStream, lightning_fcl.EWC  # what a first script wakes
seconds = time.process_time() - start
for name in {names}:
    getattr(lightning_fcl, name)  # all lazy exports
print(json.dumps([sorted({{name.split(".")[0] for name in sys.modules}} - before), seconds]))
""")
    assert set(extra) - STDLIB == {"lightning_fcl"}
    assert seconds < 0.3


def test_help_imports_no_torch():
    loaded = fresh("""
import json, sys
sys.argv = ["lightning-fcl", "--help"]
try:
    from lightning_fcl.cli import main
    main()
except SystemExit as stop:
    assert not stop.code
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
""")
    assert {"torch", "lightning", "numpy"} & set(loaded) == set()


@each("path", sources("lightning_fcl", "recipes", "tests", "docs"))
def test_files_and_functions_are_short(path):
    lines, place = path.read_text().splitlines(), path.relative_to(ROOT).parts
    small = place[0] == "recipes" or place[:2] == ("lightning_fcl", "functional")
    assert count(lines) <= (150 if small else 300)
    functions = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef)]
    stored = re.compile(r"\s+self\.(\w+) = \1")  # a constructor that keeps its arguments is as long as its signature
    bodies = {
        node.name: count([one for one in lines[first_line(node) - 1 : node.end_lineno] if not stored.fullmatch(one)])
        for node in functions
    }
    assert {name: length for name, length in bodies.items() if length > 40} == {}


def count(lines):
    """Lines that are not blank."""
    return sum(bool(line.strip()) for line in lines)


def first_line(function):
    """Where the body starts, after the docstring."""
    documented = ast.get_docstring(function) is not None
    return function.body[0].end_lineno + 1 if documented else function.body[0].lineno
