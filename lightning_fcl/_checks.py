"""Checks of constructor arguments that several methods share."""

import math

from lightning_fcl.exceptions import MisconfigurationError


def check_strength(strength: float) -> None:
    """Raise MisconfigurationError unless a penalty's ``strength`` is finite and not negative."""
    if not (math.isfinite(strength) and strength >= 0):
        raise MisconfigurationError(f"`strength` must be finite and not negative, got {strength!r}.")
