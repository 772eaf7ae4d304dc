"""The enumeration of crashes finds what it is there to find: each bug here is caught, by name."""

from __future__ import annotations

import ast
import os
import re
from functools import partial
from pathlib import Path

import pytest

import ray_dcp
from ray_dcp.errors import CommitUnknownError, InvalidRequestError, StorageError
from ray_dcp.protocol.messages import SaveOutcome
from ray_dcp.store.fault_injection import CrashError
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from tests.crash import invariants as inv
from tests.crash.crashes import check_crashes
from tests.crash.interruptions import CRASHES
from tests.crash.invariants import INVARIANTS, Aftermath
from tests.crash.own_operations import leave_a_crash, put_stock_checkpoint
from tests.crash.ranks import one_outcome
from tests.crash.registry import NEW, NEXT, OLD, Operation, Place
from tests.crash.system_calls import CALLS, interrupted_system
from tests.inline_ranks import RankResult


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


def swallows_its_death(place):
    try:
        return place.save(NEW)
    except BaseException:
        return None


def goes_back_and_forth(place):
    place.save(NEW)
    place.save(OLD)
    return place.save(NEW)


RUNS = []


def asks_other_things_in_every_run(place):
    RUNS.append(place)
    for _ in range(len(RUNS) % 2):
        place.storage.list()
    return place.save(NEW)


BUGS = [
    (deletes_first, "after", r"call 1 \(delete of '__.*an_allowed_checkpoint_loads_whole"),
    (publishes_first, "after", r"call 2 \(write of '.metadata'.*stock_dcp_agrees.*state of 2"),
    (hides_failures, "refused", r"call 0 .*told 'committed': an_allowed.*stands the state of 1"),
    (tells_failures, "refused", r"call \d+ \(list.*told 'failed': an_allowed.*the state of 2"),
    (changes_the_notes, "after", r"call 0 .*nothing_lies_outside .*notes.txt"),
    (takes_it_away, "after", r"call 2 \(delete of 'manifest-00000001.json'\)"),
    (asks_other_things_in_every_run, "before", r".*this time it"),
]


@pytest.mark.parametrize(("run", "variant", "told"), BUGS, ids=[run.__name__ for run, _, _ in BUGS])
def test_a_bug_is_found_and_told_with_operation_call_variant_and_key(run, variant, told):
    with pytest.raises(AssertionError) as caught:
        check_crashes(overwrite(run), variants=[variant])
    assert re.match(f"mine, {variant}.*{told}", str(caught.value), re.DOTALL), str(caught.value)


def test_a_swallowed_death_and_two_moments_of_commit_are_told():
    with pytest.raises(AssertionError, match="the process should die"):
        check_crashes(overwrite(swallows_its_death), variants=["before"])
    # Whatever the invariants allow, what stands must not go back.
    with pytest.raises(AssertionError, match=r"not one moment of commit, but .*'new', 'previous'"):
        check_crashes(
            overwrite(goes_back_and_forth),
            variants=["before"],
            invariants=[inv.an_allowed_checkpoint_loads_whole],
        )


def forgets_files(place):
    place.storage.write("rubbish", b"1")
    return place.save(NEW)


def leave(place):
    """Does nothing."""


def test_an_operation_that_does_not_do_what_is_said_of_it_is_told(memory):
    with pytest.raises(AssertionError, match=r"^mine, told 'committed': nothing_is_left.*rubbish"):
        check_crashes(overwrite(forgets_files))
    with pytest.raises(AssertionError, match="'committed' was told, but there stands"):
        check_crashes(overwrite(lambda place: place.save(NEXT)))
    with pytest.raises(AssertionError, match="was to be told 'failed', but is told 'committed'"):
        check_crashes(overwrite(lambda place: place.save(NEW), fails=True))
    with pytest.raises(AssertionError, match="asks nothing"):
        check_crashes(Operation(name="idle", prepare=leave, run=leave))
    memory.write("a", b"1")
    with pytest.raises(InvalidRequestError, match="empty"):
        check_crashes("save.first", storage=lambda: memory)


def test_what_was_reached_adds_up_and_nothing_is_left(memory):
    reached = check_crashes("save.overwrite", storage=lambda: memory, variants=CRASHES, every=4)
    runs = sum(reached.points.values())
    assert set(reached.points) == set(CRASHES)
    assert sum(reached.calls.values()) == sum(reached.stood.values()) == runs
    assert reached.told == {"nothing": runs}
    assert memory.list() == []


# Each invariant can fail


