"""Staged saves whose ranks, stagers and coordinator die at any time: none gets stuck.

What would end only at its deadline counts as stuck: there are no deadlines here.
"""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.support.protocol import StagedWorld

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
    st.tuples(st.just("turn"), RANKS),
)


def play(world: StagedWorld, steps) -> None:
    """Plays events."""
    for what, *how in steps:
        getattr(world, what)(*how)


@settings(max_examples=100)
@given(layout=st.sampled_from(sorted(LAYOUTS)), steps=st.lists(harmless, max_size=50))
def test_whatever_becomes_of_its_coordinators_the_save_is_committed(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    play(world, steps)
    world.settle()
    event(f"epoch {world.epoch}")
    assert world.committed
    assert {type(rank.outcome).__name__ for rank in world.ranks} == {"SaveOutcome"}


@settings(max_examples=150)
@given(layout=st.sampled_from(sorted(LAYOUTS)), steps=st.lists(deadly, max_size=50))
def test_whoever_dies_it_ends_one_way_for_all(layout, steps):
    world = StagedWorld(NODES, LAYOUTS[layout])
    play(world, steps)
    world.settle()
    event(f"committed {world.committed}, epoch {world.epoch}")
    assert world.is_over
    dead = [rank for rank in world.ranks if rank.is_dead]
    stagers = [*world.stagers, *world.dead]
    assert world.committed or dead or any(stager.is_dead for stager in stagers)
    told = {type(rank.outcome).__name__ for rank in world.ranks if not rank.is_dead}
    assert len(told) <= 1
    assert (told == {"SaveOutcome"}) == (world.committed and len(dead) < len(world.ranks))


ALL = range(len(NODES))
HANDED_IN = [("step", rank) for rank in ALL]
WAITING = [event for rank in ALL for event in (("step", rank), ("step", rank))]
WRITTEN = [("write", 1)] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("steps", "committed"),
    [
        ([*WAITING, *WRITTEN, ("kill_stager", 1)], True),
        ([*WAITING, ("write", 1), ("kill_stager", 1)], False),
        ([*WAITING, ("write", 1), ("kill_stager", 1), ("restart",)], False),
        ([*HANDED_IN, ("restart",), *(("kill_rank", rank) for rank in ALL)], True),
    ],
    ids=["after its last file", "before it", "before it, and a coordinator", "all ranks"],
)
def test_a_save_ends_as_what_was_written_when_somebody_dies(layout, steps, committed):
    """A stager's loss fails it only while files are unwritten, and each rank is told by name."""
    world = StagedWorld(NODES, LAYOUTS[layout])
    play(world, steps)
    world.settle()
    assert world.committed == committed
    for rank in world.ranks if not committed else ():
        told = rank.outcome.error.message
        for words in ("1#0", "files unwritten: it died", "the next save starts another stager"):
            assert words in told


def test_a_rank_whose_stager_dies_before_it_answers_turns_to_the_next_one():
    world = StagedWorld(NODES, LAYOUTS["own"])
    play(world, [*HANDED_IN, ("kill_stager", 1), ("look",), ("turn", 2), ("turn", 3)])
    world.settle()
    assert world.committed


def test_a_rank_and_then_its_stager_die_right_after_the_report():
    """The rank is not staged, as far as the coordinator knows, and nobody else has its bytes."""
    world = StagedWorld(NODES, LAYOUTS["own"])
    play(world, [*HANDED_IN, ("kill_rank", 2), ("kill_stager", 1)])
    world.settle()
    assert world.is_over
    assert not world.committed


@pytest.mark.parametrize("ends", ["committed", "aborted"])
def test_a_coordinator_that_dies_right_after_the_end_leaves_nothing_to_wait_for(ends):
    world = StagedWorld(NODES, LAYOUTS["own"])
    play(world, [*HANDED_IN, *([("kill_stager", 2)] if ends == "aborted" else [])])
    world.settle()
    assert world.committed == (ends == "committed")
    world.restart()
    world.work()
    assert world.coordination.active == ()
