"""`SocketTransport`: reaches a coordinator in the process of rank 0, where no Ray was named.

Rank 0 runs the coordinator, a `CoordinatorLoop`, in a thread of its process. It listens on the
interface by which the job's store is reached, or by which the other machines are if that is the
loopback interface. A random key travels through the store; a `Channel` authenticates both ends by
it before a byte is unpickled. A connection that closes is a hint: a rank that does not connect
again within `RETURN_S` counts as dead.

A rank whose connection closes connects again, and sends its unanswered messages again. If nothing
listens any more, rank 0 has ended, and the session with it: operations in progress are settled on
storage, and the next call fails by name. Connections that have not authenticated are bounded, so
that strangers can't take the descriptors of rank 0. *Rejected:* to elect another coordinator, as
the process group can't continue without rank 0 either.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import hmac
import ipaddress
import json
import logging
import os
import pickle
import platform
import random
import resource
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from ray_dcp.commit_protocol.liveness import Heartbeat, HeartbeatAck
from ray_dcp.coordinator.loop import CoordinatorLoop, LoopThread, Member
from ray_dcp.coordinator.metrics import Performer
from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess, network_namespace
from ray_dcp.core.wire_error import from_wire, text_of, to_wire
from ray_dcp.errors import CheckpointError, InternalError, ParticipantError
from ray_dcp.session.heartbeat import (
    HeartbeatSender,
    HeartbeatTransport,
    SenderState,
    Silence,
)
from ray_dcp.session.job_store import await_keys, job_store
from ray_dcp.session.session import Session
from ray_dcp.session.transport import FutureTransport, closed_meanwhile

MOST_STRANGERS = 256
"""Most connections that have not authenticated; less where few files may be open. More wait."""

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""An idle connection closes 25 s after the last sign of the other machine; and no device on the way
drops it before. While bytes are under way only `heartbeat_timeout_s` bounds the silence. *Why* no
`TCP_USER_TIMEOUT`: it would also close the connection to a process that is merely stopped, and has
much to read (measured)."""

_METHODS = frozenset(["call", "beat", "cancel", "leave", "info"])
"""Methods of the coordinator that ranks may call."""

_NONCE_BYTES = 32
_READ_BYTES = 1 << 20

CLOSED = (EOFError, OSError, asyncio.TimeoutError)
"""Errors of a connection that can't be made, or is closed."""

_open: set[socket.socket] = set()
"""The open sockets of this process. *Why*: as long as a forked child has them, the end of its
parent closes none, and nobody detects it."""


