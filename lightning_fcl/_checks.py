"""Checks of constructor arguments that several methods share."""

import math

from lightning_fcl.exceptions import MisconfigurationError


def check_strength(strength: float) -> None:
    """Raise MisconfigurationError unless a penalty's ``strength`` is finite and not negative."""
    check_amount("strength", strength)


def check_amount(name: str, value: float) -> None:
    """Raise MisconfigurationError unless the argument ``name`` is finite and not negative."""
    if not (math.isfinite(value) and value >= 0):
        raise MisconfigurationError(f"`{name}` must be finite and not negative, got {value!r}.")


def check_positive(name: str, value: float) -> None:
    """Raise MisconfigurationError unless the argument ``name`` is finite and positive."""
    if not (math.isfinite(value) and value > 0):
        raise MisconfigurationError(f"`{name}` must be finite and positive, got {value!r}.")
