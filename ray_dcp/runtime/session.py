"""Sessions: what a rank calls its coordinator with, and how it finds the other ranks.

A session is made once: by `connect`, from the Ray Train context, or from the initialised torch
process group, which serves one broadcast and one gather. After that no operation uses the group.
How a process comes to a Ray is in `attach` and `own_ray`.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from typing import Any

from ray_dcp.errors import DeadlineError, InvalidRequestError
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.protocol.messages import (
    Exchange,
    LoadDone,
    LoadJoin,
    LoadReady,
    OpKey,
    Reply,
    Request,
    SaveJoin,
    SaveReceipt,
)
from ray_dcp.runtime import registry
from ray_dcp.runtime.naming import LEASE_S, NAMESPACE, check_lease

__all__ = ["Session", "connect", "current_session"]

MARGIN_S = 120.0
"""How much longer than the coordinator's own deadlines a rank waits for it, in seconds: the
coordinator knows who is missing, so its error is the better one."""

_PLAN_PHASES = 3
"""Phases between a join and its answer, each with the deadline `plan_timeout_s`: all ranks come,
the storage is looked at, the plan is made."""
_COMMIT_PHASES = 5
"""Phases between the last receipt and the outcome, each with the deadline `commit_timeout_s`."""


class Session:
    """The operations of one rank in one group of ranks, over one coordinator.

    Calls may come from several threads. It owns nothing but its place: the coordinator leaves by
    itself.

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
        self._namespace = namespace
        self._lease_s = check_lease(lease_s)
        self._lock = threading.Lock()
        self._next_seq = 0
        self._handle: Any = None
        from ray_dcp.runtime import hooks

        self._caller = hooks.this_caller(os.getpid())
        self._options: dict[OpKey, SaveOptions | LoadOptions] = {}

    def __repr__(self) -> str:
        return f"Session({self.name!r}, rank={self.rank}, world_size={self.world_size})"

    def next_key(self) -> OpKey:
        """Returns the key of this rank's next operation.

        Ranks that call the same operations in the same order get the same keys.

        Raises:
            InvalidRequestError: The session was closed.
        """
        self._check_open()
        with self._lock:
            self._next_seq += 1
            return OpKey(self.name, self._next_seq - 1)

    def call(self, request: Request) -> Reply:
        """Returns the coordinator's reply to a request.

        Args:
            request: Of this rank, with a key of this session.

        Raises:
            DeadlineError: The coordinator did not answer, `MARGIN_S` after its own deadline.
            ParticipantError: The coordinator is out of reach.
            InvalidRequestError: The session was closed.
        """
        self._check_open()
        reply: Reply = self._ask(
            lambda actor: actor.call.remote(request, self._caller), self._patience_s(request)
        )
        return reply

    def coordinator_info(self) -> dict[str, Any]:
        """Returns what the coordinator says of itself: `epoch`, `pid`, `node_id`, `active`."""
        self._check_open()
        info: dict[str, Any] = self._ask(lambda actor: actor.info.remote(), MARGIN_S)
        return info

    def greet(self) -> None:
        """Tells the coordinator that this rank is there, so that it sees it die.

        Raises:
            ParticipantError: The coordinator is out of reach.
        """
        self._check_open()
        self._ask(lambda actor: actor.greet.remote(self.name, self.rank, self._caller), MARGIN_S)

    def enter(self, word: str, timeout_s: float) -> str:
        """Returns the generation on which this rank and all others of the name agree.

        Args:
            word: Tells this process from an earlier one of the same rank.
            timeout_s: How long to wait for the others, in seconds.

        Raises:
            DeadlineError: Some rank did not come in time; the message names them.
            RankDisagreementError: The ranks differ about their number.
        """
        answer = self._ask(
            lambda actor: actor.enter.remote(self.rank, self.world_size, word, timeout_s),
            timeout_s + MARGIN_S,
        )
        if isinstance(answer, str):
            return answer
        raise DeadlineError(
            f"Expected {self.world_size} ranks to connect as {self._actor!r} within "
            f"{timeout_s:g} s, but ranks {answer} did not come. Start them, or correct world_size",
            rank=self.rank,
        )

    def close(self) -> None:
        """Gives up this rank's place. Never raises for a coordinator that is gone already."""
        if self.closed:
            return
        self.closed = True
        registry.forget(self)
        import ray

        if self._handle is not None and ray.is_initialized():
            self._handle.leave.remote(self.name, self.rank)

    def _ask(self, send: Any, timeout_s: float) -> Any:
        from ray_dcp.runtime.call import call_actor

        who = f"the coordinator of session {self._actor!r}"
        return call_actor(who, self._reach, send, timeout_s=timeout_s, rank=self.rank)

    def _reach(self, fresh: bool) -> Any:
        from ray_dcp.runtime.coordinator import coordinator_of

        with self._lock:
            if fresh or self._handle is None:
                self._handle = coordinator_of(
                    self._actor, namespace=self._namespace, lease_s=self._lease_s
                )
            return self._handle

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidRequestError(
                f"Expected an open session, but {self!r} was closed. Make another one, or drop "
                f"the one that ray_dcp.connect returned before",
                rank=self.rank,
            )

    def _patience_s(self, request: Request) -> float:
        """Returns how long the coordinator may take before it is the one that is missing."""
        match request:
            case SaveJoin(options=options) | LoadJoin(options=options):
                self._options = {request.key: options, **dict([*self._options.items()][-16:])}
                return _PLAN_PHASES * options.plan_timeout_s + MARGIN_S
            case SaveReceipt():
                save = self._options.get(request.key)
                save = save if isinstance(save, SaveOptions) else SaveOptions()
                commit_s = _COMMIT_PHASES * save.commit_timeout_s
                return save.write_timeout_s + commit_s + MARGIN_S
            case LoadReady() | LoadDone():
                load = self._options.get(request.key)
                load = load if isinstance(load, LoadOptions) else LoadOptions()
                return load.plan_timeout_s + load.read_timeout_s + MARGIN_S
            case Exchange():
                return request.timeout_s + MARGIN_S


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
    _check_connect(rank, world_size, name, timeout_s)
    check_lease(lease_s)
    from ray_dcp.runtime.attach import attach_named

    if attach_named(address) is None:
        raise InvalidRequestError(
            "Expected a Ray cluster, but none was named. Give connect(address=...), set "
            "RAY_ADDRESS, or call ray.init() first",
            key="address",
        )
    shared = name or f"alone-{secrets.token_hex(6)}"
    place = Session(shared, rank, world_size, namespace=namespace, lease_s=lease_s)
    generation = place.enter(secrets.token_hex(8), timeout_s)
    session = Session(
        f"{shared}/{generation}",
        rank,
        world_size,
        actor=shared,
        namespace=namespace,
        lease_s=lease_s,
    )
    session.greet()
    registry.set_explicit(session)
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
    explicit = registry.explicit()
    if process_group is None and explicit is not None:
        return explicit
    if process_group is None and not _may_have_company():
        return None
    from ray_dcp.runtime import groups

    return groups.session_of(process_group, lease_s=check_lease(lease_s))


def _may_have_company() -> bool:
    """Returns whether this process could be a rank: it uses Ray, or has a process group."""
    distributed = sys.modules.get("torch.distributed")
    grouped = (
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )
    return grouped or "ray" in sys.modules


def _check_connect(rank: int, world_size: int, name: str | None, timeout_s: float) -> None:
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
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidRequestError(
            f"Expected timeout_s to be a number of seconds above 0, but found {timeout_s!r}",
            key="timeout_s",
        )
    open_session = registry.explicit()
    if open_session is not None:
        raise InvalidRequestError(
            f"Expected one connect at a time, but {open_session!r} is open. Close it first",
            rank=rank,
        )
