"""`Activity`: one call of the user on one rank, from begin to end, and how it uses the session.

While it lasts the rank sends heartbeats. A rank that leaves it by anything but an error of ray_dcp
(Ctrl-C above all) fails the call on every rank instead of letting the others wait.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.messages import OpKey, Renumbered, Reply, Request
from ray_dcp.runtime.rank_progress import RankProgress
from ray_dcp.runtime.rank_save import PlanMemory

LEAVING_S = 10.0
"""How long a rank that is interrupted takes to tell the others so, in seconds."""


class ActiveSession(Protocol):
    """What an activity needs of a session."""

    rank: int
    world_size: int
    plans: PlanMemory
    node: str
    skipped_calls: int
    """How many calls the other ranks made without this one."""

    def next_key(self) -> OpKey:
        """Returns the key of the next call."""
        ...

    def call(self, request: Request, *, beats_s: float | None = None) -> Reply:
        """Returns the coordinator's reply."""
        ...

    def begins(self, vitals: RankProgress, timeout_s: float) -> None:
        """Begins to send heartbeats."""
        ...

    def ends(self, vitals: RankProgress) -> None:
        """Ends that."""
        ...

    def gave_up(self, key: OpKey) -> None:
        """Tells a new coordinator that this rank began an operation with the one before."""
        ...

    def withdraw(self, key: OpKey, reason: str) -> None:
        """Tells that this rank leaves an operation before its end."""
        ...


class Activity:
    """A session for the time of one call of the user.

    Args:
        session: Of this rank.
        timeout_s: `heartbeat_timeout_s` of the call, in seconds.
        key: Of this call, if the session named it before.

    Attributes:
        vitals: How far it is.

    Example:
        >>> from ray_dcp.runtime.inline import InlineSession
        >>> with InlineSession("doc").activity(60.0) as activity:
        ...     activity.next_key(), activity.next_key()
        (OpKey(session='doc', seq=0, step=0), OpKey(session='doc', seq=0, step=1))
    """

    def __init__(
        self,
        session: ActiveSession,
        timeout_s: float,
        key: OpKey | None = None,
    ) -> None:
        self.vitals = RankProgress()
        self._named, self._num_steps = key, 0
        self._seq: int | None = None
        self._session = session
        self._timeout_s = timeout_s

    @property
    def rank(self) -> int:
        """Rank in the session."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the session."""
        return self._session.world_size

    @property
    def plans(self) -> PlanMemory:
        """Plans of this rank's earlier saves."""
        return self._session.plans

    @property
    def node(self) -> str:
        """Names the node of this rank; empty for a process that is alone."""
        return self._session.node

    def next_key(self) -> OpKey:
        """Returns the key of the next operation."""
        named = self._named = self._named or self._session.next_key()
        if self._seq is None:
            self._seq = named.seq + self._session.skipped_calls
        key = replace(named, seq=self._seq, step=self._num_steps)
        self._num_steps += 1
        self.vitals.names(key)
        return key

    def call(self, request: Request) -> Reply:
        """Returns the coordinator's reply.

        Args:
            request: As for the session; it is sent under the number that this call has now.

        Raises:
            CheckpointError: As the session does.
        """
        while True:
            seq = request.key.seq if self._seq is None else self._seq
            sent = replace(request, key=replace(request.key, seq=seq))
            reply = self._session.call(sent, beats_s=self._timeout_s)
            if not isinstance(reply, Renumbered):
                return reply
            self._seq = reply.seq
            self.vitals.renumber(reply.seq)
            missed = reply.seq - (self._named or request.key).seq
            self._session.skipped_calls = max(self._session.skipped_calls, missed)

    def __enter__(self) -> Activity:
        # Why now: a call that fails before its first operation counts as well.
        self._named = self._named or self._session.next_key()
        self._session.begins(self.vitals, self._timeout_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            key = self.vitals.key
            left_early = error is not None and not isinstance(error, CheckpointError)
            if left_early and key is not None and not self.vitals.over:
                with suppress(CheckpointError):
                    self._session.withdraw(key, f"{type(error).__name__} on rank {self.rank}")
            elif key is not None and self.vitals.abandoned is not None:
                self._session.gave_up(key)
        finally:
            self._session.ends(self.vitals)
