"""Events, metrics and reports of saves and loads: each phase, one end, and never in the way."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ray_dcp
from ray_dcp.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    SaveCancelledError,
    SaveSkippedError,
    UnsupportedValueError,
)
from ray_dcp.events import LOGGER_NAME, Event, outcome_of
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import LoadDone, LoadOutcome, OpKey, ReadCounts
from ray_dcp.runtime import metrics
from ray_dcp.runtime.metrics import Account

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

    def _take(self, value: float, tags: dict[str, str] | None) -> None:
        assert set(tags or {}) == self.tag_keys
        assert all(isinstance(tag, str) for tag in (tags or {}).values())
        key = tuple((tags or {})[name] for name in sorted(self.tag_keys))
        self.values.setdefault(key, []).append(value)

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert self.kind == "Counter"
        if value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        self._take(value, tags)

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert self.kind == "Histogram"
        self._take(value, tags)

    def set(self, value: float) -> None:
        assert self.kind == "Gauge"
        self._take(value, None)


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


def test_a_synchronous_save_tells_the_same_without_staging(told, counted, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    assert told.names == [
        "save.capture", "save.plan", "save.write", "save.commit", "save.committed"
    ]  # fmt: skip
    assert told.end["mode"] == "save"
    assert told.end["stall_s"] == pytest.approx(sum(e["seconds"] for e in told.events[:-1]))
    assert counted("dcp_saves") == {("save", "committed"): 1}
    assert counted("dcp_staged_bytes") == {}
    # A zero before it, which no counter of Ray's takes, is in nobody's way.
    assert counted("dcp_written_bytes") == {(): told.end["num_bytes"]}
    assert told.end["num_bytes"] > STATE_BYTES


def test_a_load_tells_what_it_read_and_its_report_the_seconds(told, counted, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    told.events.clear()
    report = ray_dcp.load(state(), checkpoint_id=tmp_path / "c")
    assert told.names[-3:] == ["load.read", "load.finish", "load.loaded"]
    assert set(told.names[:-3]) == {"load.plan"}
    assert list(report.seconds) == ["plan", "read", "finish"]
    assert told.end["num_bytes"] == report.bytes_read >= STATE_BYTES
    assert counted("dcp_loads") == {("loaded",): 1}
    assert counted("dcp_read_bytes") == {("storage",): report.bytes_read}
    assert counted("dcp_load_seconds") == {(): told.end["seconds"]}


def test_the_load_of_the_newest_step_is_one_load(told, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "step-1")
    told.events.clear()
    report = ray_dcp.load_newest(state(), tmp_path)
    assert told.end["name"] == "load.loaded"
    assert set(report.seconds) == {"plan", "read", "finish"}


@pytest.mark.parametrize("save", [ray_dcp.save, ray_dcp.async_save])
def test_a_save_that_fails_tells_why(save, told, counted, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    told.events.clear()
    options = SaveOptions(overwrite=False)
    with pytest.raises(CheckpointExistsError):
        save(state(), checkpoint_id=tmp_path / "c", options=options).result(180)
    assert told.end["name"] == "save.failed"
    assert told.end["error"].startswith("CheckpointExistsError: ")
    assert told.end["num_bytes"] == 0
    assert counted("dcp_saves")[save.__name__, "failed"] == 1
    assert len(counted("dcp_save_durable_seconds")) == 1


def test_a_state_that_can_not_be_saved_has_one_end_too(told, tmp_path):
    with pytest.raises(UnsupportedValueError):
        ray_dcp.async_save(
            {"x": torch.empty(3, device="meta")}, checkpoint_id=tmp_path / "c"
        ).result(180)
    assert told.names == ["save.capture", "save.failed"]


def test_a_load_that_fails_has_one_end(told, counted, tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        ray_dcp.load(state(), checkpoint_id=tmp_path / "c")
    assert told.end["name"] == "load.failed"
    assert counted("dcp_loads") == {("failed",): 1}
    assert counted("dcp_read_bytes") == {}


@pytest.mark.parametrize("background", [False, True])
def test_what_a_stager_of_the_users_stages_is_told_as_well(background, told, tmp_path):
    stager = DefaultStager(StagingOptions(False, False, background, False))
    handle = ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c", async_stager=stager)
    handle.committed(180)
    stager.close()
    assert told.names == [
        *(f"save.{phase}" for phase in ("stage", "capture", "plan", "write", "commit")),
        "save.committed",
    ]
    assert list(handle.report().seconds) == ["stage", "capture", "plan", "write", "commit"]


def test_a_stager_that_raises_ends_the_save(told, tmp_path):
    class Broken(DefaultStager):
        def stage(self, state_dict: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no memory")

    stager = Broken(StagingOptions(False, False, False, False))
    with pytest.raises(RuntimeError, match="no memory"):
        ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c", async_stager=stager)
    assert told.names == ["save.failed"]


def test_a_save_that_is_interrupted_has_its_end(told, tmp_path):
    class Interrupted:
        def state_dict(self) -> dict[str, Any]:
            raise KeyboardInterrupt

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    for save in (ray_dcp.save, ray_dcp.async_save):
        told.events.clear()
        with pytest.raises(KeyboardInterrupt):
            save({"x": Interrupted()}, checkpoint_id=tmp_path / "c")
        assert told.names == ["save.failed"]
        assert told.end["error"].startswith("KeyboardInterrupt")


def test_only_rank_0_counts_what_is_one_for_all_ranks(counted):
    for rank in (0, 1):
        account = Account("async_save", "/c", rank=rank, world_size=2)
        account.done("stage", 7)
        account.done("write", 9)
        account.takeovers = 2
        account.end()
        with Account("load", "/c", rank=rank, world_size=2) as load:
            load.done("read", 5)
    assert counted("dcp_saves") == {("async_save", "committed"): 1}
    assert counted("dcp_loads") == {("loaded",): 1}
    assert counted("dcp_staged_bytes") == {(): 14}
    assert counted("dcp_written_bytes") == {(): 18}
    assert counted("dcp_read_bytes") == {("storage",): 10}
    assert counted("dcp_takeovers") == {(): 4}


def test_bytes_of_a_save_that_was_not_committed_are_not_counted_as_written(counted):
    with suppress(SaveCancelledError), Account("save", "/c") as account:
        account.done("write", 9)
        raise SaveCancelledError("after the last byte")
    assert counted("dcp_saves") == {("save", "cancelled"): 1}
    assert counted("dcp_written_bytes") == {}


def test_bytes_from_the_memory_of_the_nodes_are_told_apart(told, counted):
    with Account("load", "/c") as load:
        done = LoadDone(OpKey("s", 1), 0, ReadCounts(9, 12, bytes_from_memory=5))
        load.watching(lambda _: LoadOutcome(ReadCounts(9, 12)))(done)
    assert counted("dcp_read_bytes") == {("storage",): 7, ("memory",): 5}
    assert (told.end["num_bytes"], told.end["memory_bytes"]) == (12, 5)


def test_an_account_ends_once(told, counted):
    account = Account("save", "/c")
    account.end(SaveCancelledError("by hand"))
    account.end()
    assert told.names == ["save.cancelled"]
    assert counted("dcp_saves") == {("save", "cancelled"): 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "committed"),
        (SaveSkippedError("x"), "skipped"),
        (SaveCancelledError("x"), "cancelled"),
        (CommitUnknownError("x", attempt="a"), "unknown"),
        (CheckpointNotFoundError("x"), "failed"),
        (KeyboardInterrupt(), "failed"),
    ],
)
def test_every_way_to_end_has_its_word(error, outcome):
    assert outcome_of(error, "committed") == outcome
    assert Event(name=f"save.{outcome}").is_end


# How it is told


def test_an_event_is_a_record_that_json_takes_and_names_everything():
    event = Event(name="save.stage", rank=3)
    found = json.loads(json.dumps(event.as_dict()))
    assert found["rank"] == 3
    known = {field.name for field in fields(Event)}
    assert known - set(found) == {"checkpoint_id", "attempt", "plan", "stall_s", "error"}


def test_one_line_for_a_save_at_level_info_and_the_rest_below(told, tmp_path):
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    assert told.levels == [logging.DEBUG] * (len(told.levels) - 1) + [logging.INFO]
    told.levels.clear()
    Account("save", "/c", rank=1, world_size=2).end()
    assert told.levels == [logging.DEBUG]


def test_nothing_is_made_of_an_event_that_nobody_listens_to(monkeypatch, tmp_path):
    monkeypatch.setattr(Event, "as_dict", lambda self: pytest.fail("nobody listens"))
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")


def test_a_handler_that_raises_does_not_fail_a_save(told, counted, monkeypatch, tmp_path):
    monkeypatch.setattr(Told, "emit", lambda self, record: 1 / 0)
    ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c").committed(180)


def test_a_metric_that_raises_does_not_fail_a_save(told, monkeypatch, tmp_path):
    monkeypatch.setattr(metrics, "_metric", lambda name: 1 / 0)
    monkeypatch.setattr(metrics, "_ray_is_up", lambda: True)
    ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c").committed(180)
    metrics.staging_memory(1, 2)
    assert told.end["name"] == "save.committed"


def test_without_ray_nothing_is_counted(counted, monkeypatch, tmp_path):
    monkeypatch.setattr(metrics, "_ray_is_up", lambda: False)
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    assert all(counted(name) == {} for name in metrics.METRICS)


def test_the_memory_of_a_node_is_a_gauge(counted):
    metrics.staging_memory(0, 64)
    metrics.staging_memory(32, 64)
    assert counted("dcp_staging_used_bytes") == {(): 32}
    assert counted("dcp_staging_limit_bytes") == {(): 128}
