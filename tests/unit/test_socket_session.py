"""The socket session: real sockets between threads of this process that play ranks."""

from __future__ import annotations

import hmac
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

import ray_dcp
from ray_dcp import saving
from ray_dcp.commit_protocol.liveness import Heartbeat
from ray_dcp.commit_protocol.messages import Exchange, Exchanged, Left, OpKey, Refused
from ray_dcp.core import bounds
from ray_dcp.core.phases import WRITE
from ray_dcp.errors import DeadlineError, InternalError, InvalidRequestError, ParticipantError
from ray_dcp.rank import rank_save
from ray_dcp.session import heartbeat, rank0_address, socket_channel
from ray_dcp.session.call import Call
from ray_dcp.session.discovery import current_session
from ray_dcp.session.rank_progress import RankProgress
from ray_dcp.session.session import Session
from ray_dcp.session.socket_transport import SocketLink, SocketTransport, join_by_store
from tests.support.processes import eventually

NUM_RANKS = 3


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        yield pool


def joined(pool: ThreadPoolExecutor) -> list[Session]:
    store = HashStore()
    joining = [pool.submit(join_by_store, store, "s", rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    return [one.result(60) for one in joining]


@pytest.fixture
def sessions(pool) -> Iterator[list[Session]]:
    sessions = joined(pool)
    yield sessions
    for session in reversed(sessions):
        session.close()


def sent_by(session: Session, timeout_s: float = 60.0) -> Exchange:
    outbox = dict.fromkeys(range(session.world_size), f"from {session.rank}".encode())
    return Exchange(session.next_key(), session.rank, session.world_size, "t", outbox, timeout_s)


def exchange(session: Session, timeout_s: float = 60.0) -> Any:
    reply = session.call(sent_by(session, timeout_s), silence_s=60.0)
    return reply.error if isinstance(reply, Refused) else reply


def all_exchange(pool: ThreadPoolExecutor, sessions: list[Session]) -> list[Any]:
    return [one.result(60) for one in [pool.submit(exchange, each) for each in sessions]]


def test_ranks_reach_one_coordinator(pool, sessions):
    for _ in range(2):
        assert all(isinstance(reply, Exchanged) for reply in all_exchange(pool, sessions))
    assert {session.coordinator_info()["pid"] for session in sessions} == {
        sessions[0].coordinator_info()["pid"]
    }


class Tattles:
    """Tells when it is unpickled."""

    seen: ClassVar[list[str]] = []

    def __reduce__(self):
        return (Tattles.seen.append, ("unpickled",))


def address_of(sessions: list[Session]) -> tuple[str, int]:
    return sessions[0]._transport.link.address


def test_who_does_not_know_the_key_is_refused_and_nothing_of_it_is_unpickled(
    pool, sessions, caplog, monkeypatch
):
    monkeypatch.setattr(bounds, "JOIN_S", 0.5)
    with pytest.raises((EOFError, OSError)):
        SocketLink("s", 1, "a stranger", address_of(sessions), b"a wrong key")
    with socket.create_connection(address_of(sessions)) as stranger:
        data = (1).to_bytes(8, "big") + pickle.dumps(Tattles())
        stranger.sendall(len(data).to_bytes(4, "big") + data)
        stranger.settimeout(60)
        while stranger.recv(1 << 16):  # the challenge; the end is that the connection is closed
            pass
    assert eventually(lambda: any("connections to the coordinator" in m for m in caplog.messages))
    assert Tattles.seen == []
    assert all(isinstance(reply, Exchanged) for reply in all_exchange(pool, sessions))


def test_what_opened_one_connection_opens_no_second_one(sessions):
    key, nonce = sessions[0]._transport.link.inner._key, b"n" * 32
    with socket.create_connection(address_of(sessions), 60) as first:
        first.sendall(nonce)
        proof = hmac.digest(key, b"calls" + first.recv(32) + nonce, "sha256")
        first.sendall(proof)
        assert len(first.recv(32)) == 32  # rank 0 has accepted it, and proves that it is rank 0
    with socket.create_connection(address_of(sessions), 60) as second:
        second.sendall(nonce + proof)
        assert len(second.recv(32)) == 32  # its challenge
        assert second.recv(32) == b""


def test_who_repeats_what_a_rank_says_does_not_pass_for_rank_0():
    def repeat(server: socket.socket) -> None:
        caller, _ = server.accept()
        with caller:
            while data := caller.recv(1 << 16):
                caller.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as mirror:
        threading.Thread(target=repeat, args=(mirror,), daemon=True).start()
        with pytest.raises(PermissionError, match="does not know the key"):
            SocketLink("s", 1, "a rank", mirror.getsockname(), b"the key")


def test_who_connects_and_says_nothing_keeps_nobody_waiting_and_is_dropped(
    pool, sessions, monkeypatch
):
    monkeypatch.setattr(bounds, "HANDSHAKE_S", 1.0)
    with (
        socket.create_connection(address_of(sessions), 60) as silent,
        socket.create_connection(address_of(sessions), 60) as other,
    ):
        assert all(isinstance(reply, Exchanged) for reply in all_exchange(pool, sessions))
        assert silent.recv(32) != other.recv(32)  # a challenge is not used twice
        while silent.recv(1 << 16):
            pass


def test_strangers_who_say_nothing_take_no_descriptors_and_one_line_of_the_log(
    pool, sessions, monkeypatch, caplog
):
    loop = sessions[0]._transport.link.inner
    loop._most_strangers = 16
    monkeypatch.setattr(bounds, "HANDSHAKE_S", 60.0)
    monkeypatch.setattr(bounds, "SERVED_S", 60.0)
    monkeypatch.setattr(bounds, "STRANGER_S", 0.01)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(address_of(sessions), 60))
            assert len(loop._strangers) <= 16
        assert all(isinstance(reply, Exchanged) for reply in all_exchange(pool, sessions))
        # A rank gets in while they are there, and nobody who is in is dropped.
        break_connection(sessions[1])
        assert all(isinstance(reply, Exchanged) for reply in all_exchange(pool, sessions))
        assert eventually(lambda: len(loop._strangers) <= 16)
        assert len(socket_channel.open_sockets) < 30
    assert sum(one.startswith("Refused") for one in caplog.messages) == 1


def test_all_ranks_get_in_that_connect_at_once_from_one_address(sessions):
    sessions[0]._transport.link.inner._most_strangers = 8
    key = sessions[1]._transport.link._key

    def connect(rank: int) -> SocketLink:
        together.wait(60)
        return SocketLink("s", rank, "a rank", address_of(sessions), key)

    together = threading.Barrier(100)
    with ThreadPoolExecutor(100) as pool:
        links = list(pool.map(connect, range(NUM_RANKS, NUM_RANKS + 100)))
        # Rank 0 registers a rank after it has told the rank so.
        assert eventually(lambda: len(sessions[0]._transport.link.inner.channels) >= 100)
        list(pool.map(SocketLink.close, links))


def end_of(session: Session) -> Any:
    return session._transport.link._thread.inner


def break_connection(session: Session) -> None:
    end_of(session).channel._sock.shutdown(socket.SHUT_RDWR)


def wait_for_the_look(sessions: list[Session]) -> None:
    """Returns when rank 0 has looked whether those came back whose connections have closed."""
    passed, loop = threading.Event(), sessions[0]._transport.link.loop
    loop.call_soon_threadsafe(loop.call_later, bounds.RETURN_S, passed.set)
    assert passed.wait(60)


def assert_nobody_is_missed(pool: ThreadPoolExecutor, sessions: list[Session]) -> None:
    """Has rank 0 call first, as a rank that calls itself is not missed."""
    first = sessions[0]._transport.link.ask("call", sent_by(sessions[0]), None, 60.0)
    others = all_exchange(pool, sessions[1:])
    assert all(isinstance(reply, Exchanged) for reply in [first.result(60), *others])


def test_a_connection_that_breaks_is_made_again_and_what_is_unanswered_is_sent_again(
    pool, sessions, monkeypatch
):
    monkeypatch.setattr(bounds, "RETURN_S", 2.0)
    before = end_of(sessions[1]).channel
    early = [pool.submit(exchange, session) for session in sessions[1:]]
    assert eventually(lambda: end_of(sessions[1]).unanswered)
    break_connection(sessions[1])
    assert eventually(lambda: end_of(sessions[1]).channel is not before)
    assert not early[0].done()
    assert isinstance(exchange(sessions[0]), Exchanged)
    assert all(isinstance(one.result(60), Exchanged) for one in early)
    wait_for_the_look(sessions)
    assert_nobody_is_missed(pool, sessions)


def test_the_end_of_the_connection_before_is_no_death(pool, sessions):
    early = [pool.submit(exchange, sessions[rank]) for rank in (0, 2)]
    channels = sessions[0]._transport.link.inner.channels
    assert eventually(lambda: ("s", 1) in channels)
    before = channels["s", 1]
    again = SocketLink(
        "s", 1, "again", address_of(sessions), sessions[0]._transport.link.inner._key
    )
    assert eventually(lambda: channels["s", 1] is not before)
    sessions[1]._transport.link.close()
    assert eventually(before._writer.is_closing)
    wait_for_the_look(sessions)
    again.ask("call", sent_by(sessions[1]), "again", 60.0)
    assert all(isinstance(one.result(60), Exchanged) for one in early)
    again.close()


def test_who_counted_as_lost_and_calls_takes_part_again(pool, sessions):
    sessions[0]._transport.link.ask("leave", "s", 1).result(60)
    early = pool.submit(exchange, sessions[1])
    assert eventually(lambda: end_of(sessions[1]).unanswered)
    assert sessions[1].coordinator_info()["active"]
    others = all_exchange(pool, [sessions[0], sessions[2]])
    assert all(isinstance(reply, Exchanged) for reply in [early.result(60), *others])
    assert_nobody_is_missed(pool, sessions)


def test_who_has_closed_its_session_did_not_die_and_who_never_called_is_said_to_be_where(
    pool, sessions
):
    message = exchange(sessions[1], 0.2).message
    assert all(f"rank {rank} (pid " in message for rank in (0, 2)), message
    sessions[2].close()
    wait_for_the_look(sessions)
    for _ in sessions[:2]:
        sessions[0].next_key()
    error = exchange(sessions[0])
    assert "rank 2 to take part, but it was lost: it has closed its session" in error.message


def test_a_heartbeat_is_answered_with_an_outcome_or_when_the_next_one_comes(pool, sessions):
    early = pool.submit(exchange, sessions[1])
    assert eventually(lambda: end_of(sessions[1]).unanswered)
    key, ask = OpKey("s", 0), sessions[1]._transport.link.ask
    beat = Heartbeat("s", 1, 60.0, awaits=(key,), hold_s=600.0)
    first = ask("beat", beat)
    assert sessions[1].coordinator_info()["active"] == (key,)
    assert not first.done()
    second = ask("beat", beat)
    assert first.result(60).failed == {}
    sessions[2].leave(Left(key, "it was interrupted"))
    assert [*second.result(60).failed] == [key]
    assert "it was interrupted" in early.result(60).message


def test_a_rank_that_does_not_come_back_is_named_before_it_calls_and_while_it_does(pool, sessions):
    early = [pool.submit(exchange, session) for session in sessions[:2]]
    assert eventually(lambda: end_of(sessions[1]).unanswered)
    sessions[2]._transport.link.close()  # as the end of its process does
    for reply in [*(one.result(60) for one in early), *all_exchange(pool, sessions[:2])]:
        assert isinstance(reply, ParticipantError)
        assert reply.rank == 2
        assert "rank 2 to take part, but it was lost: its process (pid " in reply.message


def test_a_rank_that_leaves_an_operation_fails_it_for_the_others(pool, sessions):
    early = [pool.submit(exchange, session) for session in sessions[:2]]
    assert eventually(lambda: end_of(sessions[1]).unanswered)
    sessions[2].leave(Left(sessions[2].next_key(), "KeyboardInterrupt on rank 2"), 60.0)
    for reply in [one.result(60) for one in early]:
        assert "KeyboardInterrupt on rank 2" in reply.message


def test_a_rank_that_is_interrupted_as_its_heartbeats_begin_leaves_its_call(
    pool, sessions, monkeypatch
):
    real, begun = heartbeat.start_thread, []

    def interrupted(work: Callable[[], object], name: str) -> None:
        monkeypatch.undo()
        begun.append(real(work, name))
        raise KeyboardInterrupt

    early = [pool.submit(exchange, session) for session in sessions[:2]]
    assert eventually(lambda: end_of(sessions[1]).unanswered)
    monkeypatch.setattr(heartbeat, "start_thread", interrupted)
    with pytest.raises(KeyboardInterrupt), Call(sessions[2], 60.0):
        pass
    for reply in [one.result(60) for one in early]:
        assert "KeyboardInterrupt on rank 2" in reply.message
    # Nobody is said to be in that call any more.
    assert eventually(lambda: not begun[0].is_alive())


def test_the_end_of_rank_0_fails_what_waits_and_what_is_called_later_by_name(pool, sessions):
    early = [pool.submit(exchange, session) for session in sessions[1:]]
    assert eventually(lambda: all(end_of(session).unanswered for session in sessions[1:]))
    sessions[0].close()
    for one in early:
        reply = one.result(60)  # it has said that it leaves
        assert isinstance(reply, ParticipantError)
        assert "it has closed its session" in reply.message
    assert eventually(lambda: all(session._transport.link.ended for session in sessions[1:]))
    for session in sessions[1:]:
        with pytest.raises(ParticipantError, match="Expected rank 0 to live") as caught:
            exchange(session)
        assert caught.value.rank == 0
        with pytest.raises(ParticipantError, match="Expected rank 0 to live"):
            session.cancel(session.next_key(), "test")
    with pytest.raises(InvalidRequestError, match="closed"):
        exchange(sessions[0])


@pytest.mark.parametrize(
    ("closes", "said"), [(0, "Expected rank 0 to live"), (1, "this process closed it meanwhile")]
)
def test_a_rank_that_moves_bytes_stops_when_rank_0_or_its_own_session_has_ended(
    sessions, closes, said
):
    with Call(sessions[1], 60.0) as call:
        progress = call.progress
        progress.begin(call.next_key())
        progress.enter(WRITE)
        sessions[closes].close()
        assert eventually(lambda: progress.stop.asked)
        assert isinstance(progress.abandoned, ParticipantError)
        assert progress.abandoned.rank == closes
        assert said in progress.abandoned.message
        progress.over = True


def test_a_call_of_another_method_or_with_wrong_arguments_fails_alone(pool, sessions):
    calls = {("info", 1, 2, 3): "The coordinator failed", ("_carry_out", ()): "Expected a method"}
    for wrong, told in calls.items():
        with pytest.raises(InternalError, match=told) as caught:
            sessions[1]._transport.link.ask(*wrong).result(60)
        assert "in _answer" in caught.value.__notes__[0], "the traceback of rank 0"
    assert all(isinstance(reply, Exchanged) for reply in all_exchange(pool, sessions))


def test_a_call_that_is_given_up_is_not_sent_again(sessions):
    with pytest.raises(DeadlineError, match=r"to answer within 0\.1 s"):
        sessions[1].call(sent_by(sessions[1], 1000.0), timeout_s=0.1)
    assert eventually(lambda: not end_of(sessions[1]).unanswered)


def test_a_rank_0_that_is_silent_is_found_frozen_and_its_work_is_given_up():
    link = SimpleNamespace(ended=None, on_end=None, ask=lambda *_: Future())
    sender = SocketTransport("s", 1, 2, link, "here").presence()
    progress = RankProgress()
    progress.enter(WRITE)
    sender.add(progress, 0.6)
    try:
        assert eventually(lambda: progress.abandoned is not None)
    finally:
        sender.remove(progress)
    error = sender.failure(False, True)
    assert type(error) is DeadlineError
    assert "the process of rank 0 is frozen" in error.message


def test_a_rank_that_does_not_come_and_a_store_that_is_not_there_are_told(monkeypatch):
    monkeypatch.setattr(bounds, "JOIN_S", 0.2)
    with pytest.raises(ParticipantError, match="all ranks to come to the session"):
        join_by_store(HashStore(), "s", 0, 2)
    with pytest.raises(ParticipantError, match="rank 0 to come to the session"):
        join_by_store(HashStore(), "s", 1, 2)
    with pytest.raises(ParticipantError, match="set RAY_ADDRESS"):
        join_by_store(None, "s", 1, 2)


def test_a_rank_0_that_can_not_listen_fails_every_rank(pool, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket, "create_server", refuse)
    store = HashStore()
    joined = [pool.submit(join_by_store, store, "s", rank, 2) for rank in range(2)]
    with pytest.raises(OSError, match="Address already in use"):
        joined[0].result(60)
    with pytest.raises(ParticipantError, match=r"Rank 0 can't be reached: .*Address already"):
        joined[1].result(60)


def test_nobody_at_the_address_of_rank_0_is_told_with_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    store = HashStore()
    store.set("ray_dcp/socket/s/address", f'["{address[0]}", {address[1]}, "00"]')
    with pytest.raises(ParticipantError, match=r"ConnectionRefusedError.*Set MASTER_ADDR"):
        join_by_store(store, "s", 1, 2)


def test_rank_0_listens_on_the_interface_of_the_store():
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20))
    assert rank0_address.host_of(PrefixStore("a", PrefixStore("b", store))) == "127.0.0.1"
    assert rank0_address.host_of(HashStore()) is None
    assert rank0_address.address_towards("127.0.0.1") == "127.0.0.1"
    assert rank0_address.address_towards("no such host.invalid") == "127.0.0.1"
    # A name of its own machine is that of the loopback interface; the others are elsewhere.
    outwards = rank0_address.address_towards("10.9.8.7")
    there = [("1", "a", "127.0.1.1"), ("2", "b", "10.9.8.7")]
    assert rank0_address.interface_of(there) == outwards
    # Containers and cloned machines have equal names; and all may say localhost for the store.
    there = [("1", "a", "127.0.1.1"), ("2", "a", "10.9.8.7")]
    assert rank0_address.interface_of(there) == outwards
    there = [("1", "a", "127.0.0.1"), ("2", "a", "127.0.0.1")]
    assert rank0_address.interface_of(there) == rank0_address.address_towards("192.0.2.1")


