"""Ranks find one session, notice that its coordinator is frozen, and that Ray was shut down."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count, permutations, repeat
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError
from torch.distributed import HashStore, TCPStore

from ray_dcp.commit_protocol.liveness import Heartbeat, HeartbeatAck
from ray_dcp.commit_protocol.messages import Left, OpKey, Refused
from ray_dcp.coordinator.actor import Rendezvous, coordinator_of
from ray_dcp.core import bounds
from ray_dcp.core.phases import WRITE
from ray_dcp.errors import (
    DeadlineError,
    InvalidRequestError,
    LimitError,
    ParticipantError,
    RankDisagreementError,
    StorageError,
)
from ray_dcp.session import (
    discovery,
    heartbeat,
    job_store,
    meeting,
    ray_calls,
    ray_transport,
)
from ray_dcp.session.call_bound import CallBound
from ray_dcp.session.connection import Connection, Disconnected, until_disconnected
from ray_dcp.session.discovery import connect, connect_announced
from ray_dcp.session.group_sessions import GroupSessions
from ray_dcp.session.job_store import announce_connect
from ray_dcp.session.meeting import await_group
from ray_dcp.session.rank_progress import RankProgress
from ray_dcp.session.ray_calls import call_actor
from ray_dcp.session.ray_transport import RayTransport
from ray_dcp.stage.stager import stager_of
from ray_dcp.store.environment import StorageVariables
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
        monkeypatch.setattr(job_store, "job_place", lambda: (store, rank))
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
    monkeypatch.setattr(job_store, "job_place", lambda: (store, 0))

    def connect():
        with connect_announced():
            await_group(store, [0, 1], 1, QUICK_S)

    with pytest.raises(RankDisagreementError):
        connect()
    with ThreadPoolExecutor(2) as pool:
        waits = waiting(pool, store, [0, 1], [0, 1])
        assert [wait.result(180) for wait in waits] == [None] * 2


def test_a_rank_that_waits_for_long_names_who_is_missing(store, caplog, monkeypatch):
    monkeypatch.setattr(bounds, "LONG_WAIT_S", 4 * QUICK_S)
    with ThreadPoolExecutor(3) as pool, caplog.at_level("WARNING"):
        waits = waiting(pool, store, [0, 1, 2], [1])
        assert eventually(lambda: caplog.messages)
        assert not waits[0].done()
        waits += waiting(pool, store, [0, 1, 2], [0, 2])
        assert [wait.result(180) for wait in waits] == [None] * 3
    (told,) = [one for one in caplog.messages if one.startswith("Rank 1 ")]
    assert "ranks 0, 2 of the process group called neither save nor load" in told


def test_ranks_that_do_not_come_are_named_with_their_hosts_and_may_come_later(store, monkeypatch):
    monkeypatch.setattr(meeting.platform, "node", lambda: "here")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeadlineError) as raised:
        await_group(store, range(4), 0, timeout_s=0.01)
    told = str(raised.value)
    assert "rank 1 on here; ranks 2, 3 on a host that no other rank is on" in told
    assert "within 0.01 s (plan_timeout_s)" in told
    assert raised.value.rank == 1
    # Who comes meanwhile does not take the rank that has left for one that waits.
    with pytest.raises(DeadlineError, match="these did not: rank 0 on"):
        await_group(store, [0, 1], 1, timeout_s=0.01)
    with ThreadPoolExecutor(2) as pool:
        waits = waiting(pool, store, [0, 1], [0, 1])
        assert [wait.result(180) for wait in waits] == [None] * 2


class LateStore:
    """A store before whose first decision something else happens."""

    def __init__(self, store, happens) -> None:
        self._store, self._happens = store, [happens]

    def __getattr__(self, name):
        if name == "compare_set" and self._happens:
            self._happens.pop()()
        return getattr(self._store, name)


def test_a_rank_whose_deadline_passes_while_the_last_one_comes_stays(store):
    """The other would wait in the group's broadcast for it, until the timeout of the group."""
    came = []
    late = LateStore(store, lambda: came.append(await_group(store, [0, 1], 1, timeout_s=0.01)))
    await_group(late, [0, 1], 0, timeout_s=0.01)
    assert came == [None]