def _close_in_child() -> None:
    for one in list(_open):
        one.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """An authenticated connection for numbered messages. Used in the event loop's thread.

    Args:
        sock: The connected socket.
        reader: Reads from it.
        writer: Writes to it.
    """

    def __init__(
        self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._sock, self._reader, self._writer = sock, reader, writer

    @classmethod
    async def begin(cls, sock: socket.socket, key: bytes, *, serves: bool) -> Channel:
        """Returns the channel over a connected socket; closes the socket if that fails.

        Args:
            sock: The socket.
            key: The key that both ends know.
            serves: Whether this end accepted the connection.

        Raises:
            PermissionError: The other end does not know the key.
            OSError: The connection is closed.
            TimeoutError: The other end does not answer.
        """
        _open.add(sock)
        channel = None
        try:
            for option in _OPTIONS:
                sock.setsockopt(*option)
            channel = cls(sock, *await asyncio.open_connection(sock=sock, limit=_READ_BYTES))
            limit_s = min(bounds.SERVED_S, bounds.HANDSHAKE_S) if serves else bounds.HANDSHAKE_S
            await asyncio.wait_for(channel._authenticate(key, serves), limit_s)
        except BaseException:
            if channel is not None:
                channel.close()
            _open.discard(sock)
            sock.close()
            raise
        return channel

    async def _authenticate(self, key: bytes, serves: bool) -> None:
        """Proves to the other end that this one knows the key, and checks the same."""
        own, roles = secrets.token_bytes(_NONCE_BYTES), (b"serves", b"calls")
        mine, theirs = roles if serves else reversed(roles)
        self._writer.write(own)
        other = await self._reader.readexactly(_NONCE_BYTES)
        if serves:
            # Why the caller first: a stranger gets no proof of the key.
            await self._check(key, theirs + own + other)
        self._writer.write(hmac.digest(key, mine + other + own, "sha256"))
        if not serves:
            await self._check(key, theirs + own + other)

    async def _check(self, key: bytes, signed: bytes) -> None:
        found = await self._reader.readexactly(32)
        if not hmac.compare_digest(found, hmac.digest(key, signed, "sha256")):
            raise PermissionError("the other end does not know the key of this session")

    def send(self, number: int, message: Any) -> None:
        """Begins to send a message; drops it if the connection is closed."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._writer.is_closing():
            self._writer.write(number.to_bytes(8, "big") + len(data).to_bytes(8, "big"))
            self._writer.write(data)

    async def receive(self) -> tuple[int, bytes]:
        """Returns the next message: its number and its pickled content.

        Raises:
            EOFError: The connection is closed.
            OSError: The same.
        """
        head = await self._reader.readexactly(16)
        data = await self._reader.readexactly(int.from_bytes(head[8:], "big"))
        return int.from_bytes(head[:8], "big"), data

    def close(self) -> None:
        """Closes the connection, once what was sent has left."""
        self._writer.close()
        _open.discard(self._sock)

    async def closed(self, timeout_s: float) -> None:
        """Closes the connection; returns when what was sent has left, or `timeout_s` has passed."""
        self.close()
        # Suppressed: the other end closed it first, or does not read.
        with suppress(*CLOSED):
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)


class _ServingLoop(CoordinatorLoop):
    """The loop, with the connections of its ranks.

    Args:
        server: The listening socket; closed by `shut`.
        key: Authenticates the ranks.
        performer: See `CoordinatorLoop`.
    """

    def __init__(
        self, server: socket.socket, key: bytes, performer: Performer | None = None
    ) -> None:
        super().__init__(performer=performer)
        self._server, self._key = server, key
        self.channels: dict[Member, Channel] = {}
        self._strangers: dict[asyncio.Task[Channel], tuple[str, float]] = {}
        self._most_strangers = most_strangers()
        self._num_refused, self._report_s = 0, 0.0
        self._resumed.set()
        self._start_task(self._check_silence())
        self._accepting = asyncio.ensure_future(self._accept())

    async def _accept(self) -> None:
        while True:
            await self._make_room()
            try:
                sock, address = await self._loop.sock_accept(self._server)
            except OSError:  # no more descriptors
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(sock, str(address[0]))
            # Why: as long as connections wait, nothing else would run, and none would be dropped.
            await asyncio.sleep(0)

    def _admit(self, sock: socket.socket, host: str) -> None:
        task = asyncio.ensure_future(Channel.begin(sock, self._key, serves=True))
        self._strangers[task] = host, self._loop.time()
        self._start_task(self._serve(task, host))

    async def _make_room(self) -> None:
        """Returns once another connection may be accepted; drops one that takes long if need be.

        *Why not before its grace*: where thousands of ranks connect at once, each new one would
        take the place of one that is about to get in. *Why the oldest of the address with most*:
        who says nothing gives way to ranks, which are few at one address.
        """
        while len(self._strangers) >= self._most_strangers:
            (busiest, _), *_ = Counter(host for host, _ in self._strangers.values()).most_common(1)
            first, begin_s = next(
                (one, begin_s)
                for one, (host, begin_s) in self._strangers.items()
                if host == busiest
            )
            left_s = begin_s + bounds.STRANGER_S - self._loop.time()
            if left_s <= 0:
                del self._strangers[first]
                first.cancel()
                return
            await asyncio.wait(self._strangers, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def _report_refused(self, host: str, error: BaseException) -> None:
        self._num_refused += 1
        if self._loop.time() >= self._report_s:
            text = "Refused %d connections to the coordinator, the last one from %s: %r"
            logger.warning(text, self._num_refused, host, error)
            self._num_refused, self._report_s = 0, self._loop.time() + _REPORT_EVERY_S

    async def _serve(self, beginning: asyncio.Task[Channel], host: str) -> None:
        try:
            channel = await beginning
        except CLOSED as error:
            self._report_refused(host, error)
            return
        except asyncio.CancelledError as error:
            if not beginning.cancelled():
                raise  # this task was cancelled
            self._report_refused(host, error)
            return
        finally:
            self._strangers.pop(beginning, None)
        member: Member | None = None
        place = ""
        # Suppressed: the connection is closed.
        with suppress(EOFError, OSError):
            session, rank, place = pickle.loads((await channel.receive())[1])
            member = (session, rank)
            self.channels[member] = channel
            self._register(*member, place)
            while True:
                self._start_task(self._answer(channel, *await channel.receive()))
        channel.close()
        if member is not None and self.channels.get(member) is channel:
            del self.channels[member]
            self._loop.call_later(bounds.RETURN_S, self._check_returned, member, place)

    def _check_returned(self, member: Member, place: str) -> None:
        if member not in self.channels:
            reason = (
                f"its process ({place}) has ended, or its machine is out of reach, as its "
                f"connection to rank 0 closed"
            )
            self._report_lost(*member, reason)

    async def leave(self, session: str, rank: int) -> None:
        """See `CoordinatorLoop.leave`."""
        self.channels.pop((session, rank), None)
        await super().leave(session, rank)

    async def _answer(self, channel: Channel, number: int, data: bytes) -> None:
        try:
            method, arguments = pickle.loads(data)
            if method not in _METHODS:
                raise InternalError(f"Expected a method of a coordinator, found {method!r}")
            channel.send(number, (True, await getattr(self, method)(*arguments)))
        except Exception as error:  # noqa: BLE001 - the rank would wait for ever
            sent = to_wire(error, "The coordinator", kind=InternalError)
            channel.send(number, (False, sent))

    async def shut(self, session: str) -> None:
        """Leaves for rank 0, and closes the connections once the other ranks have their answers."""
        self._accepting.cancel()
        _open.discard(self._server)
        self._server.close()
        end_s = self._loop.time() + bounds.EXIT_S
        await self.leave(session, 0)
        while (self._performing or self._coordination.active) and self._loop.time() < end_s:
            await asyncio.sleep(0.01)
        left_s = max(0.0, end_s - self._loop.time())
        await asyncio.gather(*(channel.closed(left_s) for channel in self.channels.values()))


def most_strangers() -> int:
    """Returns how many connections may be open that have not authenticated."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_STRANGERS if soft == resource.RLIM_INFINITY else min(MOST_STRANGERS, soft // 4)


class SocketCoordinator(LoopThread[_ServingLoop]):
    """The coordinator of one session, in a thread of rank 0's process, and rank 0's link to it.

    Args:
        session: Name of the session.
        host: Address of the interface on which it listens.
        key: Authenticates the ranks.
        performer: See `CoordinatorLoop`.

    Raises:
        OSError: It can't listen on that address.
        LimitError: No thread can be started.
    """

    ended: ParticipantError | None = None
    on_end: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, session: str, host: str, key: bytes, performer: Performer | None = None
    ) -> None:
        self._session, self._process = session, OwnProcess()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=1024)
        server.setblocking(False)
        _open.add(server)
        self.address: tuple[str, int] = (host, server.getsockname()[1])
        super().__init__(lambda: _ServingLoop(server, key, performer))
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the coordinator, once the other ranks have their answers; rank 0 leaves for them."""
        if not self._process.is_this or self.loop.is_closed():
            return
        atexit.unregister(self.close)
        # Suppressed: nobody waits longer.
        with suppress(CheckpointError, futures.TimeoutError):
            self.ask("shut", self._session).result(bounds.EXIT_S + bounds.UNWIND_S)
        self.stop()


_REPORT_EVERY_S = 60.0
"""Interval at which refused connections are reported, in seconds."""

_PAUSE_S = 0.2
"""Pause before another try to connect or to accept a connection, in seconds."""

_LONGEST_PAUSE_S = 1.0
"""The same after many tries."""

logger = logging.getLogger(__name__)


class _Calling:
    """The end of a connection at which a rank calls. Used in the event loop's thread.

    Args:
        connect: Returns a new connection.
        on_end: Called with the error when no connection can be made any more.
    """

    def __init__(
        self,
        connect: Callable[[], Coroutine[Any, Any, Channel]],
        on_end: Callable[[Exception], ParticipantError],
    ) -> None:
        self._connect, self._on_end = connect, on_end
        self._numbers = count(1)
        self.unanswered: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        self.channel: Channel | None = None
        self._ended: ParticipantError | None = None
        self._closing = False

    async def begin(self) -> None:
        """Makes the first connection.

        Raises:
            PermissionError: The process that listens there does not know the key.
            OSError: No process listens there.
            TimeoutError: It does not answer.
        """
        # Why again: rank 0 drops connections that take long, where there are many.
        channel = self.channel = await self._connected_within(bounds.JOIN_S)
        self._running = asyncio.ensure_future(self._run(channel))

    async def call(self, message: Any) -> Any:
        """Returns the answer to a message, which is sent again after a connection broke."""
        if self._ended is not None:
            raise copy.copy(self._ended)
        number: int = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self.unanswered[number] = (message, answer)
        try:
            if self.channel is not None:
                self.channel.send(number, message)
            return await answer
        finally:
            del self.unanswered[number]

    async def close(self) -> None:
        """Closes the connection."""
        self._closing = True
        if self.channel is not None:
            await self.channel.closed(1.0)

    async def _run(self, channel: Channel) -> None:
        while True:
            # Suppressed: the connection is closed.
            with suppress(EOFError, OSError):
                while True:
                    self._resolve_answer(*await channel.receive())
            channel.close()
            try:
                channel = await self._connected_within(bounds.OUT_OF_REACH_S)
            except CLOSED as error:
                ended = self._ended = self._on_end(error)
                for _, answer in self.unanswered.values():
                    if not answer.done():
                        answer.set_exception(copy.copy(ended))
                return
            self.channel = channel
            for number, (message, _) in self.unanswered.items():
                channel.send(number, message)

    def _resolve_answer(self, number: int, data: bytes) -> None:
        _, answer = self.unanswered.get(number, (None, None))
        if answer is None or answer.done():  # nobody waits any more, or it came twice
            return
        try:
            succeeded, value = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - whoever waits would do so for ever
            succeeded, value = False, error
        if succeeded:
            answer.set_result(value)
        else:
            answer.set_exception(from_wire(value, "the coordinator's answer"))

    async def _connected_within(self, timeout_s: float) -> Channel:
        """Returns a new connection.

        Raises:
            PermissionError: The process that listens there does not know the key.
            OSError: This rank closed the session; or nothing listens, as rank 0 has ended; or no
                connection could be made for `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        end_s, pause_s = loop.time() + timeout_s, _PAUSE_S
        while not self._closing:
            try:
                return await self._connect()
            except (ConnectionRefusedError, PermissionError):
                raise
            except CLOSED:
                if loop.time() > end_s:
                    raise
            # Why random: ranks that came at once are not to come at once again.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise ConnectionAbortedError("this rank has closed the session")


class SocketLink:
    """The connection of a rank other than 0 to the coordinator.

    Args:
        session: Name of the session.
        rank: This rank.
        place: This process, for messages.
        address: Address at which rank 0 listens.
        key: Authenticates both ends.

    Raises:
        PermissionError: The process that listens there does not know the key.
        OSError: No process listens there.
        TimeoutError: It does not answer.
    """

    def __init__(
        self, session: str, rank: int, place: str, address: tuple[str, int], key: bytes
    ) -> None:
        self.ended: ParticipantError | None = None
        self.on_end: Callable[[], None] = lambda: None
        self._closing = False
        self._hello, self._address, self._key = (session, rank, place), address, key
        self._thread = LoopThread(lambda: _Calling(self._connect, self._end))
        try:
            self._thread.ask("begin").result()
        except BaseException:
            self._thread.stop()
            raise

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Returns the future result of a method of the coordinator."""
        return self._thread.ask("call", (method, arguments))

    def close(self) -> None:
        """Closes the connection."""
        self._closing = True
        with suppress(CheckpointError, futures.TimeoutError):
            self._thread.ask("close").result(2.0)
        self._thread.stop()

    async def _connect(self) -> Channel:
        host, port = self._address
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        try:
            connected = asyncio.get_running_loop().sock_connect(sock, (host, port))
            await asyncio.wait_for(connected, bounds.HANDSHAKE_S)
        except BaseException:
            sock.close()
            raise
        channel = await Channel.begin(sock, self._key, serves=False)
        channel.send(0, self._hello)
        return channel

    def _end(self, error: Exception) -> ParticipantError:
        (session, rank, _), (host, port) = self._hello, self._address
        if self._closing:
            self.ended = closed_meanwhile(session, rank)
        else:
            self.ended = ParticipantError(
                f"Expected rank 0 to live, as the coordinator of session {session!r} is in its "
                f"process, but nobody answers at {host}:{port} any more ({type(error).__name__}). "
                f"Look at the log of rank 0, and restart the job",
                rank=0,
            )
        self.on_end()
        return self.ended


CoordinatorLink = SocketLink | SocketCoordinator
"""Connection of a rank to its coordinator."""


class SocketTransport(FutureTransport, HeartbeatTransport):
    """A transport over a connection to the process of rank 0; see the module.

    Args:
        session: As for `Transport`.
        rank: As for `Transport`.
        world_size: As for `Transport`.
        link: The link to the coordinator.
        place: This process, for messages.
    """

    def __init__(
        self, session: str, rank: int, world_size: int, link: CoordinatorLink, place: str
    ) -> None:
        super().__init__(
            session,
            rank,
            world_size,
            who=f"the coordinator of session {session!r}, in the process of rank 0,",
            node=platform.node(),
        )
        self.link, self._place = link, place

    @property
    def caller(self) -> str:
        """See `Transport.caller`."""
        return self._place

    def send(self, method: str, *arguments: Any) -> Future[Any]:
        """See `FutureTransport.send`."""
        return self.link.ask(method, *arguments)

    def presence(self) -> HeartbeatSender:
        """See `Transport.presence`; the end of the link stops the work of its calls."""
        sender = HeartbeatSender(self)

        def stop_working() -> None:
            if self.link.ended is not None:
                sender.abandon(copy.copy(self.link.ended))

        self.link.on_end = stop_working
        return sender

    def close(self) -> None:
        """See `Transport.close`."""
        # Suppressed: there is no coordinator any more.
        with suppress(CheckpointError, futures.TimeoutError):
            self.send("leave", self.session, self.rank).result(1.0)
        self.link.close()

    # Heartbeats

    @property
    def alive(self) -> bool:
        """See `HeartbeatTransport.alive`."""
        return self.link.ended is None

    def send_heartbeat(self, beat: Heartbeat) -> Any:
        """See `HeartbeatTransport.send_heartbeat`."""
        return self.send("beat", beat)

    def wait(self, sent: Sequence[Any], wait_s: float) -> list[Any]:
        """See `HeartbeatTransport.wait`."""
        done, _ = futures.wait(sent, wait_s, futures.FIRST_COMPLETED)
        return [ref for ref in sent if ref in done][-1:]

    def ack(self, ref: Any) -> HeartbeatAck | None:
        """See `HeartbeatTransport.ack`."""
        try:
            ack: HeartbeatAck = ref.result()
        except CheckpointError:
            if self.alive:
                raise  # it lives, and has an error of its own
            return None
        return ack

    def has_ended(self, last: HeartbeatAck | None) -> bool:
        """See `HeartbeatTransport.has_ended`."""
        return not self.alive

    def ended_error(self) -> ParticipantError | None:
        """See `HeartbeatTransport.ended_error`."""
        return copy.copy(self.link.ended)

    def silence(self, silent_s: float, timeout_s: float, state: SenderState) -> Silence:
        """See `HeartbeatTransport.silence`."""
        if silent_s <= timeout_s:
            return Silence("none")
        return Silence(
            "frozen",
            "the process of rank 0 is frozen (stopped, swapped out, or a thread holds the GIL), or "
            "its machine is out of reach. Look at that process, and call again; raise "
            "heartbeat_timeout_s if such pauses are normal",
        )


# How the ranks find each other


def join_by_store(
    store: Any, name: str, rank: int, world_size: int, *, performer: Performer | None = None
) -> Session:
    """Returns the connected session of a rank; every rank calls it.

    Args:
        store: A client of the job's store.
        name: Name of the session.
        rank: This rank in the session.
        world_size: Number of ranks.
        performer: Performs the tasks of the coordinator, on rank 0; see `CoordinatorLoop`.

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
    own = [network_namespace() or platform.node(), platform.node(), address_towards(host_of(store))]
    store.set(f"{_key(name)}/{rank}", json.dumps(own))
    if rank:
        _wait(store, [f"{_key(name)}/address"], "rank 0", rank)
        host, port, key = json.loads(store.get(f"{_key(name)}/address"))
        if not host:
            raise ParticipantError(f"Rank 0 can't be reached: {key}", rank=0)
        try:
            link = SocketLink(name, rank, place, (host, port), bytes.fromhex(key))
        except CLOSED as error:
            raise ParticipantError(
                f"Expected to reach rank 0 at {host}:{port}, but connecting gave "
                f"{type(error).__name__}: {error}. Set MASTER_ADDR to an address of its machine "
                f"that all others reach, and allow connections between the ranks",
                rank=rank,
            ) from error
        return Session(SocketTransport(name, rank, world_size, link, place))
    try:
        others = [f"{_key(name)}/{other}" for other in range(world_size)]
        _wait(store, others, "all ranks", rank)
        places = [json.loads(store.get(other)) for other in others]
        key = secrets.token_bytes(32)
        coordinator = SocketCoordinator(name, interface_of(places), key, performer)
    except Exception as error:
        store.set(f"{_key(name)}/address", json.dumps(["", 0, text_of(error)]))
        raise
    host, port = coordinator.address
    logger.info("Session %s: the ranks reach the coordinator in rank 0 at %s:%d", name, host, port)
    coordinator.ask("register", name, 0, place).result()
    store.set(f"{_key(name)}/address", json.dumps([host, port, key.hex()]))
    return Session(SocketTransport(name, rank, world_size, coordinator, place))


def forget_key(name: str) -> None:
    """Removes the key of a session from the job's store, once all ranks have it."""
    # Suppressed: not every store can, and one that has ended keeps none.
    with suppress(RuntimeError, NotImplementedError, ConnectionError):
        job_store().delete_key(f"{_key(name)}/address")


def _key(name: str) -> str:
    return f"ray_dcp/socket/{name}"


def _wait(store: Any, keys: Sequence[str], who: str, rank: int) -> None:
    if missing := await_keys(store, keys, bounds.JOIN_S):
        names = (
            ", ".join(f"rank {key.rpartition('/')[2]}" for key in missing[:8]) if rank == 0 else who
        )
        raise ParticipantError(
            f"Expected {who} to come to the session within {bounds.JOIN_S:g} s, but {names} did "
            f"not. Look whether it lives, then call again",
            rank=rank,
        )


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


ANYWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), behind the default route of all."""


def interface_of(places: Sequence[tuple[str, str, str]]) -> str:
    """Returns the address on which rank 0 listens.

    Args:
        places: For each rank, its network namespace, the name of its host, and its address
            towards the store.

    Examples:
        >>> interface_of([("1", "a", "10.0.0.1"), ("2", "b", "10.0.0.2")])
        '10.0.0.1'
        >>> interface_of([("1", "a", "127.0.0.1"), ("1", "a", "127.0.0.1")])
        '127.0.0.1'
    """
    (network, own_host, own), *others = places
    away = [(host, address) for other, host, address in others if other != network]
    if not away or not _is_loopback(own):
        return own
    # Why possible: on its own machine a name often stands for the loopback interface.
    host, address = away[0]
    if not _is_loopback(address):
        return address_towards(address)
    return address_towards(host if host != own_host else ANYWHERE)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
