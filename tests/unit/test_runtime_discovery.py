"""Ranks that reach a session in two ways get an error, instead of waiting for each other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from ray_dcp.errors import RankDisagreementError
from ray_dcp.runtime import discovery, session
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
