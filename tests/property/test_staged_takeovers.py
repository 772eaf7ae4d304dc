"""Staged saves whose stagers die and lag, and whose coordinator dies, at any time: none gets stuck.

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

events = st.one_of(
    st.tuples(st.just("step"), RANKS, st.booleans()),
    st.tuples(st.just("step"), RANKS, st.booleans()),
    st.tuples(st.just("step"), RANKS, st.booleans()),
    st.tuples(st.just("write"), STAGERS),
    st.tuples(st.just("lag"), RANKS),
    st.tuples(st.just("look")),
    st.tuples(st.just("kill stager"), STAGERS),
    st.tuples(st.just("restart")),
)


def play(world: StagedWorld, steps) -> bool:
    """Plays events; returns False when a coordinator could not take the save up."""
    for what, *how in steps:
        match what:
            case "step":
                world.step(how[0], helps=how[1])
            case "write":
                world.write(how[0])
            case "lag":
                world.lag(how[0])
            case "look":
                world.look()
            case "kill stager":
                world.kill_stager(how[0])
            case "kill rank":
                world.kill_rank(how[0])
            case "restart":
                if not world.restart():
                    return False
    return True


@settings(max_examples=240, deadline=None)
@given(layout=st.sampled_from(sorted(LAYOUTS)), steps=st.lists(events, max_size=50))
def test_while_all_ranks_live_the_save_is_committed(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    if not play(world, steps):
        event("nobody had the plan")
        assert world.is_unprotected
        return
    world.settle()
    event(f"takeovers {min(3, sum(rank.takeovers for rank in world.ranks))}, epoch {world.epoch}")
    assert world.committed
    assert {type(rank.outcome).__name__ for rank in world.ranks} == {"SaveOutcome"}


@settings(max_examples=160, deadline=None)
@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    steps=st.lists(st.one_of(events, st.tuples(st.just("kill rank"), RANKS)), max_size=50),
)
def test_when_ranks_die_too_it_ends_one_way_for_all(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    if not play(world, steps):
        event("nobody had the plan")
        return
    world.settle()
    event(f"committed {world.committed}, epoch {world.epoch}")
    dead = [rank for rank in world.ranks if rank.is_dead]
    assert world.committed or dead
    told = {type(rank.outcome).__name__ for rank in world.ranks if not rank.is_dead}
    assert len(told) <= 1
    assert (told == {"SaveOutcome"}) == (world.committed and len(dead) < len(world.ranks))


STORIES = {
    "a helper that takes nothing, while the stager dies": (
        "own",
        [("lag", 0), ("kill stager", 0), ("look",), ("step", 0, False)],
    ),
    "one of two ranks finds no helper, then the stager dies": (
        "own",
        [("lag", 0), ("step", 0, True), ("step", 1, False), ("kill stager", 0)],
    ),
    "a coordinator that knows only of the helper": (
        "own",
        [("lag", 0), ("step", 0, True), ("step", 1, False), ("kill stager", 0), ("restart",)],
    ),
    "a coordinator that comes between the receipts": (
        "own", [("write", 0), ("restart",), ("write", 1)],
    ),
    "a coordinator that comes before the receipts, and one after": (
        "own", [("restart",), ("write", 1), ("restart",)],
    ),
    "a helper that dies with one of two ranks' bytes": (
        "own",
        [("lag", 0), ("step", 0, True), ("step", 1, False), ("kill stager", 2), ("look",)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_a_save_goes_on_after(story):
    layout, steps = STORIES[story]
    world = StagedWorld(NODES, LAYOUTS[layout])
    # Everybody has handed in and waits; who could help is done.
    for rank in range(len(NODES)):
        world.step(rank)
        world.step(rank)
    world.write(2)
    assert play(world, steps)
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
        world.kill_rank(4)
    world.settle()
    assert world.committed == (ends == "committed")
    assert world.restart()
    world.work()
    assert world.coordination.active == ()


def test_nobody_hands_over_twice_what_he_was_asked_for_once():
    """A rank whose helper failed tells its number; the next order must have another one."""
    world = StagedWorld(NODES, LAYOUTS["own"])
    for rank in range(len(NODES)):
        world.step(rank)
        world.step(rank)
    world.write(2)
    world.lag(0)
    world.step(0, helps=False)
    world.step(0)
    world.kill_stager(0)
    world.look()
    world.settle()
    assert world.committed
    assert world.ranks[0].takeovers == 2
