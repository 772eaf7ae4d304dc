"""The coordinator actor under real Ray: exchanges, restarts, leases, and ranks that die."""

from __future__ import annotations

import os
import secrets
import signal
import time
from pathlib import Path

import pytest
import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list

from ray_dcp.commit_protocol.messages import Exchange, Exchanged, Refused
from ray_dcp.errors import DeadlineError, InvalidRequestError
from ray_dcp.session import ray_calls
from ray_dcp.session.discovery import connect, current_session
from ray_dcp.session.names import NAMESPACE, coordinator_name, roster_key
from ray_dcp.session.ray_transport import RayTransport
from ray_dcp.session.session import Session
from tests.support.processes import eventually, lives
from tests.support.programs.forks import plain_environment

pytestmark = pytest.mark.usefixtures("ray_session")


def fresh_sessions(world_size: int, lease_s: float = 60.0) -> list[Session]:
    name = f"test-{secrets.token_hex(4)}"
    return [
        Session(RayTransport(name, rank, world_size, lease_s=lease_s)) for rank in range(world_size)
    ]


def exchange(session: Session, key, timeout_s: float = 60.0):
    """Every rank sends its number to every rank."""
    outbox = {rank: bytes([session.rank]) for rank in range(session.world_size)}
    request = Exchange(
        key, session.rank, session.world_size, "test", outbox, timeout_s
    )  # fmt: skip
    return session.call(request)


def coordinator_lives(session: Session) -> bool:
    try:
        ray.get_actor(coordinator_name(session.name), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def test_a_closed_session_ends_its_coordinator_long_before_the_lease(threads):
    sessions = fresh_sessions(2)
    for reply in [threads.submit(exchange, each, each.next_key()) for each in sessions]:
        reply.result(180)
    for each in sessions:
        each.close()
    assert eventually(lambda: not coordinator_lives(sessions[0]))
    with pytest.raises(InvalidRequestError, match="was closed"):
        sessions[0].next_key()


def test_a_killed_coordinator_comes_back_with_a_higher_epoch_and_answers_who_waits(threads):
    sessions = fresh_sessions(4)
    before = sessions[0].coordinator_info()
    keys = [each.next_key() for each in sessions]
    early = [threads.submit(exchange, sessions[rank], keys[rank]) for rank in range(3)]
    assert eventually(lambda: sessions[3].coordinator_info()["active"] == (keys[0],))
    os.kill(before["pid"], signal.SIGKILL)
    late = threads.submit(exchange, sessions[3], keys[3])
    for reply in [*early, late]:
        assert reply.result(180) == Exchanged({rank: bytes([rank]) for rank in range(4)})
    after = sessions[0].coordinator_info()
    assert after["epoch"] == before["epoch"] + 1
    assert after["pid"] != before["pid"]
    for each in sessions:
        each.close()


class Ending:
    """An actor whose class is gone, as those of a job that has ended."""


@ray.remote(num_cpus=0)
def is_there(name: str) -> bool:
    try:
        ray_calls.get_actor(name, NAMESPACE)
    except ValueError:
        return False
    return True


@ray.remote(num_cpus=0)
def made_again(name: str, begun: str) -> str:
    options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "num_cpus": 0}
    Path(begun).touch()
    handle = ray_calls.named_actor(ray.remote(Ending).options(**options))
    return str(handle._actor_id.hex())


def test_an_actor_that_ends_after_its_job_is_none_and_is_made_again(tmp_path: Path):
    name = f"ending-{secrets.token_hex(4)}"
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    before = _internal_kv_list(b"ActorClass:", namespace=b"fun")
    actor = ray.remote(Ending).options(**options).remote()
    ray.get(actor.__ray_ready__.remote())
    (key,) = {*_internal_kv_list(b"ActorClass:", namespace=b"fun")} - {*before}
    # Ray does it a moment before the actor's name is free.
    assert _internal_kv_del(key, namespace=b"fun") == 1
    assert not ray.get(is_there.remote(name))
    begun = tmp_path / "begun"
    made = made_again.remote(name, str(begun))
    assert eventually(begun.exists)
    ray.kill(actor)
    assert ray.get(made, timeout=60) != actor._actor_id.hex()


def test_an_idle_coordinator_leaves_and_the_next_call_makes_another():
    (session,) = fresh_sessions(1, lease_s=1.0)
    before = session.coordinator_info()
    assert eventually(lambda: not lives(before["pid"]))
    assert session.coordinator_info()["epoch"] == before["epoch"] + 1
    session.close()


def test_a_coordinator_stays_for_ranks_that_live_and_leaves_with_the_last_of_them():
    sessions = fresh_sessions(2, lease_s=1.0)
    for each in sessions:
        each._transport.join()
    pid = sessions[0].coordinator_info()["pid"]
    sessions[0].close()
    assert not eventually(lambda: not lives(pid), 4)
    sessions[1].close()
    assert eventually(lambda: not lives(pid))


def test_a_restarted_coordinator_still_knows_whom_to_miss(threads):
    (session,) = fresh_sessions(1)
    victim = Victim.remote()
    victim_pid = ray.get(victim.register.remote(session.name))
    waits = Session(RayTransport(session.name, 0, 2))
    before = waits.coordinator_info()
    kept = roster_key(coordinator_name(session.name))
    assert eventually(lambda: str(victim_pid) in ray_calls.recall(kept))
    os.kill(before["pid"], signal.SIGKILL)
    os.kill(victim_pid, signal.SIGKILL)
    started_s = time.monotonic()
    refused = exchange(waits, waits.next_key(), 300.0)
    assert time.monotonic() - started_s < 120
    assert isinstance(refused, Refused)
    assert "rank 1" in str(refused.error)
    waits.close()


