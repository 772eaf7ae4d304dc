"""A short run of every fuzz target; `python -m tests.fuzz` is the long one."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import run
from tests.fuzz.targets import TARGETS

CASES = {"checkpoint": 40, "chunk table": 60}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_errors_of_ours_comes_of_spoiled_files(name: str):
    found = run(name, 500, seed=1, cases=CASES.get(name, 300))
    assert found.wrong == {}
    refused = found.cases - found.refused["nothing"]
    assert refused > found.cases / 5, "hardly anything is refused: is the reader asleep?"
    assert len(found.refused) >= (2 if name == "zstd" else 4), (
        "all are refused alike: is the file recognised at all?"
    )