def damage(storage):
    key = data_keys(storage)[0]
    data = bytearray(storage.read(key))
    data[len(data) // 2] ^= 1
    storage.write(key, data)


def save_inside(storage):
    Place(MemoryStorage(f"{storage.url.removeprefix('memory://')}/inner")).save(OLD)


def replace_by_stock(storage):
    storage.delete([entry.key for entry in storage.list()])
    put_stock_checkpoint(Place(storage), NEW)


def empty(storage):
    storage.delete([entry.key for entry in storage.list()])


FAILING = [
    (inv.an_allowed_checkpoint_loads_whole, None, {"allowed": (OLD,), "earlier": (NEW,)},
     "stands the state of 2"),
    (inv.an_allowed_checkpoint_loads_whole, None, {"allowed": ({**NEW, "a": OLD["a"]},)},
     r"none of 2 states, which differ in \[\['a'\], "),
    (inv.what_is_gone_was_deleted, empty, {"allowed": (None,)}, "what stood is gone"),
    (inv.what_is_gone_was_deleted, None, {"allowed": (None,), "earlier": ()},
     "where none ever was"),
    (inv.what_stands_verifies, damage, {}, "verify found"),
    (inv.only_what_stands_is_listed, save_inside, {},
     "a native checkpoint stands, but there is listed"),
    (inv.outcomes_agree, None, {"told": "committed", "attempt": "f00d"},
     "f00d was told as committed, but"),
    (inv.stock_dcp_agrees, replace_by_stock, {"allowed": (OLD,)},
     "stock DCP gives none of 1 states"),
    (inv.nothing_is_left, lambda storage: leave_a_crash(Place(storage)), {},
     r"left: \['__0_0.*chunks"),
]  # fmt: skip


@pytest.mark.parametrize(("invariant", "spoil", "more", "told"), FAILING)
def test_each_invariant_can_fail(memory, invariant, spoil, more, told):
    Place(memory).save(NEW)
    for holds in INVARIANTS:
        holds(Aftermath(memory, allowed=(NEW,), earlier=(OLD,)))
    empty(memory)
    Place(memory).save(NEW)
    if spoil is not None:
        spoil(memory)
    with pytest.raises(AssertionError, match=told):
        invariant(Aftermath(**{"storage": memory, "allowed": (NEW,), "earlier": (OLD,), **more}))


def test_files_beside_the_place_and_unpublished_ones_are_told(tmp_path):
    storage = LocalStorage(tmp_path / "step-1")
    Place(storage).save(NEW)
    after = Aftermath(storage, allowed=(NEW,), earlier=(OLD,), beside=frozenset({"known"}))
    (tmp_path / "known").mkdir()
    inv.nothing_lies_outside(after)
    (tmp_path / "step-1.tmp").mkdir()
    with pytest.raises(AssertionError, match=r"beside the place: \['step-1.tmp'\]"):
        inv.nothing_lies_outside(after)
    writer = storage.open_writer("__0_0.0123456789abcdef.distcp")
    with pytest.raises(AssertionError, match=r"left: \['.tmp-"):
        inv.nothing_is_left(after)
    writer.abort()


def test_what_stands_is_looked_at_without_changing_it(tmp_path):
    local = LocalStorage(tmp_path)
    Place(local).save(OLD)
    local.delete([".metadata"])
    assert inv.standing_state(local, (OLD,)) is OLD
    assert ".metadata" not in [entry.key for entry in local.list()]


def test_ranks_tell_one_outcome_or_it_is_a_bug():
    committed = RankResult(value=SaveOutcome("a1", 1, b"", ()))
    unknown = RankResult(error=CommitUnknownError("who knows", attempt="a1"))
    failed = RankResult(error=StorageError("it failed"))
    assert one_outcome([committed, unknown]).attempt == "a1"
    with pytest.raises(CommitUnknownError):
        one_outcome([failed, unknown])
    with pytest.raises(StorageError):
        one_outcome([failed, failed])
    with pytest.raises(AssertionError, match="some ranks were told of a commit, and 1 that it f"):
        one_outcome([committed, failed])


# System calls


def test_every_function_of_os_that_changes_files_in_a_storage_is_interrupted():
    harmless = {
        "PathLike", "close", "fsencode", "fspath", "fstat", "getpid", "lstat", "major", "minor",
        "environ", "path", "pread", "preadv", "scandir", "stat", "stat_result", "strerror",
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


def test_only_calls_on_files_of_the_storage_are_counted_and_interrupted(tmp_path):
    inside, outside = tmp_path / "run" / "step-1", tmp_path / "elsewhere"
    inside.mkdir(parents=True)
    with interrupted_system(LocalStorage(inside), 0, "lost") as (_, system):
        os.mkdir(outside)
        with pytest.raises(OSError, match="Input/output error"):
            os.mkdir(inside / "a")
        os.mkdir(inside / "b")
    assert (inside / "a").is_dir()
    assert not system.stopped
    assert [step.what for step in system.steps] == ["mkdir", "mkdir"]
    with interrupted_system(LocalStorage(inside), 0, "broken"):
        for name in ("c", "d"):
            with pytest.raises(OSError, match="No space left"):
                os.mkdir(inside / name)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_torn_write_leaves_whole_pages_or_half(tmp_path, parts):
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
