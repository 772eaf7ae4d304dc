"""Fault scripts do what they say, or the test fails; no system call is left out of crashes."""

from __future__ import annotations

import ast
import errno
from contextlib import nullcontext
from pathlib import Path

import pytest

import ray_dcp
from ray_dcp.errors import DamagedCheckpointError, InternalError, InvalidRequestError, StorageError
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from tests.crash.interruptions import CALLS
from tests.crash.registry import NEW, Place
from tests.support.storages import CrashError, Fault, FaultyStorage, Script
from tests.support.world import load_state

# --- Fault scripts -------------------------------------------------------------------------------


@pytest.fixture
def memory(request):
    storage = MemoryStorage(f"faults/{request.node.name.partition('[')[0]}")
    yield storage
    storage.delete([entry.key for entry in storage.list()])


def test_a_fault_that_is_never_hit_fails_the_test(memory):
    faults = [Fault(operation="read", key="a*"), Fault(operation="write", key="b", nth=2)]
    told = r"read of 'a\*' \(call 1\), write of 'b' \(call 2\)"
    with pytest.raises(InternalError, match=told), Script(faults) as script:
        script.wrap(memory).write("b", b"1")
    with pytest.raises(ZeroDivisionError), Script(faults):
        raise ZeroDivisionError  # what the test itself meets is not hidden by that


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errno.EIO, r"could not publish memory://.*/a: \[EIO\] Input/output error; the device"),
        (errno.ENOSPC, r"could not publish .*\[ENOSPC\] No space left on device; free space"),
        ("503 Slow Down", r"could not publish .*/a: the storage answered 503 Slow Down"),
        (None, r"scripted fault: commit of 'a' failed \(before\)"),
        (errno.EEXIST, r"could not publish .*/a: it exists already"),
        (StorageError("mine"), "mine"),
    ],
)
def test_an_error_says_what_a_storage_would_say(memory, error, told):
    storage = FaultyStorage(memory, [Fault(operation="commit", error=error)])
    with pytest.raises(StorageError, match=told):
        storage.open_writer("a").commit()
    assert memory.list() == []


@pytest.mark.parametrize("effect", ["before", "after"])
def test_a_delete_that_fails_or_whose_answer_is_lost_does_not_keep_the_other_keys(memory, effect):
    with Script([Fault(operation="delete", key="a", effect=effect)]) as script:
        memory.write("a", b"1")
        memory.write("b", b"1")
        with pytest.raises(StorageError):
            script.wrap(memory).delete(["a", "b"])
    assert [entry.key for entry in memory.list()] == ["a"] * (effect == "before")


def test_a_slow_call_takes_its_time_from_the_clock_that_is_given(memory):
    slept = []
    slow = Fault(operation="write", effect="slow", delay_s=30.0)
    with Script([slow], sleep=slept.append) as script:
        storage = script.wrap(memory)
        storage.write("a", b"1")
        storage.write("a", b"2")
    assert slept == [30.0]
    assert memory.read("a") == b"2"
    with pytest.raises(InvalidRequestError, match="sleep"):
        Script([slow])


@pytest.mark.parametrize(
    ("effect", "found"), [("short", b"12"), ("flip", b"12\x324"), ("torn", b"12")]
)
def test_what_is_written_may_be_less_or_other_than_was_asked(memory, effect, found):
    ends = pytest.raises(StorageError) if effect == "torn" else nullcontext()
    with Script([Fault(operation="write", effect=effect)]) as script, ends:
        script.wrap(memory).write("a", b"1234")
    assert memory.read("a") == found


def test_a_bit_that_flips_on_the_way_to_the_storage_is_found_when_it_is_read(memory):
    with Script([Fault(operation="writer.write", effect="flip")]) as script:
        Place(script.wrap(memory)).save(NEW, 1)
    with pytest.raises(DamagedCheckpointError):
        load_state(memory, NEW)


@pytest.mark.parametrize("effect", ["before", "after", "torn"])
def test_the_dead_ask_for_nothing_and_clean_nothing_up(tmp_path, effect):
    inner = LocalStorage(tmp_path)
    with Script([Fault(operation="writer.write", effect=effect, stops=True)]) as script:
        storage = script.wrap(inner)
        writer = storage.open_writer("a")
        with pytest.raises(CrashError, match=r"died at writer.write of 'a'"):
            writer.write(bytes(5 << 20))
        writer.abort()
        del writer
        for ask in (storage.list, lambda: storage.read("a"), lambda: storage.open_writer("b")):
            with pytest.raises(CrashError, match="dead"):
                ask()
    # What a crash leaves: the file without its name.
    (left,) = inner.unpublished()
    assert left.key.endswith("-a")
    assert left.num_bytes == {"before": 0, "after": 4 << 20, "torn": 0}[effect]
    assert len(script.calls) == 2


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"operation": "list", "effect": "flip"}, "flip"),
        ({"operation": "commit", "effect": "short"}, "short"),
        ({"operation": "read", "nth": 0}, "counted from 1"),
        ({"operation": "read", "times": 0}, "counted from 1"),
        ({"operation": "read", "effect": "slow"}, "delay_s"),
        ({"operation": "read", "delay_s": 1.0}, "delay_s"),
    ],
)
def test_a_fault_that_can_not_happen_is_refused(wrong, told):
    with pytest.raises(InvalidRequestError, match=told):
        Fault(**wrong)


def test_unpublished_files_are_told_through_a_script(tmp_path, memory):
    writer = LocalStorage(tmp_path).open_writer("a")
    with Script([Fault(operation="list", key=".tmp-*", nth=2)]) as script:
        storage = script.wrap(LocalStorage(tmp_path))
        assert len(storage.unpublished()) == 1
        with pytest.raises(StorageError):
            storage.unpublished()
    assert script.wrap(memory).unpublished() == ()
    writer.abort()


def test_every_function_of_os_that_changes_files_in_a_storage_is_interrupted():
    harmless = {
        "PathLike", "close", "fsencode", "fspath", "fstat", "getpid", "lstat", "major", "minor",
        "environ", "path", "posix_fadvise", "pread", "preadv", "register_at_fork", "scandir",
        "stat", "stat_result", "strerror",
    }  # fmt: skip
    used = {
        node.attr
        for file in (Path(ray_dcp.__file__).parent / "store").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and not node.attr.startswith(("O_", "POSIX_FADV", "RWF"))
    }
    assert used - harmless <= set(CALLS)
    assert {"link", "rename", "unlink", "fsync"} <= used
