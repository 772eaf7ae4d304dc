"""Everything that ray_dcp does at a place, interrupted at every call that it makes there."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.errors import CommitUnknownError
from ray_dcp.runtime.tasks import perform
from ray_dcp.store.fault_injection import CrashError
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.memory import MemoryStorage
from tests.crash.array_states import sample_state
from tests.crash.crashes import check_crashes
from tests.crash.interruptions import interrupted_storage
from tests.crash.invariants import (
    INVARIANTS,
    Aftermath,
    standing_state,
)
from tests.crash.own_operations import OPERATIONS
from tests.crash.ranks import one_outcome, save_ranks
from tests.crash.registry import NEXT, OLD, Place
from tests.crash.system_calls import interrupted_system
from tests.inline_ranks import run_ranks


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_process_that_dies_leaves_the_previous_or_the_new_checkpoint(operation):
    reached = check_crashes(operation, variants=["before"])
    assert reached.told == {"nothing": reached.points["before"]}
    assert ("new" in reached.stood) == (operation.new is not operation.previous)
    assert reached.stood["previous"] >= 1


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_who_loses_an_answer_and_goes_on_is_told_what_stands(operation):
    reached = check_crashes(operation, variants=["lost"], every=2)
    if operation.name.startswith("save.") and not operation.fails:
        # One lost answer leaves nothing open: whoever asked looks again.
        assert {"committed", "failed"} <= set(reached.told) <= {"committed", "failed"}


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_who_meets_an_error_at_any_call_is_told_what_stands(operation):
    once = check_crashes(operation, variants=["refused"], every=5)
    for_ever = check_crashes(operation, variants=["broken"], every=5)
    assert "failed" in once.told
    assert "failed" in for_ever.told
    assert "unknown" not in once.told or operation.new is None


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_process_that_dies_at_a_system_call_leaves_the_previous_or_the_new(operation, tmp_path):
    make = partial(LocalStorage, tmp_path / "step-1")
    crashes = partial(
        check_crashes, operation, storage=make, interrupt=interrupted_system, variants=["before"]
    )
    assert crashes(every=8).points["before"] >= 1


@pytest.mark.parametrize("name", ["save.overwrite", "save.overwrite_safetensors"])
def test_a_process_that_dies_in_the_midst_of_a_write_leaves_the_previous(name, tmp_path):
    reached = check_crashes(
        name,
        storage=partial(LocalStorage, tmp_path / "step-1"),
        interrupt=interrupted_system,
        variants=["torn"],
    )
    assert reached.calls.keys() == {"write", "pwritev"}
    assert reached.stood["previous"] >= 3


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32), at=st.none() | st.integers(0, 60), world_size=st.integers(1, 2),
    variant=st.sampled_from(["before", "after", "refused", "lost", "broken"]),
)  # fmt: skip
def test_two_saves_that_race_leave_one_of_the_states_whole_whatever_happens(
    seed, at, world_size, variant
):
    storage = MemoryStorage("races-and-crashes")
    storage.delete([entry.key for entry in storage.list()])
    Place(storage).save(OLD)
    one, two = sample_state(11), sample_state(12)
    told, attempts = [], []
    with interrupted_storage(storage, at, variant) as (asked, _):
        place = Place(asked)
        ranks = [
            rank
            for session, state in (("one", one), ("two", two))
            for rank in save_ranks(
                state, world_size, storage.url, session=session, opener=place.open
            )
        ]
        try:
            results = run_ranks(
                ranks,
                choose=random.Random(seed).randrange,
                performer=partial(perform, opener=place.open),
            )
        except CrashError:
            results = []
    for index, state in enumerate((one, two)) if results else ():
        try:
            outcome = one_outcome(results[index * world_size :][:world_size])
        except CommitUnknownError:
            told.append((state, None))
        except Exception:
            continue
        else:
            told.append((state, outcome.slot))
            attempts.append(outcome.attempt)
    allowed = what_may_stand(told) if results else (OLD, one, two)
    after = Aftermath(storage, allowed, earlier=(OLD, one, two), told="nothing")
    for invariant in INVARIANTS:
        invariant(after)


def what_may_stand(told):
    """What may stand by what the callers of two saves were told: their states and slots."""
    committed = sorted((slot, index) for index, (_, slot) in enumerate(told) if slot is not None)
    unknown = [state for state, slot in told if slot is None]
    last = told[committed[-1][1]][0] if committed else OLD
    return (last, *unknown)


def test_the_last_state_is_none_that_a_race_saves():
    assert standing_state(MemoryStorage("nothing-here"), (NEXT,)) is None
