"""`async_save` in a process that is alone: bytes copied, training goes on, the handle tells."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import ray_dcp
from ray_dcp import SaveOptions, asynchronous, errors
from ray_dcp.core.processes import begin
from ray_dcp.manager.background import Finisher
from ray_dcp.stage import staging_backend
from ray_dcp.store.opening import open_storage
from tests.support.comparing import differences
from tests.support.processes import eventually


def state_of(step: int) -> dict[str, Any]:
    tied = torch.full((4, 3), float(step))
    return {
        "w": torch.arange(12.0).reshape(3, 4) + step,
        "t": (torch.arange(12.0).reshape(3, 4) + step).t(),
        "scalar": torch.tensor(float(step)),
        "bf16": torch.full((5,), step, dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
        "fp8": torch.full((9,), step, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "strided": torch.arange(9 * 10**5)[::2] + step,
        "many": [torch.full((n % 7,), n + step) for n in range(300)],
        "tied": tied,
        "tied_too": tied,
        "nested": {"log": [step, step], "step": step},
    }


def loaded(path: Path) -> dict[str, Any]:
    state = state_of(0)
    ray_dcp.load(state, checkpoint_id=path)
    return state


def assert_is(state: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
    assert state["nested"] == expected["nested"]
    assert all(map(torch.equal, state["many"], expected["many"]))


class Gate:
    """A storage opener whose files wait to be written until the gate is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, target: Any) -> Any:
        assert self.open.wait(180)
        return open_storage(target)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    make = staging_backend.InProcessBackend
    monkeypatch.setattr(staging_backend, "InProcessBackend", lambda: make(gate))
    yield gate
    gate.open.set()