def test_a_closed_coordinator_leaves_no_thread_and_no_descriptor(pool):
    before = set(threading.enumerate())
    sessions = joined(pool)
    all_exchange(pool, sessions)
    before |= pool._threads
    for session in reversed(sessions):
        session.close()
        session.close()
    assert eventually(lambda: set(threading.enumerate()) <= before)
    assert socket_channel.open_sockets == set()


def test_without_torch_distributed_a_process_group_is_refused():
    with pytest.raises(InvalidRequestError, match="init_process_group"):
        current_session(object())


# Whole saves and loads.


def as_ranks(
    pool: ThreadPoolExecutor,
    sessions: list[Session],
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[int], Any],
) -> list[Any]:
    """Returns what work gave or raised on each rank, in a thread of its own."""
    here = threading.local()
    monkeypatch.setattr(
        saving, "current_session", lambda *_: None if _[1] else getattr(here, "session", None)
    )

    def run(session: Session) -> Any:
        here.session = session
        try:
            return work(session.rank)
        except Exception as error:
            return error

    return list(pool.map(run, sessions, timeout=300))


def test_cancelling_on_one_rank_fails_an_asynchronous_save_on_all(
    pool, sessions, monkeypatch, tmp_path
):
    both = threading.Barrier(NUM_RANKS)
    held, inner = threading.Event(), rank_save.write_part

    def wait_and_write(*arguments: Any, **named: Any) -> Any:
        held.wait(60)
        return inner(*arguments, **named)

    monkeypatch.setattr(rank_save, "write_part", wait_and_write)

    def save(rank: int) -> Any:
        state = {f"own {rank}": torch.full((9,), rank)}
        handle = ray_dcp.async_save(state, checkpoint_id=tmp_path / "a")
        both.wait(60)
        if rank == 2:
            assert handle.cancel()
            held.set()
        handle.committed(60)

    for error in as_ranks(pool, sessions, monkeypatch, save):
        assert isinstance(error, ray_dcp.errors.SaveCancelledError), error
    with pytest.raises(ray_dcp.CheckpointNotFoundError):
        ray_dcp.verify(tmp_path / "a")


def test_an_error_of_one_rank_is_that_of_all_and_the_next_save_works(
    pool, sessions, monkeypatch, tmp_path
):
    def save(rank: int, bad: int | None) -> Any:
        value = torch.tensor([float("nan") if rank == bad else 1.0])
        options = ray_dcp.SaveOptions(nonfinite="refuse")
        ray_dcp.save({f"w{rank}": value}, checkpoint_id=tmp_path / "a", options=options)

    for error in as_ranks(pool, sessions, monkeypatch, lambda rank: save(rank, 1)):
        assert isinstance(error, ray_dcp.errors.NonFiniteError), error
        assert error.rank == 1
    assert as_ranks(pool, sessions, monkeypatch, lambda rank: save(rank, None)) == [None] * 3
    assert ray_dcp.verify(tmp_path / "a").ok
