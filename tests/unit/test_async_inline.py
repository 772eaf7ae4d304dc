"""`async_save` in a process that is alone: bytes copied, training goes on, the handle tells."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import ray_dcp
from ray_dcp import SaveOptions, errors
from ray_dcp.runtime import staging_backend
from ray_dcp.store.opening import open_storage

REPOSITORY = Path(__file__).parents[2]


def state_of(step: int) -> dict[str, Any]:
    tied = torch.full((4, 3), float(step))
    return {
        "w": torch.arange(12.0).reshape(3, 4) + step,
        "t": (torch.arange(12.0).reshape(3, 4) + step).t(),
        "scalar": torch.tensor(float(step)),
        "bf16": torch.full((5,), step, dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
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


def spoil(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    state["nested"]["log"].clear()
    state["nested"]["step"] = -1


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


def test_what_changes_after_staging_is_saved_as_it_was(gate, tmp_path):
    state = state_of(3)
    handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "c")
    handle.staged(180)
    spoil(state)
    gate.open.set()
    handle.committed(180)
    assert_is(loaded(tmp_path / "c"), 3)


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
    assert sorted(metadata.state_dict_metadata)[:2] == ["bf16", "nested.log"]
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


class CountingStager(BlockingAsyncStager):
    """Counts its calls."""

    def __init__(self, synchronize: bool) -> None:
        super().__init__()
        self._synchronize_after_execute = synchronize
        self.calls: list[str] = []

    def stage(self, state_dict):
        self.calls.append("stage")
        return super().stage(state_dict)

    def synchronize_staging(self):
        self.calls.append("synchronize")


@pytest.mark.parametrize("synchronize", [True, False])
def test_staging_is_synchronized_when_the_stager_asks_for_it(synchronize, tmp_path):
    stager = CountingStager(synchronize)
    handle = ray_dcp.async_save(state_of(1), checkpoint_id=tmp_path / "c", async_stager=stager)
    handle.result(180)
    assert stager.calls == ["stage", "synchronize"][: 1 + synchronize]


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
if "ray" in sys.modules:
    raise SystemExit("a process that is alone has no need of Ray")
"""


def run(script: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(path)],
        check=True, cwd=REPOSITORY, timeout=400, capture_output=True, text=True,
    )  # fmt: skip


def test_a_script_that_ends_at_once_has_saved_and_says_what_failed(tmp_path):
    ended = run(SCRIPT, tmp_path / "c")
    found = {"w": torch.zeros(2_000_000)}
    ray_dcp.load(found, checkpoint_id=tmp_path / "c")
    assert bool((found["w"] == 7).all())
    assert "nobody asked" in ended.stderr
    assert "c-none" in ended.stderr


PENDING = """
import atexit, os, sys, threading, time
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
"""

FORKS = """
handle = ray_dcp.async_save({"w": torch.ones(3)}, checkpoint_id=path, async_stager=stager)
child = os.fork()
if child == 0:
    sys.exit(7)
end_s = time.monotonic() + 60
ended = (0, 0)
while ended[0] == 0 and time.monotonic() < end_s:
    ended = os.waitpid(child, os.WNOHANG)
    time.sleep(0.05)
if ended[0] == 0:
    os.kill(child, 9)
    os.waitpid(child, 0)
    print("the child hangs")
else:
    print("the child ended with", os.waitstatus_to_exitcode(ended[1]))
stager.release()
handle.result(180)
"""

IMPORTS_LATE = """
ray_dcp.async_save({"w": torch.ones(3)}, checkpoint_id=path).result(180)

def ends_the_connection():  # as that which `import ray` registers
    print("saved before" if handle.done() else "lost")

def release_late():
    threading.main_thread().join()
    stager.release()

atexit.register(ends_the_connection)
handle = ray_dcp.async_save({"w": torch.ones(3)}, checkpoint_id=path, async_stager=stager)
threading.Thread(target=release_late, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("ending", "said"), [(FORKS, "the child ended with 7"), (IMPORTS_LATE, "saved before")]
)
def test_a_save_that_is_pending_at_exit_is_awaited_by_its_own_process(
    ending, said, tmp_path, programs
):
    (ended,) = programs.run("-c", PENDING + ending, str(tmp_path / "c"))
    assert ended.stdout.strip() == said, ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert ray_dcp.verify(tmp_path / "c").ok


def test_warming_up_touches_memory_for_the_first_save():
    staging_backend._memory.clear()
    ray_dcp.warm_up({"w": torch.zeros(3 << 20), "n": 1}, no_dist=True).result(180)
    assert staging_backend._memory.idle_bytes >= 12 << 20
    with pytest.raises(errors.InvalidRequestError, match="mapping"):
        ray_dcp.warm_up([torch.zeros(3)])


@pytest.mark.parametrize("name", ["negative", "conjugate", "one of two"])
def test_a_single_view_that_shows_other_bytes_is_saved_as_it_shows_them(name, tmp_path):
    views = {
        "negative": {"v": torch._neg_view(torch.ones(2, 2))},
        "conjugate": {"v": torch.full((2, 2), 1 + 2j).conj()},
        "one of two": {"v": torch._neg_view(torch.ones(2, 2)), "w": torch.ones(2)},
    }
    state = views[name]
    ray_dcp.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True).result()
    found = ray_dcp.read_state_dict(tmp_path / "c")
    assert found["v"].tolist() == state["v"].tolist()
