"""Staged saves whose ranks, stagers and coordinator die at any time: none gets stuck.

What would end only at its deadline counts as stuck: there are no deadlines here.
"""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.staged_world import StagedWorld

NODES = [0, 0, 1, 1, 2]
LAYOUTS = {
    "own": [{0}, {1}, {2}, {3}, {4}],
    "several": [{0, 1}, {2}, {3}, {4}, set()],
}
RANKS, STAGERS = st.integers(0, 4), st.integers(0, 2)

harmless = st.one_of(
    st.tuples(st.just("step"), RANKS),
    st.tuples(st.just("step"), RANKS),
    st.tuples(st.just("write"), STAGERS),
    st.tuples(st.just("look")),
    st.tuples(st.just("restart")),
)
deadly = st.one_of(
    harmless,
    st.tuples(st.just("kill_stager"), STAGERS),
    st.tuples(st.just("kill_rank"), RANKS),
)


def play(world: StagedWorld, steps) -> bool:
    """Plays events; returns False when a coordinator could not take the save up."""
    return all(getattr(world, what)(*how) is not False or what != "restart" for what, *how in steps)


@settings(max_examples=160, deadline=None)
@given(layout=st.sampled_from(sorted(LAYOUTS)), steps=st.lists(harmless, max_size=50))
def test_whatever_becomes_of_its_coordinators_the_save_is_committed(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    if not play(world, steps):
        event("nobody had the plan")
        assert world.is_unprotected
        return
    world.settle()
    event(f"epoch {world.epoch}")
    assert world.committed
    assert {type(rank.outcome).__name__ for rank in world.ranks} == {"SaveOutcome"}


@settings(max_examples=240, deadline=None)
@given(layout=st.sampled_from(sorted(LAYOUTS)), steps=st.lists(deadly, max_size=50))
def test_whoever_dies_it_ends_one_way_for_all(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    if not play(world, steps):
        event("nobody had the plan")
        return
    world.settle()
    event(f"committed {world.committed}, epoch {world.epoch}")
    dead = [rank for rank in world.ranks if rank.is_dead]
    assert world.committed or dead or any(stager.is_dead for stager in world.stagers)
    told = {type(rank.outcome).__name__ for rank in world.ranks if not rank.is_dead}
    assert len(told) <= 1
    assert (told == {"SaveOutcome"}) == (world.committed and len(dead) < len(world.ranks))


def staged(layout="own") -> StagedWorld:
    """Returns a save whose ranks have all handed in and wait for the outcome."""
    world = StagedWorld(NODES, LAYOUTS[layout])
    for rank in range(len(NODES)):
        world.step(rank)
        world.step(rank)
    return world


@pytest.mark.parametrize("when", ["at once", "after a restart"])
def test_a_stager_that_is_lost_with_unwritten_bytes_fails_the_save_by_name(when):
    world = staged()
    world.write(1)
    world.kill_stager(1)
    assert when == "at once" or world.restart()
    world.settle()
    assert not world.committed
    for rank in world.ranks:
        assert "1#0" in rank.outcome.error.message
        assert "files unwritten: it died" in rank.outcome.error.message
        assert "the next save starts another stager" in rank.outcome.error.message


def test_a_stager_that_dies_after_its_last_receipt_does_no_harm():
    world = staged()
    while world.write(1):
        pass
    world.kill_stager(1)
    world.settle()
    assert world.committed


def test_a_coordinator_asks_also_those_of_whom_it_hears_later_what_they_wrote():
    world = StagedWorld(NODES, LAYOUTS["own"])
    for rank in range(4):
        world.step(rank)
    known = world.kept
    world.step(4)
    world.write(2)
    world.kept = known  # the coordinator died before it had put it there
    assert world.restart()
    world.settle()
    assert world.committed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_and_the_coordinator_may_die_once_all_is_staged(layout):
    world = StagedWorld(NODES, LAYOUTS[layout])
    for rank in range(len(NODES)):
        world.step(rank)
    for rank in range(len(NODES)):
        world.ranks[rank].is_dead = True
    assert world.restart()
    for rank in range(len(NODES)):
        world.kill_rank(rank)
    world.settle()
    assert world.committed


@pytest.mark.parametrize("ends", ["committed", "aborted"])
def test_a_coordinator_that_dies_right_after_the_end_leaves_nothing_to_wait_for(ends):
    world = StagedWorld(NODES, LAYOUTS["own"])
    for rank in range(len(NODES)):
        world.step(rank)
    if ends == "aborted":
        world.kill_stager(2)
    world.settle()
    assert world.committed == (ends == "committed")
    assert world.restart()
    world.work()
    assert world.coordination.active == ()
