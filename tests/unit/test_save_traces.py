"""The trace of a save: what it says, that it stays small, and that no save depends on it."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import ray_dcp
from ray_dcp.cli.main import main
from ray_dcp.cli.showing import chrome_trace, gantt
from ray_dcp.commit_protocol import messages
from ray_dcp.commit_protocol.commands import Answer, MakePlan, Perform, PublishMetadata
from ray_dcp.coordinator.metrics import SaveRecord, Tracing
from ray_dcp.core.phases import CAPTURE, PLAN, STAGE, STAGED
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.save_trace import (
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
from ray_dcp.rank.rank_save import RankSave
from ray_dcp.store.memory import MemoryStorage
from tests.support import checkpoints, cli_story

ATTEMPT = "0123456789abcdef"
KEY = messages.OpKey("s", 0)
MAKE_PLAN = MakePlan((), 1)
NO_CHECKS = np.zeros(0, np.uint64)


def join(rank: int, *, staged: bool = False, url: str = "memory://x"):
    join = messages.SaveJoin(KEY, rank, 2, messages.Target(url), SaveOptions(), b"", None, staged)
    return replace(join, phases=(("capture", 0.5), ("plan", 0.0)))


def go(rank: int, attempt: str = ATTEMPT) -> Answer:
    return Answer(KEY, (rank,), "SaveJoin", messages.SaveGo(attempt, 1, part=RankPlan(rank, ())))


def written(
    rank: int,
    *files: messages.FileReceipt,
    attempt: str = ATTEMPT,
    plan_s: float = 2.0,
    write_s: float = 1.0,
) -> messages.SaveReceipt:
    phases = (("capture", 0.5), ("plan", plan_s), ("write", write_s), ("commit", 0.0))
    return messages.SaveReceipt(KEY, rank, attempt, 1, files, None, phases)


def receipt(file: int, num_bytes: int) -> messages.FileReceipt:
    return messages.FileReceipt(file, f"f{file}", num_bytes, b"")


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


def test_a_trace_comes_back_from_its_bytes():
    trace = many(5, {3: 4.0})
    assert decode_trace(encode_trace(trace)) == trace
    assert trace.num_bytes == 35


def test_a_trace_of_ten_thousand_ranks_is_small_and_counts_them_all():
    trace = many(10_000, {4711: 5.0, 12: 0.5})
    assert len(encode_trace(trace)) < 32_000
    assert 56 <= len(trace.ranks) <= MOST_RANKS
    assert {4711, 0, 9999} <= set(trace.ranks)
    write = next(phase for phase in trace.phases if phase.phase == "write")
    assert (write.num_ranks, write.num_bytes, write.max_s) == (10_000, 70_000, 5.90471)
    assert [(one.rank, one.where) for one in trace.stragglers] == [(4711, "pid 4711")]


@pytest.mark.parametrize(
    ("phase", "stops", "late"),
    [
        ("write", [1.0, 1.0, 1.0, 2.2], [3]),
        ("write", [1.0, 1.9], []),  # not twice as long
        ("write", [1.0, 2.1], [1]),  # of two ranks, the slower one is compared with the other
        ("write", [0.001, 0.040], []),  # forty times as long, but nobody would notice
        ("write", [5.0], []),
        ("plan", [0.1, 9.0], []),  # it waits for the others
        ("write", [1.0] * 900 + [3.0 + n for n in range(100)], [*range(999, 975, -1)]),
    ],
)
def test_who_is_late(phase: str, stops: list[float], late: list[int]):
    n = len(stops)
    times = {phase: RankTimes.of(range(n), [0.0] * n, stops)}
    trace = make_trace(ATTEMPT, "save", n, 0.0, 9.0, [], times)
    assert [one.rank for one in trace.stragglers] == late


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_any_flipped_bit_of_a_trace_is_noticed(at: int, bit: int):
    data = bytearray(encode_trace(many(3)))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(DamagedCheckpointError, match="does not need it"):
        decode_trace(bytes(data), key="trace.x.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(version=2),
        lambda told: told.update(committed_s=float("nan")),
        lambda told: told["spans"].append(["write", "0", 0.0, 1.0, 1]),
        lambda told: told.pop("phases"),
        lambda told: told.update(spans=None),
    ],
)
def test_what_is_no_trace_is_refused(change):
    told = json.loads(encode_trace(many(2)))
    del told["xxh3_128"]
    change(told)
    from ray_dcp.core.checksums import digest_bytes

    body = json.dumps(told).encode()[:-1]
    ending = f',\n "xxh3_128": "{digest_bytes(body).hex()}"}}\n'.encode()
    with pytest.raises(DamagedCheckpointError):
        decode_trace(body + ending)


# --- the record ---------------------------------------------------------------------------------


def recorded(*, staged: bool = False) -> SaveRecord:
    record = SaveRecord(join(0, staged=staged), unix_s=1000.0, now_s=10.0)
    record.add_request(join(0, staged=staged), 10.0, "pid 1 on a")
    record.add_request(join(1, staged=staged), 11.0, "pid 2 on b")
    record.attempt = ATTEMPT
    record.add_task(MAKE_PLAN, 11.0, 11.5)
    return record


def spans(trace: SaveTrace | None) -> list[tuple[str, int | None, float, float, int]]:
    assert trace is not None
    return [(s.phase, s.rank, s.start_s, s.stop_s, s.num_bytes) for s in trace.spans]


def test_the_phases_that_ranks_send_are_those_of_the_trace():
    record = recorded()
    record.add_request(written(0, receipt(0, 5), receipt(1, 6)), 13.0)
    record.add_request(written(0, receipt(0, 5), receipt(1, 6), write_s=2.0), 14.0)  # again
    record.add_request(written(1, receipt(2, 9), attempt="another"), 13.0)
    record.add_request(written(1, receipt(2, 9), plan_s=1.0, write_s=3.5), 15.5)
    trace = record.trace(committed_s=16.0)
    assert spans(trace) == [
        ("plan", None, 1.5, 2.0, 0),
        ("capture", 0, 0.0, 0.5, 0),
        ("plan", 0, 0.5, 2.5, 0),
        ("write", 0, 2.5, 3.5, 11),
        ("capture", 1, 1.0, 1.5, 0),
        ("plan", 1, 1.5, 2.5, 0),
        ("write", 1, 2.5, 6.0, 9),
    ]
    assert trace.began_s == 999.5  # rank 0 had captured for half a second when it joined
    assert (trace.mode, trace.committed_s) == ("save", 6.5)
    assert [(one.rank, one.phase, one.where) for one in trace.stragglers] == [
        (1, "write", "pid 2 on b"), (1, "capture", "pid 2 on b"),
    ]  # fmt: skip


@pytest.mark.parametrize(("join_s", "last_s"), [(0.0, 0.25), (0.25, 0.0)])
def test_a_message_that_is_late_moves_no_phase_and_makes_none_longer(join_s: float, last_s: float):
    record = SaveRecord(join(0), unix_s=1000.0, now_s=10.0)
    record.attempt = ATTEMPT
    for rank in (0, 1):
        late = (join_s, last_s) if rank else (0.0, 0.0)
        record.add_request(join(rank), 10.0 + late[0])
        record.add_request(written(rank, receipt(rank, 5)), 13.0 + late[1])
    assert spans(record.trace(16.0)) == [
        span
        for rank in (0, 1)
        for span in (
            ("capture", rank, 0.0, 0.5, 0), ("plan", rank, 0.5, 2.5, 0),
            ("write", rank, 2.5, 3.5, 5),
        )
    ]  # fmt: skip


def test_a_stager_writes_while_its_rank_hands_over_and_a_rank_beside_it_afterwards():
    record = recorded(staged=True)
    phases = (("capture", 0.5), ("plan", 1.5), ("stage", 1.0))
    record.add_request(messages.PartsHeld(KEY, 0, ATTEMPT, 1, "s0", phases, 11), 13.0)
    for at_s, file in ((13.5, receipt(0, 5)), (14.0, receipt(1, 6)), (15.0, receipt(1, 6))):
        record.add_request(messages.PartsWritten(KEY, 0, ATTEMPT, 1, (file,)), at_s)
    own = (*phases, ("write", 1.5), ("commit", 0.0))
    record.add_request(
        messages.SaveReceipt(KEY, 1, ATTEMPT, 1, (receipt(2, 9),), None, own, 9), 14.5
    )
    record.add_request(messages.SaveStaged(KEY, 0, ATTEMPT, 1, None, "s0", (("stage", 9.0),)), 15.0)
    trace = record.trace(committed_s=16.0)
    assert trace.mode == "async_save"
    assert spans(trace)[1:] == [
        ("capture", 0, 0.0, 0.5, 0),
        ("plan", 0, 0.5, 2.0, 0),
        ("stage", 0, 2.0, 3.0, 11),
        ("write", 0, 2.0, 4.5, 11),
        ("capture", 1, 0.5, 1.0, 0),
        ("plan", 1, 1.0, 2.5, 0),
        ("stage", 1, 2.5, 3.5, 9),
        ("write", 1, 3.5, 5.0, 9),
    ]


@pytest.mark.parametrize(
    ("staged", "sends", "phases"),
    [
        (False, messages.SaveReceipt, ["capture", "plan", "write"]),
        (True, messages.SaveReceipt, ["capture", "plan", "stage", "write"]),
        (True, messages.SaveStaged, ["capture", "plan", "stage"]),
    ],
)
def test_a_rank_sends_its_own_phases(staged: bool, sends: type, phases: list[str]):
    """Not what a stager writes after it, or has copied for it before it began."""
    target = messages.Target("memory://x")
    save = RankSave(KEY, rank=0, world_size=1, target=target, options=SaveOptions(), staged=staged)
    for step in [CAPTURE, PLAN, STAGE, STAGED]:
        save.progress.enter(step)
    assigned = messages.SaveGo(ATTEMPT, 1, part=RankPlan(0, ()))
    sent = next(save.outcome(assigned, sends(KEY, 0, ATTEMPT, 1)))
    assert [phase for phase, _ in sent.phases if phase != "commit"] == phases


# --- the file -----------------------------------------------------------------------------------


def noted(tracing: Tracing, **options: object) -> Perform:
    tracing.record_request(join(0, **options))
    tracing.record_answer(go(0))
    tracing.record_request(written(0, receipt(0, 5)))
    return Perform(KEY, PublishMetadata(messages.Target("memory://trace-file"), 1, None))


def test_the_trace_is_written_while_metadata_is_published():
    storage = MemoryStorage("trace-file")
    tracing = Tracing(opener=lambda _: storage)
    command = noted(tracing)
    assert tracing.perform(command, lambda task: task) is command.task
    assert decode_trace(storage.read(trace_key(ATTEMPT))).world_size == 2
    storage.delete([trace_key(ATTEMPT)])
    tracing.perform(command, lambda task: task)  # once only
    assert storage.list() == []


def test_a_storage_that_refuses_the_trace_changes_nothing(caplog: pytest.LogCaptureFixture):
    def refuses(_: messages.Target):
        raise ray_dcp.StorageError("no space left")

    tracing = Tracing(opener=refuses)
    command = noted(tracing)
    with caplog.at_level(logging.DEBUG, logger="ray_dcp.coordinator.metrics"):
        assert tracing.perform(command, lambda task: task) is command.task
    assert "no space left" in caplog.text


def test_notes_that_go_wrong_change_nothing(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object):
        raise RuntimeError("a bug")

    tracing = Tracing(opener=broken)
    monkeypatch.setattr(SaveRecord, "add_request", broken)
    tracing.record_request(join(0))
    monkeypatch.setattr(SaveRecord, "add_task", broken)
    tracing.record_answer(go(0))
    assert tracing.perform(Perform(KEY, MAKE_PLAN), lambda task: "done") == "done"


# --- beside real checkpoints --------------------------------------------------------------------


def traces(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.name.startswith("trace."))


@pytest.mark.parametrize("is_async", [False, True])
def test_every_save_of_a_process_leaves_one_trace(tmp_path: Path, is_async: bool):
    state = {"w": torch.ones(1000), "b": torch.zeros(3)}
    for _ in range(2):  # what the second one replaces goes with all else of the first
        if is_async:
            ray_dcp.async_save(state, checkpoint_id=tmp_path / "c").result()
        else:
            ray_dcp.save(state, checkpoint_id=tmp_path / "c")
    view = ray_dcp.open(tmp_path / "c")
    assert traces(tmp_path / "c") == [trace_key(view.attempt)]
    trace = view.trace
    assert trace.mode == ("async_save" if is_async else "save")
    # The plan is that of the first one.
    assert {span.phase for span in trace.spans if span.rank is None} == {
        "look", "build", "table", "record",
    }  # fmt: skip
    phases = {"capture", "plan", "write"} | ({"stage"} if is_async else set())
    assert {span.phase for span in trace.spans if span.rank == 0} == phases
    assert all(0 <= s.start_s <= s.stop_s <= trace.committed_s for s in trace.spans)
    assert trace.num_bytes == view.num_bytes
    report = ray_dcp.verify(tmp_path / "c")
    assert (report.ok, report.notes) == (True, ())


def test_the_trace_has_the_seconds_of_the_report(tmp_path: Path):
    handle = ray_dcp.async_save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "c")
    handle.result()
    told = handle.report().seconds
    trace = ray_dcp.open(tmp_path / "c").trace
    took = {s.phase: s.stop_s - s.start_s for s in trace.spans if s.rank == 0}
    rounded_s = 1.1e-5  # both ends of a span are rounded
    assert took == {phase: pytest.approx(told[phase], abs=rounded_s) for phase in took}
    assert took.keys() == told.keys() - {"commit"}


def test_a_trace_goes_with_its_checkpoint_and_one_that_came_too_late_is_collected(tmp_path: Path):
    for name in "cd":
        ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / name)
    (tmp_path / "d" / traces(tmp_path / "d")[0]).unlink()
    (own,) = traces(tmp_path / "c")
    late = tmp_path / "c" / trace_key("00000000000000aa")
    late.write_bytes(b"{}")
    other = tmp_path / "c" / "trace.notes.json"
    other.write_text("somebody else's")
    assert ray_dcp.collect(tmp_path / "c").deleted == (late.name,)
    assert traces(tmp_path / "c") == [own, other.name]
    assert own in ray_dcp.delete(tmp_path / "c").deleted
    assert traces(tmp_path / "c") == [other.name]
    assert ray_dcp.open(tmp_path / "d").trace is None


def test_a_damaged_trace_is_a_note_and_no_damage(tmp_path: Path):
    ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "c")
    (name,) = traces(tmp_path / "c")
    (tmp_path / "c" / name).write_bytes(b"")
    report = ray_dcp.verify(tmp_path / "c")
    assert report.ok
    assert name in report.notes[0]
    with pytest.raises(DamagedCheckpointError, match="trace of a save"):
        _ = ray_dcp.open(tmp_path / "c").trace
    assert "expected the trace of a save" in ray_dcp.open(tmp_path / "c")._repr_html_()


def test_the_trace_of_another_attempt_is_refused(tmp_path: Path):
    for name in ("a", "b"):
        ray_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / name)
    (one,), (other,) = traces(tmp_path / "a"), traces(tmp_path / "b")
    (tmp_path / "a" / one).write_bytes((tmp_path / "b" / other).read_bytes())
    with pytest.raises(DamagedCheckpointError, match="expected the trace of attempt"):
        _ = ray_dcp.open(tmp_path / "a").trace


# --- the command timeline -------------------------------------------------------------------------


def timeline(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": None}).invoke(main, ["timeline", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ray_dcp.save({"w": torch.ones(50)}, checkpoint_id=tmp_path / "run" / "step-7", no_dist=True)
    return tmp_path / "run" / "step-7"


def test_the_course_of_a_save_is_printed_as_it_was(tmp_path: Path):
    """Of a trace that is given: no two saves take as long. See tests/golden/README.md."""
    table = checkpoints.large_table(2, 4, ATTEMPT, files=4)
    path = checkpoints.place_table(tmp_path / "run" / "step-7", table, ATTEMPT)
    (path / trace_key(ATTEMPT)).write_bytes(encode_trace(async_trace()))
    told = []
    for arguments in ([f"{tmp_path}/run@7"], [path, "--json"]):
        found = timeline(*arguments)
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
    found = timeline(saved, "--chrome", tmp_path / "trace.json")
    assert found.exit_code == 0
    assert "ui.perfetto.dev" in found.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "coordinator", 1: "rank 0"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans if e["pid"] == 1} >= {"capture", "plan", "write", "commit"}
    assert all(e["dur"] >= 0 and e["ts"] > 1e15 for e in spans)
    assert json.loads(timeline(saved, "--json", "--chrome", tmp_path / "b.json").output)["attempt"]
    assert (tmp_path / "b.json").exists()
    events = json.loads(chrome_trace(async_trace()))["traceEvents"]
    late = [e for e in events if e.get("args", {}).get("straggler")]
    assert [(e["pid"], e["name"], e["args"]["where"]) for e in late] == [
        (4, "write", "pid 7 on node-b")
    ]


def test_a_trace_that_is_damaged_or_gone_says_so(saved: Path):
    found = timeline(saved, "--chrome", saved / "missing" / "t.json")
    assert "can't be written" in found.output
    assert "Traceback" not in found.output
    (trace,) = saved.glob("trace.*.json")
    trace.write_text("{")
    found = timeline(saved)
    assert (found.exit_code, "itself does not need it" in found.output) == (1, True)
    trace.unlink()
    found = timeline(saved)
    assert found.exit_code == 2
    assert "could not be written, or was deleted" in " ".join(found.output.split())
