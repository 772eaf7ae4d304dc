"""Ranks that reach a session in two ways get an error, instead of waiting for each other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from ray_dcp.errors import RankDisagreementError
from ray_dcp.runtime import discovery, ray_private
from ray_dcp.runtime.discovery import (
    announce_connect,
    await_group,
    connect_announced,
    withdraw_connect,
)
from tests.polling import eventually

QUICK_S = 0.05


@pytest.fixture(params=["hash", "tcp"])
def store(request):
    if request.param == "hash":
        return HashStore()
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20))


def test_ranks_of_a_group_meet(store):
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(await_group, store, [2, 5, 7], rank, QUICK_S) for rank in (2, 5, 7)]
        assert [wait.result(180) for wait in waits] == [None] * 3


def test_a_rank_whose_company_uses_connect_is_told_and_so_is_the_next(store):
    announce_connect(store, 0)
    for rank in (1, 2):
        with pytest.raises(RankDisagreementError, match=r"rank 0 called ray_dcp\.connect"):
            await_group(store, [0, 1, 2], rank, QUICK_S)


def test_a_rank_that_was_told_does_not_count_as_one_that_came(store):
    announce_connect(store, 0)
    with pytest.raises(RankDisagreementError):
        await_group(store, [0, 1], 1, QUICK_S)
    withdraw_connect(store, 0)
    announce_connect(store, 1)
    with pytest.raises(RankDisagreementError, match="rank 1 called"):
        await_group(store, [0, 1], 0, QUICK_S)


def test_a_rank_that_calls_connect_later_is_seen_too(store):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_group, store, [0, 1], 1, QUICK_S)
        threading.Timer(3 * QUICK_S, announce_connect, (store, 0)).start()
        with pytest.raises(RankDisagreementError):
            waiting.result(180)


def test_a_rank_that_has_closed_its_session_comes_by_the_group(store):
    announce_connect(store, 0)
    withdraw_connect(store, 0)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(await_group, store, [0, 1], rank, QUICK_S) for rank in range(2)]
        assert [wait.result(180) for wait in waits] == [None] * 2


def test_a_connect_that_fails_is_taken_back(store, monkeypatch):
    monkeypatch.setattr(ray_private, "job_place", lambda: (store, 0))
    seen = []

    def connect():
        with connect_announced():
            seen.append(store.check(["ray_dcp/discovery/connect/0"]))
            raise KeyError

    with pytest.raises(KeyError):
        connect()
    assert seen == [True]
    assert not store.check(["ray_dcp/discovery/connect/0"])


def test_a_rank_that_is_only_late_is_waited_for(store):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(await_group, store, [0, 1], 1, QUICK_S)
        with pytest.raises(TimeoutError):
            waiting.result(4 * QUICK_S)
        await_group(store, [0, 1], 0, QUICK_S)
        assert waiting.result(180) is None


def test_without_a_store_nobody_is_asked():
    await_group(None, [0, 1], 0)
    announce_connect()
    withdraw_connect()


def test_a_rank_that_waits_for_long_says_who_did_not_come(store, caplog, monkeypatch):
    monkeypatch.setattr(discovery, "LONG_WAIT_S", 4 * QUICK_S)
    with ThreadPoolExecutor(3) as pool, caplog.at_level("WARNING"):
        waits = [pool.submit(await_group, store, [0, 1, 2], 1, QUICK_S)]
        assert eventually(lambda: caplog.messages)
        waits += [pool.submit(await_group, store, [0, 1, 2], rank, QUICK_S) for rank in (0, 2)]
        assert [wait.result(180) for wait in waits] == [None] * 3
    (told,) = [one for one in caplog.messages if one.startswith("Rank 1 ")]
    assert "ranks 0, 2 of the process group called neither save nor load" in told
