"""The coordinator of a socket session: a `CoordinatorLoop` in threads of rank 0's process.

Ranks connect by a `Channel`, which authenticates both ends before a byte is unpickled. A connection
that closes is a hint: a rank that does not connect again within `RETURN_S` counts as dead.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Queue
from typing import Any

from ray_dcp.core.processes import OwnProcess, start_thread
from ray_dcp.errors import CheckpointError, InternalError, LimitError, ParticipantError
from ray_dcp.runtime.coordinator_loop import CoordinatorLoop, Member

RETURN_S = 0.5
"""How long a rank whose connection closed may take to connect again, in seconds."""

HANDSHAKE_S = 10.0
"""How long one end may take to authenticate, in seconds."""

EXIT_S = 10.0
"""How long the process of rank 0 goes on at its end until the others have their answers, in
seconds."""

_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""After 25 s without a sign of the other machine a connection on which nothing is sent closes; and
nothing on the way forgets it before."""

_PAUSE_S = 0.2
"""Before another try to accept a connection, in seconds."""

_METHODS = frozenset(["call", "beat", "cancel", "leave", "info"])
"""Of the coordinator, for ranks that connect."""

logger = logging.getLogger(__name__)

_open: set[socket.socket | Connection] = set()
"""Of this process. *Why*: while a child that was forked has them, the end of its parent closes
none, and nobody sees it."""


def _close_in_child() -> None:
    for one in list(_open):
        one.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


class Channel:
    """An authenticated connection for numbered messages. Whoever sends one does not wait for that.

    Args:
        sock: Connected; closed if authentication fails.
        key: What both ends know.
        serves: Whether this end has accepted the connection.

    Raises:
        AuthenticationError: The other end does not know the key.
        OSError: It is gone, or does not answer.
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
        """Sends a message some time later; nothing, where the connection is closed."""
        self._outgoing.put(number.to_bytes(8, "big") + pickle.dumps(message, -1))

    def receive(self) -> tuple[int, bytes]:
        """Returns the next message: its number, and what `pickle.loads` makes it of.

        Raises:
            EOFError: The connection is closed.
            OSError: The same.
        """
        data = self._connection.recv_bytes()
        return int.from_bytes(data[:8], "big"), data[8:]

    def flush(self, end_s: float) -> None:
        """Returns when all is sent, or `time.monotonic` is beyond the end."""
        with self._outgoing.all_tasks_done:
            self._outgoing.all_tasks_done.wait_for(
                lambda: not self._outgoing.unfinished_tasks, max(0.0, end_s - time.monotonic())
            )

    def close(self) -> None:
        """Closes it; whoever waits in `receive` gets an error."""
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
        """Notes by which connection a rank is reached."""
        self.channels[member] = channel
        self._register(*member, place)

    def disconnected(self, member: Member, place: str, channel: Channel) -> None:
        """Notes that a connection closed."""
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
        """Returns the connections, when nothing is under way any more."""
        while self._performing or self._coordination.active:
            await asyncio.sleep(0.01)
        return [*self.channels.values()]


class SocketCoordinator:
    """The coordinator of one session, in threads of rank 0's process; also rank 0's `Link`.

    Args:
        session: Name of the session.
        host: Address of the interface on which it listens.
        key: Authenticates the ranks.

    Raises:
        OSError: It can't listen there.
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
        """See `Link.ask`."""
        if self._closing:
            failed: Future[Any] = Future()
            failed.set_exception(ParticipantError("The coordinator was closed", rank=0))
            return failed
        call = getattr(self._serving, method)
        return asyncio.run_coroutine_threadsafe(call(*arguments), self._loop)

    def close(self) -> None:
        """Ends it, when the other ranks have the answers that there are: for them rank 0 leaves."""
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
