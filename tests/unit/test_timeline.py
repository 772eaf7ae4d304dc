"""`ray-dcp timeline`: the course of a save as text, JSON, and for Chrome's viewer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.cli.showing import chrome_trace, gantt
from ray_dcp.format.save_trace import (
    RankTimes,
    SaveTrace,
    Span,
    encode_trace,
    make_trace,
    trace_key,
)
from tests.support import big_views, cli_story

ATTEMPT = "0123456789abcdef"


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(main, ["timeline", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ray_dcp.save({"w": torch.ones(50)}, checkpoint_id=tmp_path / "run" / "step-7", no_dist=True)
    return tmp_path / "run" / "step-7"


def test_the_course_of_a_save_is_printed_as_it_was(tmp_path: Path):
    """Of a trace that is given: no two saves take as long. See tests/golden/README.md."""
    table = big_views.table(2, 4, ATTEMPT, files=4)
    path = big_views.checkpoint(tmp_path / "run" / "step-7", table, ATTEMPT)
    (path / trace_key(ATTEMPT)).write_bytes(encode_trace(async_trace()))
    told = []
    for arguments in ([f"{tmp_path}/run@7"], [path, "--json"]):
        found = run(*arguments)
        assert found.exit_code == 0, found.output
        command = " ".join(map(str, arguments))
        told.append(f"$ ray-dcp timeline {command}\n{found.output}".replace(str(tmp_path), "TMP"))
    cli_story.compare("timeline", "\n".join(told), renew="RENEW_GOLDEN" in os.environ)


def async_trace() -> SaveTrace:
    """A save of four ranks, the last of which is late."""
    four = range(4)
    times = {
        "capture": RankTimes.of(four, [0.0, 0.01, 0.0, 0.02], [0.1] * 4),
        "plan": RankTimes.of(four, [0.1] * 4, [0.2] * 4),
        "stage": RankTimes.of(four, [0.2] * 4, [0.3, 0.32, 0.3, 0.35]),
        "write": RankTimes.of(four, [0.25] * 4, [0.8, 0.82, 0.8, 1.9], [3 << 20] * 4),
    }
    coordinator = [
        Span("look", None, 0.05, 0.1), Span("plan", None, 0.12, 0.2),
        Span("build", None, 1.9, 1.94), Span("table", None, 1.94, 1.97),
        Span("record", None, 1.97, 2.0),
    ]  # fmt: skip
    return make_trace(ATTEMPT, "async_save", 4, 1e9, 2.0, coordinator, times,
                      where={3: "pid 7 on node-b"})  # fmt: skip


def test_ten_thousand_ranks_fit_a_screen_or_two():
    n = 10_000
    times = {"write": RankTimes.of(range(n), [0.5] * n, [0.75] * (n - 1) + [1.75], [1 << 20] * n)}
    lines = gantt(make_trace(ATTEMPT, "save", n, 1e9, 2.0, [], times), "run", 80)
    lines = [click.unstyle(line) for line in lines]
    assert len(lines) < 120
    assert any(line.startswith("… and 99") for line in lines)
    assert any(line.split()[:2] == ["write", "10000"] for line in lines)


def test_the_file_for_chrome_has_complete_events_of_all_lanes(saved: Path, tmp_path: Path):
    found = run(saved, "--chrome", tmp_path / "trace.json")
    assert found.exit_code == 0
    assert "ui.perfetto.dev" in found.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "coordinator", 1: "rank 0"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans if e["pid"] == 1} >= {"capture", "plan", "write", "commit"}
    assert all(e["dur"] >= 0 and e["ts"] > 1e15 for e in spans)
    assert json.loads(run(saved, "--json", "--chrome", tmp_path / "b.json").output)["attempt"]
    assert (tmp_path / "b.json").exists()
    events = json.loads(chrome_trace(async_trace()))["traceEvents"]
    late = [e for e in events if e.get("args", {}).get("straggler")]
    assert [(e["pid"], e["name"], e["args"]["where"]) for e in late] == [
        (4, "write", "pid 7 on node-b")
    ]


def test_a_trace_that_is_damaged_or_gone_says_so(saved: Path):
    found = run(saved, "--chrome", saved / "missing" / "t.json")
    assert "can't be written" in found.output
    assert "Traceback" not in found.output
    (trace,) = saved.glob("trace.*.json")
    trace.write_text("{")
    found = run(saved)
    assert (found.exit_code, "itself does not need it" in found.output) == (1, True)
    trace.unlink()
    found = run(saved)
    assert found.exit_code == 2
    assert "could not be written, or was deleted" in " ".join(found.output.split())
