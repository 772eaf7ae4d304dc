"""`SocketSession`: the session of a rank of a torch process group for which no Ray was named.

Rank 0 runs the coordinator, a `SocketCoordinator`: a `CoordinatorLoop` in threads of its process.
It listens on the interface by which the job's store is reached, or by which the other machines are
if that is the loopback interface. A random key travels through the store; a `Channel` authenticates
both ends with it before a byte is unpickled. A connection that closes is a hint: a rank that does
not connect again within `RETURN_S` counts as dead.

A rank whose connection closes connects again, and sends its unanswered messages again. If nothing
listens any more, rank 0 has ended, and the session with it: operations in progress are settled on
storage, and the next call fails by name. *Rejected:* to elect another coordinator, as the process
group can't continue without rank 0 either.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import ipaddress
import json
import logging
import os
import pickle
import platform
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Queue
from typing import Any

from ray_dcp.commit_protocol.liveness import OUT_OF_REACH_S, Heartbeat, HeartbeatAck
from ray_dcp.core.processes import OwnProcess, start_thread
from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    InternalError,
    LimitError,
    ParticipantError,
)
from ray_dcp.runtime.coordinator_loop import CoordinatorLoop, Member
from ray_dcp.runtime.heartbeat import HeartbeatSender
from ray_dcp.runtime.session import Session

RETURN_S = 0.5
"""How long a rank whose connection closed may take to connect again, in seconds."""

HANDSHAKE_S = 10.0
"""How long one end may take to authenticate, in seconds."""

EXIT_S = 10.0
"""How long the process of rank 0 waits at its exit until the other ranks have their answers, in
seconds."""

_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""An idle connection closes 25 s after the last sign of the other machine; and no device on the way
drops it before."""

_METHODS = frozenset(["call", "beat", "cancel", "leave", "info"])
"""Methods of the coordinator that ranks may call."""

_open: set[socket.socket | Connection] = set()
"""The open sockets of this process. *Why*: as long as a forked child has them, the end of its
parent closes none, and nobody detects it."""


def _close_in_child() -> None:
    for one in list(_open):
        one.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """An authenticated connection for numbered messages. Sending does not block.

    Args:
        sock: A connected socket; closed if authentication fails.
        key: The key that both ends know.
        serves: Whether this end accepted the connection.

    Raises:
        AuthenticationError: The other end does not know the key.
        OSError: The connection is closed, or the other end does not answer.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, serves: bool) -> None:
        sock.settimeout(None)
        self._sock, self._connection = sock, Connection(os.dup(sock.fileno()))
        _open.update((self._sock, self._connection))
        self._outgoing: Queue[bytes | None] = Queue()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._limit_reads(HANDSHAKE_S)
            steps = [deliver_challenge, answer_challenge]
            for step in steps if serves else reversed(steps):
                step(self._connection, key)
            self._limit_reads(0.0)
            start_thread(self._send_all, "ray_dcp sends")
        except BaseException:
            self.close()
            raise

    def send(self, number: int, message: Any) -> None:
        """Queues a message for sending; drops it if the connection is closed."""
        self._outgoing.put(number.to_bytes(8, "big") + pickle.dumps(message, -1))

    def receive(self) -> tuple[int, bytes]:
        """Returns the next message: its number and its pickled content.

        Raises:
            EOFError: The connection is closed.
            OSError: The same.
        """
        data = self._connection.recv_bytes()
        return int.from_bytes(data[:8], "big"), data[8:]

    def flush(self, end_s: float) -> None:
        """Waits until all messages are sent, or `time.monotonic` has passed `end_s`."""
        with self._outgoing.all_tasks_done:
            self._outgoing.all_tasks_done.wait_for(
                lambda: not self._outgoing.unfinished_tasks, max(0.0, end_s - time.monotonic())
            )

    def close(self) -> None:
        """Closes the connection; a thread that waits in `receive` gets an error."""
        # Suppressed: the other end closed it first.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for one in (self._sock, self._connection):
            _open.discard(one)
        self._sock.close()
        self._outgoing.put(None)

    def _limit_reads(self, timeout_s: float) -> None:
        # Why not settimeout: it makes the descriptor one that does not block.
        limit = struct.pack("ll", int(timeout_s), 0)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def _send_all(self) -> None:
        broken = False
        while (data := self._outgoing.get()) is not None:
            try:
                if not broken:
                    self._connection.send_bytes(data)
            except OSError:
                broken = True
            finally:
                self._outgoing.task_done()


class _ServingLoop(CoordinatorLoop):
    """The loop, with the connections of its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.channels: dict[Member, Channel] = {}
        self._resumed.set()
        self._start(self._check_silence())

    def connected(self, member: Member, place: str, channel: Channel) -> None:
        """Registers a rank with its connection."""
        self.channels[member] = channel
        self._register(*member, place)

    def disconnected(self, member: Member, place: str, channel: Channel) -> None:
        """Handles a connection that closed."""
        if self.channels.get(member) is channel:
            del self.channels[member]
            self._loop.call_later(RETURN_S, self._check_returned, member, place)

    def _check_returned(self, member: Member, place: str) -> None:
        if member not in self.channels:
            reason = (
                f"its process ({place}) has ended, or its machine is out of reach, as its "
                f"connection to rank 0 closed"
            )
            self._lose(*member, reason)

    async def leave(self, session: str, rank: int) -> None:
        """See `CoordinatorLoop.leave`."""
        self.channels.pop((session, rank), None)
        await super().leave(session, rank)

    def answer(self, channel: Channel, number: int, data: bytes) -> None:
        """Begins to answer a message."""
        self._start(self._answer(channel, number, data))

    async def _answer(self, channel: Channel, number: int, data: bytes) -> None:
        try:
            method, arguments = pickle.loads(data)
            if method not in _METHODS:
                raise InternalError(f"Expected a method of a coordinator, found {method!r}")
            channel.send(number, (True, await getattr(self, method)(*arguments)))
        except CheckpointError as error:
            channel.send(number, (False, error))
        except Exception as error:  # noqa: BLE001 - the rank would wait for ever
            text = f"{type(error).__name__}: {error}. Please report this"
            channel.send(number, (False, InternalError(f"The coordinator failed: {text}")))

    async def idle(self) -> list[Channel]:
        """Returns the connections, once no operation is in progress."""
        while self._performing or self._coordination.active:
            await asyncio.sleep(0.01)
        return [*self.channels.values()]


