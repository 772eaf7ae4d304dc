"""Rendezvous: ranks that only share a name agree on a generation, in any order, however often."""

from __future__ import annotations

from itertools import count, permutations

import pytest

from ray_dcp.errors import InvalidRequestError, RankDisagreementError
from ray_dcp.runtime.coordinator import Rendezvous


@pytest.fixture
def rendezvous() -> Rendezvous:
    numbers = count(1)
    return Rendezvous(lambda: f"g{next(numbers)}")


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_ranks_get_one_generation_in_any_order(rendezvous: Rendezvous, order):
    told = [rendezvous.enter(rank, 3, f"w{rank}") for rank in order]
    assert told == [None, None, "g1"]
    assert [rendezvous.enter(rank, 3, f"w{rank}") for rank in range(3)] == ["g1"] * 3


def test_a_rank_that_restarts_before_all_entered_keeps_the_others_in_the_meeting(
    rendezvous: Rendezvous,
):
    assert rendezvous.enter(0, 2, "a") is None
    assert rendezvous.enter(0, 2, "a2") is None
    assert rendezvous.missing == [1]
    assert rendezvous.enter(1, 2, "b") == "g1"
    assert rendezvous.generation_for(0, "a2") == "g1"
    assert rendezvous.generation_for(0, "a") is None


def test_a_rank_that_restarts_after_all_entered_begins_a_new_meeting(rendezvous: Rendezvous):
    rendezvous.enter(0, 2, "a")
    rendezvous.enter(1, 2, "b")
    assert rendezvous.enter(0, 2, "a2") is None
    assert rendezvous.missing == [1]
    assert rendezvous.enter(1, 2, "b2") == "g2"


def test_the_next_run_may_have_another_number_of_ranks(rendezvous: Rendezvous):
    assert rendezvous.enter(0, 1, "a") == "g1"
    assert rendezvous.enter(1, 2, "b") is None
    assert rendezvous.enter(0, 2, "a2") == "g2"


def test_all_ranks_are_told_once_that_they_disagree_about_their_number(rendezvous: Rendezvous):
    rendezvous.enter(0, 3, "a")
    with pytest.raises(RankDisagreementError, match=r"rank 1 gives 2 and ranks \[0\] gave 3"):
        rendezvous.enter(1, 2, "b")
    with pytest.raises(RankDisagreementError, match=r"rank 1 gives 2 and ranks \[0\] gave 3"):
        rendezvous.enter(2, 3, "c")
    assert [rendezvous.enter(rank, 3, f"again {rank}") for rank in range(3)] == [None, None, "g1"]


def test_a_disagreement_can_be_forgotten(rendezvous: Rendezvous):
    rendezvous.enter(0, 3, "a")
    with pytest.raises(RankDisagreementError):
        rendezvous.enter(1, 2, "b")
    rendezvous.forget_disagreement()
    assert [rendezvous.enter(rank, 3, f"again {rank}") for rank in (2, 0, 1)] == [None, None, "g1"]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rendezvous: Rendezvous, rank, world_size):
    with pytest.raises(InvalidRequestError):
        rendezvous.enter(rank, world_size, "a")
