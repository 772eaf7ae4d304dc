"""`SaveOptions(staging="background")`: the call returns when the save is planned.

A thread copies; training waits where it would change the state, and a change that waits for
nothing is found.
"""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

import ray_dcp
from ray_dcp.errors import DeadlineError, InvalidRequestError, StorageError
from ray_dcp.options import SaveOptions
from ray_dcp.runtime import staging_backend
from ray_dcp.store.opening import open_storage

BACKGROUND = SaveOptions(staging="background")


class Gate:
    """Nothing is staged before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        real = staging_backend.fill_rows

        def fill_rows(*args: Any, **more: Any) -> None:
            self.begun.set()
            assert self.open.wait(180)
            real(*args, **more)

        monkeypatch.setattr(staging_backend, "fill_rows", fill_rows)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def weight_at(path: Any) -> list[list[float]]:
    return ray_dcp.open(path)["weight"][:].tolist()


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_call_returns_before_anything_is_copied(gate, tmp_path):
    state = {"w": torch.ones(9)}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=BACKGROUND)
    assert gate.begun.wait(180)
    assert handle.progress.phase == "staging"
    with pytest.raises(DeadlineError, match="be staged"):
        handle.staged(0.01)
    gate.open.set()
    handle.staged(180)
    state["w"].zero_()
    handle.committed(180)
    assert ray_dcp.open(tmp_path / "c")["w"][:].tolist() == [1.0] * 9


def test_a_step_waits_until_the_state_is_staged_and_only_a_step(gate, tmp_path):
    model, optimizer = model_and_optimizer()
    handle = ray_dcp.async_save(
        model.state_dict(), checkpoint_id=tmp_path / "c", options=BACKGROUND
    )
    handle.before_step(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    stepped = threading.Event()
    thread = in_thread(lambda: (optimizer.step(), stepped.set()))
    assert gate.begun.wait(180)
    assert not stepped.wait(0.05)
    assert model.weight.tolist() == [[1.0] * 3] * 2
    gate.open.set()
    thread.join(180)
    assert stepped.is_set()
    assert model.weight.tolist() == [[0.0] * 3] * 2
    handle.committed(180)
    assert weight_at(tmp_path / "c") == [[1.0] * 3] * 2


def test_a_step_waits_for_every_save_and_keeps_one_hook(gate, tmp_path):
    model, optimizer = model_and_optimizer()
    options = SaveOptions(staging="background", max_pending=2)
    handles = []
    for name in "ab":
        place = tmp_path / name
        handles.append(ray_dcp.async_save(model.state_dict(), checkpoint_id=place, options=options))
        handles[-1].before_step(optimizer)
    gate.open.set()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert all(handle.staging_completion.done() for handle in handles)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    for handle in handles:
        handle.committed(180)
    assert [weight_at(tmp_path / name) for name in "ab"] == [[[1.0] * 3] * 2] * 2


def test_a_save_that_fails_holds_no_step_up(monkeypatch, tmp_path):
    def fails(*_: Any, **__: Any) -> None:
        raise StorageError("no memory is left")

    monkeypatch.setattr(staging_backend, "fill_rows", fails)
    model, optimizer = model_and_optimizer()
    handle = ray_dcp.async_save(
        model.state_dict(), checkpoint_id=tmp_path / "c", options=BACKGROUND
    )
    handle.before_step(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.0] * 3] * 2
    with pytest.raises(StorageError, match="no memory is left"):
        handle.staged()
    with pytest.raises(StorageError, match="no memory is left"):
        handle.committed(180)


class FailingStager(AsyncStager):
    """A user's stager, which fails with an error of its own."""

    def stage(self, state_dict: Any) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("no stream is left"))
        return failed


def test_a_stager_that_fails_holds_no_step_up(tmp_path):
    model, optimizer = model_and_optimizer()
    handle = ray_dcp.async_save(
        model.state_dict(), checkpoint_id=tmp_path / "c", async_stager=FailingStager()
    )
    handle.before_step(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="no stream is left"):
        handle.staged()


def test_what_has_no_hooks_is_refused(tmp_path):
    handle = ray_dcp.async_save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(InvalidRequestError, match=r"found object; call staged\(\) before"):
        handle.before_step(object())
    handle.committed(180)


def test_objects_are_those_of_the_call(gate, tmp_path):
    state = {"w": torch.ones(9), "log": [1, 2], "more": {"text": "before"}}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=BACKGROUND)
    state["log"].append(3)
    state["more"]["text"] = "after"
    gate.open.set()
    handle.committed(180)
    found = {"w": torch.zeros(9), "log": [0, 0], "more": {"text": ""}}
    ray_dcp.load(found, checkpoint_id=tmp_path / "c")
    assert found["log"] == [1, 2]
    assert found["more"] == {"text": "before"}


@pytest.mark.parametrize("staging", ["call", "background"])
def test_the_state_may_go_when_it_is_staged(staging, monkeypatch, tmp_path):
    """It is not held until the commit: a state made for the save alone takes its memory twice."""
    write = threading.Event()
    make = staging_backend.InProcessBackend

    def opener(target: Any) -> Any:
        assert write.wait(180)
        return open_storage(target)

    monkeypatch.setattr(staging_backend, "InProcessBackend", lambda: make(opener))
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    options = SaveOptions(staging=staging)
    handle = ray_dcp.async_save({"w": tensor}, checkpoint_id=tmp_path / "c", options=options)
    del tensor
    try:
        handle.staged(180)
        for _ in range(100):
            gc.collect()
            if gone() is None:
                break
        assert gone() is None
        assert not handle.done()
    finally:
        write.set()
    handle.committed(180)


def test_its_report_counts_what_training_waited_and_not_the_copy(gate, tmp_path):
    state = {"w": torch.ones(9)}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=BACKGROUND)
    assert gate.begun.wait(180)
    with pytest.raises(DeadlineError):
        handle.staged(0.02)
    gate.open.set()
    handle.committed(180)
    report = handle.report()
    assert report.waited_s is not None
    assert report.waited_s >= 0.02
    assert report.stall_s == pytest.approx(
        report.seconds["capture"] + report.seconds["plan"] + report.waited_s
    )
    trace = ray_dcp.open(tmp_path / "c").trace
    (plan,) = (span for span in trace.spans if (span.rank, span.phase) == (0, "plan"))
    assert trace.stall_s == plan.stop_s, "though it waited for the copy as well"
    called = ray_dcp.async_save(state, checkpoint_id=tmp_path / "d")
    called.committed(180)
    assert called.report().waited_s is None


class Hooks(DefaultSavePlanner):
    """A planner of the user's."""


def test_a_planner_s_hooks_are_asked_in_the_call(gate, tmp_path):
    gate.open.set()
    handle = ray_dcp.async_save(
        {"w": torch.ones(9)}, checkpoint_id=tmp_path / "c", planner=Hooks(), options=BACKGROUND
    )
    assert handle.staging_completion.done()
    handle.committed(180)
    trace = ray_dcp.open(tmp_path / "c").trace
    assert trace.stall_s == max(span.stop_s for span in trace.spans if span.phase == "stage")
