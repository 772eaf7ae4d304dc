"""Everything that ray_dcp does at a place, interrupted at many calls and every step of a rank.

Deaths come before every call of the storage; the other faults at some of them, unless
RAY_DCP_THOROUGH is set.
"""

from __future__ import annotations

import os
from functools import partial

import pytest
from obstore.store import MemoryStore

from ray_dcp.place.delete import delete
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from ray_dcp.store.object_storage import ObjectStorage
from tests.crash import crashes
from tests.crash.crashes import OPERATIONS, check_crashes
from tests.crash.interruptions import interrupted_system
from tests.crash.invariants import is_same
from tests.support.arrays import state_of
from tests.support.storages import Script
from tests.support.world import load_state, loads_whole, run_ranks, save, save_ranks, save_state

SPARSE = 1 if os.environ.get("RAY_DCP_THOROUGH") else 2
"""How much further apart the calls are than in a thorough run."""

# --- Calls of the storage and of the system -------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_whatever_a_call_meets_the_previous_or_the_new_checkpoint_stands_as_is_told(operation):
    every = {"before": 1, "lost": 2 * SPARSE, "refused": 5 * SPARSE, "broken": 5 * SPARSE}
    reached = check_crashes(operation, variants=every, every=every)
    assert ("reuse" in reached.calls) == (operation.name == "save.linked")
    assert ("new" in reached.stood) == (operation.new is not operation.previous)
    assert reached.stood["previous"] >= 1
    told = reached.told_after
    assert told["before"] == {"nothing"}
    if operation.name.startswith("save.") and not operation.fails:
        # One lost answer leaves nothing open: whoever asked looks again.
        assert {"committed", "failed"} <= told["lost"] <= {"committed", "failed"}
    assert "failed" in told["refused"]
    assert "failed" in told["broken"]
    assert "unknown" not in told["refused"] or operation.new is None


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_process_that_dies_at_a_system_call_leaves_the_previous_or_the_new(operation, tmp_path):
    make = partial(LocalStorage, tmp_path / "step-1")
    crashes = partial(
        check_crashes, operation, storage=make, interrupt=interrupted_system, variants=["before"]
    )
    assert crashes(every=8 * SPARSE).points["before"] >= 1


@pytest.mark.parametrize("name", ["save.overwrite", "save.linked"])
def test_who_meets_an_error_at_a_system_call_is_told_what_stands(name, tmp_path):
    reached = check_crashes(
        name,
        storage=partial(LocalStorage, tmp_path / "step-1"),
        interrupt=interrupted_system,
        variants=["refused", "lost", "broken"],
        every=6 * SPARSE,
    )
    assert set(reached.points) == {"refused", "lost", "broken"}
    assert {"committed", "failed"} <= set(reached.told)


class WithoutLinks(MemoryStorage):
    """A storage that can give no key the bytes of another one."""

    reuse = None


def test_a_link_is_a_step_of_its_own_on_a_filesystem(tmp_path):
    reached = check_crashes(
        "save.linked",
        storage=partial(LocalStorage, tmp_path / "step-1"),
        interrupt=interrupted_system,
        variants=["before"],
        every=2 * SPARSE - 1,
    )
    assert reached.calls["link"] >= 2
    assert reached.stood["previous"] >= 1 <= reached.stood["new"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ObjectStorage(MemoryStore(), "run"),
        partial(WithoutLinks, "without-links"),
    ],
    ids=["copies", "neither"],
)
def test_a_storage_that_copies_or_does_neither_keeps_the_previous_or_the_new(make):
    variants = ["before", "lost", "refused"]
    reached = check_crashes("save.linked", storage=make, variants=variants, every=2 * SPARSE - 1)
    assert reached.calls["reuse"] >= 1
    assert {"previous", "new"} <= set(reached.stood)


class Meanwhile(Script):
    """Does something before the call of a number."""

    def __init__(self, at, act):
        super().__init__()
        self.num_calls, self._at, self._act = 0, at, act

    def choose(self, call):
        if self.num_calls == self._at:
            self._act()
        self.num_calls += 1


@pytest.mark.parametrize(
    "make",
    [lambda root, step: LocalStorage(root / step), lambda root, step: MemoryStorage(f"m/{step}")],
    ids=["links", "memory"],
)
def test_the_last_step_may_be_deleted_before_any_call_of_a_save_that_links_to_it(make, tmp_path):
    number, linked = 0, 0
    while True:
        old, new = make(tmp_path / str(number), "step-1"), make(tmp_path / str(number), "step-2")
        save_state(old, crashes.OLD, options=crashes.LINK, history=crashes.KnownRun(old))
        script = Meanwhile(number, partial(delete, old.url, opener=lambda _, old=old: old))
        save_state(
            script.wrap(new), crashes.NEW_WITH_OLD, options=crashes.LINK,
            history=crashes.KnownRun(old),
        )  # fmt: skip
        linked += sum(call.operation == "reuse" for call in script.calls)
        assert is_same(load_state(new, crashes.NEW), crashes.NEW_WITH_OLD)
        is_over = script.num_calls <= number
        delete(new.url, opener=lambda _, new=new: new)
        if is_over:
            break
        number += 3
    assert number > 12
    assert linked > 12


@pytest.mark.parametrize("name", ["save.overwrite", "save.linked"])
def test_a_process_that_dies_in_the_midst_of_a_write_leaves_the_previous(name, tmp_path):
    reached = check_crashes(
        name,
        storage=partial(LocalStorage, tmp_path / "step-1"),
        interrupt=interrupted_system,
        variants=["torn"],
    )
    assert reached.calls.keys() == {"pwritev"}
    assert reached.stood["previous"] >= 3


# --- Steps of the ranks and the coordinator -------------------------------------------------------


OLD, NEW, NEXT = state_of(1), state_of(2), state_of(3)
STATES = [OLD, NEW, NEXT]


def fresh(name, overwrite):
    """Returns an empty place, with a checkpoint on it if asked."""
    storage = MemoryStorage(name)
    storage.delete([entry.key for entry in storage.list()])
    if overwrite:
        save(OLD, 2, storage.url)
    return storage.url


def check_place(url, allowed):
    """What stands is one of the allowed states, whole, and the place can be saved to again."""
    found = loads_whole(url, STATES)
    assert found in allowed
    save(NEXT, 3, url, session="after")
    assert loads_whole(url, STATES) == 2
    return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_before_any_step_leaves_the_previous_or_the_new_checkpoint(overwrite):
    found = []
    for step in range(1000):
        url = fresh("crash-steps", overwrite)
        results = run_ranks(save_ranks(NEW, 3, url), crash_at=step)
        found.append(check_place(url, {0 if overwrite else None, 1}))
        if all(result.ended for result in results):
            break
        # Nobody was told of a success that is not there.
        assert found[-1] == 1 or all(result.error or not result.ended for result in results)
    previous = 0 if overwrite else None
    # There is one moment of commit: before it the previous one stands, from it on the new one.
    commit = found.index(1)
    assert found == [previous] * commit + [1] * (len(found) - commit)
    assert commit > 10
