"""Events, metrics, logs and reports of saves and loads: each phase, one end, never in the way."""

from __future__ import annotations

import logging
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
from ray_dcp.events import LOGGER_NAME, Event, outcome_of
from ray_dcp.options import SaveOptions
from ray_dcp.runtime import metrics
from ray_dcp.runtime.metrics import Account

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


def test_an_asynchronous_save_tells_each_phase_and_one_end(told, counted, tmp_path):
    handle = ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c")
    handle.committed(180)
    phases = ["capture", "plan", "stage", "write", "commit"]
    assert told.names == [*(f"save.{phase}" for phase in phases), "save.committed"]
    report = handle.report()
    assert list(report.seconds) == phases
    assert report.stall_s == pytest.approx(sum(report.seconds[p] for p in phases[:3]))
    assert report.bytes_staged == STATE_BYTES
    written = sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp"))
    assert report.bytes_written == written
    end = told.end
    assert end["attempt"] == report.attempt
    assert end["stall_s"] == pytest.approx(report.stall_s)
    assert end["seconds"] >= sum(report.seconds.values())
    assert (end["num_bytes"], end["staged_bytes"]) == (written, STATE_BYTES)
    assert (end["mode"], end["path"]) == ("async_save", "native")
    assert end["checkpoint_id"] == str(tmp_path / "c")
    assert counted("dcp_saves") == {("async_save", "committed"): 1}
    assert counted("dcp_staged_bytes") == {(): STATE_BYTES}
    assert counted("dcp_written_bytes") == {(): written}
    assert counted("dcp_save_stall_seconds") == {("async_save",): end["stall_s"]}
    assert counted("dcp_save_durable_seconds") == {("async_save",): end["seconds"]}


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


@pytest.mark.parametrize("save", [ray_dcp.save, ray_dcp.async_save])
def test_a_save_that_fails_tells_why(save, told, counted, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    told.events.clear()
    options = SaveOptions(overwrite=False)
    with pytest.raises(errors.CheckpointExistsError):
        save(state(), checkpoint_id=tmp_path / "c", options=options).result(180)
    assert told.end["name"] == "save.failed"
    assert told.end["error"].startswith("CheckpointExistsError: ")
    assert told.end["num_bytes"] == 0
    assert counted("dcp_saves")[save.__name__, "failed"] == 1
    assert len(counted("dcp_save_durable_seconds")) == 1


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


def test_only_rank_0_counts_what_is_one_for_all_ranks_and_written_is_what_was_committed(counted):
    with suppress(errors.SaveCancelledError), Account("save", "/c") as account:
        account.done("write", 9)
        raise errors.SaveCancelledError("after the last byte")
    assert counted("dcp_written_bytes") == {}
    for rank in (0, 1):
        account = Account("async_save", "/c", rank=rank, world_size=2)
        account.done("stage", 7)
        account.done("write", 9)
        account.end()
        with Account("load", "/c", rank=rank, world_size=2) as load:
            load.done("read", 5)
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
    Account("save", "/c", rank=1, world_size=2).end()
    assert told.levels == [logging.DEBUG]


def test_a_handler_that_raises_does_not_fail_a_save(told, monkeypatch, tmp_path):
    monkeypatch.setattr(Told, "emit", lambda self, record: 1 / 0)
    ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c").committed(180)


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


def test_an_event_comes_to_whoever_subscribed_until_he_ends_it(tmp_path: Path, heard: list[Event]):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    names = [event.name for event in heard]
    assert names == ["save.capture", "save.plan", "save.write", "save.commit", "save.committed"]
    assert {event.checkpoint_id for event in heard} == {str(tmp_path / "c")}
    late: list[Event] = []
    events.subscribe(late.append)()
    ray_dcp.load(state(), checkpoint_id=tmp_path / "c")
    assert heard[-1].name == "load.loaded"
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


def test_an_account_ends_once_and_the_memory_of_a_node_is_a_gauge(told, counted):
    account = Account("save", "/c")
    account.end(errors.SaveCancelledError("by hand"))
    account.end()
    assert told.names == ["save.cancelled"]
    assert counted("dcp_saves") == {("save", "cancelled"): 1}
    metrics.staging_memory(0, 64)
    metrics.staging_memory(32, 64)
    assert counted("dcp_staging_used_bytes") == {(): 32}
    assert counted("dcp_staging_limit_bytes") == {(): 128}
