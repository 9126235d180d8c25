"""Optional packages: import late, and say in one line how to get a missing one."""

import importlib
from types import ModuleType

from lightning_fcl.exceptions import MissingExtraError


def optional_import(name: str, *, extra: str) -> ModuleType:
    """Import ``name`` or raise one line that holds the pip command.

    Args:
        name: Dotted module name, e.g. ``"matplotlib.pyplot"``.
        extra: The extra of this package that installs it, e.g. ``"plot"``.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: If the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        raise MissingExtraError(
            f"`{package}` is not installed, and this feature needs it: pip install 'lightning-fcl[{extra}]'"
        ) from error
