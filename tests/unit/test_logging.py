"""Every call and phase is told: as events, and to DCP's logger in DCP's form."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import logger as stock_logger

import ray_dcp
from ray_dcp import events
from ray_dcp.events import Event

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


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


def state() -> dict[str, Any]:
    return {"w": torch.ones(3), "n": 1}


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


def test_what_fails_says_so_once(tmp_path: Path, heard: list[Event]):
    with pytest.raises(ray_dcp.CheckpointError):
        ray_dcp.load(state(), checkpoint_id=tmp_path / "none")
    assert [event.name for event in heard if event.is_end] == ["load.failed"]
    assert "CheckpointNotFoundError" in (heard[-1].error or "")


def test_an_asynchronous_save_tells_its_end_once(tmp_path: Path, heard: list[Event]):
    ray_dcp.async_save(state(), checkpoint_id=tmp_path / "c").result()
    assert [event.name for event in heard if event.is_end] == ["save.committed"]


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


def test_errors_go_to_dcps_logger_as_errors(tmp_path: Path, logged: list[dict[str, Any]]):
    with pytest.raises(ray_dcp.CheckpointError):
        ray_dcp.load(state(), checkpoint_id=tmp_path / "none")
    (last,) = [
        each for each in logged if each["event"] == "exception" and each["func_name"] == "load"
    ]
    assert last["level"] == "ERROR"
    assert str(tmp_path) in last["error"]


def test_a_listener_that_fails_disturbs_nobody(
    tmp_path: Path, heard: list[Event], caplog: pytest.LogCaptureFixture
):
    def fail(event: Event) -> None:
        raise ValueError("a listener")

    unsubscribe = events.subscribe(fail)
    ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
    unsubscribe()
    assert heard[-1].name == "save.committed"
    assert "A listener of events failed" in caplog.text


def test_one_line_per_call_is_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="ray_dcp"):
        ray_dcp.save(state(), checkpoint_id=tmp_path / "c")
        ray_dcp.load(state(), checkpoint_id=tmp_path / "c")
    lines = [r.getMessage().partition(" ")[0] for r in caplog.records if r.levelno == logging.INFO]
    assert lines == ["save.committed", "load.loaded"]