def test_a_state_of_several_windows_is_saved_as_it_was(gate, monkeypatch, tmp_path):
    monkeypatch.setattr(staging_backend, "PIECE_BYTES", 2 << 20)
    state = {f"{n}": torch.arange(700_000 + n, dtype=torch.float32) + n for n in range(4)}
    # Views that show other bytes than lie in memory, and one that leaves some out.
    state["strided"] = torch.arange(9 * 10**5)[::2]
    state["conjugate"] = torch.full((2, 2), 1 + 2j).conj()
    state["negative"] = torch._neg_view(torch.ones(2, 2))
    expected = {name: value.clone() for name, value in state.items()}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c")
    for value in state.values():
        value.zero_()
    gate.open.set()
    handle.committed(180)
    ray_dcp.load(state, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_handle_is_both_of_what_dcp_returns(gate, tmp_path):
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c")
    assert isinstance(handle, Future)
    assert isinstance(handle, AsyncSaveResponse)
    assert handle.staging_completion.done()
    assert not handle.upload_completion.done()
    assert not handle.done()
    assert handle.running()
    assert handle.progress.phase == "writing"
    assert len({handle, handle}) == 1
    gate.open.set()
    metadata = handle.result(180)
    assert handle.upload_completion.result(0) is metadata
    assert sorted(metadata.state_dict_metadata)[:2] == ["bf16", "fp8"]
    assert handle.progress == ray_dcp.SaveProgress("committed", *[handle.progress.bytes_total] * 2)


def test_a_failed_save_is_told_by_the_handle_and_leaves_what_stood(tmp_path):
    ray_dcp.save(state_of(1), checkpoint_id=tmp_path / "c")
    handle = ray_dcp.async_save(
        state_of(2), checkpoint_id=tmp_path / "c", options=SaveOptions(overwrite=False)
    )
    with pytest.raises(errors.CheckpointExistsError):
        handle.result(180)
    with pytest.raises(errors.CheckpointExistsError):
        handle.upload_completion.result(0)
    assert handle.progress.phase == "failed"
    assert_is(loaded(tmp_path / "c"), 1)


def test_waiting_has_a_deadline_and_the_save_goes_on(gate, tmp_path):
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c")
    with pytest.raises(errors.DeadlineError, match="goes on"):
        handle.committed(0.01)
    with pytest.raises(errors.DeadlineError, match="goes on"):
        handle.committed(-1)
    for wrong in ("1", float("nan"), True):
        with pytest.raises(errors.InvalidRequestError, match="timeout_s must be a number of sec"):
            handle.committed(wrong)
    gate.open.set()
    handle.committed(float("inf"))
    assert_is(loaded(tmp_path / "c"), 1)


@pytest.mark.parametrize("how", ["call", "background", "stager"])
def test_ctrl_c_before_the_thread_begins_leaves_no_save_behind(how, monkeypatch, tmp_path):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    options = SaveOptions(
        staging="call" if how == "stager" else how,
        **dict.fromkeys(("plan_timeout_s", "write_timeout_s", "commit_timeout_s"), 150),
    )
    where: dict[str, Any] = {"checkpoint_id": tmp_path / "c", "options": options}
    if how == "stager":
        where["async_stager"] = BlockingAsyncStager()
    with monkeypatch.context() as patch:
        patch.setattr(asynchronous, "start_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ray_dcp.async_save(state_of(1), **where)
    assert not asynchronous._running
    began_s = time.monotonic()
    ray_dcp.async_save(state_of(2), **where).committed(180)
    assert time.monotonic() - began_s < 100
    assert_is(loaded(tmp_path / "c"), 2)


def test_a_cancelled_save_ends_so_and_leaves_what_stood(gate, tmp_path):
    gate.open.set()
    ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c").committed(180)
    gate.open.clear()
    handle = ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "c")
    assert handle.cancel()
    gate.open.set()
    with pytest.raises(errors.SaveCancelledError):
        handle.committed(180)
    assert handle.cancelled()
    assert not handle.cancel()
    assert_is(loaded(tmp_path / "c"), 1)


def test_a_save_that_the_users_stager_stages_is_cancelled_too(tmp_path):
    class Stager(BlockingAsyncStager):
        def stage(self, state_dict):
            self.state, self.staged = state_dict, Future()
            return self.staged

    stager = Stager()
    ray_dcp.save(state_of(1), checkpoint_id=tmp_path / "c")
    handle = ray_dcp.async_save(state_of(2), checkpoint_id=tmp_path / "c", async_stager=stager)
    assert handle.cancel()
    stager.staged.set_result(stager.state)
    with pytest.raises(errors.SaveCancelledError):
        handle.committed(180)
    assert handle.cancelled()
    assert_is(loaded(tmp_path / "c"), 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DefaultStager(StagingOptions(False, False, False, False)),
        lambda: DefaultStager(StagingOptions(False, False, True, False)),
        lambda: BlockingAsyncStager(cache_staged_state_dict=False),
    ],
    ids=["blocking", "in the background", "deprecated"],
)
def test_stagers_of_dcp_are_used_and_stay_open(make, tmp_path):
    stager = make()
    for step in (1, 2):
        handle = ray_dcp.async_save(
            state_of(step), checkpoint_id=tmp_path / "c", async_stager=stager
        )
        handle.staged(180)
        handle.result(180)
        assert handle.report().staging == type(stager).__name__
        assert_is(loaded(tmp_path / "c"), step)
    stager.close()


