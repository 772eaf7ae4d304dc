"""`Session`: how a rank calls its coordinator. `discovery` creates it.

A session is created once: by `connect`, from the Ray Train context, or from the initialised torch
process group, with one broadcast and one gather. After that no operation uses the group. If a Ray
was named, it is a `RaySession`, else a `SocketSession`; a process that is alone has an
`InlineSession`. A session only carries messages to the coordinator and replies back.

`longest_s` is the outermost bound of a rank's call, longer than all deadlines of the coordinator:
for a coordinator that sends heartbeats but never answers. One that is dead or frozen is detected
long before (`heartbeat`).

`Connection` knows whether this process is still connected to the Ray of its handles. *Why*: users
shut Ray down, and start it again. A handle from before is useless then, and a call to Ray in a
process without Ray would start a new cluster.

The coordinator of an `InlineSession` is a `CoordinatorLoop`, as of every session, in a thread of
this process. All threads share it.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any

from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import (
    Exchange,
    Left,
    OpKey,
    Reply,
    Request,
    SaveStaged,
)
from ray_dcp.commit_protocol.plan_cache import PlanMemory
from ray_dcp.coordinator.loop import CoordinatorLoop, LoopThread
from ray_dcp.coordinator.metrics import Performer
from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess, ProcessLock, wait_any
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    ParticipantError,
    SaveCancelledError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.rank.unchanged import RunHistory
from ray_dcp.session.heartbeat import HeartbeatSender
from ray_dcp.session.names import NAMESPACE
from ray_dcp.session.rank_progress import RankProgress

if TYPE_CHECKING:
    from ray_dcp.session.shared_reads import RayPeers

MOST_CALLS = 1_000_000
"""Most calls of an actor that wait at once; each rank waits in two or three. *Why*: Ray admits 1000
by default, so that with more ranks the last one to join would never be admitted."""


def named_address() -> str | None:
    """Returns the cluster that the user named with `RAY_ADDRESS`, or None."""
    return os.environ.get("RAY_ADDRESS") or None


def group_name(first_rank: int, world_size: int) -> str:
    """Returns a new name for the session of a torch process group."""
    return f"group-{first_rank}-{world_size}-{secrets.token_hex(8)}"


_PLAN_PHASES = 5
"""Phases between a join and its reply, each with the deadline `plan_timeout_s`: all ranks join,
some send their rows, twice at most, the storage is read, the plan is made."""


_OPEN_PHASES = 3
"""The same for a load: all ranks join, the storage is read, and one to spare."""


_COMMIT_PHASES = 5
"""Phases between the last receipt and the outcome, each with the deadline `commit_timeout_s`."""


_REMEMBERED = 16
"""Number of operations whose options are remembered."""


def longest_s(request: Request, options: SaveOptions | LoadOptions) -> float:
    """Returns how long the coordinator may take to answer before it counts as lost, in seconds.

    Args:
        request: A request of a rank.
        options: Options of its operation.
    """
    if isinstance(request, Exchange):
        return request.timeout_s + bounds.MARGIN_S
    if isinstance(request, Opening):
        phases = _OPEN_PHASES if isinstance(options, LoadOptions) else _PLAN_PHASES
        return phases * options.plan_timeout_s + bounds.MARGIN_S
    if isinstance(options, LoadOptions):
        return options.plan_timeout_s + options.read_timeout_s + bounds.MARGIN_S
    return options.write_timeout_s + _COMMIT_PHASES * options.commit_timeout_s + bounds.MARGIN_S


class Session(ABC):
    """The operations of one rank in one group of ranks, over one coordinator.

    Calls may come from several threads. `RaySession` and `SocketSession` implement how a message
    reaches the coordinator.

    Args:
        name: Name of the session, the same on all ranks and never used before.
        rank: This rank, from 0.
        world_size: Number of ranks.
        who: Description of the coordinator, for errors.
        node: Name of this rank's node.
    """

    _heartbeats: HeartbeatSender
    """Sends the heartbeats; a process that is alone sends none."""
    stages_itself = True
    """Whether this process holds the bytes of its asynchronous saves; if not, a stager does."""
    namespace = NAMESPACE
    """Ray namespace of the actors of this session, and of the memory that its loads look in."""
    connection: Connection | None = None
    """Connection of this process to Ray; None for a session that needs none."""

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        who: str,
        node: str,
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.closed = False
        self.node = node
        self._who = who
        self._process = OwnProcess()
        self._lock = threading.Lock()
        self._next_seq, self.skipped_calls = 0, 0
        self.plans, self.history = PlanMemory(), RunHistory()
        self._options: dict[OpKey, SaveOptions | LoadOptions] = {}
        self.own_values = rank, world_size
        """The rank whose `PerRank` values this process loads, and the number of ranks. Others than
        its own where it loads alone what several save together."""

    def __repr__(self) -> str:
        return f"Session({self.name!r}, rank={self.rank}, world_size={self.world_size})"

    def next_key(self) -> OpKey:
        """Returns the key of the next call of this rank's user.

        Ranks that make the same calls in the same order get the same keys.

        Raises:
            InvalidRequestError: The session is closed.
        """
        self._check_open()
        with self._lock:
            self._next_seq += 1
            return OpKey(self.name, self._next_seq - 1)

    def call(self, request: Request, *, silence_s: float | None = None) -> Reply:
        """Returns the coordinator's reply to a request.

        Args:
            request: A request of this rank, with a key of this session.
            silence_s: Silence, in seconds, after which the coordinator may mark this rank as
                frozen, because it sends heartbeats in a call of the user. None: it sends none.

        Raises:
            DeadlineError: The coordinator is frozen, or did not answer within `MARGIN_S` after its
                own deadline.
            ParticipantError: The coordinator is out of reach, or died and does not know the
                operation.
            InvalidRequestError: The session is closed.
        """
        self._check_open()
        is_held = isinstance(request, SaveStaged)
        outlives_restart = is_held or isinstance(request, Opening)
        timeout_s = self._bound_s(request)
        try:
            reply: Reply = self._call_gatherer(request, silence_s) or self._ask(
                "call",
                request,
                self._sender,
                silence_s,
                timeout_s=timeout_s,
                given_up=lambda failed: self._heartbeats.failure(
                    failed, outlives_restart, request.key if is_held else None
                ),
                uncounted_s=lambda: self._heartbeats.queued_s(request.key),
            )
        except (ParticipantError, DeadlineError) as error:
            self.leave(Left(request.key, f"{type(error).__name__}: {error.message}"))
            raise
        return reply

    def _bound_s(self, request: Request) -> float:
        """Returns how long the coordinator may take to answer, in seconds."""
        if isinstance(request, Opening) and not isinstance(request, Exchange):
            kept = [*self._options.items()][-_REMEMBERED:]
            self._options = dict([*kept, (request.key, request.options)])
        return longest_s(request, self._options.get(request.key) or SaveOptions())

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Fails a save on all ranks with `SaveCancelledError`, unless its commit has begun.

        May be called from any thread and any rank, and repeatedly.

        Args:
            key: Key of the save.
            reason: Who cancels it, for the error.

        Returns:
            Whether that was possible; the same if called again.

        Raises:
            ParticipantError: The coordinator is out of reach.
            InvalidRequestError: The session is closed.
        """
        self._check_open()
        cancelled: bool = self._ask("cancel", key, reason, timeout_s=bounds.MARGIN_S)
        return cancelled

    # For a call of the user

    def begin_call(self, progress: RankProgress, timeout_s: float) -> None:
        """Begins to send heartbeats for a call of the user."""
        self._heartbeats.add(progress, timeout_s)

    def end_call(self, progress: RankProgress) -> None:
        """Ends the heartbeats for a call of the user."""
        self._heartbeats.remove(progress)

    def leave(self, left: Left, wait_s: float = 0.0) -> None:
        """Reports that this rank leaves an operation before its end; see `HeartbeatSender.leave`.

        Args:
            left: The operation and the reason.
            wait_s: How long to wait until a coordinator has received it, in seconds.
        """
        self._heartbeats.leave(left, wait_s)

    def coordinator_info(self) -> dict[str, Any]:
        """Returns the coordinator's `epoch`, `pid`, `node_id` and `active` operations."""
        self._check_open()
        info: dict[str, Any] = self._ask("info", timeout_s=bounds.MARGIN_S)
        return info

    def peers(self) -> RayPeers | None:
        """Returns the other ranks, for shared reads; None if this session passes no bytes on."""
        return None

    @property
    def is_outlived(self) -> bool:
        """Whether this process has left what the session stands on, and can make another one."""
        return self.closed

    def close(self) -> None:
        """Leaves the session. Never raises because the coordinator is gone."""
        if not self.closed:
            self.closed = True
            if self._process.is_this:
                self.history.close()
                self._close()

    # What a kind of session adds

    @property
    @abstractmethod
    def _sender(self) -> Any:
        """This process, for the coordinator; messages contain its string."""

    @abstractmethod
    def _ask(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        given_up: Callable[[bool], CheckpointError | None] = lambda _: None,
        uncounted_s: Callable[[], float] = lambda: 0.0,
    ) -> Any:
        """Returns the result of a method of the coordinator; repeats the call if that may help.

        Args:
            method: Name of a method of `CoordinatorLoop`.
            arguments: Arguments of the method.
            timeout_s: For everything, including repetitions, in seconds.
            given_up: Called regularly; returns why waiting any longer is useless, or None. Its
                argument says whether the coordinator was out of reach meanwhile.
            uncounted_s: Returns how much of the elapsed time does not count, in seconds.

        Raises:
            DeadlineError: No answer in time.
            ParticipantError: The coordinator is gone, or out of reach.
            CheckpointError: The method raised it, or `given_up` returned it.
        """

    def _call_gatherer(self, request: Request, silence_s: float | None) -> Reply | None:
        """Returns the reply to a request that was sent by a gatherer; None if it was not."""
        return None

    @abstractmethod
    def _close(self) -> None:
        """Releases the resources of this session."""

    def _check_open(self) -> None:
        self._process.check(
            repr(self), "Give no_dist=True to save or load alone there, or start it by spawn"
        )
        if self.closed:
            raise InvalidRequestError(
                f"Expected an open session, but {self!r} was closed. Make another one, or drop "
                f"the one that ray_dcp.connect returned before",
                rank=self.rank,
            )


