"""Shared memory is one for all who open it, has no name, and goes with the last of them."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ray_dcp.errors import InvalidRequestError, LimitError
from ray_dcp.stage.memory import StagingMemory, free_memory_bytes
from ray_dcp.stage.memory_tier import Part
from ray_dcp.stage.values import Slot, StagerOptions
from ray_dcp.stage.write_queue import step_behind
from tests.descriptors import open_memory

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


def test_generations_have_room_for_any_number_of_slots():
    memory = StagingMemory.create(1000, PAGE)
    memory.slot(0)[:] = b"x" * PAGE
    memory.mark(Slot(999, 3))
    assert bytes(memory.slot(0)) == b"x" * PAGE
    assert memory.holds(Slot(999, 3))


def test_touching_makes_pages_present_and_changes_nothing():
    memory = StagingMemory.create(2, 16 * PAGE)
    memory.slot(0)[:] = b"y" * 16 * PAGE
    before = os.fstat(memory.address.fd).st_blocks * 512
    memory.touch(0)
    memory.touch(1)
    assert bytes(memory.slot(0)) == b"y" * 16 * PAGE
    assert os.fstat(memory.address.fd).st_blocks * 512 >= before + 16 * PAGE
    assert not any(memory.slot(1))


def test_what_was_touched_is_written_without_page_faults():
    memory = StagingMemory.create(1, 512 * PAGE)
    memory.slot_array(0)[:] = 1
    other = StagingMemory.open(memory.address)
    other.touch(0)
    target = other.slot_array(0)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    target[:] = 2
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 50
    assert set(memory.slot(0)[:: 64 * PAGE]) == {2}


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


def test_a_process_finds_what_it_has_open_already():
    memory = StagingMemory.create(1, PAGE)
    assert StagingMemory.mapped_here(memory.address) is memory
    other = StagingMemory.open(memory.address)
    memory.close()
    assert StagingMemory.mapped_here(other.address) is None
    again = StagingMemory.open(other.address)
    assert StagingMemory.mapped_here(other.address) is again
    del again
    gc.collect()
    assert StagingMemory.mapped_here(other.address) is None


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


@pytest.mark.parametrize(("slots", "length"), [(0, PAGE), (1, 0), (1, 100)])
def test_odd_sizes_are_refused(slots, length):
    with pytest.raises(InvalidRequestError):
        StagingMemory.create(slots, length)


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


def test_views_stay_good_after_it_is_closed():
    memory = StagingMemory.create(1, PAGE)
    view = memory.slot(0)
    view[:3] = b"abc"
    fd = memory.address.fd
    memory.close()
    memory.close()
    assert bytes(view[:3]) == b"abc"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


CHILD = """
import sys
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.stage.values import Slot
arena = StagingMemory.create(2, 1 << 20)
arena.slot(1)[:5] = b"hello"
print(arena.address.pid, arena.address.fd, *arena.address.identity, flush=True)
sys.stdin.read()
"""


def test_it_survives_the_one_who_made_it_and_not_the_last_one():
    from ray_dcp.stage.values import MemoryAddress

    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pid, fd, device, inode = map(int, child.stdout.readline().split())
    before = set(os.listdir("/dev/shm"))
    memory = StagingMemory.open(MemoryAddress(pid, fd, (device, inode), 2, 1 << 20))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert bytes(memory.slot(1)[:5]) == b"hello"
    again = StagingMemory.open(memory.address)
    assert bytes(again.slot(1)[:5]) == b"hello"
    assert set(os.listdir("/dev/shm")) <= before
    memory.close()
    again.close()
    gc.collect()
    open_files = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the directory's own
            found = os.fstat(int(name))
            open_files.add((found.st_dev, found.st_ino))
    assert (device, inode) not in open_files


def test_what_is_free_is_between_nothing_and_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory_bytes() <= total


def test_a_container_with_less_memory_counts(monkeypatch, tmp_path):
    from ray_dcp.stage import memory

    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(memory, "_cgroup", lambda: str(tmp_path))
    assert free_memory_bytes() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes() > 600_000


def test_only_the_calling_thread_steps_behind():
    found = {}

    def run() -> None:
        step_behind(7, "idle")
        step_behind(3, "low")
        found["nice"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = os.getpriority(os.PRIO_PROCESS, os.getpid())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found["nice"] == max(before, 7)
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == before


def test_windows_fit_the_limit_four_times():
    options = StagerOptions()
    assert options.window_bytes_within(64_000_000) == 15 << 20
    assert options.window_bytes_within(1 << 40) == 64 << 20
    assert options.window_bytes_within(8 << 20) == 2 << 20


@pytest.mark.parametrize("wrong", [
    {"limit_bytes": (8 << 20) - 1}, {"window_bytes": 1 << 20}, {"num_writers": 0}, {"nice": 20},
    {"nice": -1}, {"io_priority": "high"},
])  # fmt: skip
def test_options_that_can_not_be_are_refused(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        StagerOptions(**wrong)