def test_the_last_rank_waits_for_one_that_leaves_while_it_comes(store):
    meeting = "ray_dcp/discovery//2-0-1/0"
    store.set(f"{meeting}/0", '["there", 0, 1]')
    late = LateStore(store, lambda: store.compare_set(f"{meeting}/end", "", "left"))
    with pytest.raises(DeadlineError, match="these did not: rank 0 on"):
        await_group(late, [0, 1], 1, timeout_s=0.05)
    with ThreadPoolExecutor(2) as pool:
        waits = waiting(pool, store, [0, 1], [0, 1])
        assert [wait.result(180) for wait in waits] == [None] * 2


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


# --- after `ray.shutdown` -------------------------------------------------------------------------


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
        call_actor("the coordinator", lambda fresh: object(), sent.append, CallBound(5.0), rank=1)
    assert sent == []
    assert not ray.is_initialized()


def test_a_ray_that_goes_between_the_look_and_the_call_is_not_started_anew(monkeypatch):
    monkeypatch.setattr(ray_calls, "check_ray", lambda who, rank: None)
    with pytest.raises(ParticipantError, match="has not been started"):
        call_actor("the coordinator", lambda fresh: "actor", lambda actor: "ref", CallBound(5.0))
    assert not ray.is_initialized()


@pytest.mark.parametrize("name", ["get", "get_actor", "kill", "nodes", "put", "wait"])
def test_no_call_starts_a_ray(name):
    given = {"nodes": (), "get_actor": ("name", "namespace"), "put": ([], 1)}
    arguments = given.get(name, ([],))
    with pytest.raises(RaySystemError, match="not been started"):
        getattr(ray_calls, name)(*arguments)
    assert not ray.is_initialized()


def test_a_process_that_only_imported_ray_train_is_none_of_its_workers():
    import ray.train

    assert ray_calls.train_ranks() is None
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Exception("no submit"), ParticipantError), (TypeError("no pickle"), TypeError)],
    ids=["a handle of another cluster is out of reach", "a mistake stays one"],
)
def test_an_error_of_the_call_itself(monkeypatch, error, expected):
    monkeypatch.setattr(ray_calls.ray, "is_initialized", lambda: True)
    with pytest.raises(expected, match=str(error)):
        call_actor("the coordinator", lambda fresh: object(), failing(error), CallBound(5.0))


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
    assert call_actor("the coordinator", lambda fresh: "actor", send, CallBound(60.0)) == "actor"
    assert not caplog.messages


def test_an_actor_that_stays_out_of_reach_is_given_up_and_it_is_said_before(
    answering, caplog, monkeypatch
):
    # A tenth of a second passes with each look at the clock.
    clock = SimpleNamespace(monotonic=count(0.0, 0.1).__next__)
    monkeypatch.setattr(ray_calls, "time", clock)
    with pytest.raises(ParticipantError, match=r"reachable.*it is restarting"):
        call_actor(
            "the coordinator", lambda fresh: "actor", answering(repeat(UNAVAILABLE)), CallBound(1e4)
        )
    (told,) = caplog.messages
    assert told.startswith("No call has reached the coordinator for")
    with pytest.raises(ParticipantError, match="it is restarting"):
        call_actor(
            "the coordinator", lambda fresh: "actor", answering(repeat(UNAVAILABLE)), CallBound(0.1)
        )


def test_an_actor_that_lived_meanwhile_may_be_out_of_reach_as_long_again(answering, monkeypatch):
    monkeypatch.setattr(bounds, "OUT_OF_REACH_S", 0.2)
    monkeypatch.setattr(bounds, "REACHED_S", 0.1)
    send = answering([UNAVAILABLE] * 6)

    def slowly(actor):
        threading.Event().wait(0.15)
        return send(actor)

    assert call_actor("the coordinator", lambda fresh: "actor", slowly, CallBound(60.0)) == "actor"


