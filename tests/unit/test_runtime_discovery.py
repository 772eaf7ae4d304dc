"""Ranks find one session: by a name that they share, in any order, or by their process group."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count, permutations

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from ray_dcp.errors import InvalidRequestError, RankDisagreementError
from ray_dcp.runtime import discovery, session
from ray_dcp.runtime.coordinator import Rendezvous
from ray_dcp.runtime.discovery import await_group, connect_announced
from ray_dcp.runtime.session import GroupSessions, announce_connect
from tests.support.processes import eventually

QUICK_S = 0.05


@pytest.fixture(params=["hash", "tcp"])
def store(request):
    if request.param == "hash":
        return HashStore()
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20))


@pytest.fixture
def announce(store, monkeypatch):
    """Announces that a rank uses `connect`, or takes it back."""

    def run(rank, connected=True):
        monkeypatch.setattr(session, "job_place", lambda: (store, rank))
        announce_connect(connected)

    return run


def waiting(pool, store, group, ranks):
    return [pool.submit(await_group, store, group, rank, QUICK_S) for rank in ranks]


@pytest.mark.parametrize(
    "left", [[], [2, 5]], ids=["all by the group", "some had connected before"]
)
def test_ranks_of_a_group_come_to_one_session(store, announce, left):
    for rank in left:
        announce(rank)
        announce(rank, False)
    with ThreadPoolExecutor(3) as pool:
        waits = waiting(pool, store, [2, 5, 7], [2, 5, 7])
        assert [wait.result(180) for wait in waits] == [None] * 3


def test_every_rank_of_a_group_learns_that_one_uses_connect_and_then_does_not_count(
    store, announce
):
    announce(0)
    for rank in (1, 2):
        with pytest.raises(RankDisagreementError, match=r"rank 0 called ray_dcp\.connect"):
            await_group(store, [0, 1, 2], rank, QUICK_S)
    announce(0, False)
    announce(1)
    with pytest.raises(RankDisagreementError, match="rank 1 called"):
        await_group(store, [0, 1, 2], 0, QUICK_S)


def test_a_rank_that_calls_connect_later_is_seen_too(store, announce):
    with ThreadPoolExecutor(1) as pool:
        (wait,) = waiting(pool, store, [0, 1], [1])
        threading.Timer(3 * QUICK_S, announce, (0,)).start()
        with pytest.raises(RankDisagreementError):
            wait.result(180)


def test_a_connect_that_fails_is_taken_back(store, monkeypatch):
    monkeypatch.setattr(session, "job_place", lambda: (store, 0))

    def connect():
        with connect_announced():
            await_group(store, [0, 1], 1, QUICK_S)

    with pytest.raises(RankDisagreementError):
        connect()
    with ThreadPoolExecutor(2) as pool:
        waits = waiting(pool, store, [0, 1], [0, 1])
        assert [wait.result(180) for wait in waits] == [None] * 2


def test_a_rank_that_waits_for_long_names_who_is_missing(store, caplog, monkeypatch):
    monkeypatch.setattr(discovery, "LONG_WAIT_S", 4 * QUICK_S)
    with ThreadPoolExecutor(3) as pool, caplog.at_level("WARNING"):
        waits = waiting(pool, store, [0, 1, 2], [1])
        assert eventually(lambda: caplog.messages)
        assert not waits[0].done()
        waits += waiting(pool, store, [0, 1, 2], [0, 2])
        assert [wait.result(180) for wait in waits] == [None] * 3
    (told,) = [one for one in caplog.messages if one.startswith("Rank 1 ")]
    assert "ranks 0, 2 of the process group called neither save nor load" in told


def test_two_threads_make_the_first_session_of_a_group_once(monkeypatch):
    """Each would broadcast, and take the other's answer."""
    both, made, came = threading.Barrier(2), [], set()

    def make(*_):
        made.append(threading.current_thread())
        assert not eventually(lambda: len(made) > 1, 0.5)

    sessions = GroupSessions()
    look = sessions.of

    def of(group):
        found = look(group)
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            both.wait(60)
        return found

    monkeypatch.setattr(sessions, "of", of)
    monkeypatch.setattr(discovery, "_make", make)
    monkeypatch.setattr(discovery, "sessions", sessions)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        with ThreadPoolExecutor(2) as pool:
            for one in [pool.submit(discovery.session_of, group) for _ in range(2)]:
                assert one.result(60) is None
    finally:
        torch.distributed.destroy_process_group()
    assert len(made) == 1


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
