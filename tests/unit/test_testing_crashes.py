"""The enumeration of crashes finds what it is there to find: each bug here is caught, by name."""

from __future__ import annotations

import ast
import os
import re
from functools import partial
from pathlib import Path

import pytest

import ray_dcp
from ray_dcp.errors import InvalidRequestError, StorageError
from ray_dcp.format.manifest import record_key
from ray_dcp.io.checkpoint import read_checkpoint
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from tests.crash import invariants as inv
from tests.crash.crashes import check_crashes
from tests.crash.interruptions import CRASHES
from tests.crash.invariants import INVARIANTS, Aftermath
from tests.crash.own_operations import leave_a_crash, put_stock_checkpoint
from tests.crash.registry import (
    NEW,
    NEXT,
    OLD,
    Operation,
    Place,
    register_operation,
    registered_operation,
    registered_operations,
    unregister_operation,
)
from tests.crash.system_calls import CALLS, interrupted_system


@pytest.fixture
def memory(request):
    storage = MemoryStorage(f"crashes/{request.node.name.partition('[')[0]}")
    yield storage
    storage.delete([entry.key for entry in storage.list()])


def overwrite(run, **more):
    """An operation that replaces OLD by NEW in its own way."""
    return Operation(
        name="mine", prepare=lambda place: place.save(OLD), run=run, previous=OLD, new=NEW, **more
    )


def data_keys(storage):
    return [entry.key for entry in storage.list() if entry.key.endswith(".distcp")]


# Bugs that must be found


def deletes_first(place):
    place.storage.delete(data_keys(place.storage))
    return place.save(NEW)


def publishes_first(place):
    """Lets stock DCP see a save before it is committed."""
    other = MemoryStorage("crashes/other")
    Place(other).save(NEW)
    keys = [*data_keys(other), ".metadata"]
    for key in keys:
        place.storage.write(key, other.read(key))
    place.storage.delete(keys[:-1])
    other.delete([entry.key for entry in other.list()])
    return place.save(NEW)


def forgets_files(place):
    place.storage.write("rubbish", b"1")
    return place.save(NEW)


def hides_failures(place):
    """Tells a commit whatever came of it."""
    try:
        return place.save(NEW)
    except StorageError:
        return None


def tells_failures(place):
    """Tells a failure although it has committed."""
    place.save(NEW)
    place.storage.list()


def changes_the_notes(place):
    place.storage.write("notes.txt", b"yours")
    place.storage.write("notes.txt", b"mine")
    return place.save(NEW)


def takes_it_away(place):
    """Moves the old records away for a moment, so that nothing stands and nobody knows why."""
    keys = [e.key for e in place.storage.list() if e.key.startswith("manifest-")]
    records = {key: place.storage.read(key) for key in keys}
    place.storage.delete(keys)
    for key, data in records.items():
        place.storage.write(key, data)
    return place.save(NEW)


BUGS = [
    (deletes_first, "after", r"call 1 \(delete of '__.*an_allowed_checkpoint_loads_whole"),
    (publishes_first, "after", r"call 2 \(write of '.metadata'.*stock_dcp_agrees.*state of 2"),
    (hides_failures, "refused", r"call 0 .*told 'committed': an_allowed.*stands the state of 1"),
    (tells_failures, "refused", r"call \d+ \(list.*told 'failed': an_allowed.*the state of 2"),
    (changes_the_notes, "after", r"call 0 .*nothing_lies_outside .*notes.txt"),
    (takes_it_away, "after", r"call 2 \(delete of 'manifest-00000001.json'\)"),
]


@pytest.mark.parametrize(("run", "variant", "told"), BUGS, ids=[run.__name__ for run, _, _ in BUGS])
def test_a_bug_is_found_and_told_with_operation_call_variant_and_key(run, variant, told):
    with pytest.raises(AssertionError) as caught:
        check_crashes(overwrite(run), variants=[variant])
    assert re.match(f"mine, {variant} {told}", str(caught.value), re.DOTALL), str(caught.value)


def test_files_that_are_left_without_any_interruption_are_told():
    with pytest.raises(AssertionError, match=r"^mine, told 'committed': nothing_is_left.*rubbish"):
        check_crashes(overwrite(forgets_files))


def test_an_operation_that_does_not_do_what_it_is_registered_for_is_told(memory):
    with pytest.raises(AssertionError, match="'committed' was told, but there stands"):
        check_crashes(overwrite(lambda place: place.save(NEXT)))
    with pytest.raises(AssertionError, match="was to be told 'failed', but is told 'committed'"):
        check_crashes(overwrite(lambda place: place.save(NEW), fails=True))
    with pytest.raises(AssertionError, match="asks nothing"):
        check_crashes(Operation(name="idle", prepare=leave, run=leave))


def leave(place):
    """Does nothing."""