LOOK_S = 0.5
"""Interval at which a waiting call checks whether it is still useful, in seconds."""


def closed_meanwhile(session: str, rank: int) -> ParticipantError:
    """Returns the error of a call during which its own process closed the session."""
    return ParticipantError(
        f"Expected session {session!r} to be open until the end of the call, but this process "
        f"closed it meanwhile",
        rank=rank,
    )


class LinkSession(Session):
    """A session whose calls are futures of a link to the coordinator."""

    @property
    @abstractmethod
    def _link(self) -> Any:
        """The link: its `ask` returns the future result of a method of the coordinator."""

    @property
    def _sender(self) -> Any:
        return None

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
                wait_any([answer], min(left_s, LOOK_S))
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
            raise closed_meanwhile(self.name, self.rank) from None
        finally:
            answer.cancel()


class GroupSessions:
    """The sessions of the process groups of this process, and that of `connect`."""

    def __init__(self) -> None:
        self.explicit: Session | None = None
        self._lock = ProcessLock()
        self._groups: dict[int, tuple[weakref.ref[Any], Session | None]] = {}
        self._making: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def making(self, group: Any) -> threading.Lock:
        """Returns the lock under which the first session of a group is created."""
        with self._lock:
            return self._making[id(group)]

    def of(self, group: Any) -> tuple[bool, Session | None]:
        """Returns whether this very group object is registered, and its session.

        A group that was destroyed and created again is another object, and has no session yet; nor
        has one whose session is outlived.
        """
        with self._lock:
            known, session = self._groups.get(id(group), (None, None))
            if known is None or known() is not group:
                return False, None
            if session is not None and session.is_outlived:
                return False, None
            return True, session

    def set(self, group: Any, session: Session | None) -> None:
        """Registers the session of a group, None for a group of one; closes unused ones."""
        with self._lock:
            dead = [key for key, (known, _) in self._groups.items() if known() is None]
            # Why the group itself: its session is outlived.
            replaced = [id(group)] if id(group) in self._groups else []
            ended = [self._groups.pop(key)[1] for key in {*dead, *replaced}]
            self._groups[id(group)] = (weakref.ref(group), session)
        for each in ended:
            if each is not None:
                each.close()

    def close_all(self) -> None:
        """Closes every session of this process."""
        with self._lock:
            sessions = [self.explicit, *(session for _, session in self._groups.values())]
            self._groups.clear()
        for session in sessions:
            if session is not None:
                session.close()


