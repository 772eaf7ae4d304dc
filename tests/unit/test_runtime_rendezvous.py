"""Ranks meet in one session, or get an error; calls after Ray was shut down are told."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import count, permutations
from pathlib import Path

import pytest
import ray
from ray.exceptions import RaySystemError
from torch.distributed import HashStore, TCPStore

from ray_dcp.errors import InvalidRequestError, ParticipantError, RankDisagreementError
from ray_dcp.runtime import attach, private_ray, ray_calls, registry
from ray_dcp.runtime.coordinator_call import call_actor
from ray_dcp.runtime.registry import connects, leaves_connect, meet
from ray_dcp.runtime.rendezvous import Rendezvous
from ray_dcp.runtime.session import connect
from tests.polling import eventually

# --- By a name ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(meeting: Rendezvous, rank, world_size):
    with pytest.raises(InvalidRequestError):
        meeting.enter(rank, world_size, "a")


# --- By a process group ---------------------------------------------------------------------------


QUICK_S = 0.05


@pytest.fixture(params=["hash", "tcp"])
def store(request):
    if request.param == "hash":
        return HashStore()
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20))


def test_ranks_of_a_group_meet(store):
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(meet, store, [2, 5, 7], rank, QUICK_S) for rank in (2, 5, 7)]
        assert [wait.result(180) for wait in waits] == [None] * 3


def test_a_rank_whose_company_uses_connect_is_told_and_so_is_the_next(store):
    connects(store, 0)
    for rank in (1, 2):
        with pytest.raises(RankDisagreementError, match=r"rank 0 called ray_dcp\.connect"):
            meet(store, [0, 1, 2], rank, QUICK_S)


def test_a_rank_that_calls_connect_later_is_seen_too(store):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, store, [0, 1], 1, QUICK_S)
        threading.Timer(3 * QUICK_S, connects, (store, 0)).start()
        with pytest.raises(RankDisagreementError):
            waiting.result(180)


def test_a_rank_that_has_closed_its_session_comes_by_the_group(store):
    connects(store, 0)
    leaves_connect(store, 0)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(meet, store, [0, 1], rank, QUICK_S) for rank in range(2)]
        assert [wait.result(180) for wait in waits] == [None] * 2


def test_a_rank_that_is_only_late_is_waited_for(store):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, store, [0, 1], 1, QUICK_S)
        with pytest.raises(TimeoutError):
            waiting.result(4 * QUICK_S)
        meet(store, [0, 1], 0, QUICK_S)
        assert waiting.result(180) is None


def test_a_rank_that_waits_for_long_says_who_did_not_come(store, caplog, monkeypatch):
    monkeypatch.setattr(registry, "LONG_WAIT_S", 4 * QUICK_S)
    with ThreadPoolExecutor(3) as pool, caplog.at_level("WARNING"):
        waits = [pool.submit(meet, store, [0, 1, 2], 1, QUICK_S)]
        assert eventually(lambda: caplog.messages)
        waits += [pool.submit(meet, store, [0, 1, 2], rank, QUICK_S) for rank in (0, 2)]
        assert [wait.result(180) for wait in waits] == [None] * 3
    (told,) = [one for one in caplog.messages if one.startswith("Rank 1 ")]
    assert "ranks 0, 2 of the process group called neither save nor load" in told


# --- When this process has shut its Ray down ------------------------------------------------------


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A private Ray that this process is in, as long as its supervisor locks the folder."""
    own = private_ray.PrivateRay("127.0.0.1:7", str(tmp_path / "rdcp"), "", 77, platform.node())
    Path(own.directory).mkdir()
    monkeypatch.setattr(private_ray, "joined", lambda: own)
    return own


@pytest.fixture
def supervisor(own):
    """Its supervisor; `close` is its death."""
    with ExitStack() as stack:
        lock = os.open(own.directory, os.O_RDONLY)
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield stack


def test_a_call_that_would_wait_for_ever_ends_when_the_ray_of_our_own_is_lost(own, supervisor):
    began, never = threading.Event(), threading.Event()

    def hang():
        began.set()
        never.wait()

    def die():
        began.wait()
        supervisor.close()

    threading.Thread(target=die).start()
    with pytest.raises(ParticipantError, match="it was lost"):
        ray_calls.unless_lost(hang)()
    never.set()


def test_no_call_reaches_a_ray_that_is_not_up():
    sent = []
    with pytest.raises(ParticipantError, match="shut down"):
        call_actor("the coordinator", lambda fresh: object(), sent.append, timeout_s=5.0, rank=1)
    assert sent == []
    assert not ray.is_initialized()


@pytest.mark.parametrize("name", ["get", "get_actor", "kill", "nodes", "put", "wait"])
def test_no_call_starts_a_ray(name):
    arguments = {"nodes": (), "get_actor": ("name", "namespace")}.get(name, ([],))
    with pytest.raises(RaySystemError, match="not been started"):
        getattr(ray_calls, name)(*arguments)
    assert not ray.is_initialized()


@pytest.fixture
def nobody_accepts():
    """An address at which connections are neither accepted nor refused."""
    with socket.socket() as server, ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield "{}:{}".format(*server.getsockname())


def test_a_cluster_that_does_not_accept_connections_is_given_up(nobody_accepts, monkeypatch):
    monkeypatch.setattr(attach, "PROBE_S", 0.5)
    with pytest.raises(ParticipantError, match=r"TimeoutError.*correct the address"):
        connect(nobody_accepts)


def test_a_cluster_at_whose_address_nobody_listens_is_given_up(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", "{}:{}".format(*unused.getsockname()))
        with pytest.raises(ParticipantError, match=r"ConnectionRefusedError.*RAY_ADDRESS"):
            connect()


@pytest.mark.parametrize("says", ["The current node timed out during startup.", "no such file"])
def test_a_ray_of_our_own_that_a_busy_machine_starts_too_slowly_is_started_again(monkeypatch, says):
    made = []

    def supervisor(
        directory: Path, token: Path, order: private_ray.SupervisorOrder
    ) -> subprocess.Popen[bytes]:
        made.append(directory)
        if len(made) == 2:
            found = private_ray.PrivateRay("127.0.0.1:7", str(directory), str(token), 7)
            (directory / private_ray.READY).write_text(found.encode())
        (directory / private_ray.LOG).write_text(says)
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return process

    monkeypatch.setattr(private_ray, "_start_supervisor", supervisor)
    if says == "no such file":
        with pytest.raises(ParticipantError, match="no such file"):
            private_ray.start_private_ray()
        assert len(made) == 1
    else:
        assert private_ray.start_private_ray().directory == str(made[1])
        shutil.rmtree(made[1])
    assert not made[0].exists()
