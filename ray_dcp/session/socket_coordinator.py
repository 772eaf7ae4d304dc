"""`SocketCoordinator`: the coordinator of a session in the process of rank 0.

It is a `CoordinatorLoop` in a thread, which listens for the other ranks. A connection that closes
is a hint: a rank that does not connect again within `RETURN_S` counts as dead. Connections that
have not authenticated are bounded, so that strangers can't take the descriptors of rank 0.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import pickle
import resource
import socket
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress

from ray_dcp.coordinator.loop import CoordinatorLoop, LoopThread, Member
from ray_dcp.coordinator.metrics import Performer
from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess
from ray_dcp.core.wire_error import to_wire
from ray_dcp.errors import CheckpointError, InternalError, ParticipantError
from ray_dcp.session.socket_channel import CLOSED, Channel, open_sockets

MOST_STRANGERS = 256
"""Most connections that have not authenticated; less where few files may be open. More wait."""

_METHODS = frozenset(["call", "beat", "cancel", "leave", "info"])
"""Methods of the coordinator that ranks may call."""

_REPORT_EVERY_S = 60.0
"""Interval at which refused connections are reported, in seconds."""

PAUSE_S = 0.2
"""Pause before another try to connect or to accept a connection, in seconds."""

logger = logging.getLogger(__name__)


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
                await asyncio.sleep(PAUSE_S)
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
        open_sockets.discard(self._server)
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
        open_sockets.add(server)
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
