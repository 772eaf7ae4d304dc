"""`SocketTransport`: reaches a coordinator in the process of rank 0, where no Ray was named.

Rank 0 runs the coordinator in a thread of its process. It listens on the interface by which the
job's store is reached, or by which the other machines are if that is the loopback interface. A
random key travels through the store; a `Channel` authenticates both ends by it.

A rank whose connection closes connects again, and sends its unanswered messages again. If nothing
listens any more, rank 0 has ended, and the session with it: operations in progress are settled on
storage, and the next call fails by name. *Rejected:* to elect another coordinator, as the process
group can't continue without rank 0 either.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import pickle
import platform
import random
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from ray_dcp.commit_protocol.liveness import Heartbeat, HeartbeatAck
from ray_dcp.coordinator.loop import LoopThread
from ray_dcp.coordinator.metrics import Performer
from ray_dcp.core import bounds
from ray_dcp.core.processes import network_namespace
from ray_dcp.core.wire_error import from_wire, text_of
from ray_dcp.errors import CheckpointError, ParticipantError
from ray_dcp.session.heartbeat import (
    HeartbeatSender,
    HeartbeatTransport,
    SenderState,
    Silence,
)
from ray_dcp.session.job_store import await_keys, job_store
from ray_dcp.session.rank0_address import address_towards, host_of, interface_of
from ray_dcp.session.session import Session
from ray_dcp.session.socket_channel import CLOSED, Channel
from ray_dcp.session.socket_coordinator import PAUSE_S, SocketCoordinator
from ray_dcp.session.transport import FutureTransport, closed_meanwhile

_LONGEST_PAUSE_S = 1.0
"""Pause before another try to connect after many tries, in seconds."""

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
        end_s, pause_s = loop.time() + timeout_s, PAUSE_S
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