def test_an_actor_that_dies_for_good_is_made_anew_so_often_and_no_more(answering):
    made = []
    with pytest.raises(ParticipantError, match="ActorDiedError"):
        call_actor("x", made.append, answering(repeat(ActorDiedError())), CallBound(60.0))
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
    monkeypatch.setattr(bounds, "PROBE_S", 0.5)
    with pytest.raises(ParticipantError, match=r"TimeoutError.*correct the address"):
        connect(nobody_accepts)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", "{}:{}".format(*unused.getsockname()))
        with pytest.raises(ParticipantError, match=r"ConnectionRefusedError.*RAY_ADDRESS"):
            connect()


@pytest.mark.parametrize(
    "make",
    [partial(coordinator_of, variables=StorageVariables.of_this_process()), stager_of],
    ids=["coordinator", "stager"],
)
def test_an_actor_of_ours_is_not_made_in_a_ray_that_nobody_asked_for(make):
    # As in a thread that follows a save, when another one has just shut Ray down.
    with pytest.raises(RaySystemError):
        make("a" * 56, lease_s=60.0)
    assert not ray.is_initialized()


# --- heartbeats -----------------------------------------------------------------------------------


TIMEOUT_S = 0.6


@dataclass(frozen=True, eq=False)
class Sent:
    """A heartbeat, and which incarnation it was sent to."""

    life: int
    beat: Heartbeat


class Incarnations:
    """A coordinator that Ray starts anew; `frozen` are the incarnations that answer nothing."""

    def __init__(self):
        self.life, self.frozen, self.killed, self.pulses = 0, set(), [], None
        self.plan = ""
        self.beats, self.answers, self.num_lost = [], {}, 0
        self.answered_s = []
        self.beat = SimpleNamespace(remote=self._sent)

    def _sent(self, beat):
        self.beats.append(beat)
        is_lost = len(self.beats) <= self.num_lost
        return Sent(-1 if is_lost else self.life, beat)

    def get(self, sent):
        self.answered_s.append(time.monotonic())
        return HeartbeatAck("id", sent.life, "pid 1", **self.answers)

    def recall(self, name):
        if name.startswith("staged:"):
            return self.plan if name.endswith(":4:s") else ""
        return "" if self.pulses is None else str(next(self.pulses))

    def wait(self, refs, *, num_returns, timeout):
        time.sleep(0.01)
        done = [ref for ref in refs if ref.life == self.life and self.life not in self.frozen]
        return done, [ref for ref in refs if ref not in done]


@pytest.fixture
def sender(coordinator, monkeypatch):
    transport = RayTransport("s", 0, 1)
    monkeypatch.setattr(transport.ray, "coordinator", lambda fresh=False: coordinator)
    return transport.presence()


@pytest.fixture
def progress(sender):
    """A call of the user, for which the sender sends heartbeats until the end of the test."""
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    yield progress
    sender.remove(progress)


