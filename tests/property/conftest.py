"""For property tests: players let one call of a storage through at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.interruptions import one_call_at_a_time


@pytest.fixture(scope="module", autouse=True)
def calls_in_turn() -> Iterator[None]:
    with one_call_at_a_time():
        yield
