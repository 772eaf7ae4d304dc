"""A manager that keeps one step, interrupted at every call, and beside others: none is lost."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ray_dcp.manager.catalogue import FOLDER, look
from ray_dcp.store.local import LocalStorage
from tests.crash.crashes import check_crashes
from tests.crash.interruptions import interrupted_system
from tests.crash.invariants import (
    an_allowed_checkpoint_loads_whole,
    expect,
    is_same,
    nothing_lies_outside,
    standing_state,
)
from tests.crash.registry import NEW, NEXT, OLD, Operation
from tests.support.manager_places import (
    folders_of,
    in_this_thread,
    newest_state,
    root_of,
    save_step,
    writer_of,
)
from tests.support.manager_places import settings as manager_settings
from tests.support.manager_play import play
from tests.support.storages import CrashError, Fault, Script

# --- Crashes --------------------------------------------------------------------------------------


def every_listed_step_loads(after):
    """What the catalogue lists is whole: one of the states that were ever saved."""
    root = root_of(after.storage)
    for found in look(root, manager_settings().names).steps.values():
        expect(
            standing_state(root.open(found.name), after.states) is not None,
            f"{found.name} does not load",
        )


def a_later_writer_leaves_one_step(after):
    """The next save works, and only its step and what managers share is left."""
    writer = writer_of(after.storage, max_to_keep=1)
    save_step(writer, after.storage, 9, NEXT)
    expect(list(writer.look().steps) == [9], f"there are steps {list(writer.look().steps)}")
    expect(is_same(newest_state(after.storage, after.states), NEXT), "the later save does not load")
    ours = folders_of(after.storage) - {key.partition("/")[0] for key in after.foreign}
    expect(ours == {"step-00000009", FOLDER}, f"there is left {sorted(ours)}")


INVARIANTS = (
    an_allowed_checkpoint_loads_whole,
    every_listed_step_loads,
    nothing_lies_outside,
    a_later_writer_leaves_one_step,
)


def keep_one(place, step, state, **telling):
    return save_step(writer_of(place.storage, max_to_keep=1), place.storage, step, state, **telling)


def leave_old_and_more(place):
    keep_one(place, 1, OLD)
    # What a process left that died before it could commit the next step.
    dies = Fault(operation="write", key="*manifest-*", stops=True)
    with suppress(CrashError), Script([dies]) as script:
        storage = script.wrap(place.storage)
        save_step(writer_of(storage, max_to_keep=1), storage, 2, NEXT)


SAVE = Operation(
    name="manager.save_keep_1",
    prepare=leave_old_and_more,
    run=lambda place: keep_one(place, 3, NEW),
    previous=OLD,
    new=NEW,
    look=newest_state,
    invariants=INVARIANTS,
)
REPLACE = Operation(
    name="manager.replace_keep_1",
    prepare=lambda place: keep_one(place, 3, OLD),
    run=lambda place: keep_one(place, 3, NEW, replace=True),
    previous=OLD,
    new=NEW,
    look=newest_state,
    invariants=INVARIANTS,
)


@pytest.fixture(autouse=True)
def _in_this_thread():
    with in_this_thread():
        yield


@pytest.mark.parametrize("operation", [SAVE, REPLACE], ids=str)
def test_the_only_good_step_survives_the_death_of_the_process_at_any_call(operation):
    reached = check_crashes(operation, variants=["before"])
    assert reached.stood["previous"] >= 5
    assert reached.stood["new"] >= 5
    assert set(reached.stood) == {"previous", "new"}


@pytest.mark.parametrize("variant", ["torn", "lost", "refused", "broken"])
def test_the_only_good_step_survives_every_other_fault(variant):
    reached = check_crashes(SAVE, variants=[variant], every=5)
    # Only small records are written after the commit, and those at once: nothing is torn then.
    assert set(reached.stood) == ({"previous"} if variant == "torn" else {"previous", "new"})


def test_the_only_good_step_survives_a_death_at_a_system_call(tmp_path):
    reached = check_crashes(
        SAVE,
        storage=partial(LocalStorage, tmp_path / "run"),
        interrupt=interrupted_system,
        variants=["before"],
        every=10,
    )
    assert set(reached.stood) == {"previous", "new"}


# --- Races ----------------------------------------------------------------------------------------


_reached: Counter[str] = Counter()


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def _no_step_is_deleted_that_must_stand(seed):
    model = play(seed)
    assert model.wrong == []
    for what in model.seen:
        event(what)
    _reached.update(model.seen)


def test_no_step_is_deleted_that_must_stand_whatever_happens_at_once():
    _no_step_is_deleted_that_must_stand()
    assert _reached["deleted, by retention"] >= 1
    assert _reached["saved"] >= 10