class SocketCoordinator:
    """The coordinator of one session, in threads of rank 0's process, and rank 0's link to it.

    Args:
        session: Name of the session.
        host: Address of the interface on which it listens.
        key: Authenticates the ranks.

    Raises:
        OSError: It can't listen on that address.
        LimitError: No thread can be started.
    """

    ended: ParticipantError | None = None
    on_end: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, session: str, host: str, key: bytes) -> None:
        self._session, self._key = session, key
        self._process = OwnProcess()
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=1024)
        _open.add(self._server)
        self.address: tuple[str, int] = (host, self._server.getsockname()[1])
        ready: Future[_ServingLoop] = Future()
        start_thread(partial(self._run, ready), "ray_dcp coordinator")
        self._serving = ready.result()
        start_thread(self._accept_all, "ray_dcp accepts")
        atexit.register(self.close)

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Returns the future result of a method of the coordinator."""
        if self._closing:
            failed: Future[Any] = Future()
            failed.set_exception(ParticipantError("The coordinator was closed", rank=0))
            return failed
        call = getattr(self._serving, method)
        return asyncio.run_coroutine_threadsafe(call(*arguments), self._loop)

    def close(self) -> None:
        """Ends the coordinator, once the other ranks have their answers; rank 0 leaves for them."""
        if self._closing or not self._process.is_this:
            return
        end_s = time.monotonic() + EXIT_S
        leaves, idle = self.ask("leave", self._session, 0), self.ask("idle")
        self._closing = True
        atexit.unregister(self.close)
        _open.discard(self._server)
        # Suppressed: nobody is connected, or nobody waits longer.
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with suppress(Exception):
            leaves.result(EXIT_S)
            for channel in idle.result(max(0.0, end_s - time.monotonic())):
                channel.flush(end_s)
        for channel in [*self._serving.channels.values()]:
            channel.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, ready: Future[_ServingLoop]) -> None:
        async def begin() -> None:
            ready.set_result(_ServingLoop())

        self._loop = asyncio.new_event_loop()
        try:
            self._loop.run_until_complete(begin())
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        except BaseException as error:
            with suppress(InvalidStateError):
                ready.set_exception(error)
            raise
        finally:
            self._loop.close()

    def _accept_all(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._server.accept()
            except OSError:  # closed, or no more descriptors
                threading.Event().wait(0.0 if self._closing else _PAUSE_S)
                continue
            try:
                start_thread(partial(self._serve, sock), "ray_dcp serves")
            except LimitError as error:
                logger.warning("A rank can't connect: %s", error)
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            channel = Channel(sock, self._key, serves=True)
        except (AuthenticationError, EOFError, OSError, LimitError) as error:
            logger.warning("Refused a connection to the coordinator: %r", error)
            return
        member: Member | None = None
        place = ""
        # Suppressed: the connection closed; or this coordinator did, and its loop with it.
        with suppress(EOFError, OSError, RuntimeError):
            session, rank, place = pickle.loads(channel.receive()[1])
            member = (session, rank)
            self._in_loop(self._serving.connected, member, place, channel)
            while True:
                self._in_loop(self._serving.answer, channel, *channel.receive())
        channel.close()
        with suppress(RuntimeError):
            if member is not None:
                self._in_loop(self._serving.disconnected, member, place, channel)

    def _in_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)


JOIN_S = 60.0
"""How long the ranks wait for each other while they connect, in seconds."""

LOOK_S = 0.5
"""Interval at which a waiting call checks whether it is still useful, in seconds."""

_PAUSE_S = 0.2
"""Pause before another try to connect or to accept a connection, in seconds."""

logger = logging.getLogger(__name__)


class SocketLink:
    """The connection of a rank other than 0 to the coordinator.

    Args:
        session: Name of the session.
        rank: This rank.
        place: This process, for messages.
        address: Address at which rank 0 listens.
        key: Authenticates both ends.

    Raises:
        AuthenticationError: The process that listens there does not know the key.
        OSError: No process listens there.
    """

    def __init__(
        self, session: str, rank: int, place: str, address: tuple[str, int], key: bytes
    ) -> None:
        self.ended: ParticipantError | None = None
        self.on_end: Callable[[], None] = lambda: None
        self._member, self._place, self._address, self._key = (session, rank), place, address, key
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._numbers = count(1)
        self._unanswered: dict[int, tuple[Any, Future[Any]]] = {}
        self._channel = self._connect()
        start_thread(self._run, "ray_dcp answers")

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Returns the future result of a method of the coordinator."""
        number, answer = next(self._numbers), Future[Any]()
        message = (method, arguments)
        with self._lock:
            if self.ended is not None:
                answer.set_exception(copy.copy(self.ended))
                return answer
            self._unanswered[number] = (message, answer)
            channel = self._channel
        answer.add_done_callback(lambda _: self._unanswered.pop(number, None))
        channel.send(number, message)
        return answer

    def close(self) -> None:
        """Closes the connection."""
        self._closing.set()
        self._channel.flush(time.monotonic() + 1.0)
        self._channel.close()

    def _connect(self) -> Channel:
        sock = socket.create_connection(self._address, HANDSHAKE_S)
        channel = Channel(sock, self._key, serves=False)
        channel.send(0, (*self._member, self._place))
        return channel

    def _run(self) -> None:
        while True:
            # Suppressed: the connection is closed.
            with suppress(EOFError, OSError):
                while True:
                    self._take(*self._channel.receive())
            self._channel.close()
            try:
                channel = self._connect_again()
            except (AuthenticationError, EOFError, OSError, LimitError) as error:
                self._end(error)
                return
            with self._lock:
                self._channel = channel
                again = [(number, message) for number, (message, _) in self._unanswered.items()]
            for number, message in again:
                channel.send(number, message)

    def _take(self, number: int, data: bytes) -> None:
        _, answer = self._unanswered.get(number, (None, None))
        if answer is None:  # nobody waits any more, or it came twice
            return
        # Suppressed: whoever waited has just given up.
        with suppress(InvalidStateError):
            try:
                succeeded, value = pickle.loads(data)
            except Exception as error:  # noqa: BLE001 - whoever waits would do so for ever
                succeeded, value = False, InternalError(f"Expected an answer, found {error!r}")
            if succeeded:
                answer.set_result(value)
            else:
                answer.set_exception(value)

    def _connect_again(self) -> Channel:
        """Returns another connection.

        Raises:
            OSError: This rank closed the session; or nothing listens, as rank 0 has ended; or no
                connection could be made for `OUT_OF_REACH_S`.
        """
        end_s = time.monotonic() + OUT_OF_REACH_S
        while not self._closing.is_set():
            try:
                return self._connect()
            except ConnectionRefusedError:
                raise
            except (EOFError, OSError):
                if time.monotonic() > end_s:
                    raise
            self._closing.wait(_PAUSE_S)
        raise ConnectionAbortedError("this rank has closed the session")

    def _end(self, error: Exception) -> None:
        host, port = self._address
        with self._lock:
            self.ended = ParticipantError(
                f"Expected rank 0 to live, as the coordinator of session {self._member[0]!r} is in "
                f"its process, but nobody answers at {host}:{port} any more "
                f"({type(error).__name__}). Look at the log of rank 0, and restart the job",
                rank=0,
            )
            unanswered = [*self._unanswered.values()]
        for _, answer in unanswered:
            with suppress(InvalidStateError):
                answer.set_exception(copy.copy(self.ended))
        self.on_end()


