"""The two CPU ranks that all two-rank tests of a session share."""

from collections.abc import Iterator

import pytest

from lightning_fcl.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two persistent processes in one gloo group."""
    with RankPool(2) as pool:
        yield pool
