"""A crash at every step of a rank or the coordinator: the previous checkpoint or the new, whole.

Crashes and faults at every call of the storage are in `test_crash_enumeration`.
"""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_dcp.options import SaveOptions
from ray_dcp.runtime.tasks import outcome, perform
from ray_dcp.store.memory import MemoryStorage
from tests.crash.interruptions import interrupted_storage
from tests.crash.registry import Place
from tests.inline_ranks import run_ranks
from tests.numpy_ranks import loads_whole, save, save_ranks, state_of

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


@pytest.mark.parametrize("container", ["torch_save", "safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_before_any_step_leaves_the_previous_or_the_new_checkpoint(overwrite, container):
    found = []
    for step in range(1000):
        url = fresh("crash-steps", overwrite)
        options = SaveOptions(container=container)
        results = run_ranks(save_ranks(NEW, 3, url, options=options), crash_at=step)
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


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32), world_size=st.integers(1, 4), twice=st.floats(0, 1),
    crash_at=st.none() | st.integers(0, 40),
)  # fmt: skip
def test_no_order_and_no_repetition_of_messages_changes_what_a_save_does(
    seed, world_size, twice, crash_at
):
    url = fresh("orders", True)
    order = random.Random(seed)
    results = run_ranks(
        save_ranks(NEW, world_size, url),
        choose=order.randrange,
        fate=lambda _: "twice" if order.random() < twice else "live",
        crash_at=crash_at,
    )
    committed = check_place(url, {0, 1}) == 1
    if all(result.ended for result in results):
        assert committed
        assert {result.get().slot for result in results} == {2}
    assert not any(result.error for result in results)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    gone=st.dictionaries(
        st.tuples(st.integers(0, 2), st.sampled_from(["SaveJoin", "SaveReceipt"])),
        st.sampled_from(["freeze", "die"]), min_size=1, max_size=3,
    ),
)  # fmt: skip
def test_nobody_waits_for_ever_for_ranks_that_are_gone(seed, gone):
    url = fresh("gone", True)
    order = random.Random(seed)
    results = run_ranks(
        save_ranks(NEW, 3, url),
        choose=order.randrange,
        fate=lambda request: gone.get((request.rank, type(request).__name__), "live"),
    )
    # Who is gone before it joins ends the save before the others can be gone later.
    lost = {rank for rank, step in gone if step == "SaveJoin"} or {rank for rank, _ in gone}
    for rank, result in enumerate(results):
        assert result.ended == (rank not in lost)
        if result.ended:
            assert lost & set(result.error.failures)
            assert set(result.error.failures) <= lost
    check_place(url, {0})


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32), fault=st.none() | st.integers(0, 50), world_size=st.integers(1, 3)
)
def test_of_two_overlapping_saves_at_most_one_commits_in_a_slot(seed, fault, world_size):
    url = fresh("races", True)
    order = random.Random(seed)
    with interrupted_storage(MemoryStorage("races"), fault, "lost") as (storage, _):
        place = Place(storage)
        ranks = [
            generator
            for session, state in (("one", NEW), ("two", NEXT))
            for generator in save_ranks(state, world_size, url, session=session, opener=place.open)
        ]
        results = run_ranks(
            ranks, choose=order.randrange, performer=partial(perform, opener=place.open)
        )
    outcomes = {}
    for index, result in enumerate(results):
        assert result.ended
        outcomes.setdefault(index // world_size, set()).add(
            result.value.slot if result.error is None else type(result.error)
        )
    assert all(len(told) == 1 for told in outcomes.values())
    slots = sorted(
        (slot, index) for index, told in outcomes.items() for slot in told if isinstance(slot, int)
    )
    # The one that committed last stands; with no commit, the one from before.
    assert loads_whole(url, STATES) == (slots[-1][1] + 1 if slots else 0)
    assert len({slot for slot, _ in slots}) == len(slots)
    for result in results:
        if result.error is None:
            assert outcome(url, result.value.attempt) == "committed"
