"""What all recipes share: their command line, the choice of methods, and where real data lie."""

import importlib.util
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_fcl.exceptions import FCLError, MisconfigurationError


def command_line(main: Callable[..., Any]) -> None:
    """Run ``main`` with its arguments as options, and end with one line if they cannot work.

    Args:
        main: A typed function with a docstring; ``data_dir`` becomes ``--data-dir`` (or ``--data_dir``), and a ``bool``
            a plain switch.
    """
    from jsonargparse import auto_cli

    switches = {name for name, parameter in inspect.signature(main).parameters.items() if parameter.annotation is bool}
    try:
        auto_cli(main, args=[_option(text, switches) for text in sys.argv[1:]], as_positional=False)
    except FCLError as error:
        sys.exit(f"error: {error}")


def _option(text: str, switches: Collection[str]) -> str:
    name, equals, value = text.partition("=")
    if not name.startswith("--"):
        return text
    name = name[2:].replace("-", "_")
    return f"--{name}=true" if name in switches and not equals else f"--{name}{equals}{value}"


def chosen_methods(
    method: str | Sequence[str], known: Collection[str], groups: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """The methods to run.

    Args:
        method: Names, or the name of a group.
        known: All that may be named.
        groups: What one word stands for; by default ``"all"`` for all that is known.

    Raises:
        MisconfigurationError: If a name is unknown.

    Example:
        >>> chosen_methods("all", ["none", "ewc"]), chosen_methods("ewc", ["none", "ewc"])
        (['none', 'ewc'], ['ewc'])
    """
    groups = groups or {"all": known}
    names = list(groups.get(method, [method])) if isinstance(method, str) else list(method)
    for name in names:
        if name not in known:
            words = ", ".join([*groups, *known]).removeprefix("all, ")
            raise MisconfigurationError(f"`method` must be all or one of {words}, got {name!r}.")
    return names


def real_data(data_dir: Path | None, name: str) -> Path | None:
    """The folder of real data: ``data_dir``, else ``$FCL_DATA/name`` if that variable is set, else ``None``."""
    home = os.environ.get("FCL_DATA")
    return data_dir or (Path(home, name) if home else None)


def write_parts(
    trainer: Any,
    make_model: Callable[..., Any],
    model_options: dict[str, Any],
    make_stream: Callable[..., Any],
    stream_options: dict[str, Any],
) -> None:
    """Write ``analyse.yaml`` into the run folder: how ``lightning-fcl analyse`` makes model and stream again.

    Args:
        trainer: Its ``run_dir`` is the run folder; only rank 0 writes.
        make_model: An importable function.
        model_options: Its arguments, plain values.
        make_stream: An importable function.
        stream_options: Its arguments, plain values.
    """
    import yaml

    pairs = {"model": (make_model, model_options), "stream": (make_stream, stream_options)}
    parts = {
        name: {"class_path": f"{make.__module__}.{make.__qualname__}", "init_args": options}
        for name, (make, options) in pairs.items()
    }
    if trainer.is_global_zero:
        (trainer.run_dir / "analyse.yaml").write_text(yaml.safe_dump(parts, sort_keys=False), encoding="utf-8")


def library_commit() -> str:
    """The commit of the checkout that the library runs from, ``-dirty`` if it was changed since; else ``unknown``."""
    where = Path(__file__).parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=where, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def save_bench(
    rows: Sequence[Mapping[str, Any]],
    command: str,
    out: Path | None,
    columns: Sequence[str] | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Put a benchmark's figures together with where they come from, and write them if ``out`` is given.

    Args:
        rows: One per case, under ``"case"`` its name; figures are numbers, texts, or ``[min, median, max]``.
        command: The command line that made them.
        out: JSON file, e.g. in ``docs/results``; ``docs/make_tables.py`` makes a table of it.
        columns: Figures that the table shows, in order; by default all.
        **facts: Whatever else belongs to the figures, as JSON.

    Returns:
        What was written.
    """
    import torch

    cores = f"{processor()}, {os.cpu_count()} cores"
    results: dict[str, Any] = {"command": command, "commit": library_commit(), "machine": cores}
    results["versions"] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    results |= {**facts, **({} if columns is None else {"columns": list(columns)}), "rows": [dict(row) for row in rows]}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def load_script(folder: Path, name: str) -> ModuleType:
    """The module in file ``name`` of a bench folder; ends with one line if there is none."""
    path = folder.resolve() / name
    if not path.exists():
        raise SystemExit(f"`--bench-dir` must hold {name}, got {str(folder)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())