class Held:
    """Holds what a save does in the background until the next save has been called."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def here(self):
        self.begun.set()
        assert self.go_on.wait(180)

    def release_soon(self):
        assert self.begun.wait(180)
        threading.Timer(0.1, self.go_on.set).start()


class HeldPlanner(DefaultSavePlanner):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def create_local_plan(self):
        self.held.here()
        return super().create_local_plan()


class HeldWriter(_FileSystemWriter):
    """A writer that does not stage."""

    def __init__(self, path, held):
        super().__init__(path)
        self.held = held

    def write_data(self, plan, planner):
        self.held.here()
        return super().write_data(plan, planner)


def plug_ins(kind, path):
    """Makes what saves share, and what each has for its own."""
    held = Held()
    if kind == "writer":
        return held, {"storage_writer": HeldWriter(path, held)}, dict
    if kind == "planner":
        planner = DefaultSavePlanner()
        return held, {"planner": planner}, lambda: {"storage_writer": HeldWriter(path, held)}
    stager = DefaultStager(StagingOptions(False, kind == "stager with a thread", False, False))
    return held, {"async_stager": stager}, lambda: {"planner": HeldPlanner(held)}


@pytest.mark.parametrize("kind", ["writer", "planner", "stager", "stager with a thread"])
@pytest.mark.parametrize("then", [ray_dcp.async_save, ray_dcp.save])
def test_saves_that_share_a_plug_in_do_not_overlap(then, kind, tmp_path):
    """A writer has one path, a planner one state, and a stager one copy of it."""
    held, shared, own = plug_ins(kind, tmp_path)
    weight, ended = torch.zeros(1000), []
    for step in (1, 2):
        weight.fill_(step)
        call, how = ray_dcp.async_save, {**shared, **own()}
        if step == 2:
            held.release_soon()
            call = then
        if call is ray_dcp.save:
            how.pop("async_stager", None)
        state = {"w": weight, f"only in {step}": step}
        ended.append(call(state, checkpoint_id=tmp_path / str(step), **how))
        if call is ray_dcp.async_save:
            ended[-1].staged(180)
    for step, one in zip((1, 2), ended, strict=True):
        if isinstance(one, ray_dcp.SaveHandle):
            one.result(180)
        found = ray_dcp.read_state_dict(tmp_path / str(step))
        assert sorted(found) == [f"only in {step}", "w"]
        assert found["w"].unique().tolist() == [step]
    if stager := shared.get("async_stager"):
        stager.close()


@pytest.mark.parametrize("kind", ["writer", "planner", "stager"])
def test_plug_ins_are_freed_once_their_save_has_ended(kind, tmp_path):
    """A stager has a copy of the state, and a planner the state itself."""
    held, shared, own = plug_ins(kind, tmp_path)
    held.go_on.set()
    state = {"w": torch.ones(3)}
    how = {"async_stager": BlockingAsyncStager(), **shared, **own()}
    freed = weakref.ref(next(iter(shared.values())))
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", **how)
    handle.result(180)
    del handle, how, shared
    assert eventually(lambda: gc.collect() >= 0 and freed() is None)


class Pair(NamedTuple):
    value: torch.Tensor
    name: str


class Holder:
    def __init__(self, *values: Any) -> None:
        self.values = values


STAGERS = [
    lambda: DefaultStager(StagingOptions(False, False, False, False)),
    lambda: BlockingAsyncStager(cache_staged_state_dict=False),
]


@pytest.mark.parametrize("make", STAGERS)
def test_a_stager_is_given_what_views_show(make, tmp_path):
    shown = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "conjugate": shown.conj(), "nested": {"imag": [shown.conj().imag, 1]},
        "tuple": (shown.conj(), [2]), "negative": torch._neg_view(torch.ones(3)),
        "pair": [(Pair(shown.conj(), "x"),)], "plain": shown,
        "object": {"list": [Holder(shown.conj(), shown)]},
    }  # fmt: skip
    expected = {name: copy.deepcopy(value) for name, value in state.items()}
    with closing(make()) as stager, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'(pair|object.*)' holds")
        handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager)
        handle.result(180)
    assert state["nested"]["imag"][0].is_neg()
    assert state["object"]["list"][0].values[0].is_conj()
    found: dict[str, Any] = dict.fromkeys(("tuple", "pair"))
    found["object"] = {"list": [None]}
    found |= {name: torch.zeros_like(state[name]) for name in ("conjugate", "negative", "plain")}
    found["nested"] = {"imag": [torch.zeros(2), None]}
    options = ray_dcp.LoadOptions(weights_only=False)
    ray_dcp.load(found, checkpoint_id=tmp_path / "c", options=options)
    for value, expected_value in zip(
        found.pop("object")["list"][0].values, (shown.conj(), shown), strict=True
    ):
        assert torch.equal(value, expected_value)
    ((value, _),) = found.pop("pair")[0]  # DCP's older stager makes tuples of all kinds of them
    assert torch.equal(value, shown.conj())
    assert {name: differences(found[name], expected[name]) for name in found} == {
        name: [] for name in found
    }


@pytest.mark.parametrize("make", STAGERS)
def test_a_stager_is_not_given_freed_memory(make, tmp_path):
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    state = {"a": {"freed": freed}, "b": (freed,), "c": torch.ones(1), "d": Holder(freed)}
    with (
        closing(make()) as stager,
        pytest.raises(errors.UnsupportedValueError, match=r"3 value.*'a\.freed'.*'b\.0'.*'d'"),
    ):
        ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", async_stager=stager)


class ForeignWriter(stock.FileSystemWriter):
    """A subclass of DCP's writer, which ray_dcp does not take at its word."""


