"""What all recipes share: their command line, the choice of methods, and where real data lie."""

import inspect
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
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


def chosen_methods(method: str | list[str], known: Collection[str]) -> list[str]:
    """The methods to run.

    Args:
        method: Names, or ``"all"``.
        known: What ``"all"`` stands for, and whatever else may be named.

    Raises:
        MisconfigurationError: If a name is unknown.

    Example:
        >>> chosen_methods("all", ["none", "ewc"]), chosen_methods("ewc", ["none", "ewc"])
        (['none', 'ewc'], ['ewc'])
    """
    names = list(known) if method == "all" else [method] if isinstance(method, str) else list(method)
    for name in names:
        if name not in known:
            raise MisconfigurationError(f"`method` must be all or one of {', '.join(known)}, got {name!r}.")
    return names


def real_data(data_dir: Path | None, name: str) -> Path | None:
    """The folder of real data: ``data_dir``, else ``$FCL_DATA/name`` if that variable is set, else ``None``."""
    home = os.environ.get("FCL_DATA")
    return data_dir or (Path(home, name) if home else None)