@pytest.fixture
def coordinator(monkeypatch):
    fake = Incarnations()
    monkeypatch.setattr(ray_transport.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(bounds, "KILL_S", 1000.0)
    monkeypatch.setattr(ray_calls, "wait", fake.wait)
    monkeypatch.setattr(ray_calls, "get", fake.get)
    monkeypatch.setattr(ray_calls, "recall", fake.recall)
    monkeypatch.setattr(ray_calls, "kill", lambda actor, **_: fake.killed.append(fake.life))
    monkeypatch.setattr(ray_calls, "id_of", lambda actor: "id")
    monkeypatch.setattr(ray_calls, "this_caller", lambda pid: ray_calls.Caller("job", "id", pid))
    monkeypatch.setattr(ray_calls, "this_connection", lambda: ("node", "job"))
    monkeypatch.setattr(ray_calls, "life_of", lambda _: ray_calls.Life(fake.life, True))
    return fake


def test_each_incarnation_that_freezes_is_found_frozen_and_is_ended_once(coordinator, sender):
    for life in range(2):
        coordinator.life = life
        coordinator.frozen.add(life)
        progress = RankProgress()
        sender.add(progress, TIMEOUT_S)
        assert eventually(lambda: sender.failure(False, True) is not None)
        assert type(sender.failure(False, True)) is DeadlineError
        # Another call of the user finds it still there, as Ray takes its time to end it.
        sender.remove(progress)
        again = RankProgress()
        sender.add(again, TIMEOUT_S)
        assert not eventually(lambda: sender.failure(False, True) is not None, 3 * TIMEOUT_S)
        sender.remove(again)
        assert coordinator.killed == [*range(life + 1)]


def test_only_a_staged_save_whose_plan_is_kept_waits_for_the_next_incarnation(coordinator, sender):
    coordinator.frozen.add(0)
    coordinator.plan = "a plan"
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.killed == [0], 20)
    assert eventually(lambda: sender.failure(False, True) is not None, 20)
    assert sender.failure(False, True, OpKey("s", 4)) is None
    assert type(sender.failure(False, True, OpKey("s", 5))) is DeadlineError
    coordinator.plan = ""
    assert type(sender.failure(False, True, OpKey("s", 4))) is DeadlineError
    sender.remove(progress)


def test_a_heartbeat_that_got_lost_does_not_count_once_a_later_one_is_answered(coordinator, sender):
    coordinator.num_lost = 1
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    progress.enter(WRITE)  # which is told at once
    assert not eventually(lambda: sender.failure(False, True) is not None, 3 * TIMEOUT_S)
    sender.remove(progress)


def test_one_that_lives_and_only_this_rank_can_not_reach_is_not_ended(coordinator, sender):
    coordinator.frozen.add(0)
    coordinator.pulses = count()  # it goes on to write that it lives
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: sender.failure(False, True) is not None)
    error = sender.failure(False, True)
    assert type(error) is DeadlineError
    assert "rank 0 can't reach it" in error.message
    assert coordinator.killed == []
    assert len(coordinator.beats) == heartbeat.MOST_UNANSWERED
    coordinator.frozen.clear()
    assert eventually(lambda: sender.failure(False, True) is None)
    sender.remove(progress)


def test_one_that_wrote_that_it_lives_and_then_froze_is_ended(coordinator, sender):
    coordinator.frozen.add(0)
    coordinator.pulses = iter(lambda: 7, None)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.killed == [0])
    sender.remove(progress)


def test_what_a_rank_has_left_is_said_until_a_coordinator_knows(coordinator, sender, monkeypatch):
    monkeypatch.setattr(bounds, "LEFT_TIMEOUT_S", TIMEOUT_S)
    coordinator.answers = {"is_up_to_date": False}  # it takes saves up
    left = Left(OpKey("s", 4), "Ctrl-C", is_interrupt=True)
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(sender.leave, left, 60.0)
        assert eventually(lambda: len(coordinator.beats) > 1)
        assert not said.done()
        coordinator.answers = {}
        said.result(60)
    assert all(beat.left == (left,) for beat in coordinator.beats)
    num_said = len(coordinator.beats)
    assert not eventually(lambda: len(coordinator.beats) > num_said, 0.3)


def test_a_coordinator_that_died_stops_who_moves_bytes_and_the_next_one_may_begin_a_call(
    coordinator, sender, progress, monkeypatch
):
    def die(sent):
        coordinator.life = 1
        raise ActorDiedError

    progress.enter(WRITE)
    assert eventually(lambda: coordinator.answered_s)
    assert sender.failure(True, False) is None
    monkeypatch.setattr(ray_calls, "get", die)
    assert eventually(lambda: progress.abandoned is not None)
    assert type(progress.abandoned) is type(sender.failure(True, False)) is ParticipantError
    assert sender.failure(True, True) is None