def test_a_writer_of_another_kind_stages_and_writes_as_in_dcp(tmp_path):
    state = state_of(4)
    handle = ray_dcp.async_save(state, storage_writer=ForeignWriter(tmp_path / "c"))
    handle.staged(180)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    handle.result(180)
    assert handle.report().path == "foreign storage"
    found = {"w": torch.zeros(3, 4)}
    ray_dcp.load(found, checkpoint_id=tmp_path / "c")
    assert torch.equal(found["w"], state_of(4)["w"])


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_dcps_writer_is_taken_at_its_word(kind, tmp_path):
    handle = ray_dcp.async_save(
        state_of(5),
        storage_writer=stock.FileSystemWriter(tmp_path / "c"),
        async_checkpointer_type=kind,
    )
    handle.result(180)
    assert handle.report().path == "native"
    assert_is(loaded(tmp_path / "c"), 5)


def test_something_that_is_no_stager_is_refused(tmp_path):
    with pytest.raises(errors.InvalidRequestError, match="AsyncStager"):
        ray_dcp.async_save({}, checkpoint_id=tmp_path / "c", async_stager=object())


SCRIPT = """
import sys, torch, ray_dcp
ray_dcp.async_save({"x": torch.empty(3, device="meta")}, checkpoint_id=sys.argv[1] + "-none")
ray_dcp.async_save({"w": torch.full((2_000_000,), 7.0)}, checkpoint_id=sys.argv[1])
"""


def test_a_script_that_ends_at_once_has_saved_and_says_what_failed(tmp_path, programs):
    (ended,) = programs.run("-c", SCRIPT, str(tmp_path / "c"))
    assert ended.returncode == 0, ended.stderr
    found = {"w": torch.zeros(2_000_000)}
    ray_dcp.load(found, checkpoint_id=tmp_path / "c")
    assert bool((found["w"] == 7).all())
    assert "nobody asked" in ended.stderr
    assert "c-none" in ended.stderr


PENDING = """
import atexit, os, signal, sys, threading
from concurrent.futures import Future
import torch
from torch.distributed.checkpoint.staging import AsyncStager
import ray_dcp

path = sys.argv[1]

class Later(AsyncStager):
    def __init__(self):
        self.staged = Future()

    def stage(self, state_dict):
        self.state = state_dict
        return self.staged

    def release(self):
        self.staged.set_result(self.state)

stager = Later()
ray_dcp.async_save({"w": torch.ones(3)}, checkpoint_id=path).result(180)

def ends_the_connection():  # as that which `import ray` registers
    if os.getpid() == parent:
        print("saved before" if handle.done() else "lost")

def release_late():
    threading.main_thread().join()
    stager.release()

atexit.register(ends_the_connection)
handle = ray_dcp.async_save({"w": torch.ones(3)}, checkpoint_id=path, async_stager=stager)
parent, child = os.getpid(), os.fork()
if child == 0:
    signal.alarm(60)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
threading.Thread(target=release_late, daemon=True).start()
"""