sessions = GroupSessions()
"""The sessions of this process. A forked child keeps them, and they refuse calls: without them it
would save alone, to the same places."""


class Connection:
    """The connection of this process to Ray, as it is when this object is created.

    Args:
        who: Description of its user.
        rank: This rank, for errors.
    """

    def __init__(self, who: str, rank: int) -> None:
        # Why here: a process that is alone has no need of Ray.
        from ray_dcp.session import ray_calls

        ray_calls.survive_shutdown()
        self._who, self._rank = who, rank
        self._now = ray_calls.this_connection
        self._made_with = self._now()

    @property
    def is_up(self) -> bool:
        """Whether the process is still connected to the same Ray."""
        return self._made_with is not None and self._now() == self._made_with

    @property
    def is_replaced(self) -> bool:
        """Whether the process is connected to another Ray, or anew to the same one."""
        return self._now() not in (None, self._made_with)

    def check(self) -> None:
        """Raises `ParticipantError` if the connection is not up."""
        if not self.is_up:
            raise ParticipantError(
                f"Expected the Ray that {self._who} was made with, but this process has shut it "
                f"down since. Call ray.shutdown() after the last save or load has ended; to go "
                f"on, call ray.init() again on all ranks, or, after ray_dcp.connect, close the "
                f"session and connect again",
                rank=self._rank,
            )


