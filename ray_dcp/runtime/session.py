"""`Session`: how a rank calls its coordinator, and how it finds the other ranks.

A session is made once: by `connect`, from the Ray Train context, or from the initialised torch
process group, which serves one broadcast and one gather. After that no operation uses the group.
`attach` and `private_ray` have how a process attaches to a Ray.

`CallTimeouts` are the outermost bounds of a rank's calls, longer than all of the coordinator's own
deadlines: for a coordinator that sends heartbeats and yet never answers. One that is dead or frozen
is detected long before (`heartbeat`).

`Connection` knows whether this process is still connected to the Ray that its handles are of. Users
shut Ray down, and start it again. A handle from before is of no use then, and worse: a call to Ray
in a process without Ray starts a new cluster, without being asked.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_dcp.commit_protocol.error_aggregation import Opening, name_ranks
from ray_dcp.commit_protocol.liveness import LONG_WAIT_S
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
from ray_dcp.core.checks import check_above_0
from ray_dcp.core.processes import OwnProcess, ProcessLock
from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    DeadlineError,
    InvalidRequestError,
    ParticipantError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.runtime.actor_names import LEASE_S, NAMESPACE, memory_owner
from ray_dcp.runtime.rank_progress import Activity, RankProgress
from ray_dcp.runtime.rank_save import PlanMemory

if TYPE_CHECKING:
    from ray_dcp.runtime.staging import RankStaging
    from ray_dcp.stage.values import StagerOptions


def check_connect(address: Any, rank: Any, world_size: Any, name: Any, timeout_s: Any) -> None:
    """Raises `InvalidRequestError` for arguments that `connect` can't use, or a second connect."""
    if address is not None and (not isinstance(address, str) or not address):
        raise InvalidRequestError(
            f"Expected address to name a Ray cluster, such as 'host:6379' or 'auto', but found "
            f"{address!r}",
            key="address",
        )
    numbers = (rank, world_size)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in numbers) or not (
        0 <= rank < world_size
    ):
        raise InvalidRequestError(
            f"Expected a rank from 0 to world_size - 1, but found rank={rank!r}, "
            f"world_size={world_size!r}. Give each process its own number",
            key="rank",
        )
    if name is None and world_size > 1:
        raise InvalidRequestError(
            f"Expected a name that the {world_size} ranks share, but found none. Give "
            f"connect(name=...), the same on every rank",
            key="name",
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidRequestError(
            f"Expected name to be a string of at least one character, but found {name!r}",
            key="name",
        )
    check_above_0(timeout_s, "timeout_s")
    if sessions.explicit is not None:
        raise InvalidRequestError(
            f"Expected one connect at a time, but {sessions.explicit!r} is open. Close it first",
            rank=rank,
        )


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


logger = logging.getLogger(__name__)


class Session:
    """The operations of one rank in one group of ranks, over one coordinator.

    Calls may come from several threads. It owns nothing but its place.

    Args:
        name: Of this session, the same on all its ranks and never used before.
        rank: This process, from 0.
        world_size: Number of ranks.
        actor: What the coordinator is called after; the session's name by default.
        namespace: Ray namespace of the coordinator.
        lease_s: How long an unused coordinator stays, in seconds.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        *,
        actor: str | None = None,
        namespace: str = NAMESPACE,
        lease_s: float = LEASE_S,
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.closed = False
        self._actor = actor or name
        self._who = f"the coordinator of session {self._actor!r}"
        self.namespace = namespace
        self.lease_s = check_above_0(lease_s, "lease_s")
        self._process = OwnProcess()
        self._lock = threading.Lock()
        self._staging: RankStaging | None = None
        self._staging_lock = threading.Lock()
        self._next_seq, self.skipped_calls, self.plans = 0, 0, PlanMemory()
        self._handle: Any = None
        from ray_dcp.runtime import ray_private

        self._caller = ray_private.this_caller(os.getpid())
        self.node, _ = ray_private.this_connection() or ("", "")
        from ray_dcp.runtime.gatherer import GatheredCalls
        from ray_dcp.runtime.heartbeat import HeartbeatSender

        self.connection = Connection(repr(self), rank)
        self._timeouts = CallTimeouts()
        self._heartbeats = HeartbeatSender(self._reach, self.name, rank, self._who, self._actor)
        self._gathered = GatheredCalls(rank, world_size, self._actor, namespace, lease_s)

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
            reply: Reply = self._gathered.call(request, self._caller, silence_s) or self._ask(
                lambda actor: actor.call.remote(request, self._caller, silence_s),
                timeout_s,
                lambda failed: self._heartbeats.failure(failed, outlives_restart, is_held),
                lambda: self._heartbeats.queued_s(request.key),
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
        cancelled: bool = self._ask(lambda actor: actor.cancel.remote(key, reason), MARGIN_S)
        return cancelled

    # For asynchronous saves

    def staging(self, options: StagerOptions | None = None) -> RankStaging:
        """Returns this rank's place at its node's stager, made on first use.

        Args:
            options: For a stager that is made now.

        Raises:
            ParticipantError: No stager starts.
        """
        from ray_dcp.runtime.staging import RankStaging

        self._check_open()
        self.connection.check()
        with self._staging_lock:
            if self._staging is None:
                self._staging = RankStaging(
                    f"{self.name}:{self.rank}",
                    owner=memory_owner(self._actor, self.rank),
                    namespace=self.namespace,
                    lease_s=self.lease_s,
                    options=options,
                )
            return self._staging

    def coordinator(self) -> Any:
        """Returns the handle of the coordinator."""
        return self._reach(False)

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
        info: dict[str, Any] = self._ask(lambda actor: actor.info.remote(), MARGIN_S)
        return info

    def register(self) -> None:
        """Registers this rank with the coordinator, which then detects its death.

        Raises:
            ParticipantError: The coordinator is out of reach.
        """
        self._check_open()
        self._ask(lambda actor: actor.register.remote(self.name, self.rank, self._caller), MARGIN_S)

    def enter(self, token: str, timeout_s: float) -> str:
        """Returns the generation on which this rank and all others of the name agree.

        Args:
            token: Tells this process from an earlier one of the same rank.
            timeout_s: How long to wait for the others, in seconds.

        Raises:
            DeadlineError: Some rank did not come in time; the message names them.
            RankDisagreementError: The ranks differ about their number.
        """
        answer = self._enter(token, min(timeout_s, LONG_WAIT_S))
        if not isinstance(answer, str) and timeout_s > LONG_WAIT_S:
            logger.warning(
                "Rank %d has waited %g s to connect as %r: %s did not come yet",
                self.rank,
                LONG_WAIT_S,
                self._actor,
                name_ranks(answer),
            )
            answer = self._enter(token, timeout_s - LONG_WAIT_S)
        if isinstance(answer, str):
            return answer
        raise DeadlineError(
            f"Expected {self.world_size} ranks to connect as {self._actor!r} within "
            f"{timeout_s:g} s, but ranks {answer} did not come. Start them, or correct world_size",
            rank=self.rank,
        )

    def _enter(self, token: str, timeout_s: float) -> str | list[int]:
        answer: str | list[int] = self._ask(
            lambda actor: actor.enter.remote(self.rank, self.world_size, token, timeout_s),
            timeout_s + MARGIN_S,
        )
        return answer

    def continued(self, where: str) -> Session:
        """Returns the session that takes the place of this one, whose private Ray was lost.

        Its calls go on with the numbers of this one, so that ranks which come to it at different
        calls know whom they wait for. This process is in the next Ray already.

        Args:
            where: Names that Ray, the same on all ranks.

        Raises:
            ParticipantError: Its coordinator is out of reach.
        """
        after = Session(
            f"{self.name}-{where}",
            self.rank,
            self.world_size,
            namespace=self.namespace,
            lease_s=self.lease_s,
        )
        with self._lock:
            after._next_seq, after.skipped_calls = self._next_seq, self.skipped_calls
        after.register()
        if self._staging is not None:
            self._staging.close()
        return after

    def close(self) -> None:
        """Leaves the session. Never raises for a coordinator that is gone already."""
        if self.closed:
            return
        self.closed = True
        if not self._process.is_this:
            return
        if sessions.explicit is self:
            from ray_dcp.runtime.discovery import announce_connect

            announce_connect(False)
            sessions.explicit = None
        self._gathered.close()
        if self._staging is not None:
            self._staging.close()
        if self._handle is not None and self.connection.is_up:
            self._handle.leave.remote(self.name, self.rank)

    def _ask(
        self,
        send: Any,
        timeout_s: float,
        given_up: Callable[[bool], CheckpointError | None] = lambda _: None,
        uncounted_s: Callable[[], float] = lambda: 0.0,
    ) -> Any:
        from ray_dcp.runtime.coordinator_call import call_actor

        return call_actor(
            self._who,
            self._reach,
            send,
            timeout_s=timeout_s,
            rank=self.rank,
            given_up=given_up,
            uncounted_s=uncounted_s,
        )

    def _reach(self, fresh: bool) -> Any:
        from ray_dcp.runtime.coordinator import coordinator_of

        self.connection.check()
        with self._lock:
            if fresh or self._handle is None:
                self._handle = coordinator_of(
                    self._actor, namespace=self.namespace, lease_s=self.lease_s
                )
            return self._handle

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


def connect(
    address: str | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    name: str | None = None,
    namespace: str = NAMESPACE,
    timeout_s: float = 600.0,
    lease_s: float = LEASE_S,
) -> Session:
    """Returns the session of this process among ranks that know each other only by a name.

    Every rank calls it; it returns when all have. From then on `save` and `load` use it, until it
    is closed.

    Args:
        address: Ray cluster. `RAY_ADDRESS` counts when it is None, and the cluster that this
            process is connected to; no other cluster is ever used.
        rank: Number of this process, from 0.
        world_size: Number of processes.
        name: What the processes share; may be left out by one that is alone. The same name may be
            used again by the next run of the job.
        namespace: Ray namespace for the coordinator.
        timeout_s: How long to wait for the other ranks, in seconds.
        lease_s: How long an unused coordinator stays, in seconds.

    Raises:
        InvalidRequestError: No cluster was named, an argument is wrong, or this process has an
            open session from another `connect`.
        ParticipantError: The cluster can't be reached, or a rank did not come.
    """
    check_connect(address, rank, world_size, name, timeout_s)
    check_above_0(lease_s, "lease_s")
    from ray_dcp.runtime.attach import attach_named
    from ray_dcp.runtime.discovery import connect_announced

    if attach_named(address) is None:
        raise InvalidRequestError(
            "Expected a Ray cluster, but none was named. Give connect(address=...), set "
            "RAY_ADDRESS, or call ray.init() first",
            key="address",
        )
    shared = name or f"alone-{secrets.token_hex(6)}"
    place = Session(shared, rank, world_size, namespace=namespace, lease_s=lease_s)
    with connect_announced():
        generation = place.enter(secrets.token_hex(8), timeout_s)
    session = Session(
        f"{shared}/{generation}",
        rank,
        world_size,
        actor=shared,
        namespace=namespace,
        lease_s=lease_s,
    )
    session.register()
    sessions.explicit = session
    return session


def current_session(
    process_group: Any = None, no_dist: bool = False, *, lease_s: float = LEASE_S
) -> Session | None:
    """Returns this rank's session for a group, after making it when it is the first time.

    The first call for a group is collective over that group; later ones are not. Looked for in
    this order: an explicit `connect`; the Ray Train context; the initialised torch process group.

    Args:
        process_group: A torch process group; None for the whole job.
        no_dist: This process saves or loads alone.
        lease_s: How long what is started for the session stays when it is unused, in seconds.

    Returns:
        None for a process that is alone: `InlineSession` does it, without Ray.

    Raises:
        InvalidRequestError: This process is not in the group.
        ParticipantError: Some rank can't come to the session's Ray; raised on all ranks.
    """
    if no_dist:
        return None
    if process_group is None and sessions.explicit is not None:
        return sessions.explicit
    if process_group is None and not may_be_distributed():
        return None
    from ray_dcp.runtime import discovery

    return discovery.session_of(
        process_group, Session, sessions, lease_s=check_above_0(lease_s, "lease_s")
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


def may_be_distributed() -> bool:
    """Returns whether this process could be a rank: it uses Ray, or a process group of several."""
    distributed = sys.modules.get("torch.distributed")
    if "ray" in sys.modules or distributed is None or not distributed.is_available():
        return "ray" in sys.modules
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


class Connection:
    """This process's connection to Ray, as it is when this is made.

    Args:
        who: Needs it, in words.
        rank: This rank, for errors.
    """

    def __init__(self, who: str, rank: int) -> None:
        # Why here: a process that is alone has no need of Ray.
        from ray_dcp.runtime import private_ray, ray_private

        ray_private.survive_shutdown()
        self._who, self._rank = who, rank
        self._own = private_ray.joined()
        self._now = ray_private.this_connection
        self._made_with = self._now()

    @property
    def is_up(self) -> bool:
        """Whether it is the same still."""
        return self._made_with is not None and self._now() == self._made_with

    @property
    def is_lost(self) -> bool:
        """Whether it is to a private Ray that has died; see `PrivateRay.is_lost`."""
        return self._own is not None and self._own.is_lost

    def check_own(self) -> None:
        """Raises `ParticipantError` when it is lost."""
        if self._own is not None:
            self._own.check(self._rank)

    def check(self) -> None:
        """Raises `ParticipantError` when it is lost, or not up."""
        self.check_own()
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
    stager and the coordinator may live, in a cluster that this process only left. Where a Ray of
    our own was lost they do not, and its error is raised.

    Args:
        call: Returns the coordinator's reply.
        connection: Of the session; None for one without Ray.
    """

    def connected(request: Request) -> Reply:
        try:
            return call(request)
        except (ParticipantError, SystemExit) as error:
            if connection is not None:
                connection.check_own()
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
