"""Staging memory: shared, given out in slots, laid out in windows, and filled."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import InvalidRequestError, LimitError
from ray_dcp.io.writer import write_part
from ray_dcp.options import SaveOptions
from ray_dcp.planning.global_plan import make_plan, rank_plan
from ray_dcp.stage import copying
from ray_dcp.stage.allocator import SlotAllocator
from ray_dcp.stage.copying import copy_all, fill_window
from ray_dcp.stage.memory import StagingMemory, free_memory_bytes
from ray_dcp.stage.memory_tier import Part
from ray_dcp.stage.values import Slot, StageKey, StagerOptions
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.stage.write_queue import Channel, WriteQueue
from ray_dcp.store.opening import open_storage
from ray_dcp.torch_adapter.capture import capture
from tests.descriptors import open_memory
from tests.polling import eventually
from tests.staged import MIB, Rank, Share, same_files, share

# --- Shared memory --------------------------------------------------------------------------------


PAGE = 4096


def test_what_one_writes_the_other_reads_and_slots_do_not_overlap():
    memory = StagingMemory.create(3, 2 * PAGE)
    other = StagingMemory.open(memory.address)
    for index in range(3):
        memory.slot(index)[:] = bytes([index + 1]) * 2 * PAGE
        memory.mark(Slot(index, 7 + index))
    for index in range(3):
        assert bytes(other.slot(index)) == bytes([index + 1]) * 2 * PAGE
        assert other.holds(Slot(index, 7 + index))
        assert not other.holds(Slot(index, 8 + index))
        assert other.slot_array(index).__array_interface__["data"][0] % PAGE == 0
    other.slot_array(1)[5] = 99
    assert memory.slot(1)[5] == 99


@pytest.mark.parametrize("present", [False, True])
def test_reads_see_the_bytes_whether_pages_are_present_or_not_until_the_slot_is_anothers(present):
    memory = StagingMemory.create(2, 4 * PAGE)
    memory.slot(1)[:] = bytes(range(256)) * 64
    memory.mark(Slot(1, 5))
    other = StagingMemory.open(memory.address)
    if present:
        other.touch(1)
    target = bytearray(300)
    parts = [Part(Slot(1, 5), 256 + 7, 100), Part(None, 0, 50), Part(Slot(1, 5), 0, 150)]
    assert other.read_into(parts, memoryview(target))
    expected = bytes(range(256))
    assert bytes(target) == expected[7:107] + bytes(50) + expected[:150]
    memory.mark(Slot(1, 6))
    assert not other.read_into(parts, memoryview(target))
    memory.mark(Slot(1, 5))
    other.close()
    assert not other.read_into(parts, memoryview(target))


@pytest.mark.parametrize("present", [False, True])
def test_a_slot_that_becomes_anothers_while_it_is_read_gives_nothing(monkeypatch, present):
    memory = StagingMemory.create(1, PAGE)
    memory.mark(Slot(0, 1))
    other = StagingMemory.open(memory.address)
    if present:
        other.touch(0)

    def taken(real):
        def copy(*given):
            done = real(*given)
            memory.mark(Slot(0, 2))
            return done

        return copy

    monkeypatch.setattr(np, "copyto", taken(np.copyto))
    assert not other.read_into([Part(Slot(0, 1), 0, 100)], memoryview(bytearray(100)))


def test_another_file_under_that_descriptor_is_refused(tmp_path: Path):
    memory = StagingMemory.create(1, PAGE)
    with (tmp_path / "file").open("wb") as file:
        wrong = replace(memory.address, fd=file.fileno())
        with pytest.raises(LimitError, match="another file"):
            StagingMemory.open(wrong)
    with pytest.raises(LimitError, match="can't be opened"):
        StagingMemory.open(replace(memory.address, fd=9999))
    with pytest.raises(LimitError, match="can't be opened"):
        StagingMemory.open(replace(memory.address, pid=2**22 - 3))


def test_an_address_space_that_is_too_small_says_what_to_do(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    gc.collect()  # so that nothing of other tests goes meanwhile
    before = len(open_memory())
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(LimitError, match="limit_bytes"):
        StagingMemory.create(2, PAGE)
    gc.collect()
    assert len(open_memory()) <= before


CHILD = """
import sys
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.stage.values import Slot
arena = StagingMemory.create(2, 1 << 20)
arena.slot(1)[:5] = b"hello"
print(arena.address.pid, arena.address.fd, *arena.address.identity, flush=True)
sys.stdin.read()
"""


def named() -> set[str]:
    """Returns what has a name in shared memory, but for what other test processes put there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("ray_dcp-test-")}


