"""One arena for all cells of a session: a Ray of its own on the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import THIRD_PARTY_WARNINGS

if TYPE_CHECKING:
    from tests.chaos.arena import Arena


def pytest_configure(config: pytest.Config) -> None:
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="package")
def arena() -> Iterator[Arena]:
    """Where the cells are played; when it is closed nothing of it may be left."""
    # Why here: as in tests/integration/conftest.py.
    from tests.chaos.arena import Arena

    with closing(Arena()) as arena:
        yield arena
        left = arena.leaks()
    assert left == []
