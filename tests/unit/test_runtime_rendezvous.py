"""Rendezvous: ranks that only share a name agree on a generation, in any order, however often."""

from __future__ import annotations

from itertools import count, permutations

import pytest

from ray_dcp.errors import InvalidRequestError, RankDisagreementError
from ray_dcp.runtime.coordinator import Rendezvous


@pytest.fixture
def meeting() -> Rendezvous:
    numbers = count(1)
    return Rendezvous(lambda: f"g{next(numbers)}")


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_ranks_get_one_generation_in_any_order(meeting: Rendezvous, order):
    told = [meeting.enter(rank, 3, f"w{rank}") for rank in order]
    assert told == [None, None, "g1"]
    assert [meeting.enter(rank, 3, f"w{rank}") for rank in range(3)] == ["g1"] * 3


def test_a_rank_that_restarts_before_all_met_keeps_the_others_in_the_meeting(meeting: Rendezvous):
    assert meeting.enter(0, 2, "a") is None
    assert meeting.enter(0, 2, "a2") is None
    assert meeting.missing == [1]
    assert meeting.enter(1, 2, "b") == "g1"
    assert meeting.generation_for(0, "a2") == "g1"
    assert meeting.generation_for(0, "a") is None


def test_a_rank_that_restarts_after_all_met_begins_a_new_meeting(meeting: Rendezvous):
    meeting.enter(0, 2, "a")
    meeting.enter(1, 2, "b")
    assert meeting.enter(0, 2, "a2") is None
    assert meeting.missing == [1]
    assert meeting.enter(1, 2, "b2") == "g2"


def test_the_next_run_may_have_another_number_of_ranks(meeting: Rendezvous):
    assert meeting.enter(0, 1, "a") == "g1"
    assert meeting.enter(1, 2, "b") is None
    assert meeting.enter(0, 2, "a2") == "g2"


def test_all_ranks_are_told_once_that_they_disagree_about_their_number(meeting: Rendezvous):
    meeting.enter(0, 3, "a")
    with pytest.raises(RankDisagreementError, match=r"rank 1 gives 2 and ranks \[0\] gave 3"):
        meeting.enter(1, 2, "b")
    with pytest.raises(RankDisagreementError, match=r"rank 1 gives 2 and ranks \[0\] gave 3"):
        meeting.enter(2, 3, "c")
    assert [meeting.enter(rank, 3, f"again {rank}") for rank in range(3)] == [None, None, "g1"]


def test_a_disagreement_can_be_forgotten(meeting: Rendezvous):
    meeting.enter(0, 3, "a")
    with pytest.raises(RankDisagreementError):
        meeting.enter(1, 2, "b")
    meeting.forget_dispute()
    assert [meeting.enter(rank, 3, f"again {rank}") for rank in (2, 0, 1)] == [None, None, "g1"]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(meeting: Rendezvous, rank, world_size):
    with pytest.raises(InvalidRequestError):
        meeting.enter(rank, world_size, "a")