def test_an_operation_that_asks_other_things_in_every_run_is_told():
    runs = []

    def fickle(place):
        runs.append(place)
        for _ in range(len(runs) % 2):
            place.storage.list()
        return place.save(NEW)

    with pytest.raises(AssertionError, match="this time it"):
        check_crashes(overwrite(fickle), variants=["before"])


def test_two_moments_of_commit_are_told():
    """Whatever the invariants allow, what stands must not go back."""

    def back_and_forth(place):
        place.save(NEW)
        place.save(OLD)
        return place.save(NEW)

    with pytest.raises(AssertionError, match=r"not one moment of commit, but .*'new', 'previous'"):
        check_crashes(
            overwrite(back_and_forth),
            variants=["before"],
            invariants=[inv.an_allowed_checkpoint_loads_whole],
        )


def test_a_swallowed_crash_is_told():
    def immortal(place):
        try:
            return place.save(NEW)
        except BaseException:
            return None

    with pytest.raises(AssertionError, match="the process should die"):
        check_crashes(overwrite(immortal), variants=["before"])


def test_a_storage_must_be_empty_and_is_left_empty(memory):
    memory.write("a", b"1")
    with pytest.raises(InvalidRequestError, match="empty"):
        check_crashes("save.first", storage=lambda: memory)
    memory.delete(["a"])
    check_crashes("save.first", storage=lambda: memory, variants=["before"], every=4)
    assert memory.list() == []


def test_what_opens_its_path_takes_a_directory():
    with pytest.raises(InvalidRequestError, match="LocalStorage, but found MemoryStorage"):
        check_crashes(overwrite(leave, needs_path=True))


def test_names_of_operations_are_unique_and_known():
    added = register_operation("doc.mine", prepare=leave, run=leave)
    try:
        assert added in registered_operations()
        assert registered_operation("doc.mine") is added
        with pytest.raises(InvalidRequestError, match="another name"):
            register_operation("doc.mine", prepare=leave, run=leave)
    finally:
        unregister_operation("doc.mine")
    with pytest.raises(InvalidRequestError, match=r"save.first.*found 'doc.mine'"):
        check_crashes("doc.mine")


def test_what_was_reached_adds_up():
    reached = check_crashes("save.overwrite", variants=CRASHES, every=4)
    runs = sum(reached.points.values())
    assert set(reached.points) == set(CRASHES)
    assert sum(reached.calls.values()) == sum(reached.stood.values()) == runs
    assert reached.told == {"nothing": runs}


# Each invariant can fail


def standing(storage, **more):
    Place(storage).save(NEW)
    return Aftermath(**{"storage": storage, "allowed": (NEW,), "earlier": (OLD,), **more})