class Disconnected(Exception):
    """Ray was shut down in this process during a call."""


def until_disconnected(
    call: Callable[[Request], Reply], connection: Connection | None
) -> Callable[[Request], Reply]:
    """Returns a function that calls the coordinator, and raises `Disconnected` after a shutdown.

    *Why* not as for any other rank without an answer, which votes against its own save: the stager
    and the coordinator may live, in a cluster that only this process left.

    Args:
        call: Returns the coordinator's reply.
        connection: Connection of the session; None for a session without Ray.
    """

    def connected(request: Request) -> Reply:
        try:
            return call(request)
        except (ParticipantError, SystemExit) as error:
            # Ray ends the threads that wait for it by SystemExit when it is shut down.
            if isinstance(error, ParticipantError) and (connection is None or connection.is_up):
                raise
            raise Disconnected from error

    return connected


def shut_down_meanwhile(url: str, attempt: str, rank: int) -> CommitUnknownError:
    """Returns the error of a save whose process shut Ray down before its outcome.

    Args:
        url: URL of the checkpoint.
        attempt: The attempt.
        rank: This rank.
    """
    return CommitUnknownError(
        f"Expected Ray to be up until the save had ended, but it was shut down in this process "
        f"meanwhile. A cluster that goes on may still commit it: ask ray_dcp.outcome({url!r}, "
        f"{attempt!r}). Wait for the handle before ray.shutdown()",
        attempt=attempt,
        checkpoint_id=url,
        rank=rank,
    )