CoordinatorLink = SocketLink | SocketCoordinator
"""Connection of a rank to its coordinator."""


class SocketHeartbeatSender(HeartbeatSender):
    """Sends heartbeats over a link.

    Args:
        link: The link to the coordinator.
        session: Name of the session.
        rank: This rank.
        who: Description of the coordinator, for errors.
    """

    def __init__(self, link: CoordinatorLink, session: str, rank: int, who: str) -> None:
        self._link = link
        super().__init__(session, rank, who)
        link.on_end = self._stop_working

    @property
    def _is_up(self) -> bool:
        return self._link.ended is None

    def _stop_working(self) -> None:
        if self._link.ended is not None:
            self._abandon(copy.copy(self._link.ended))

    def _send(self, beat: Heartbeat) -> Any:
        return self._link.ask("beat", beat)

    def _answered(self, wait_s: float) -> list[Any]:
        done, _ = futures.wait([*self._sent], wait_s, futures.FIRST_COMPLETED)
        return [ref for ref in self._sent if ref in done][-1:]

    def _ack_of(self, ref: Any) -> HeartbeatAck | None:
        try:
            ack: HeartbeatAck = ref.result()
        except CheckpointError:
            if self._is_up:
                raise  # it lives, and has an error of its own
            return None
        return ack

    def _is_gone(self) -> bool:
        return not self._is_up

    def _died(self) -> ParticipantError:
        return copy.copy(self._link.ended) or super()._died()

    def _check_coordinator(self, timeout_s: float) -> None:
        silent_s = self._silent_s
        if silent_s > timeout_s:
            self._frozen = self._silent(
                silent_s,
                "the process of rank 0 is frozen (stopped, swapped out, or a thread holds the "
                "GIL), or its machine is out of reach. Look at that process, and call again; "
                "raise heartbeat_timeout_s if such pauses are normal",
            )
            self._abandon(self._frozen)