def test_a_save_that_is_pending_at_exit_is_awaited_before_connections_end(tmp_path, programs):
    (ended,) = programs.run("-c", PENDING, str(tmp_path / "c"))
    # A child that is forked meanwhile ends at once.
    assert ended.stdout.split("\n")[:2] == ["7", "saved before"], ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert ray_dcp.verify(tmp_path / "c").ok


def test_warming_up_touches_memory_for_the_first_save():
    staging_backend._memory.clear()
    ray_dcp.warm_up({"w": torch.zeros(3 << 20), "n": 1}, no_dist=True).result(180)
    assert staging_backend._memory.idle_bytes >= 12 << 20
    with pytest.raises(errors.InvalidRequestError, match="mapping"):
        ray_dcp.warm_up([torch.zeros(3)])


# --- SaveOptions(staging="background"): the call returns when the save is planned ----------------


BACKGROUND = SaveOptions(staging="background")


class CopyGate:
    """Nothing is staged before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        real = staging_backend.fill_window

        def fill_window(*args: Any) -> None:
            self.begun.set()
            assert self.open.wait(180)
            real(*args)

        monkeypatch.setattr(staging_backend, "fill_window", fill_window)


@pytest.fixture
def copy_gate(monkeypatch):
    gate = CopyGate(monkeypatch)
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


def test_the_call_returns_before_anything_is_copied(copy_gate, tmp_path):
    state = {"w": torch.ones(9)}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=BACKGROUND)
    assert copy_gate.begun.wait(180)
    assert handle.progress.phase == "staging"
    with pytest.raises(errors.DeadlineError, match="be staged"):
        handle.staged(0.01)
    copy_gate.open.set()
    handle.staged(180)
    state["w"].zero_()
    handle.committed(180)
    assert ray_dcp.open(tmp_path / "c")["w"][:].tolist() == [1.0] * 9


def interrupt_twice(waits: Any) -> None:
    """Calls what waits, and sends Ctrl-C to it, and once more when it has ended waiting."""

    def interrupt_again(frame: Any, event: str, argument: object) -> None:
        is_first_handled = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if event == "call" and is_first_handled and frame.f_code in releases:
            raise KeyboardInterrupt

    several = concurrent.futures._base._AcquireFutures.__exit__
    releases = [each.__code__ for each in (threading.Condition.__exit__, several)]
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    sys.setprofile(interrupt_again)
    try:
        with pytest.raises(KeyboardInterrupt):
            waits()
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    "wait", ["staged", "staging_completion.result", "upload_completion.result"]
)
def test_ctrl_c_twice_while_waiting_does_not_hold_the_save_up(wait, copy_gate, tmp_path):
    state = {"w": torch.ones(9)}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=BACKGROUND)
    interrupt_twice(attrgetter(wait)(handle))
    copy_gate.open.set()
    handle.committed(60)
    assert ray_dcp.open(tmp_path / "c")["w"][:].tolist() == [1.0] * 9


def test_ctrl_c_twice_while_a_manager_waits_for_saves_does_not_hold_the_next_wait_up():
    written, saves = threading.Event(), Finisher()
    saves.add(7, 0.0, partial(written.wait, 180))
    interrupt_twice(saves.ended)
    written.set()
    found: list[int] = []
    waits = in_thread(lambda: found.extend(one.step for one in saves.ended()))
    waits.join(60)
    assert found == [7]


def test_a_step_waits_until_the_state_is_staged_and_only_a_step(copy_gate, tmp_path):
    model, optimizer = model_and_optimizer()
    handle = ray_dcp.async_save(
        model.state_dict(), checkpoint_id=tmp_path / "c", options=BACKGROUND
    )
    handle.before_step(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    stepped = threading.Event()
    thread = in_thread(lambda: (optimizer.step(), stepped.set()))
    assert copy_gate.begun.wait(180)
    assert not stepped.wait(0.05)
    assert model.weight.tolist() == [[1.0] * 3] * 2
    copy_gate.open.set()
    thread.join(180)
    assert stepped.is_set()
    assert model.weight.tolist() == [[0.0] * 3] * 2
    handle.committed(180)
    assert weight_at(tmp_path / "c") == [[1.0] * 3] * 2


def test_a_step_waits_for_every_save_and_keeps_one_hook(copy_gate, tmp_path):
    model, optimizer = model_and_optimizer()
    options = SaveOptions(staging="background", max_pending=2)
    handles = []
    for name in "ab":
        place = tmp_path / name
        handles.append(ray_dcp.async_save(model.state_dict(), checkpoint_id=place, options=options))
        handles[-1].before_step(optimizer)
    copy_gate.open.set()
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
        raise errors.StorageError("no memory is left")

    monkeypatch.setattr(staging_backend, "fill_window", fails)
    model, optimizer = model_and_optimizer()
    handle = ray_dcp.async_save(
        model.state_dict(), checkpoint_id=tmp_path / "c", options=BACKGROUND
    )
    handle.before_step(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.0] * 3] * 2
    with pytest.raises(errors.StorageError, match="no memory is left"):
        handle.staged()
    with pytest.raises(errors.StorageError, match="no memory is left"):
        handle.committed(180)


def test_what_has_no_hooks_is_refused(tmp_path):
    handle = ray_dcp.async_save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(errors.InvalidRequestError, match=r"found object; call staged\(\) before"):
        handle.before_step(object())
    handle.committed(180)


def test_objects_are_those_of_the_call(copy_gate, tmp_path):
    state = {"w": torch.ones(9), "log": [1, 2], "more": {"text": "before"}}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=BACKGROUND)
    state["log"].append(3)
    state["more"]["text"] = "after"
    copy_gate.open.set()
    handle.committed(180)
    found = {"w": torch.zeros(9), "log": [0, 0], "more": {"text": ""}}
    ray_dcp.load(found, checkpoint_id=tmp_path / "c")
    assert found["log"] == [1, 2]
    assert found["more"] == {"text": "before"}


@pytest.mark.parametrize("staging", ["call", "background"])
def test_the_state_may_go_when_it_is_staged(staging, gate, tmp_path):
    """It is not held until the commit: a state made for the save alone takes its memory twice."""
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    options = SaveOptions(staging=staging)
    handle = ray_dcp.async_save({"w": tensor}, checkpoint_id=tmp_path / "c", options=options)
    del tensor
    handle.staged(180)
    for _ in range(100):
        gc.collect()
        if gone() is None:
            break
    assert gone() is None
    assert not handle.done()
    gate.open.set()
    handle.committed(180)


def test_its_report_counts_what_training_waited_and_not_the_copy(copy_gate, tmp_path):
    state = {"w": torch.ones(9)}
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", options=BACKGROUND)
    assert copy_gate.begun.wait(180)
    with pytest.raises(errors.DeadlineError):
        handle.staged(0.02)
    copy_gate.open.set()
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


def test_a_planner_s_hooks_are_asked_in_the_call(copy_gate, tmp_path):
    copy_gate.open.set()
    handle = ray_dcp.async_save(
        {"w": torch.ones(9)}, checkpoint_id=tmp_path / "c", planner=Hooks(), options=BACKGROUND
    )
    assert handle.staging_completion.done()
    handle.committed(180)
    trace = ray_dcp.open(tmp_path / "c").trace
    assert trace.stall_s == max(span.stop_s for span in trace.spans if span.phase == "stage")


def test_a_thread_whose_waiter_is_cancelled_ends_without_an_error():
    gate, threads = threading.Event(), list[threading.Thread]()

    def work() -> None:
        threads.append(threading.current_thread())
        gate.wait(60)

    async def give_up() -> None:
        awaited = asyncio.ensure_future(asyncio.wrap_future(begin(work, "held")))
        awaited.cancel()
        await asyncio.wait([awaited])

    asyncio.run(give_up())
    gate.set()
    assert eventually(lambda: threads and not threads[0].is_alive())
