"""For property tests: what waits for a storage at the same time waits one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ray_dcp.io import checkpoint
from ray_dcp.runtime import tasks


def one_after_the_other(*calls: Callable[[], Any]) -> tuple[Any, ...]:
    return tuple(call() for call in calls)


@pytest.fixture(scope="module", autouse=True)
def one_call_at_a_time() -> Iterator[None]:
    """Players stop before a call by its number, which has to be the same call each time."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint, tasks):
            patch.setattr(module, "at_once", one_after_the_other)
        yield
