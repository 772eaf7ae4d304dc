"""Events, metrics, logs and reports of saves and loads: each phase, one end, never in the way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import logger as stock_logger
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ray_dcp
from ray_dcp import errors, events
from ray_dcp.coordinator import metrics
from ray_dcp.core.phases import READ, STAGE, WRITE, Step
from ray_dcp.events import LOGGER_NAME, Event, outcome_of
from ray_dcp.options import SaveOptions
from ray_dcp.rank import rank_save
from ray_dcp.session.call import Call
from ray_dcp.session.inline_transport import inline_session
from ray_dcp.session.session import Session
from ray_dcp.stage import staging_backend
from ray_dcp.store.opening import open_storage
from tests.support.adapter import OwnReader, OwnSave, OwnWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

STATE_BYTES = 4000


def state() -> dict[str, Any]:
    return {"w": torch.arange(1000.0), "step": 3}


class Told(logging.Handler):
    """Takes the events that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.levels: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(record.event)
        self.levels.append(record.levelno)

    @property
    def names(self) -> list[str]:
        return [event["name"] for event in self.events]

    @property
    def end(self) -> dict[str, Any]:
        assert len([e for e in self.events if Event(name=e["name"]).is_end]) == 1, self.names
        return self.events[-1]


@pytest.fixture
def told():
    logger = logging.getLogger(LOGGER_NAME)
    handler, level = Told(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


class Instrument:
    """Takes values as the metric of Ray does that it stands for, and adds them up."""

    def __init__(self, kind: str, tag_keys: tuple[str, ...]) -> None:
        self.kind, self.tag_keys = kind, set(tag_keys)
        self.values: dict[tuple[str, ...], list[float]] = {}

    def __getattr__(self, method: str) -> Any:
        assert method == {"Counter": "inc", "Histogram": "observe", "Gauge": "set"}[self.kind]
        return self._take

    def _take(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert value > 0 or self.kind != "Counter", "Ray refuses it"
        assert set(tags or {}) == self.tag_keys
        assert all(isinstance(tag, str) for tag in (tags or {}).values())
        key = tuple((tags or {})[name] for name in sorted(self.tag_keys))
        self.values.setdefault(key, []).append(value)


@pytest.fixture
def counted(monkeypatch):
    made = {name: Instrument(kind, tags) for name, (kind, _, tags) in metrics.METRICS.items()}
    monkeypatch.setattr(metrics, "_metric", made.__getitem__)
    monkeypatch.setattr(metrics, "_ray_is_up", lambda: True)
    return lambda name: {tags: sum(values) for tags, values in made[name].values.items()}


# What a save tells


def test_the_end_of_an_asynchronous_save_tells_what_its_metrics_and_report_do(
    told, counted, tmp_path
):
    handle = ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c")
    handle.committed(180)
    end, report = told.end, handle.report()
    written = sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp"))
    assert (end["num_bytes"], end["staged_bytes"]) == (written, STATE_BYTES)
    assert (report.bytes_written, report.bytes_staged) == (written, STATE_BYTES)
    assert (end["mode"], end["path"]) == ("async_save", "native")
    assert (end["checkpoint_id"], end["attempt"]) == (str(tmp_path / "c"), report.attempt)
    assert counted("dcp_saves") == {("async_save", "committed"): 1}
    assert counted("dcp_staged_bytes") == {(): STATE_BYTES}
    assert counted("dcp_written_bytes") == {(): written}


def test_a_load_tells_what_it_read_and_its_report_the_seconds(told, counted, tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError):
        ray_dcp.load(state(), checkpoint_id=tmp_path / "c")
    assert told.end["name"] == "load.failed"
    failed_s = told.end["seconds"]
    assert (counted("dcp_loads"), counted("dcp_read_bytes")) == ({("failed",): 1}, {})
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    told.events.clear()
    report = ray_dcp.load(state(), checkpoint_id=tmp_path / "c")
    assert told.names[-3:] == ["load.read", "load.finish", "load.loaded"]
    assert set(told.names[:-3]) == {"load.plan"}
    assert list(report.seconds) == ["plan", "read", "finish"]
    assert told.end["num_bytes"] == report.bytes_read >= STATE_BYTES
    assert counted("dcp_loads") == {("failed",): 1, ("loaded",): 1}
    assert counted("dcp_read_bytes") == {("storage",): report.bytes_read}
    assert counted("dcp_load_seconds") == {(): pytest.approx(failed_s + told.end["seconds"])}


class Interrupted:
    """A value that the user's Ctrl-C meets."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyboardInterrupt

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Broken(DefaultStager):
    """A stager that raises."""

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no memory")


@pytest.mark.parametrize(
    ("save", "value", "stager", "error"),
    [
        (ray_dcp.async_save, torch.empty(3, device="meta"), None, errors.UnsupportedValueError),
        (ray_dcp.async_save, 1, Broken, RuntimeError),
        (ray_dcp.async_save, Interrupted(), None, KeyboardInterrupt),
        (ray_dcp.save, Interrupted(), None, KeyboardInterrupt),
    ],
)
def test_a_save_that_ends_before_it_is_planned_has_one_end_too(
    save, value, stager, error, told, tmp_path
):
    how = {"async_stager": stager(StagingOptions(False, False, False, False))} if stager else {}
    with pytest.raises(error):
        save({"x": value}, checkpoint_id=tmp_path / "c", **how).result(180)
    assert told.end["name"] == "save.failed"
    assert told.end["error"].startswith(error.__name__)


def call_of(mode: str, rank: int = 0) -> Call:
    call = Call(inline_session(), 60.0)
    call.rank, call.world_size = rank, 2
    call.report(mode, "/c")
    return call


def moved(call: Call, step: Step, num_bytes: int) -> None:
    call.progress.enter(step)
    call.progress.count(num_bytes)


def test_only_rank_0_counts_what_is_one_for_all_ranks_and_written_is_what_was_committed(counted):
    cancelled = Call(inline_session(), 60.0)
    with suppress(errors.SaveCancelledError), cancelled.reported("save", "/c"):
        moved(cancelled, WRITE, 9)
        raise errors.SaveCancelledError("after the last byte")
    assert counted("dcp_written_bytes") == {}
    for rank in (0, 1):
        call = call_of("async_save", rank=rank)
        moved(call, STAGE, 7)
        moved(call, WRITE, 9)
        call.end()
        load = call_of("load", rank=rank)
        moved(load, READ, 5)
        load.end()
    assert counted("dcp_saves") == {("save", "cancelled"): 1, ("async_save", "committed"): 1}
    assert counted("dcp_loads") == {("loaded",): 1}
    assert counted("dcp_staged_bytes") == {(): 14}
    assert counted("dcp_written_bytes") == {(): 18}
    assert counted("dcp_read_bytes") == {("storage",): 10}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "committed"),
        (errors.SaveSkippedError("x"), "skipped"),
        (errors.SaveCancelledError("x"), "cancelled"),
        (errors.CommitUnknownError("x", attempt="a"), "unknown"),
        (errors.CheckpointNotFoundError("x"), "failed"),
        (KeyboardInterrupt(), "failed"),
    ],
)
def test_every_way_to_end_has_its_word(error, outcome):
    assert outcome_of(error, "committed") == outcome
    assert Event(name=f"save.{outcome}").is_end


# How it is told


def test_one_line_for_a_save_at_level_info_and_the_rest_below(told, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    assert told.levels == [logging.DEBUG] * (len(told.levels) - 1) + [logging.INFO]
    told.levels.clear()
    call_of("save", rank=1).end()
    assert told.levels == [logging.DEBUG]


def test_a_metric_or_listener_that_raises_does_not_fail_a_save(
    heard, monkeypatch, tmp_path, caplog
):
    def fail(*_):
        raise ValueError("a listener")

    monkeypatch.setattr(metrics, "_metric", fail)
    monkeypatch.setattr(metrics, "_ray_is_up", lambda: True)
    unsubscribe = events.subscribe(fail)
    ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c").committed(180)
    unsubscribe()
    metrics.staging_memory(1, 2)
    assert heard[-1].name == "save.committed"
    assert "A listener of events failed" in caplog.text


# Who listens


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    found: list[Event] = []
    unsubscribe = events.subscribe(found.append)
    yield found
    unsubscribe()


@pytest.fixture
def logged() -> Iterator[list[dict[str, Any]]]:
    """What a handler on DCP's logger is told."""
    found: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append({**record.msg, "level": record.levelname})  # type: ignore[dict-item]

    logger, handler = stock_logger._dcp_logger, Handler()
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_listener_that_is_unsubscribed_hears_nothing_more(tmp_path: Path, heard: list[Event]):
    late: list[Event] = []
    events.subscribe(late.append)()
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    assert {event.checkpoint_id for event in heard} == {str(tmp_path / "c")}
    assert late == []


def test_a_handler_on_dcps_logger_hears_what_dcp_would_tell(
    tmp_path: Path, logged: list[dict[str, Any]]
):
    writer, planner = stock.FileSystemWriter(tmp_path / "c"), stock.DefaultSavePlanner()
    stock.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    theirs = {each["func_name"]: each for each in logged if each["event"] == "end"}
    logged.clear()
    ray_dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    ours = {each["func_name"]: each for each in logged if each["event"] == "end"}
    for name in ("save", "local_step", "global_step", "write_data"):
        assert theirs[name].keys() <= ours[name].keys() | {"checkpoint_id"}, name
    same = ("checkpoint_id", "storage_writer", "planner", "func_name", "event", "level")
    assert {key: theirs["save"][key] for key in same} == {key: ours["save"][key] for key in same}
    logged.clear()
    ray_dcp.load(state(), checkpoint_id=tmp_path / "c", planner=stock.DefaultLoadPlanner())
    assert [each["event"] for each in logged if each["func_name"] == "load"] == ["start", "end"]


def test_a_call_ends_once_and_the_memory_of_a_node_is_a_gauge(told, counted):
    call = call_of("save")
    call.end(errors.SaveCancelledError("by hand"))
    call.end()
    assert told.names == ["save.cancelled"]
    assert counted("dcp_saves") == {("save", "cancelled"): 1}
    metrics.staging_memory(0, 64)
    metrics.staging_memory(32, 64)
    assert counted("dcp_staging_used_bytes") == {(): 32}
    assert counted("dcp_staging_limit_bytes") == {(): 128}


# All of them by one clock


DCP_NAMES = {
    "save": {
        "local_step": "capture",
        "global_step": "plan",
        "stage_state_dict": "stage",
        "write_data": "write",
        "finish_checkpoint": "commit",
    },
    "load": {"read_data": "read", "finish_load": "finish"},
}
"""What DCP's logger calls the phases. Those of a load's plan are several there."""


def stager(*, is_async: bool) -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, is_async, False))


