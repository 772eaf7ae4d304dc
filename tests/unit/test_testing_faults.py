"""Fault scripts do what they say, or the test fails; no system call is left out of crashes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ray_dcp
from ray_dcp.errors import DamagedCheckpointError, InternalError
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.storage import MemoryStorage
from tests.crash.interruptions import CALLS
from tests.crash.registry import NEW, Place
from tests.support.storages import CrashError, Fault, Script
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
