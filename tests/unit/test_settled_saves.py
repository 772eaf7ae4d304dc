"""What is settled stays so: no report, future or callback of a save makes something else of it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.logger import _dcp_logger

import ray_dcp
from ray_dcp import asynchronous, errors, events
from ray_dcp.options import SaveOptions
from ray_dcp.runtime import staging_backend
from ray_dcp.runtime.session import session_alone
from tests.unit.test_async_inline import Gate, gate  # noqa: F401 - a fixture

PATIENCE_S = 120


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((64,), value)}


def assert_holds(path: Path, value: float) -> None:
    assert ray_dcp.verify(path).ok
    assert ray_dcp.read_state_dict(path)["w"].unique().tolist() == [value]


class Stranger:
    """An object that a safe load refuses: a save warns of it."""


def telling(value: float) -> dict[str, Any]:
    return {**state_of(value), "object": Stranger()}


# One session: `max_pending` and `when_full` hold for a process that is alone


def test_the_next_save_waits_for_the_one_before_and_has_its_memory(gate: Gate, tmp_path):  # noqa: F811
    staging_backend._memory.clear()
    first = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "1")
    handles, begun = [], threading.Event()

    def more() -> None:
        begun.set()
        for value in (2, 3, 4):
            path = tmp_path / str(value)
            handles.append(ray_dcp.async_save(state_of(value), checkpoint_id=path))

    saving = threading.Thread(target=more, daemon=True)
    saving.start()
    begun.wait()
    # A load of another thread is not behind them.
    ray_dcp.save(state_of(0), checkpoint_id=tmp_path / "0")
    ray_dcp.load(state_of(5), checkpoint_id=tmp_path / "0")
    assert not first.done()
    assert not handles
    gate.open.set()
    saving.join(PATIENCE_S)
    for handle in (first, *handles):
        handle.committed(PATIENCE_S)
    assert staging_backend._memory.idle_bytes <= 2 << 20  # of one save
    for value in (1, 2, 3, 4):
        assert_holds(tmp_path / str(value), value)


def test_a_save_that_its_process_left_in_a_hanging_storage_is_in_nobodys_way(
    gate: Gate,  # noqa: F811
    tmp_path,
):
    first = ray_dcp.async_save(
        state_of(1), checkpoint_id=tmp_path / "1", options=SaveOptions(write_timeout_s=1)
    )
    second = ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "2")
    with pytest.raises(errors.DeadlineError):
        first.committed(PATIENCE_S)
    gate.open.set()
    second.committed(PATIENCE_S)
    assert_holds(tmp_path / "2", 2)


# Futures that users hold


def test_who_gives_up_waiting_for_a_future_does_not_end_the_save(gate: Gate, tmp_path):  # noqa: F811
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c")

    async def wait_a_moment() -> None:
        for future in (handle.upload_completion, handle.upload_completion):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(future), 0.01)

    asyncio.run(wait_a_moment())
    assert not handle.upload_completion.cancel()
    assert not handle.staging_completion.cancel()
    handle.upload_completion.set_result("something else")
    gate.open.set()
    assert handle.result(PATIENCE_S).state_dict_metadata.keys() == {"w"}
    assert_holds(tmp_path / "c", 1)


def test_no_callback_breaks_the_thread_that_ends_a_save(gate: Gate, tmp_path, caplog):  # noqa: F811
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c")
    called = []

    def ends(future: Any) -> None:
        called.append(future)
        raise SystemExit("a callback")

    def waits(future: Any) -> None:
        called.append(handle.result(PATIENCE_S))

    for future in (handle.upload_completion, handle):
        future.add_done_callback(waits)
        future.add_done_callback(ends)
    gate.open.set()
    handle.result(PATIENCE_S)
    for thread in threading.enumerate():
        if thread.name.startswith("ray_dcp save"):
            thread.join(PATIENCE_S)
    assert len(called) == 4
    assert "A callback of" in caplog.text
    handle.add_done_callback(called.append)
    assert called[-1] is handle


def test_a_callback_of_staging_may_wait_for_the_end_of_its_save(tmp_path):
    options = SaveOptions(staging="background")
    told = threading.Event()

    class Slow:
        def __reduce__(self) -> Any:
            return int, (1,)

    handle = ray_dcp.async_save({**state_of(1), "s": Slow()}, checkpoint_id=tmp_path / "c",
                                options=options)  # fmt: skip

    def waits(future: Any) -> None:
        handle.result(PATIENCE_S)
        told.set()

    # Called in this thread where it is staged already.
    handle.staging_completion.add_done_callback(waits)
    handle.committed(PATIENCE_S)
    assert told.wait(PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_listener_of_events_that_raises_leaves_an_asynchronous_save_as_it_is(tmp_path, error):
    heard = []

    def listener(event: events.Event) -> None:
        if event.is_end:
            heard.append(event)
            raise error("a listener")

    unsubscribe = events.subscribe(listener)
    try:
        ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c").committed(PATIENCE_S)
    finally:
        unsubscribe()
    assert heard
    assert_holds(tmp_path / "c", 1)


# What follows a commit


@pytest.fixture
def strict() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_warning_that_is_an_error_does_not_fail_what_is_committed(strict, tmp_path, caplog):
    ray_dcp.save(telling(1), checkpoint_id=tmp_path / "sync")
    ray_dcp.async_save(telling(2), checkpoint_id=tmp_path / "async").committed(PATIENCE_S)
    with ray_dcp.CheckpointManager(tmp_path / "run", save_interval=1) as manager:
        assert manager.save(1, telling(3))
        assert manager.save_async(2, telling(4))
        manager.join()
        assert manager.all_steps() == [1, 2]
    assert caplog.text.count("Stranger") >= 4
    for place, value in (
        ("sync", 1),
        ("async", 2),
        ("run/step-00000001", 3),
        ("run/step-00000002", 4),
    ):
        found = state_of(0)
        ray_dcp.load(found, checkpoint_id=tmp_path / place)
        assert found["w"].unique().tolist() == [value]


def test_a_load_that_is_done_is_not_failed_by_its_warning(strict, tmp_path):
    for step in (1, 2):
        ray_dcp.save(state_of(step), checkpoint_id=tmp_path / f"step-{step:08}")
    next((tmp_path / "step-00000002").glob("*.distcp")).unlink()
    found = state_of(0)
    assert ray_dcp.load_newest(found, tmp_path).step == 1
    with ray_dcp.CheckpointManager(tmp_path, read_only=True) as manager:
        again = state_of(0)
        assert manager.restore("auto", again).step == 1
    assert found["w"].tolist() == again["w"].tolist() == [1.0] * 64


class Raises(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("a handler")


@pytest.mark.parametrize("name", [events.LOGGER_NAME, _dcp_logger.name, "ray_dcp"])
def test_a_log_handler_that_raises_fails_neither_save_nor_load(tmp_path, name):
    told = []
    logger, handler = logging.getLogger(name), Raises()
    level, unsubscribe = logger.level, events.subscribe(lambda event: told.append(event.outcome))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        ray_dcp.save(state_of(1), checkpoint_id=tmp_path / "sync")
        ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "async").committed(PATIENCE_S)
        ray_dcp.load(state_of(0), checkpoint_id=tmp_path / "sync")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        unsubscribe()
    assert [outcome for outcome in told if outcome in events._ENDS] == [
        "committed", "committed", "loaded"
    ]  # fmt: skip


def test_a_writer_that_takes_no_save_id_does_not_fail_what_is_committed(tmp_path):
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path / "c")
    kind, tried = type(writer), []

    class Refuses:
        def __get__(self, *_: object) -> str:
            return "mine"

        def __set__(self, _: object, save_id: str) -> None:
            tried.append(save_id)
            raise AttributeError("no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "save_id", Refuses(), raising=False)
        ray_dcp.save(state_of(1), storage_writer=writer)
    assert ray_dcp.outcome(tmp_path / "c", tried[-1]) == "committed"
    assert_holds(tmp_path / "c", 1)


def test_an_interrupt_after_the_commit_leaves_the_step_committed_for_its_manager(tmp_path):
    def interrupt(event: events.Event) -> None:
        if event.is_end:
            raise KeyboardInterrupt

    with ray_dcp.CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        unsubscribe = events.subscribe(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                manager.save(1, state_of(1), tags=("keep",))
        finally:
            unsubscribe()
        assert manager.step_info(1).tags == {"keep"}
        assert manager.all_steps() == [1]


# No threads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what refuses new threads: of some names, or all."""
    begin = threading.Thread.start

    def refuse(*names: str) -> None:
        def start(thread: threading.Thread) -> None:
            if not names or thread.name.partition("/")[0].strip() in names:
                raise RuntimeError("can't start new thread")
            begin(thread)

        monkeypatch.setattr(threading.Thread, "start", start)

    yield refuse
    monkeypatch.undo()


