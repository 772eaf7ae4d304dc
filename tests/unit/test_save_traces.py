"""The trace of a save: what it says, that no save depends on it, and how `timeline` shows it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.save_trace import (
    MAX_TRACE_BYTES,
    MOST_RANKS,
    RankTimes,
    SaveTrace,
    Span,
    decode_trace,
    encode_trace,
    make_trace,
    trace_key,
)
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.commands import Answer, MakePlan, Perform, PublishMetadata
from ray_dcp.protocol.messages import FileReceipt, OpKey, SaveGo, SaveJoin, SaveReceipt, Target
from ray_dcp.protocol.save_recorder import SaveRecorder
from ray_dcp.runtime.inline import Tracing
from ray_dcp.store.memory import MemoryStorage
from tests import big_views, cli_story

# --- The trace ------------------------------------------------------------------------------------


ATTEMPT = "0123456789abcdef"
KEY = OpKey("s", 0)
PLAN = MakePlan((), "torch_save", 1)
NO_CHECKS = np.zeros(0, np.uint64)


def join(rank: int, *, staged: bool = False, trace: bool = True, url: str = "memory://x"):
    options = SaveOptions(trace=trace)
    return SaveJoin(KEY, rank, 2, Target(url), options, b"", None, staged, capture_s=0.5)


def go(rank: int, attempt: str = ATTEMPT) -> Answer:
    return Answer(KEY, (rank,), "SaveJoin", SaveGo(attempt, 1, RankPlan(rank, "torch_save", ())))


def receipt(file: int, num_bytes: int) -> FileReceipt:
    return FileReceipt(file, f"f{file}", num_bytes, b"", NO_CHECKS)


def many(n: int, late: dict[int, float] | None = None):
    ranks = np.arange(n)
    stops = np.full(n, 1.0) + np.linspace(0, 0.01, n)
    for rank, extra in (late or {}).items():
        stops[rank] += extra
    times = {
        "capture": RankTimes.of(ranks, np.zeros(n), np.full(n, 0.1)),
        "write": RankTimes.of(ranks, np.full(n, 0.1), stops, np.full(n, 7)),
    }
    where = {rank: f"pid {rank}" for rank in range(n)}
    return make_trace(ATTEMPT, "save", n, 1e9, 3.0, [Span("record", None, 2.0, 3.0)], times,
                      where=where)  # fmt: skip


# --- the value ----------------------------------------------------------------------------------


def test_a_trace_of_ten_thousand_ranks_is_small_and_counts_them_all():
    trace = many(10_000, {4711: 5.0, 12: 0.5})
    assert len(encode_trace(trace)) < 32_000
    assert 56 <= len(trace.ranks) <= MOST_RANKS
    assert {4711, 0, 9999} <= set(trace.ranks)
    write = next(phase for phase in trace.phases if phase.phase == "write")
    assert (write.num_ranks, write.num_bytes, write.max_s) == (10_000, 70_000, 5.90471)
    assert [(one.rank, one.where) for one in trace.stragglers] == [(4711, "pid 4711")]


@pytest.mark.parametrize(
    ("stops", "late"),
    [
        ([1.0, 1.0, 1.0, 2.2], [3]),
        ([1.0, 1.9], []),  # not twice as long
        ([1.0, 2.1], [1]),  # of two ranks, the slower one is compared with the other
        ([0.001, 0.040], []),  # forty times as long, but nobody would notice
        ([5.0], []),
    ],
)
def test_who_is_late(stops: list[float], late: list[int]):
    n = len(stops)
    times = {"write": RankTimes.of(range(n), [0.0] * n, stops)}
    trace = make_trace(ATTEMPT, "save", n, 0.0, 9.0, [], times)
    assert [one.rank for one in trace.stragglers] == late


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_of_a_trace_is_noticed(at: int, bit: int):
    data = bytearray(encode_trace(many(3)))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(DamagedCheckpointError, match="does not need it"):
        decode_trace(bytes(data), key="trace.x.json")


def test_a_file_that_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(DamagedCheckpointError, match="more than"):
        decode_trace(b" " * (MAX_TRACE_BYTES + 1))


# --- the file -----------------------------------------------------------------------------------


def noted(tracing: Tracing, **options: object) -> Perform:
    tracing.hears(join(0, **options))
    tracing.tells(go(0))
    tracing.hears(SaveReceipt(KEY, 0, ATTEMPT, 1, (receipt(0, 5),)))
    return Perform(KEY, PublishMetadata(Target("memory://trace-file"), 1, None))


def test_a_storage_that_refuses_the_trace_changes_nothing(caplog: pytest.LogCaptureFixture):
    def refuses(_: Target):
        raise ray_dcp.StorageError("no space left")

    tracing = Tracing(opener=refuses)
    command = noted(tracing)
    with caplog.at_level(logging.DEBUG, logger="ray_dcp.runtime.inline"):
        assert tracing.perform(command, lambda task: task) is command.task
    assert "no space left" in caplog.text


def test_notes_that_go_wrong_change_nothing(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object):
        raise RuntimeError("a bug")

    tracing = Tracing(opener=broken)
    monkeypatch.setattr(SaveRecorder, "hears", broken)
    tracing.hears(join(0))
    monkeypatch.setattr(SaveRecorder, "tells", broken)
    monkeypatch.setattr(SaveRecorder, "performed", broken)
    tracing.tells(go(0))
    assert tracing.perform(Perform(KEY, PLAN), lambda task: "done") == "done"


# --- beside real checkpoints --------------------------------------------------------------------


def traces(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.name.startswith("trace."))


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
@pytest.mark.parametrize("is_async", [False, True])
def test_every_save_of_a_process_leaves_one_trace(tmp_path: Path, container: str, is_async: bool):
    options = SaveOptions(container=container)
    state = {"w": torch.ones(1000), "b": torch.zeros(3)}
    for _ in range(2):  # what the second one replaces goes with all else of the first
        if is_async:
            ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=options).result()
        else:
            ray_dcp.save(state, checkpoint_id=tmp_path / "c", options=options)
    view = ray_dcp.open(tmp_path / "c")
    assert traces(tmp_path / "c") == [trace_key(view.attempt)]
    trace = view.trace
    assert trace.mode == ("async_save" if is_async else "save")
    assert {span.phase for span in trace.spans if span.rank is None} == {
        "look", "plan", "build", "table", "record",
    }  # fmt: skip
    phases = {"capture", "plan", "write"} | ({"stage"} if is_async else set())
    assert {span.phase for span in trace.spans if span.rank == 0} == phases
    assert all(0 <= s.start_s <= s.stop_s <= trace.committed_s for s in trace.spans)
    assert trace.num_bytes == view.num_bytes
    report = ray_dcp.verify(tmp_path / "c")
    assert (report.ok, report.notes) == (True, ())


def test_a_trace_goes_with_its_checkpoint(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "c")
    (trace,) = traces(tmp_path / "c")
    kept = ray_dcp.collect(tmp_path / "c")
    assert (kept.deleted, kept.kept) == ((), ())
    assert trace in ray_dcp.delete(tmp_path / "c").deleted
    assert traces(tmp_path / "c") == []


def test_a_trace_that_came_too_late_is_collected(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "c")
    late = tmp_path / "c" / trace_key("00000000000000aa")
    late.write_bytes(b"{}")
    other = tmp_path / "c" / "trace.notes.json"
    other.write_text("somebody else's")
    assert ray_dcp.collect(tmp_path / "c").deleted == (late.name,)
    assert other.exists()


def test_a_trace_is_not_taken_for_an_attempt_that_may_still_commit():
    storage = MemoryStorage("trace-alone")
    storage.write(trace_key("00000000000000bb"), b"{}")
    report = ray_dcp.collect("memory://trace-alone")
    assert report.deleted == (trace_key("00000000000000bb"),)
    assert report.kept == ()


def test_a_damaged_trace_is_a_note_and_no_damage(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "c")
    (name,) = traces(tmp_path / "c")
    (tmp_path / "c" / name).write_bytes(b"")
    report = ray_dcp.verify(tmp_path / "c")
    assert report.ok
    assert name in report.notes[0]
    with pytest.raises(DamagedCheckpointError, match="trace of a save"):
        _ = ray_dcp.open(tmp_path / "c").trace
    assert "how it was saved" not in ray_dcp.open(tmp_path / "c")._repr_html_()


def test_the_trace_of_another_attempt_is_refused(tmp_path: Path):
    for name in ("a", "b"):
        ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / name)
    (one,), (other,) = traces(tmp_path / "a"), traces(tmp_path / "b")
    (tmp_path / "a" / one).write_bytes((tmp_path / "b" / other).read_bytes())
    with pytest.raises(DamagedCheckpointError, match="expected the trace of attempt"):
        _ = ray_dcp.open(tmp_path / "a").trace


def test_without_a_trace_there_is_none(tmp_path: Path):
    options = SaveOptions(trace=False)
    ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "c", options=options)
    assert traces(tmp_path / "c") == []
    assert ray_dcp.open(tmp_path / "c").trace is None


# --- `ray-dcp timeline` ---------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["timeline", *map(str, arguments)])


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


def test_what_has_no_trace_says_why(tmp_path: Path):
    options = ray_dcp.SaveOptions(trace=False)
    ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", options=options, no_dist=True)
    found = run(tmp_path / "c")
    assert found.exit_code == 2
    assert "SaveOptions(trace=False)" in found.output
    assert run(tmp_path / "nothing").exit_code == 2


def test_a_file_that_can_not_be_written_leaves_nothing(saved: Path, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    found = run(saved, "--chrome", tmp_path / "missing" / "t.json")
    assert found.exit_code != 0
    assert "can't be written" in found.output
    assert "Traceback" not in found.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "run"]


def test_it_loads_neither_torch_nor_ray(saved: Path):
    code = (
        "import sys; from ray_dcp.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit(bool({'torch', 'ray', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "timeline", str(saved)], check=False, timeout=400,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
