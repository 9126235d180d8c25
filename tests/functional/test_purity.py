"""The maths stands on torch and the standard library alone."""

import ast
import sys
from pathlib import Path
from types import FunctionType

import pytest

from lightning_fcl import functional

FILES = sorted(Path(functional.__path__[0]).glob("*.py"))
OURS = ("lightning_fcl.types", "lightning_fcl.exceptions", "lightning_fcl.functional")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_functional_imports_only_torch_and_the_standard_library(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            allowed = name.startswith(OURS) or name.split(".")[0] in {"torch", *sys.stdlib_module_names}
            assert allowed, f"{path.name} imports {name}"


def test_exports_are_sorted_and_unique():
    lines = [line for line in Path(functional.__file__).read_text().splitlines() if line.startswith("from")]
    assert lines == sorted(set(lines))


FUNCTIONS = {name: thing for name, thing in vars(functional).items() if isinstance(thing, FunctionType)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_has_an_example(name):
    assert ">>>" in FUNCTIONS[name].__doc__