SAVES: dict[str, dict[str, Any]] = {
    "native": {},
    "planner hooks": {"planner": OwnSave},
    "foreign storage": {"storage_writer": OwnWriter},
}
ASYNC_SAVES: dict[str, dict[str, Any]] = {
    **SAVES,
    "background": {"options": SaveOptions(staging="background")},
    "a stager of the user's": {"async_stager": lambda: stager(is_async=False)},
    "one that copies in a thread": {"async_stager": lambda: stager(is_async=True)},
}
FAILURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "capture": ({"x": torch.empty(3, device="meta")}, {}),
    "plan": ({}, {"options": SaveOptions(overwrite=False)}),
    "write": ({}, {"broken": True}),
}


def how(place: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments, with what is made for each call; a storage knows its place."""
    made = {name: value() for name, value in given.items() if name in ("planner", "async_stager")}
    if "storage_writer" in given:
        made["storage_writer"] = given["storage_writer"](place)
    return {"checkpoint_id": place, **given, **made}


@pytest.fixture
def broken_disk(monkeypatch):
    """Lets no part file be written from now on."""

    def refuse(*_: object, **__: object):
        raise errors.StorageError("no space left")

    def breaks() -> None:
        monkeypatch.setattr(rank_save, "write_part", refuse)

    return breaks


class Readers:
    """What everything that tells of an operation has told, which must be one story."""

    def __init__(self, heard: list[Event], logged: list[dict[str, Any]], counted: Any) -> None:
        self.heard, self.logged, self.counted = heard, logged, counted

    def agree(self, operation: str, seconds: Any = None, stall_s: float | None = None) -> None:
        """Asserts that all tell the same of the only operation so far."""
        *phases, end = self.heard
        assert [event.name for event in self.heard if event.is_end] == [end.name]
        by_phase: dict[str, float] = {}
        for event in phases:
            by_phase[event.outcome] = by_phase.get(event.outcome, 0.0) + event.seconds
        assert sum(by_phase.values()) == pytest.approx(end.seconds, abs=1e-6), "a gap"
        if seconds is not None:
            assert seconds == pytest.approx(by_phase, abs=1e-9)
        named: dict[str, float] = {}
        for each in self.logged:
            phase = DCP_NAMES[operation].get(each["func_name"])
            if phase is not None and each["event"] == "end":
                named[phase] = named.get(phase, 0.0) + each["times_spent"] / 1e9
            elif phase is not None and each["event"] == "exception":
                named[phase] = by_phase[phase]
        told = {phase: s for phase, s in by_phase.items() if (operation, phase) != ("load", "plan")}
        assert named == pytest.approx(told, abs=1e-6)
        if operation == "load":
            assert sum(self.counted("dcp_load_seconds").values()) == end.seconds
            return
        stalls = self.counted("dcp_save_stall_seconds")
        assert list(stalls.values()) == [pytest.approx(end.stall_s)]
        durable = sum(self.counted("dcp_save_durable_seconds").values())
        assert durable == (end.seconds if end.outcome == "committed" else 0)
        assert end.stall_s == pytest.approx(end.seconds if stall_s is None else stall_s)


@pytest.fixture
def readers(heard, logged, counted) -> Readers:
    return Readers(heard, logged, counted)


def agrees_with_trace(heard: list[Event], place: Path) -> None:
    """Asserts that what a rank tells the coordinator of its phases is what it tells elsewhere."""
    trace = ray_dcp.open(place).trace
    assert trace is not None
    spans = {span.phase: span for span in trace.spans if span.rank == 0}
    told = {event.outcome: event for event in heard}
    for phase, span in spans.items():
        assert span.seconds == pytest.approx(told[phase].seconds, abs=3e-5), phase
        assert span.num_bytes == told[phase].num_bytes


@pytest.mark.parametrize("given", SAVES.values(), ids=SAVES)
def test_whoever_tells_of_a_save_tells_the_same(given, readers, tmp_path):
    place = tmp_path / "c"
    ray_dcp.save(state(), **how(place, given))
    readers.agree("save")
    if "storage_writer" not in given:
        agrees_with_trace(readers.heard, place)
    assert [event.outcome for event in readers.heard] == [
        "capture", "plan", "write", "commit", "committed",
    ]  # fmt: skip


@pytest.mark.parametrize("given", ASYNC_SAVES.values(), ids=ASYNC_SAVES)
def test_whoever_tells_of_an_asynchronous_save_tells_the_same(given, readers, tmp_path):
    place = tmp_path / "c"
    began_s = time.perf_counter()
    handle = ray_dcp.async_save(state(), **how(place, given))
    called_s = time.perf_counter() - began_s
    handle.committed(180)
    report = handle.report()
    readers.agree("save", report.seconds, report.stall_s)
    assert report.stall_s - (report.waited_s or 0.0) <= called_s
    phases = {event.outcome: event.num_bytes for event in readers.heard}
    assert set(phases) == {"capture", "plan", "stage", "write", "commit", "committed"}
    assert (phases["stage"], phases["write"]) == (report.bytes_staged, report.bytes_written)
    if "storage_writer" not in given and "async_stager" not in given:
        agrees_with_trace(readers.heard, place)


@pytest.mark.parametrize("save", [ray_dcp.save, ray_dcp.async_save])
@pytest.mark.parametrize("phase", FAILURES)
def test_a_save_that_fails_spends_its_time_in_the_phase_that_failed(
    save, phase, readers, broken_disk, tmp_path
):
    more, given = FAILURES[phase]
    given = {**given}
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    for told in (readers.heard, readers.logged):
        told.clear()
    before = readers.counted("dcp_save_durable_seconds")
    if given.pop("broken", False):
        broken_disk()
    with pytest.raises(errors.CheckpointError):
        save({**state(), **more}, checkpoint_id=tmp_path / "c", **given).result(180)
    assert readers.heard[-1].name == "save.failed"
    assert readers.heard[-1].seconds == pytest.approx(
        sum(event.seconds for event in readers.heard[:-1]), abs=1e-6
    )
    assert readers.counted("dcp_save_durable_seconds") == before
    assert readers.counted("dcp_saves")[save.__name__, "failed"] == 1
    if save is ray_dcp.save:
        assert readers.heard[-1].stall_s == pytest.approx(readers.heard[-1].seconds)
        failed = [each["func_name"] for each in readers.logged if each["event"] == "exception"]
        assert failed[-1] == "save"
        assert len(failed) == 2, "the phase, then the whole"


@pytest.mark.parametrize("end", ["cancelled", "skipped"])
def test_a_save_that_is_given_up_tells_where_its_time_went(end, readers, monkeypatch, tmp_path):
    gate = threading.Event()

    def held(target: Any) -> Any:
        assert gate.wait(180)
        return open_storage(target)

    make = staging_backend.InProcessBackend
    monkeypatch.setattr(staging_backend, "InProcessBackend", lambda: make(held))
    options = SaveOptions(max_pending=1, when_full="skip")
    try:
        first = ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c", options=options)
        handle = first
        if end == "skipped":
            handle = ray_dcp.async_save(state(), checkpoint_id=tmp_path / "d", options=options)
        assert end == "skipped" or first.cancel()
    finally:
        gate.set()
    with pytest.raises(errors.SaveCancelledError):
        handle.committed(180)
    with suppress(errors.SaveCancelledError):
        first.committed(180)
    told = [event for event in readers.heard if event.checkpoint_id == handle.checkpoint_id]
    assert told[-1].name == f"save.{end}"
    by_phase = {event.outcome: event.seconds for event in told[:-1]}
    assert handle.report().seconds == pytest.approx(by_phase, abs=1e-9)
    assert sum(by_phase.values()) == pytest.approx(told[-1].seconds, abs=1e-6)
    assert handle.report().stall_s == pytest.approx(told[-1].stall_s)


@pytest.mark.parametrize("reader", [None, OwnReader], ids=["native", "foreign storage"])
def test_whoever_tells_of_a_load_tells_the_same(reader, readers, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    for told in (readers.heard, readers.logged):
        told.clear()
    given = {"storage_reader": reader(tmp_path / "c")} if reader else {}
    report = ray_dcp.load(state(), checkpoint_id=tmp_path / "c", **given)
    readers.agree("load", report.seconds)
    assert [event.outcome for event in readers.heard] == ["plan", "read", "finish", "loaded"]


def test_what_a_load_reads_to_compare_targets_is_of_its_plan(readers, tmp_path):
    whole = torch.arange(1000.0)
    ray_dcp.save({"a": whole, "b": whole.clone()}, checkpoint_id=tmp_path / "c")
    for told in (readers.heard, readers.logged):
        told.clear()
    target = torch.zeros(1000)
    report = ray_dcp.load({"a": target, "b": target}, checkpoint_id=tmp_path / "c")
    assert torch.equal(target, whole)
    readers.agree("load", report.seconds)
    assert [event.outcome for event in readers.heard] == ["plan", "read", "finish", "loaded"]


@pytest.mark.parametrize("call", [ray_dcp.save, ray_dcp.load])
def test_an_interrupt_after_the_outcome_does_not_undo_it(call, told, monkeypatch, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    told.events.clear()

    def interrupted(*_: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "end_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(state(), checkpoint_id=tmp_path / "c")
    assert told.end["name"] in ("save.committed", "load.loaded")


def test_a_load_that_falls_back_a_step_tells_of_all_that_it_tried(readers, tmp_path, recwarn):
    for step in (1, 2):
        ray_dcp.save(state(), checkpoint_id=tmp_path / f"step-{step}")
    next((tmp_path / "step-2").glob("*.distcp")).unlink()
    for told in (readers.heard, readers.logged):
        told.clear()
    report = ray_dcp.load_newest(state(), tmp_path)
    assert report.step == 1
    readers.agree("load", report.seconds)