RANK = 0


class _InlineLoop(CoordinatorLoop):
    """The loop, with a call by which its only rank leaves an operation."""

    _grace_s = bounds.OWN_DEADLINE_S

    def __init__(self, performer: Performer | None) -> None:
        super().__init__(performer=performer)
        self._resumed.set()

    async def withdraw(self, left: Left, wait_s: float) -> None:
        """Ends an operation; returns once its tasks have ended, or `wait_s` has passed."""
        self._carry_out(self._coordination.withdraw(RANK, left))
        end_s = self._loop.time() + wait_s
        while left.key in self._performing and self._loop.time() < end_s:
            await asyncio.sleep(0.01)


class InlineSession(LinkSession):
    """The session of a process that is alone: world size 1, no Ray.

    Tasks run in threads of their own, and have the deadlines of their phases in real time: one that
    hangs in the storage is abandoned, and ends the call.

    Args:
        name: Name of the session.
        performer: Performs tasks; by default `tasks.perform`.

    Examples:
        >>> InlineSession("doc").next_key()
        OpKey(session='doc', seq=0, step=0)
    """

    def __init__(self, name: str = "inline", *, performer: Performer | None = None) -> None:
        super().__init__(name, RANK, 1, who="the coordinator of this process", node="")
        self._make = lambda: _InlineLoop(performer)
        self._thread: LoopThread[_InlineLoop] | None = None
        self._starting = threading.Lock()
        self._calls: set[RankProgress] = set()

    def call(self, request: Request, *, silence_s: float | None = None) -> Reply:
        """Returns the reply to a request; see `Session.call`.

        Raises:
            InternalError: The request is of another rank or world.
        """
        if request.rank or (isinstance(request, Opening) and request.world_size != 1):
            raise InternalError(
                f"Expected rank 0 of world size 1, as this is a session of one process, but found "
                f"a {type(request).__name__} of rank {request.rank}"
            )
        self._check_open()
        # Why without a bound of its own: the deadlines of all phases pass in the same process.
        reply: Reply = self._ask("call", request, timeout_s=math.inf)
        return reply

    def cancel(self, key: OpKey, reason: str) -> bool:
        """See `Session.cancel`."""
        cancelled = super().cancel(key, reason)
        for progress in list(self._calls) if cancelled else ():
            if progress.key == key:
                progress.stop.because(SaveCancelledError("The save was cancelled"))
        return cancelled

    def begin_call(self, progress: RankProgress, timeout_s: float) -> None:
        """Registers a call of the user, for `cancel`."""
        self._calls.add(progress)

    def end_call(self, progress: RankProgress) -> None:
        """Removes a call that has ended."""
        self._calls.discard(progress)

    def leave(self, left: Left, wait_s: float = 0.0) -> None:
        """Ends an operation that its caller has left.

        Args:
            left: The operation and the reason. One that has ended does no harm.
            wait_s: How long to wait until its tasks have ended, in seconds.
        """
        self._check_open()
        # Why not `_ask`: a second Ctrl-C would cancel the call before the loop has begun it.
        wait_any([self._link.ask("withdraw", left, wait_s)], wait_s + bounds.UNWIND_S)

    @property
    def _link(self) -> LoopThread[_InlineLoop]:
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread(self._make)
                weakref.finalize(self, _stop, self._thread, OwnProcess()).atexit = False
            return self._thread

    def _check_open(self) -> None:
        self._process.check("this save or load", "Call save or load anew in the child")
        super()._check_open()

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.stop()


def _stop(thread: LoopThread[_InlineLoop], owner: OwnProcess) -> None:
    if owner.is_this:
        thread.stop()


_alone: list[InlineSession] = []
"""The session of this process."""
os.register_at_fork(after_in_child=_alone.clear)


def session_alone() -> InlineSession:
    """Returns the session of this process if it is alone; always the same one."""
    if not _alone:
        _alone.append(InlineSession())
    return _alone[-1]