def damage(storage):
    key = data_keys(storage)[0]
    data = bytearray(storage.read(key))
    data[len(data) // 2] ^= 1
    storage.write(key, data)


def test_all_invariants_hold_after_a_quiet_save(memory):
    after = standing(memory)
    for invariant in INVARIANTS:
        invariant(after)


def test_a_state_that_is_not_allowed_is_told(memory):
    with pytest.raises(AssertionError, match="stands the state of 2"):
        inv.an_allowed_checkpoint_loads_whole(standing(memory, allowed=(OLD,), earlier=(NEW,)))


def test_a_mixture_is_told_with_the_names_that_differ(memory):
    after = standing(memory, allowed=({**NEW, "a": OLD["a"]},))
    with pytest.raises(AssertionError, match=r"none of 2 states, which differ in \[\['a'\], "):
        inv.an_allowed_checkpoint_loads_whole(after)


def test_what_is_gone_without_having_been_deleted_is_told(memory):
    Place(memory).save(OLD)
    ray_dcp.delete(memory.url)
    inv.what_is_gone_was_deleted(Aftermath(memory, allowed=(None,), earlier=(OLD,)))
    memory.delete([entry.key for entry in memory.list()])
    with pytest.raises(AssertionError, match="what stood is gone"):
        inv.what_is_gone_was_deleted(Aftermath(memory, allowed=(None,), earlier=(OLD,)))


def test_a_checkpoint_that_nobody_saved_is_told(memory):
    Place(memory).save(NEW)
    with pytest.raises(AssertionError, match="where none ever was"):
        inv.what_is_gone_was_deleted(Aftermath(memory, allowed=(None,)))


def test_damage_is_told(memory):
    after = standing(memory)
    damage(memory)
    with pytest.raises(AssertionError, match="verify found"):
        inv.what_stands_verifies(after)


def test_a_second_checkpoint_in_a_subfolder_is_told(memory):
    after = standing(memory)
    Place(MemoryStorage(f"{memory.url.removeprefix('memory://')}/inner")).save(OLD)
    with pytest.raises(AssertionError, match="a native checkpoint stands, but there is listed"):
        inv.only_what_stands_is_listed(after)


def test_an_attempt_that_was_told_but_does_not_stand_is_told(memory):
    with pytest.raises(AssertionError, match="f00d was told as committed, but"):
        inv.outcomes_agree(standing(memory, told="committed", attempt="f00d"))


def test_stock_dcp_that_sees_what_does_not_stand_is_told(memory):
    put_stock_checkpoint(Place(memory), NEW)
    after = Aftermath(memory, allowed=(NEW,), earlier=(NEW, OLD))
    inv.stock_dcp_agrees(after)
    with pytest.raises(AssertionError, match="stock DCP gives none of 1 states"):
        inv.stock_dcp_agrees(Aftermath(memory, allowed=(OLD,)))


def test_files_beside_the_place_are_told(tmp_path):
    storage = LocalStorage(tmp_path / "step-1")
    after = standing(storage, beside=frozenset({"known"}))
    (tmp_path / "known").mkdir()
    inv.nothing_lies_outside(after)
    (tmp_path / "step-1.tmp").mkdir()
    with pytest.raises(AssertionError, match=r"beside the place: \['step-1.tmp'\]"):
        inv.nothing_lies_outside(after)


def test_leftovers_are_told(memory, tmp_path):
    after = standing(memory)
    leave_a_crash(Place(memory))
    with pytest.raises(AssertionError, match=r"left: \['__0_0.*chunks"):
        inv.nothing_is_left(after)
    inv.a_later_save_works(after)
    inv.nothing_is_left(after)
    assert memory.read(record_key(read_checkpoint(memory).slot))
    local = LocalStorage(tmp_path)
    after = standing(local)
    writer = local.open_writer("__0_0.0123456789abcdef.distcp")
    with pytest.raises(AssertionError, match=r"left: \['.tmp-"):
        inv.nothing_is_left(after)
    writer.abort()


# System calls


def test_every_function_of_os_that_changes_files_in_a_storage_is_interrupted():
    harmless = {
        "PathLike", "close", "fsencode", "fspath", "fstat", "getpid", "lstat", "major", "minor",
        "environ", "path", "pread", "preadv", "scandir", "stat", "strerror",
    }  # fmt: skip
    used = {
        node.attr
        for file in (Path(ray_dcp.__file__).parent / "store").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and not node.attr.startswith(("O_", "RWF"))
    }
    assert used - harmless <= set(CALLS)
    assert {"link", "rename", "unlink", "fsync"} <= used


def test_the_operating_system_is_as_before_after_an_enumeration(tmp_path):
    before = {name: getattr(os, name) for name in CALLS}
    check_crashes(
        "save.first",
        storage=partial(LocalStorage, tmp_path / "step-1"),
        interrupt=interrupted_system,
        variants=["torn", "lost"],
        every=9,
    )
    assert {name: getattr(os, name) for name in CALLS} == before


def test_calls_on_other_files_are_neither_counted_nor_interrupted(tmp_path):
    inside, outside = tmp_path / "run" / "step-1", tmp_path / "elsewhere"
    inside.mkdir(parents=True)
    with interrupted_system(LocalStorage(inside), 0, "lost") as (_, system):
        os.mkdir(outside)
        reading, writing = os.pipe()
        os.write(writing, b"x")
    assert system.steps == ()
    os.close(reading)
    os.close(writing)


def test_a_system_call_that_fails_is_told_to_the_caller_and_its_effect_is_there(tmp_path):
    path = tmp_path / "a"
    with interrupted_system(LocalStorage(tmp_path), 0, "lost") as (_, system):
        with pytest.raises(OSError, match="Input/output error"):
            os.mkdir(path)
        os.mkdir(tmp_path / "b")
    assert path.is_dir()
    assert not system.stopped
    with interrupted_system(LocalStorage(tmp_path), 0, "broken") as (_, system):
        for name in ("c", "d"):
            with pytest.raises(OSError, match="No space left"):
                os.mkdir(tmp_path / name)
    assert [step.what for step in system.steps] == ["mkdir", "mkdir"]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_torn_write_leaves_whole_pages_or_half(tmp_path, parts):
    from ray_dcp.store.fault_injection import CrashError

    fd = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    with interrupted_system(LocalStorage(tmp_path), 0, "torn") as (_, system):
        with pytest.raises(CrashError):
            os.pwritev(fd, [bytes(9000)] * parts, 0)
        with pytest.raises(CrashError):
            os.link(tmp_path / "a", tmp_path / "b")
        os.unlink(tmp_path / "a")
    os.close(fd)
    assert system.stopped
    assert os.listdir(tmp_path) == ["a"]
    assert os.path.getsize(tmp_path / "a") == {1: 4096, 2: 9000, 3: 18000}[parts]
