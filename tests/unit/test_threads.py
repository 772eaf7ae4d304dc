"""The threads that `begin` starts: few, none behind work that hangs, none for good."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_dcp
from ray_dcp.core import processes
from ray_dcp.core.processes import begin
from ray_dcp.stage.write_queue import step_behind

WAIT_S = 60.0


def await_idle() -> None:
    """Waits until no thread waits for work any more."""
    for thread in threading.enumerate():
        if thread.name == processes.IDLE:
            thread.join(WAIT_S)


def state() -> dict[str, Any]:
    return {"layer": torch.nn.Linear(4, 4).state_dict()}


def save(path: Path) -> None:
    ray_dcp.save(state(), checkpoint_id=path)


def save_in_the_background(path: Path) -> None:
    ray_dcp.async_save(state(), checkpoint_id=path).result(WAIT_S)


def load(path: Path) -> None:
    ray_dcp.load(state(), checkpoint_id=path)


@pytest.mark.parametrize("call", [save, save_in_the_background, load])
def test_a_call_of_a_process_that_is_alone_starts_few_threads(
    call: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(tmp_path / "before")
    await_idle()
    started, start = [], threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    call(tmp_path / "before" if call is load else tmp_path / "now")
    assert len(started) <= 3, started  # and one, for the coordinator, in the first call


def test_work_never_waits_behind_work_that_hangs():
    go_on = threading.Event()
    hanging = [begin(lambda: go_on.wait(WAIT_S), "hangs") for _ in range(3)]
    assert begin(lambda: 1, "works").result(WAIT_S) == 1
    go_on.set()
    assert all(one.result(WAIT_S) for one in hanging)


def test_work_that_is_begun_where_some_was_done_is_done_by_the_same_thread():
    await_idle()
    first = begin(threading.current_thread, "first").result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        begin(lambda: 1 // 0, "fails").result(WAIT_S)
    second, name = begin(
        lambda: (threading.current_thread(), threading.current_thread().name), "second"
    ).result(WAIT_S)
    assert (second, name) == (first, "second")
    second.join(WAIT_S)
    assert not second.is_alive()


def test_a_thread_that_has_lowered_its_priority_does_no_other_work():
    begin(lambda: step_behind(19), "polite").result(WAIT_S)
    niceness = begin(
        lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), "ordinary"
    ).result(WAIT_S)
    assert niceness == os.getpriority(os.PRIO_PROCESS, os.getpid())
