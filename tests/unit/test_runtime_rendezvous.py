"""Rendezvous: ranks that only share a name agree on a generation, in any order, however often."""

from __future__ import annotations

import asyncio
from itertools import count, permutations

import pytest

from ray_dcp.errors import InvalidRequestError, RankDisagreementError
from ray_dcp.runtime.coordinator import Rendezvous


def answers(*calls: tuple[int, int, str] | None, timeout_s: float = 0.5) -> list[object]:
    """Returns the answers to ranks that enter one after the other; None waits for those before."""

    async def play() -> list[object]:
        numbers = count(1)
        rendezvous = Rendezvous(lambda: f"g{next(numbers)}")
        joining = []
        for one in calls:
            if one is None:
                await asyncio.wait(joining)
            else:
                joining.append(asyncio.ensure_future(rendezvous.join(*one, timeout_s)))
                await asyncio.sleep(0)
        return await asyncio.gather(*joining, return_exceptions=True)

    return asyncio.run(play())


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_all_ranks_get_one_generation_in_any_order_also_if_a_call_is_repeated(order):
    calls = [(rank, 3, f"w{rank}") for rank in order]
    assert answers(*calls, None, *calls) == ["g1"] * 6


def test_a_rank_that_restarts_before_all_entered_keeps_the_others_in_the_rendezvous():
    assert answers((0, 2, "a"), (0, 2, "a2"), (1, 2, "b")) == [[], "g1", "g1"]


def test_a_rank_that_restarts_after_all_entered_begins_a_new_rendezvous():
    first = (0, 2, "a"), (1, 2, "b"), None
    assert answers(*first, (0, 2, "a2"), (1, 2, "b2")) == ["g1", "g1", "g2", "g2"]
    assert answers(*first, (0, 2, "a2"), timeout_s=0.01) == ["g1", "g1", [1]]
    assert answers((0, 1, "a"), None, (1, 2, "b"), (0, 2, "a2")) == ["g1", "g2", "g2"]


def test_all_ranks_get_the_error_once_if_they_disagree_about_their_number():
    wrong, again = [(0, 3, "a"), (1, 2, "b"), (2, 3, "c")], [(r, 3, f"d{r}") for r in range(3)]
    *errors, second, third, fourth = answers(*wrong, None, *again)
    assert {type(error) for error in errors} == {RankDisagreementError}
    assert {"rank 1 gives 2 and ranks [0] gave 3" in str(error) for error in errors} == {True}
    assert {second, third, fourth} == {"g1"}


def test_a_disagreement_is_forgotten():
    async def play() -> list[object]:
        rendezvous = Rendezvous(lambda: "g1")
        wrong = [rendezvous.join(0, 3, "a", 0.01), rendezvous.join(1, 2, "b", 0.01)]
        await asyncio.gather(*wrong, return_exceptions=True)
        await asyncio.sleep(0.02)
        return await asyncio.gather(*(rendezvous.join(rank, 3, "c", 60.0) for rank in (2, 0, 1)))

    assert asyncio.run(play()) == ["g1"] * 3


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world_size):
    (error,) = answers((rank, world_size, "a"))
    assert isinstance(error, InvalidRequestError)
