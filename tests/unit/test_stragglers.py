"""When a slow stager is helped: after a look at its pace, and where help pays."""

from __future__ import annotations

import pytest

from ray_dcp.protocol.liveness import HELP_COSTS_S, LEAST_WAIT_S, Pace, find_stragglers


def others(done_s: float, count: int = 3) -> dict[int, Pace]:
    return {rank: Pace(100, 100, done_s=done_s) for rank in range(1, count + 1)}


@pytest.mark.parametrize("usual_s", [0.6, 4.0, 60.0])
def test_a_tenth_of_the_pace_is_seen_as_soon_as_the_others_are_done(usual_s):
    assert find_stragglers({0: Pace(10, 100), **others(usual_s)}, usual_s) == {
        0: f"after {usual_s:.1f} s 10 of 100 bytes were written, where others took "
        f"{usual_s:.1f} s for theirs"
    }
    assert find_stragglers({0: Pace(9, 100), **others(usual_s)}, 0.99 * usual_s) == {}


def test_what_has_written_nothing_is_helped_but_not_at_once():
    paces = {0: Pace(0, 100), **others(0.1)}
    assert find_stragglers(paces, 0.9 * LEAST_WAIT_S) == {}
    assert set(find_stragglers(paces, LEAST_WAIT_S)) == {0}


def test_nobody_is_helped_who_ends_before_help_could_come():
    """Ten times as slow as the others, but with less left to do than help costs."""
    elapsed_s = 0.6
    left = HELP_COSTS_S / elapsed_s
    soon, late = round(1000 / (1 + 0.9 * left)), round(1000 / (1 + 1.1 * left))
    assert find_stragglers({0: Pace(soon, 1000), **others(0.06)}, elapsed_s) == {}
    assert set(find_stragglers({0: Pace(late, 1000), **others(0.06)}, elapsed_s)) == {0}


def test_nobody_is_helped_who_takes_less_than_twice_as_long():
    assert find_stragglers({0: Pace(55, 100), **others(10.0)}, 10.0) == {}
    assert set(find_stragglers({0: Pace(45, 100), **others(10.0)}, 10.0)) == {0}


def test_nobody_is_helped_before_half_of_the_ranks_are_done():
    slow = {rank: Pace(1, 100) for rank in (10, 11, 12)}
    assert find_stragglers({**slow, **others(1.0, count=2)}, 50.0) == {}
    assert set(find_stragglers({**slow, **others(1.0, count=3)}, 50.0)) == {10, 11, 12}


def test_a_rank_without_bytes_is_never_helped():
    assert find_stragglers({0: Pace(0, 0), **others(1.0)}, 50.0) == {}
