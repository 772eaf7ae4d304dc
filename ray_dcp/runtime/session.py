"""`Session`: how a rank calls its coordinator. `discovery` makes it.

A session is made once: by `connect`, from the Ray Train context, or from the initialised torch
process group, which serves one broadcast and one gather. After that no operation uses the group.
Where somebody named a Ray it is a `RaySession`, else a `SocketSession`; a process that is alone has
an `InlineSession`. A session is only how a message gets to the coordinator and back.

`CallTimeouts` are the outermost bounds of a rank's calls, longer than all of the coordinator's own
deadlines: for a coordinator that sends heartbeats and yet never answers. One that is dead or frozen
is detected long before (`heartbeat`).

`Connection` knows whether this process is still connected to the Ray that its handles are of. Users
shut Ray down, and start it again. A handle from before is of no use then, and worse: a call to Ray
in a process without Ray starts a new cluster, without being asked.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import (
    Exchange,
    Left,
    LoadDone,
    LoadJoin,
    LoadReady,
    OpKey,
    PartsHeld,
    Reply,
    Request,
    SaveStaged,
)
from ray_dcp.core.processes import OwnProcess, ProcessLock
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DeadlineError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.heartbeat import HeartbeatSender
from ray_dcp.runtime.rank_progress import Activity, RankProgress
from ray_dcp.runtime.rank_save import PlanMemory
from ray_dcp.runtime.unchanged import RunHistory

MARGIN_S = 120.0
"""How much longer than the coordinator's own deadlines a rank waits for it, in seconds: the
coordinator knows who is missing, so its error is the better one."""

_PLAN_PHASES = 5
"""Phases between a join and its answer, each with the deadline `plan_timeout_s`: all ranks join,
some send their rows, twice at most, the storage is read, the plan is made."""
_OPEN_PHASES = 3
"""The same of a load: all ranks join, the storage is read, with one to spare."""
_COMMIT_PHASES = 5
"""Phases between the last receipt and the outcome, each with the deadline `commit_timeout_s`."""
_REMEMBERED = 16
"""Operations whose options are remembered."""


class CallTimeouts:
    """Knows the options of the operations that one rank has begun.

    Examples:
        >>> from ray_dcp.commit_protocol.messages import Target
        >>> key = OpKey("run", 0)
        >>> CallTimeouts().of(LoadJoin(key, 0, 1, Target("memory://x"), LoadOptions()))
        1920.0
    """

    def __init__(self) -> None:
        self._options: dict[OpKey, SaveOptions | LoadOptions] = {}

    def of(self, request: Request) -> float:
        """Returns how long the coordinator may take before it is the one that is missing.

        Args:
            request: Any request of this rank; its opening came before the others.

        Returns:
            Seconds.
        """
        if isinstance(request, Exchange):
            return request.timeout_s + MARGIN_S
        if isinstance(request, Opening):
            kept = [*self._options.items()][-_REMEMBERED:]
            self._options = dict([*kept, (request.key, request.options)])
            phases = _OPEN_PHASES if isinstance(request, LoadJoin) else _PLAN_PHASES
            return phases * request.options.plan_timeout_s + MARGIN_S
        options = self._options.get(request.key)
        if isinstance(request, LoadReady | LoadDone):
            load = options if isinstance(options, LoadOptions) else LoadOptions()
            return load.plan_timeout_s + load.read_timeout_s + MARGIN_S
        save = options if isinstance(options, SaveOptions) else SaveOptions()
        return save.write_timeout_s + _COMMIT_PHASES * save.commit_timeout_s + MARGIN_S


class Session(ABC):
    """The operations of one rank in one group of ranks, over one coordinator.

    Calls may come from several threads. `RaySession` and `SocketSession` say how a message gets to
    the coordinator.

    Args:
        name: Of this session, the same on all its ranks and never used before.
        rank: This process, from 0.
        world_size: Number of ranks.
        who: The coordinator in words, for errors.
        node: Names the node of this rank.
        heartbeats: Sends them.
    """

    stages_itself = True
    """Whether this process holds the bytes of its asynchronous saves; else a stager does."""

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        who: str,
        node: str,
        heartbeats: HeartbeatSender,
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
        self._timeouts = CallTimeouts()
        self._heartbeats = heartbeats

    def __repr__(self) -> str:
        return f"Session({self.name!r}, rank={self.rank}, world_size={self.world_size})"

    def next_key(self) -> OpKey:
        """Returns the key of this rank's next call of its user.

        Ranks that make the same calls in the same order get the same keys.

        Raises:
            InvalidRequestError: The session was closed.
        """
        self._check_open()
        with self._lock:
            self._next_seq += 1
            return OpKey(self.name, self._next_seq - 1)

    def activity(self, timeout_s: float, key: OpKey | None = None) -> Activity:
        """Returns what a call of the user uses this session through: a context manager.

        While it is entered this rank sends heartbeats, and detects a coordinator that is silent.

        Args:
            timeout_s: `heartbeat_timeout_s` of that call, in seconds.
            key: Of that call, if `next_key` named it before.
        """
        return Activity(self, timeout_s, key)

    def call(self, request: Request, *, silence_s: float | None = None) -> Reply:
        """Returns the coordinator's reply to a request.

        Args:
            request: Of this rank, with a key of this session.
            silence_s: Silence, in seconds, after which the coordinator may mark this rank frozen:
                it is in an activity, and sends heartbeats. None: it sends none.

        Raises:
            DeadlineError: The coordinator is frozen, or did not answer `MARGIN_S` after its own
                deadline.
            ParticipantError: The coordinator is out of reach, or died and knows no more what the
                request is about.
            InvalidRequestError: The session was closed.
        """
        self._check_open()
        is_held = isinstance(request, SaveStaged | PartsHeld)
        outlives_restart = is_held or isinstance(request, Opening)
        timeout_s = self._timeouts.of(request)
        try:
            reply: Reply = self._batched(request, silence_s) or self._ask(
                "call",
                request,
                self._caller,
                silence_s,
                timeout_s=timeout_s,
                given_up=lambda failed: self._heartbeats.failure(failed, outlives_restart, is_held),
                uncounted_s=lambda: self._heartbeats.queued_s(request.key),
            )
        except (ParticipantError, DeadlineError) as error:
            self.leave(Left(request.key, f"{type(error).__name__}: {error.message}"))
            raise
        return reply

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Fails a save on all ranks with `SaveCancelledError`, unless its commit has begun.

        May be called from any thread and any rank, and again.

        Args:
            key: Which save.
            reason: Who wants it, for the error.

        Returns:
            Whether it was still possible; the same when asked again.

        Raises:
            ParticipantError: The coordinator is out of reach.
            InvalidRequestError: The session was closed.
        """
        self._check_open()
        cancelled: bool = self._ask("cancel", key, reason, timeout_s=MARGIN_S)
        return cancelled

    # For an activity

    def begin_call(self, progress: RankProgress, timeout_s: float) -> None:
        """Begins to send heartbeats for a call of the user."""
        self._heartbeats.add(progress, timeout_s)

    def end_call(self, progress: RankProgress) -> None:
        """Ends that."""
        self._heartbeats.remove(progress)

    def leave(self, left: Left, wait_s: float = 0.0) -> None:
        """Reports that this rank leaves an operation before its end. See `HeartbeatSender.leave`.

        Args:
            left: Which operation, and why.
            wait_s: How long to wait until a coordinator knows, in seconds.
        """
        self._heartbeats.leave(left, wait_s)

    def coordinator_info(self) -> dict[str, Any]:
        """Returns what the coordinator reports of itself: `epoch`, `pid`, `node_id`, `active`."""
        self._check_open()
        info: dict[str, Any] = self._ask("info", timeout_s=MARGIN_S)
        return info

    def close(self) -> None:
        """Leaves the session. Never raises for a coordinator that is gone already."""
        if not self.closed:
            self.closed = True
            if self._process.is_this:
                self._close()

    # What a kind of session adds

    @property
    @abstractmethod
    def _caller(self) -> Any:
        """This process, as the coordinator registers it; its text is for messages."""

    @abstractmethod
    def _ask(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        given_up: Callable[[bool], CheckpointError | None] = lambda _: None,
        uncounted_s: Callable[[], float] = lambda: 0.0,
    ) -> Any:
        """Returns what a method of the coordinator returns; repeats the call where that may help.

        Args:
            method: Of `CoordinatorLoop`.
            arguments: Of it.
            timeout_s: For everything, repeats included, in seconds.
            given_up: Asked now and then why it is of no use to wait any longer. Its argument:
                whether the coordinator was out of reach meanwhile.
            uncounted_s: Returns how much of the time so far does not count, in seconds.

        Raises:
            DeadlineError: No answer in time.
            ParticipantError: The coordinator is gone, or out of reach.
            CheckpointError: What the method raised, or `given_up` returned.
        """

    def _batched(self, request: Request, silence_s: float | None) -> Reply | None:
        """Returns the reply to a request that went together with others; None where none did."""
        return None

    @abstractmethod
    def _close(self) -> None:
        """Lets go of what this session has."""

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