def test_an_asynchronous_save_without_a_thread_fails_and_is_in_nobodys_way(
    no_threads, monkeypatch, tmp_path
):
    no_threads("ray_dcp save")
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "1")
    with pytest.raises(errors.LimitError, match="start a thread"):
        handle.result(PATIENCE_S)
    assert handle.upload_completion.done()
    assert not asynchronous._running
    assert session_alone().coordinator_info()["active"] == ()
    monkeypatch.undo()
    began_s = time.monotonic()
    asynchronous._drain()
    ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "2").committed(PATIENCE_S)
    assert time.monotonic() - began_s < PATIENCE_S
    assert not list((tmp_path / "1").glob("*.distcp"))
    atexit.unregister(asynchronous._drain)


def test_without_threads_every_call_fails_cleanly_and_the_next_ones_work(
    no_threads, monkeypatch, tmp_path
):
    ray_dcp.save(state_of(0), checkpoint_id=tmp_path / "c")
    no_threads()
    with pytest.raises(errors.LimitError):
        ray_dcp.save(state_of(1), checkpoint_id=tmp_path / "c")
    with pytest.raises(errors.LimitError):
        ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c").result(PATIENCE_S)
    with pytest.raises(errors.LimitError):
        ray_dcp.load(state_of(0), checkpoint_id=tmp_path / "c")
    monkeypatch.undo()
    assert_holds(tmp_path / "c", 0)
    ray_dcp.save(state_of(2), checkpoint_id=tmp_path / "c")
    assert_holds(tmp_path / "c", 2)


@pytest.mark.parametrize("name", ["trace", "ray_dcp removal", "ray_dcp manager"])
def test_a_thread_for_what_follows_a_commit_is_not_needed(no_threads, tmp_path, name):
    with ray_dcp.CheckpointManager(tmp_path, save_interval=1, max_to_keep=1) as manager:
        no_threads(name)
        for step in (1, 2):
            assert manager.save_async(step, state_of(step))
        manager.join()
        assert manager.all_steps() == [2]
