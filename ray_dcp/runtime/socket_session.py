"""`SocketSession`: the session of a rank of a torch process group that nobody gave a Ray.

Rank 0 runs the coordinator, a `SocketCoordinator`. It listens on the interface by which the job's
store is reached, or the other machines where that is the loopback interface. A random key goes
through the store, and authenticates both ends of every connection.

A rank whose connection closes connects again, and sends what has no answer yet again. Where nobody
listens any more rank 0 has ended, and the session with it: what is under way is settled on storage,
and the next call fails by name. *Rejected:* to elect another coordinator, as the process group
can't go on without rank 0 either.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing import AuthenticationError
from typing import Any, Protocol

from ray_dcp.commit_protocol.liveness import OUT_OF_REACH_S, Heartbeat, HeartbeatAck
from ray_dcp.core.processes import start_thread
from ray_dcp.errors import (
    CheckpointError,
    DeadlineError,
    InternalError,
    LimitError,
    ParticipantError,
)
from ray_dcp.runtime.heartbeat import HeartbeatSender
from ray_dcp.runtime.process_group import address_towards, host_of, interface_of
from ray_dcp.runtime.session import Session
from ray_dcp.runtime.socket_coordinator import HANDSHAKE_S, Channel, SocketCoordinator

JOIN_S = 60.0
"""How long the ranks wait for each other while they connect, in seconds."""

LOOK_S = 0.5
"""How often a call that waits looks whether that is still of use, in seconds."""

_PAUSE_S = 0.2
"""Before another try to connect, in seconds."""

logger = logging.getLogger(__name__)


class Link(Protocol):
    """The way of a rank to its coordinator."""

    ended: ParticipantError | None
    """Why there is no coordinator any more."""
    on_end: Callable[[], None]
    """Called when there is none any more."""

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Returns what a method of the coordinator will return."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class SocketLink:
    """The connection of a rank other than 0 to the coordinator.

    Args:
        session: Name of the session.
        rank: This rank.
        place: This process, for messages.
        address: Where rank 0 listens.
        key: Authenticates both.

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
        """See `Link.ask`."""
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
        """See `Link.close`."""
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
            OSError: This rank has closed it; or nobody listens, which is the end of rank 0; or no
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


class SocketHeartbeatSender(HeartbeatSender):
    """Sends heartbeats over a `Link`.

    Args:
        link: To the coordinator.
        session: Name of the session.
        rank: This rank.
        who: The coordinator in words, for errors.
    """

    def __init__(self, link: Link, session: str, rank: int, who: str) -> None:
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
    """A session without Ray: see the module.

    Args:
        name: As for `Session`.
        rank: As there.
        world_size: As there.
        link: To the coordinator.
        place: This process, for messages.
    """

    def __init__(self, name: str, rank: int, world_size: int, link: Link, place: str) -> None:
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


# --- how the ranks find each other --------------------------------------------------------------


def join_by_store(store: Any, name: str, rank: int, world_size: int) -> SocketSession:
    """Returns the session of a rank, connected; every rank calls it.

    Args:
        store: That of the job.
        name: Of the session.
        rank: This rank in it.
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