class SocketSession(Session):
    """A session without Ray; see the module.

    Args:
        name: As for `Session`.
        rank: As for `Session`.
        world_size: As for `Session`.
        link: The link to the coordinator.
        place: This process, for messages.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, link: CoordinatorLink, place: str
    ) -> None:
        who = f"the coordinator of session {name!r}, in the process of rank 0,"
        super().__init__(
            name,
            rank,
            world_size,
            who=who,
            node=platform.node(),
            heartbeats=SocketHeartbeatSender(link, name, rank, who),
        )
        self._link, self._place = link, place

    @property
    def _caller(self) -> str:
        return self._place

    def _close(self) -> None:
        # Suppressed: there is no coordinator any more.
        with suppress(CheckpointError, futures.TimeoutError):
            self._link.ask("leave", self.name, self.rank).result(1.0)
        self._link.close()

    def _ask(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        given_up: Callable[[bool], CheckpointError | None] = lambda _: None,
        uncounted_s: Callable[[], float] = lambda: 0.0,
    ) -> Any:
        begun_s = time.monotonic()
        answer = self._link.ask(method, *arguments)
        try:
            while True:
                left_s = begun_s + timeout_s + uncounted_s() - time.monotonic()
                futures.wait([answer], max(0.0, min(left_s, LOOK_S)))
                if answer.done():
                    return answer.result()
                reason = given_up(False)
                if reason is not None:
                    raise reason
                if left_s <= 0:
                    raise DeadlineError(
                        f"Expected {self._who} to answer within {timeout_s:g} s, but it did not. "
                        f"Look whether that process is frozen, or raise the timeout",
                        rank=self.rank,
                    )
        except futures.CancelledError:
            raise ParticipantError(
                f"Expected session {self.name!r} to be open until the end of the call, but this "
                f"process closed it meanwhile",
                rank=self.rank,
            ) from None
        finally:
            answer.cancel()


# How the ranks find each other


def join_by_store(store: Any, name: str, rank: int, world_size: int) -> SocketSession:
    """Returns the connected session of a rank; every rank calls it.

    Args:
        store: The job's store.
        name: Name of the session.
        rank: This rank in the session.
        world_size: Number of ranks.

    Raises:
        ParticipantError: A rank does not come, or rank 0 can't be reached.
    """
    if store is None:
        raise ParticipantError(
            "Expected the default process group to have a store, by which ranks without Ray find "
            "each other, but torch gives none. Start Ray, and set RAY_ADDRESS on all ranks",
            rank=rank,
        )
    place = f"pid {os.getpid()} on {platform.node()}"
    own = [platform.node(), address_towards(host_of(store))]
    store.set(f"{_key(name)}/{rank}", json.dumps(own))
    if rank:
        _wait(store, [f"{_key(name)}/address"], "rank 0", rank)
        host, port, key = json.loads(store.get(f"{_key(name)}/address"))
        if not host:
            raise ParticipantError(f"Rank 0 can't be reached: {key}", rank=0)
        try:
            link = SocketLink(name, rank, place, (host, port), bytes.fromhex(key))
        except (AuthenticationError, EOFError, OSError) as error:
            raise ParticipantError(
                f"Expected to reach rank 0 at {host}:{port}, but connecting gave "
                f"{type(error).__name__}: {error}. Set MASTER_ADDR to an address of its machine "
                f"that all others reach, and allow connections between the ranks",
                rank=rank,
            ) from error
        return SocketSession(name, rank, world_size, link, place)
    try:
        others = [f"{_key(name)}/{other}" for other in range(world_size)]
        _wait(store, others, "all ranks", rank)
        places = [json.loads(store.get(other)) for other in others]
        key = secrets.token_bytes(32)
        coordinator = SocketCoordinator(name, interface_of(places), key)
    except Exception as error:
        store.set(f"{_key(name)}/address", json.dumps(["", 0, f"{type(error).__name__}: {error}"]))
        raise
    host, port = coordinator.address
    logger.info("No Ray was named: the ranks reach the coordinator in rank 0 at %s:%d", host, port)
    coordinator.ask("register", name, 0, place).result()
    store.set(f"{_key(name)}/address", json.dumps([host, port, key.hex()]))
    return SocketSession(name, rank, world_size, coordinator, place)


def forget_key(store: Any, name: str) -> None:
    """Removes the key of a session from the store, once all ranks have it."""
    # Suppressed: not every store can.
    with suppress(RuntimeError, NotImplementedError):
        store.delete_key(f"{_key(name)}/address")


def _key(name: str) -> str:
    return f"ray_dcp/socket/{name}"


def _wait(store: Any, keys: Sequence[str], who: str, rank: int) -> None:
    try:
        store.wait([*keys], timedelta(seconds=JOIN_S))
    except RuntimeError as error:  # torch's own timeout error is one, in every version
        raise ParticipantError(
            f"Expected {who} to come to the session within {JOIN_S:g} s, but: {error}. Look "
            f"whether it lives, then call again",
            rank=rank,
        ) from error


def host_of(store: Any) -> str | None:
    """Returns the host of a store; None if it is not served by one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host: str | None = getattr(store, "host", None)
    return host


def address_towards(host: str | None) -> str:
    """Returns the address of the interface by which this machine reaches a host."""
    # Suppressed: no such host, or no way there.
    with suppress(OSError):
        found = socket.getaddrinfo(host or "127.0.0.1", 9, type=socket.SOCK_DGRAM)
        for family, kind, _, _, address in sorted(found, key=lambda one: one[0]):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_of(places: Sequence[tuple[str, str]]) -> str:
    """Returns the address on which rank 0 listens.

    Args:
        places: For each rank, the name of its machine and its address towards the store.

    Examples:
        >>> interface_of([("a", "10.0.0.1"), ("b", "10.0.0.2")])
        '10.0.0.1'
        >>> interface_of([("a", "127.0.0.1"), ("a", "127.0.0.1")])
        '127.0.0.1'
    """
    (machine, own), *others = places
    away = [other for other in others if other[0] != machine]
    if not away or not ipaddress.ip_address(own).is_loopback:
        return own
    # Why possible: on its own machine a name often stands for the loopback interface.
    name, address = away[0]
    return address_towards(name if ipaddress.ip_address(address).is_loopback else address)
