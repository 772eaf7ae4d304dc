"""What becomes of calls when this process has shut its Ray down: told, and none reaches Ray."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from itertools import repeat

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError

from ray_dcp.errors import DeadlineError, ParticipantError
from ray_dcp.runtime import ray_calls, ray_session
from ray_dcp.runtime.coordinator import coordinator_of
from ray_dcp.runtime.discovery import connect
from ray_dcp.runtime.ray_calls import call_actor
from ray_dcp.runtime.session import (
    Connection,
    Disconnected,
    until_disconnected,
)
from ray_dcp.runtime.stager import stager_of


@pytest.fixture
def connected(monkeypatch):
    """Sets which connection this process has; the first one at the start."""

    def set_to(value: tuple[str, str] | None) -> None:
        monkeypatch.setattr(ray_calls, "this_connection", lambda: now[0])
        now[0] = value

    now: list[tuple[str, str] | None] = [None]
    set_to(("node", "job 1"))
    return set_to


@pytest.mark.parametrize("now", [None, ("node", "job 2"), ("other node", "job 1")])
def test_a_connection_is_up_until_it_is_another_one(connected, now):
    connection = Connection("session 's'", 3)
    assert connection.is_up
    connection.check()
    connected(now)
    assert not connection.is_up
    with pytest.raises(ParticipantError, match=r"session 's' .* has shut it down") as caught:
        connection.check()
    assert caught.value.rank == 3
    connected(("node", "job 1"))
    assert connection.is_up


def failing(error: BaseException):
    def asked(request):
        raise error

    return asked


@pytest.mark.parametrize("error", [ParticipantError("gone"), DeadlineError("late"), SystemExit(0)])
def test_no_answer_after_ray_was_shut_down_is_a_disconnection(connected, error):
    connection = Connection("s", 0)
    connected(None)
    with pytest.raises(Disconnected) as caught:
        until_disconnected(failing(error), connection)(None)
    assert caught.value.__cause__ is error


def test_no_answer_while_ray_is_up_stays_what_it_is(connected):
    error = ParticipantError("the coordinator died")
    for connection in (Connection("s", 0), None):
        with pytest.raises(ParticipantError) as caught:
            until_disconnected(failing(error), connection)(None)
        assert caught.value is error


def test_no_call_reaches_a_ray_that_is_not_up():
    sent = []
    with pytest.raises(ParticipantError, match="shut down"):
        call_actor("the coordinator", lambda fresh: object(), sent.append, timeout_s=5.0, rank=1)
    assert sent == []
    assert not ray.is_initialized()


def test_a_ray_that_goes_between_the_look_and_the_call_is_not_started_anew(monkeypatch):
    monkeypatch.setattr(ray_calls, "check_ray", lambda who, rank: None)
    with pytest.raises(ParticipantError, match="has not been started"):
        call_actor("the coordinator", lambda fresh: "actor", lambda actor: "ref", timeout_s=5.0)
    assert not ray.is_initialized()


@pytest.mark.parametrize("name", ["get", "get_actor", "kill", "nodes", "put", "wait"])
def test_no_call_starts_a_ray(name):
    arguments = {"nodes": (), "get_actor": ("name", "namespace")}.get(name, ([],))
    with pytest.raises(RaySystemError, match="not been started"):
        getattr(ray_calls, name)(*arguments)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Exception("no submit"), ParticipantError), (TypeError("no pickle"), TypeError)],
    ids=["a handle of another cluster is out of reach", "a mistake stays one"],
)
def test_an_error_of_the_call_itself(monkeypatch, error, expected):
    monkeypatch.setattr(ray_calls.ray, "is_initialized", lambda: True)
    with pytest.raises(expected, match=str(error)):
        call_actor("the coordinator", lambda fresh: object(), failing(error), timeout_s=5.0)


@pytest.fixture
def answering(monkeypatch):
    """Calls of an actor fail as they are told to, one after the other; then there is an answer."""

    def send(errors):
        left = iter(errors)

        def one(actor):
            for error in left:
                raise error
            return actor

        return one

    monkeypatch.setattr(ray_calls.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_calls, "_PAUSE_S", (0.0, 0.0))
    monkeypatch.setattr(ray_calls, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_calls, "get", lambda ref, **_: ref)
    return send


UNAVAILABLE = ActorUnavailableError("it is restarting", b"\0" * 16)


def test_an_actor_is_called_again_for_as_long_as_ray_may_take_to_start_it_anew(answering, caplog):
    send = answering([UNAVAILABLE] * 200)
    assert call_actor("the coordinator", lambda fresh: "actor", send, timeout_s=60.0) == "actor"
    assert not caplog.messages


def test_an_actor_that_stays_out_of_reach_is_given_up_and_it_is_said_before(
    answering, caplog, monkeypatch
):
    monkeypatch.setattr(ray_calls, "OUT_OF_REACH_S", 0.2)
    monkeypatch.setattr(ray_calls, "LONG_WAIT_S", 0.05)
    with pytest.raises(ParticipantError, match=r"reachable.*it is restarting"):
        call_actor(
            "the coordinator", lambda fresh: "actor", answering(repeat(UNAVAILABLE)), timeout_s=60.0
        )
    (told,) = caplog.messages
    assert told.startswith("No call has reached the coordinator for")
    with pytest.raises(ParticipantError, match="it is restarting"):
        call_actor(
            "the coordinator", lambda fresh: "actor", answering(repeat(UNAVAILABLE)), timeout_s=0.1
        )


def test_an_actor_that_lived_meanwhile_may_be_out_of_reach_as_long_again(answering, monkeypatch):
    monkeypatch.setattr(ray_calls, "OUT_OF_REACH_S", 0.2)
    monkeypatch.setattr(ray_calls, "REACHED_S", 0.1)
    send = answering([UNAVAILABLE] * 6)

    def slowly(actor):
        threading.Event().wait(0.15)
        return send(actor)

    assert call_actor("the coordinator", lambda fresh: "actor", slowly, timeout_s=60.0) == "actor"


def test_an_actor_that_dies_for_good_is_made_anew_so_often_and_no_more(answering):
    made = []
    with pytest.raises(ParticipantError, match="ActorDiedError"):
        call_actor("x", made.append, answering(repeat(ActorDiedError())), timeout_s=60.0)
    assert made == [False] + [True] * (ray_calls.MOST_MADE - 1)


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


def test_a_cluster_that_can_not_be_reached_ends_the_connect(nobody_accepts, monkeypatch):
    monkeypatch.setattr(ray_session, "PROBE_S", 0.5)
    with pytest.raises(ParticipantError, match=r"TimeoutError.*correct the address"):
        connect(nobody_accepts)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", "{}:{}".format(*unused.getsockname()))
        with pytest.raises(ParticipantError, match=r"ConnectionRefusedError.*RAY_ADDRESS"):
            connect()


@pytest.mark.parametrize("make", [coordinator_of, stager_of], ids=["coordinator", "stager"])
def test_an_actor_of_ours_is_not_made_in_a_ray_that_nobody_asked_for(make):
    # As in a thread that follows a save, when another one has just shut Ray down.
    with pytest.raises(RaySystemError):
        make("a" * 56, lease_s=60.0)
    assert not ray.is_initialized()