class GroupSessions:
    """The sessions of the living process groups of this process, and that of `connect`."""

    def __init__(self) -> None:
        self.explicit: Session | None = None
        self._lock = ProcessLock()
        self._groups: dict[int, tuple[weakref.ref[Any], Session | None]] = {}
        self._making: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def making(self, group: Any) -> threading.Lock:
        """Returns the lock under which the first session of a group is made."""
        with self._lock:
            return self._making[id(group)]

    def of(self, group: Any) -> tuple[bool, Session | None]:
        """Returns whether this very group object has been here, and its session.

        A group that was destroyed and made again is another object, and has no session yet.
        """
        with self._lock:
            known, session = self._groups.get(id(group), (None, None))
            if known is None or known() is not group or (session is not None and session.closed):
                return False, None
            return True, session

    def set(self, group: Any, session: Session | None) -> None:
        """Notes the session of a group (None: a group of one) and closes those of dead groups."""
        with self._lock:
            dead = [key for key, (known, _) in self._groups.items() if known() is None]
            ended = [self._groups.pop(key)[1] for key in dead]
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
"""Those of this process. In a child that was forked they stay, and refuse calls: without them it
would save alone, to the same places."""


class Connection:
    """This process's connection to Ray, as it is when this is made.

    Args:
        who: Needs it, in words.
        rank: This rank, for errors.
    """

    def __init__(self, who: str, rank: int) -> None:
        # Why here: a process that is alone has no need of Ray.
        from ray_dcp.runtime import ray_private

        ray_private.survive_shutdown()
        self._who, self._rank = who, rank
        self._now = ray_private.this_connection
        self._made_with = self._now()

    @property
    def is_up(self) -> bool:
        """Whether it is the same still."""
        return self._made_with is not None and self._now() == self._made_with

    def check(self) -> None:
        """Raises `ParticipantError` when it is not up."""
        if not self.is_up:
            raise ParticipantError(
                f"Expected the Ray that {self._who} was made with, but this process has shut it "
                f"down since. Call ray.shutdown() after the last save or load has ended; to go "
                f"on, close the session and connect again",
                rank=self._rank,
            )


class Disconnected(Exception):
    """Ray was shut down in this process while something of it was under way."""


def until_disconnected(
    call: Callable[[Request], Reply], connection: Connection | None
) -> Callable[[Request], Reply]:
    """Returns what calls the coordinator, or raises `Disconnected`.

    *Why* not as for any other rank that gets no answer, which votes against its own save: the
    stager and the coordinator may live, in a cluster that this process only left.

    Args:
        call: Returns the coordinator's reply.
        connection: Of the session; None for one without Ray.
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
        url: Where it saves to.
        attempt: Its attempt.
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
