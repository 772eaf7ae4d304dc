"""The bench of asynchronous saves runs, on a state so small that its numbers mean nothing."""

from __future__ import annotations

import argparse
import json
import math

import pytest

from tests.bench import async_saves

MEASURED = ("stall", "first", "durable", "cpu", "memory")
"""Without the rows that need peers, ranks and nodes of their own, which take minutes."""


@pytest.mark.usefixtures("ray_session")
def test_the_bench_measures_every_row_of_one_process_and_leaves_nothing(tmp_path):
    found = tmp_path / "found.json"
    written = tmp_path / "written"
    written.mkdir()
    parser = argparse.ArgumentParser()
    async_saves.add_arguments(parser)
    line = ["--megabytes", "4", "--json", str(found), "--rows", *MEASURED]
    given = parser.parse_args(line, argparse.Namespace(rounds=1, dir=written))
    async_saves.command(given)
    told = json.loads(found.read_text())["told"]
    rows = {row["key"]: row for row in told if "key" in row}
    assert set(rows) == set(MEASURED)
    assert all(math.isfinite(row["value"]) for row in rows.values())
    facts = {fact["fact"]: fact["median"] for fact in told if "fact" in fact}
    assert facts["CPU"] / 0.004 == pytest.approx(rows["cpu"]["value"], rel=0.2)
    assert list(written.iterdir()) == []
    assert {"note": "left in /dev/shm: nothing"} in told