@ray.remote(num_cpus=0)
class Victim:
    """Rank 1 of 2, which dies before it calls."""

    def register(self, name: str) -> int:
        RayTransport(name, 1, 2).join()
        return os.getpid()


def test_a_coordinator_does_not_leave_while_a_rank_waits(threads):
    first, second = fresh_sessions(2, lease_s=1.0)
    before = first.coordinator_info()
    started_s = time.monotonic()
    waiting = threads.submit(exchange, first, first.next_key())
    # Several leases pass, then the other rank comes.
    assert eventually(lambda: time.monotonic() - started_s > 4)
    assert isinstance(exchange(second, second.next_key()), Exchanged)
    assert isinstance(waiting.result(180), Exchanged)
    assert lives(before["pid"]) or second.coordinator_info()["epoch"] > before["epoch"]
    first.close()
    second.close()


def test_ranks_connect_by_name_and_a_restarted_job_of_that_name_gets_a_new_session(threads):
    name = f"job-{secrets.token_hex(4)}"

    def come(rank: int) -> str:
        place = RayTransport(name, rank, 2)
        return place.enter(secrets.token_hex(4), 30.0)

    generations = []
    for _ in range(2):
        first, second = threads.map(come, range(2))
        assert first == second
        generations.append(first)
    assert generations[0] != generations[1]


def test_a_rank_that_never_connects_is_named():
    place = RayTransport(f"job-{secrets.token_hex(4)}", 1, 3)
    with pytest.raises(DeadlineError, match=r"ranks \[0, 2\] did not come"):
        place.enter("a", 0.5)


def test_connect_makes_the_session_that_save_uses_until_it_is_closed(ray_session):
    session = connect(ray_session)
    try:
        assert current_session() is session
        assert current_session(no_dist=True) is None
        assert exchange(session, session.next_key()) == Exchanged({0: b"\0"})
        with pytest.raises(InvalidRequestError, match="is open"):
            connect()
    finally:
        session.close()
    assert current_session() is None


def test_connect_refuses_another_cluster_than_the_one_that_is_connected():
    with pytest.raises(InvalidRequestError, match="connected to the"):
        connect("10.0.0.1:6379")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2, "world_size": 2, "name": "x"},
        {"rank": -1},
        {"address": 5},
        {"rank": True},
        {"rank": 0, "world_size": 2},
        {"name": ""},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"lease_s": float("nan")},
        {"lease_s": "1"},
    ],
    ids=str,
)
def test_connect_refuses_wrong_arguments(wrong):
    with pytest.raises(InvalidRequestError):
        connect(**wrong)


ROUNDS = 5

SCRIPT = """
import sys, threading
import ray, ray_dcp
from ray_dcp.errors import ParticipantError


def ask(session, asked, ended):
    try:
        while True:
            session.coordinator_info()
            asked.release()
    except ParticipantError as error:
        ended.append(error)


for _ in range(int(sys.argv[2])):
    ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
    session = ray_dcp.connect(name="asked", namespace="shut")
    asked, ended = threading.Semaphore(0), []
    threads = [threading.Thread(target=ask, args=(session, asked, ended)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        asked.acquire()
    ray.shutdown()
    for thread in threads:
        thread.join()
    assert len(ended) == len(threads), ended
    assert not ray.is_initialized()
    session.close()
print("lives")
"""


def test_a_process_outlives_that_ray_is_shut_down_under_threads_that_use_it(ray_session, programs):
    # A process of its own: when it fails, Ray ends it. Most of such rounds did.
    (ended,) = programs.run("-c", SCRIPT, ray_session, str(ROUNDS))
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr


AGAIN = """
import os, sys
import ray, torch
import torch.distributed as dist
import ray_dcp

dist.init_process_group("gloo")
rank, sessions = dist.get_rank(), []
for turn in range(3):
    ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
    state = {"w": torch.full((3,), float(turn))}
    ray_dcp.save(state, checkpoint_id=f"{sys.argv[2]}/{turn}")
    ray_dcp.async_save(state, checkpoint_id=f"{sys.argv[2]}/async-{turn}").committed(180)
    found = {"w": torch.zeros(3)}
    ray_dcp.load(found, checkpoint_id=f"{sys.argv[2]}/async-{turn}")
    assert found["w"].tolist() == [turn] * 3
    ray.shutdown()
    try:
        ray_dcp.save(state, checkpoint_id=f"{sys.argv[2]}/down")
    except ray_dcp.ParticipantError as error:
        assert "call ray.init() again on all ranks" in error.message, error
    else:
        raise AssertionError("saved without its Ray")
    dist.barrier()
print("saved again")
dist.destroy_process_group()
"""


def test_a_group_whose_ranks_leave_their_ray_and_come_back_goes_on(ray_session, programs, tmp_path):
    env = plain_environment(RAY_AUTH_MODE="disabled")
    ended = programs.run("-c", AGAIN, ray_session, str(tmp_path), ranks=2, env=env)
    assert [one.stdout for one in ended] == ["saved again\n"] * 2, [one.stderr for one in ended]
    assert not (tmp_path / "down").exists()