def test_it_survives_the_one_who_made_it_and_not_the_last_one():
    from ray_dcp.stage.values import MemoryAddress

    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, fd, device, inode = map(int, child.stdout.readline().split())
    assert os.stat(f"/proc/{pid}/fd/{fd}").st_nlink == 0  # it has a name nowhere
    before = named()
    memory = StagingMemory.open(MemoryAddress(pid, fd, (device, inode), 2, 1 << 20))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert bytes(memory.slot(1)[:5]) == b"hello"
    again = StagingMemory.open(memory.address)
    assert bytes(again.slot(1)[:5]) == b"hello"
    assert named() <= before
    memory.close()
    again.close()
    gc.collect()
    open_files = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the directory's own
            found = os.fstat(int(name))
            open_files.add((found.st_dev, found.st_ino))
    assert (device, inode) not in open_files


def test_a_container_with_less_memory_counts(monkeypatch, tmp_path):
    from ray_dcp.stage import memory

    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(memory, "_cgroup", lambda: str(tmp_path))
    assert free_memory_bytes() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes() > 600_000


@pytest.mark.parametrize("wrong", [
    {"limit_bytes": (8 << 20) - 1}, {"window_bytes": 1 << 20}, {"window_bytes": True},
    {"memory": "arena"}, {"limit_bytes": 64e6}, {"limit_bytes": "64"}, {"window_bytes": None},
])  # fmt: skip
def test_options_that_can_not_be_are_refused(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        StagerOptions(**wrong)


# --- Slots ----------------------------------------------------------------------------------------


NUM_SLOTS = 3


class Allocator(RuleBasedStateMachine):
    """Drives a `SlotAllocator` as ranks and writers do; a model says who may have which slot."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.windows: dict[str, list[set[int]]] = {}
        self.slots: dict[tuple[str, int], object] = {}
        self.here: set[tuple[str, int]] = set()
        self.unread: dict[tuple[str, int], set[int]] = {}
        self.finished: dict[str, set[int]] = {}
        self.lingering: dict[int, object] = {}

    @initialize(linger=st.booleans())
    def make(self, linger):
        self.linger = linger
        self.allocator = SlotAllocator(NUM_SLOTS, linger=linger)

    @rule(
        target=jobs,
        files=st.lists(st.sets(st.integers(0, 2), min_size=1), max_size=5),
        keep=st.booleans(),
    )
    def begin(self, files, keep):
        self.number += 1
        job = f"job {self.number}"
        self.allocator.begin(job, f"rank {self.number % 2}", files, keep=keep)
        self.windows[job] = files
        self.finished[job] = set()
        self.unread.update({(job, w): set(f) for w, f in enumerate(files)})
        return job

    @rule()
    def end(self):
        for grant in self.allocator.ended():
            assert self.linger
            assert grant.slot == self.slots[grant.job, grant.window]
            assert (grant.job, grant.window) not in self.holders(grant.slot.index)
            self.lingering[grant.slot.index] = grant.slot

    @rule(index=st.integers(0, NUM_SLOTS - 1))
    def free(self, index):
        if index in self.lingering:
            self.allocator.gone(self.lingering.pop(index))

    @rule()
    def grants(self):
        for grant in self.allocator.grants():
            assert grant.slot.index not in self.lingering
            at = (grant.job, grant.window)
            assert at not in self.slots
            granted = [w for (j, w) in self.slots if j == grant.job]
            assert grant.window == len(granted)
            assert not self.holders(grant.slot.index), "granted while it was still wanted"
            for slot in self.slots.values():
                if slot.index == grant.slot.index:
                    assert grant.slot.generation > slot.generation
            self.slots[at] = grant.slot

    def holders(self, index):
        """Returns which windows must still have a slot."""
        found = []
        for (job, window), slot in self.slots.items():
            if slot.index != index or job not in self.windows:
                continue
            newest = max(s.generation for s in self.slots.values() if s.index == index)
            if slot.generation != newest:
                continue
            is_here = (job, window) in self.here
            unread = self.unread[job, window] - self.finished[job]
            if not is_here or unread:
                found.append((job, window))
        return found

    @rule(job=jobs, window=st.integers(0, 4))
    def deliver(self, job, window):
        if (job, window) in self.slots and job in self.windows:
            self.allocator.delivered(job, window)
            self.here.add((job, window))

    @rule(job=jobs, window=st.integers(0, 4), file=st.integers(0, 2))
    def read(self, job, window, file):
        if (job, window) in self.here and job in self.windows:
            self.allocator.read(job, window, file)
            self.unread[job, window].discard(file)

    @rule(job=jobs, file=st.integers(0, 2))
    def finish(self, job, file):
        # Also of a file that failed before all its windows came.
        if job in self.windows:
            self.allocator.finished(job, file)
            self.finished[job].add(file)

    @rule(job=consumes(jobs))
    def drop(self, job):
        self.allocator.drop(job)
        self.windows.pop(job, None)
        self.allocator.drop(job)

    @invariant()
    def never_more_than_there_are(self):
        assert 0 <= self.allocator.num_used <= NUM_SLOTS


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_a_slot_that_a_rank_still_fills_is_not_given_away_when_its_file_has_failed():
    allocator = SlotAllocator(1)
    allocator.begin("a", "x", [{0}])
    allocator.grants()
    allocator.begin("b", "y", [{0}])
    allocator.finished("a", 0)
    assert allocator.grants() == []
    allocator.delivered("a", 0)
    assert [grant.job for grant in allocator.grants()] == ["b"]


def test_a_window_that_nobody_wants_gives_its_slot_back_when_it_is_delivered():
    allocator = SlotAllocator(1)
    allocator.begin("a", "x", [set(), {0}])
    allocator.grants()
    allocator.delivered("a", 0)
    assert allocator.num_used == 0


def test_jobs_that_wait_take_turns():
    allocator = SlotAllocator(3)
    allocator.begin("a", "x", [{0}] * 5)
    allocator.grants()
    allocator.begin("b", "y", [{0}] * 5)
    for window in (0, 1):
        allocator.delivered("a", window)
        allocator.read("a", window, 0)
    assert [(g.job, g.window) for g in allocator.grants()] == [("a", 3), ("b", 0)]


def finish(allocator, job, windows):
    for window in range(windows):
        allocator.delivered(job, window)
        allocator.read(job, window, 0)
    allocator.finished(job, 0)


def test_a_kept_job_has_its_slots_until_others_need_them_the_oldest_first():
    allocator = SlotAllocator(4)
    for job in "ab":
        allocator.begin(job, "x", [{0}, {0}], keep=True)
        allocator.grants()
        assert not allocator.is_whole(job)
        finish(allocator, job, 2)
        assert allocator.is_whole(job)
    assert allocator.num_used == 4
    allocator.begin("c", "x", [{0}])
    assert [grant.job for grant in allocator.grants()] == ["c"]
    assert (allocator.is_whole("a"), allocator.is_whole("b")) == (False, True)
    assert allocator.num_used == 3
    allocator.drop("b")
    assert allocator.num_used == 1


# --- Windows --------------------------------------------------------------------------------------


SIZES = st.lists(
    st.one_of(
        st.integers(0, 200),
        st.sampled_from([64 << 10, (64 << 10) - 1, 128 << 10, MIB, MIB + 1, 2 * MIB, 5 * MIB + 77]),
        st.integers(0, 3 * MIB),
    ),
    max_size=14,
)


def lengths_of(what):
    return [[len(what.items.deferred(row)) for row in f.deferred.tolist()] for f in what.plan.files]


@settings(max_examples=20, deadline=None)
@given(
    sizes=SIZES,
    deferred=st.lists(st.integers(0, 3 * MIB).map(bytes), max_size=3),
    part_bytes=st.sampled_from([MIB, 4 * MIB, 1 << 30]),
    window_bytes=st.sampled_from([2 * MIB, 3 * MIB, 64 * MIB]),
)
def test_segments_cover_each_piece_once_in_order_and_fit_their_windows(
    sizes, deferred, part_bytes, window_bytes
):
    what = share(sizes, deferred, part_bytes=part_bytes)
    lengths = lengths_of(what)
    layout = lay_out_windows(what.plan, lengths, window_bytes)
    assert layout.total_bytes == what.num_bytes
    line = layout.window.astype(np.int64) * window_bytes + layout.offset
    assert (layout.num_bytes > 0).all()
    assert (line[1:] >= (line + layout.num_bytes)[:-1]).all()
    assert (layout.offset + layout.num_bytes <= window_bytes).all()
    place = np.arange(len(layout.file))
    assert (np.diff(layout.file * (1 << 20) + layout.piece) >= 0).all()
    for index, file in enumerate(what.plan.files):
        own = slice(*layout.file_first[index : index + 2].tolist())
        assert set(layout.file[own].tolist()) <= {index}
        planned = [*file.payload_bytes.tolist(), *lengths[index]]
        rows = [*file.row.tolist(), *file.deferred.tolist()]
        for piece, num_bytes in enumerate(planned):
            found = place[own][layout.piece[own] == piece]
            assert layout.num_bytes[found].sum() == num_bytes
            assert set(layout.row[found].tolist()) <= {rows[piece]}
            assert set(layout.is_deferred[found].tolist()) <= {piece >= len(file.row)}
            ends = np.cumsum(layout.num_bytes[found])
            assert layout.start[found].tolist() == [0, *ends[:-1].tolist()][: len(found)]
            block = 1 if piece >= len(file.row) else int(file.block_bytes[piece])
            assert not (layout.num_bytes[found[:-1]] % block).any()
            if piece < len(file.row) and num_bytes >= 64 << 10:
                at = file.payload_offset[piece] + layout.start[found]
                assert ((layout.offset[found] - at) % 4096 == 0).all()
                assert layout.file_end[found].tolist() == (at + layout.num_bytes[found]).tolist()
            elif piece < len(file.row):
                assert len(found) <= 1
    for window in range(layout.num_windows):
        own = slice(*layout.window_first[window : window + 2].tolist())
        assert own.stop > own.start
        assert (layout.window[own] == window).all()
        used = (layout.offset + layout.num_bytes)[own].max()
        assert layout.used_bytes[window] == used
        assert layout.files_of(window) == set(layout.file[own].tolist())


def test_the_ends_of_deferred_items_are_where_they_are_written(tmp_path):
    what = share([100, 70_000], [b"a" * 100, b"", b"b" * 3, b"c" * 70_001])
    (receipt,) = what.written(Target(str(tmp_path)))
    layout = lay_out_windows(what.plan, lengths_of(what), 2 * MIB)
    ends = {p.row: p.item_offset + p.item_bytes for p in receipt.deferred if p.item_bytes}
    assert len(ends) == 3
    own = layout.is_deferred
    rows, found = layout.row[own].tolist(), layout.file_end[own].tolist()
    assert dict(zip(rows, found, strict=True)) == ends


# --- Filling windows ------------------------------------------------------------------------------


SLOT = 2 * MIB


def state() -> dict[str, object]:
    """Returns tensors of many kinds; some share their memory."""
    base = torch.arange(3 << 20, dtype=torch.int32)
    tied = torch.randn(700, 500)
    return {
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "fp8": torch.arange(100, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "bf16": torch.randn(300, 700).bfloat16(),
        "half": torch.randn(33).half(),
        "complex": torch.randn(64, 3, dtype=torch.complex64),
        "complex_conj": torch.randn(5000, 3, dtype=torch.complex128).conj(),
        "empty": torch.zeros(0, 7),
        "transposed": torch.randn(800, 900).t(),
        "strided": base[::2],
        "whole": base,
        "slice": base[10:100_000],
        "tied_a": tied,
        "tied_b": tied,
        "grad": torch.randn(40, 40, requires_grad=True),
        "many": [torch.full((n % 7,), n, dtype=torch.int64) for n in range(300)],
        "step": 10,
        "note": {"text": "hello", "items": [1, 2, {"a"}]},
    }


def test_every_kind_of_tensor_is_staged_as_it_is_written(tmp_path: Path):
    tensors = state()
    captured = capture(tensors, rank=0, world_size=1)
    plan = make_plan([captured.columns], part_bytes=6 * MIB)
    what = Share(captured, rank_plan(plan, 0), 0)
    places = Target(str(tmp_path / "staged")), Target(str(tmp_path / "rank"))
    write_part(
        open_storage(places[1]), what.plan, "a1",
        source=captured.source, deferred=captured.deferred, options=SaveOptions(),
    )  # fmt: skip
    arena = StagingMemory.create(6, SLOT)
    channel = Channel(SLOT, SlotAllocator(6), arena)
    reports = []
    queue = WriteQueue({"shared": channel}, lambda _, report: reports.append(report))
    rank = Rank(queue, channel, what, what.order(StageKey("s", 0, "a1"), places[0], SLOT))
    rank.stage()
    for value in tensors.values():
        if isinstance(value, torch.Tensor) and not value.requires_grad and value.numel():
            value.zero_()
    assert eventually(lambda: len(reports) == len(what.plan.files))
    assert not [report.error for report in reports if report.error]
    assert same_files(*places)


def filled(what: Share, filler) -> list[bytes]:
    lengths = [[len(what.items.deferred(r)) for r in f.deferred.tolist()] for f in what.plan.files]
    layout = lay_out_windows(what.plan, lengths, SLOT)
    windows = []
    for window in range(layout.num_windows):
        into = np.zeros(layout.used_bytes[window], np.uint8)
        fill_window(layout, window, into, filler, what.items.deferred)
        windows.append(into.tobytes())
    return windows


# copies


def pairs(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(3)
    return [
        (np.zeros(length, np.uint8), random.integers(1, 256, length, dtype=np.uint8))
        for length in lengths
    ]


@pytest.mark.parametrize("num_threads", [None, 1, 3, 99])
def test_every_byte_of_every_length_is_copied(num_threads):
    given = pairs(0, 1, 9 * MIB + 5, 4 * MIB, 3, *range(200))
    copy_all(iter(given), num_threads)
    assert all(np.array_equal(into, found) for into, found in given)


def test_who_is_interrupted_leaves_nobody_who_goes_on_copying(monkeypatch):
    """The caller may use the memory for something else then."""
    begun, interrupted, copied = threading.Event(), threading.Event(), []

    def copyto(*pair):
        if threading.get_ident() == caller:
            assert begun.wait(180)
            interrupted.set()
            raise KeyboardInterrupt
        begun.set()
        assert interrupted.wait(180)
        copied.append(pair)

    caller = threading.get_ident()
    monkeypatch.setattr(copying.np, "copyto", copyto)
    monkeypatch.setattr(copying, "deque", SlowToEmpty)
    with pytest.raises(KeyboardInterrupt):
        copy_all(pairs(40 * MIB), 2)
    assert len(copied) == 1


class SlowToEmpty(deque):
    """Gives nothing more once it was asked by two threads, until it is empty."""

    def popleft(self):
        if len(self) < 9:
            assert eventually(lambda: not self)
        return super().popleft()