def test_what_is_left_while_an_answer_comes_is_said_in_the_next_heartbeat(
    coordinator, sender, monkeypatch
):
    first, second = (Left(OpKey("s", seq), "Ctrl-C") for seq in (4, 5))
    get, later = coordinator.get, iter([second])

    def leave_and_get(sent):
        for left in later:
            sender.leave(left, 0.0)
        return get(sent)

    monkeypatch.setattr(ray_calls, "get", leave_and_get)
    sender.leave(first, 60.0)
    assert eventually(lambda: coordinator.beats[-1].left == (second,))
    assert eventually(lambda: sender._thread is None)


def test_a_heartbeat_that_fails_is_sent_again_and_what_an_answer_says_is_logged(
    coordinator, sender, monkeypatch, caplog
):
    errors = iter([StorageError("out of order")])

    def fail_once(sent):
        for error in errors:
            raise error
        return HeartbeatAck("id", 0, "pid 1", waits=("It waits for rank 3",))

    monkeypatch.setattr(ray_calls, "get", fail_once)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: "It waits for rank 3" in caplog.messages)
    assert "out of order" in caplog.text
    sender.remove(progress)


def test_a_short_timeout_does_not_wait_for_its_first_heartbeat(coordinator, sender, monkeypatch):
    monkeypatch.setattr(heartbeat, "FIRST_HEARTBEAT_S", 1000.0)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    sender.remove(progress)


def test_calls_at_once_beat_as_often_as_the_shortest_timeout_needs(coordinator, sender, progress):
    other = RankProgress()
    sender.add(other, 1000.0)
    assert eventually(lambda: coordinator.beats and len(coordinator.beats[-1].doings) == 2)
    assert coordinator.beats[-1].timeout_s == TIMEOUT_S
    sender.remove(other)


def test_what_a_rank_has_left_is_not_said_for_ever(coordinator, monkeypatch, sender):
    monkeypatch.setattr(bounds, "OUT_OF_REACH_S", 0.3)
    coordinator.answers = {"is_up_to_date": False}
    sender.leave(Left(OpKey("s", 4), "Ctrl-C", is_interrupt=True), 20.0)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats and not coordinator.beats[-1].left)
    sender.remove(progress)


def test_a_call_that_got_no_thread_is_forgotten(coordinator, monkeypatch, sender):

    def refuse(*_):
        raise LimitError("no threads")

    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "start_thread", refuse)
        with pytest.raises(LimitError, match="no threads"):
            sender.add(RankProgress(), TIMEOUT_S)
    progress = RankProgress()
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    assert len(coordinator.beats[-1].doings) == 1
    sender.remove(progress)


def test_the_time_in_the_queue_is_counted_from_answer_to_answer(coordinator, sender):
    progress, key = RankProgress(), OpKey("s", 4)
    progress.begin(key)
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: len(coordinator.answered_s) > 2)
    last_s = coordinator.answered_s[-1]
    coordinator.answers = {"queued": (4,)}
    assert eventually(lambda: sender.queued_s(key) > 0)
    assert sender.queued_s(key) <= time.monotonic() - last_s
    assert sender.queued_s(OpKey("s", 5)) == 0
    sender.remove(progress)


def test_a_rank_that_moves_bytes_stops_when_the_save_has_failed_elsewhere(coordinator, sender):
    progress, key = RankProgress(), OpKey("s", 4)
    progress.begin(key)
    sender.add(progress, TIMEOUT_S)
    assert eventually(lambda: coordinator.beats)
    assert coordinator.beats[-1].awaits == ()  # it has not joined yet
    full = StorageError("full")
    progress.enter(WRITE)
    assert eventually(lambda: coordinator.beats[-1].awaits == (key,))
    coordinator.answers = {"failed": {key: Refused(full)}}
    assert eventually(lambda: progress.stop.asked)
    assert progress.stop.error is full
    progress.begin(OpKey("s", 5))
    assert not progress.stop.asked
    sender.remove(progress)
