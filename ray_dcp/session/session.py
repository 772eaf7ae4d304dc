"""`Session`: a rank's line to its coordinator. `discovery` creates it.

A session is created once: by `connect`, from the Ray Train context, or from the initialised torch
process group, with one broadcast and one gather. After that no operation uses the group. If a Ray
was named, its transport is a `RayTransport`, else a `SocketTransport`; a process that is alone has
an `InlineTransport`. A session only carries messages to the coordinator and replies back.

*Careful*: importing this module does not import ray; a process that is alone never needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import (
    Left,
    OpKey,
    Reply,
    Request,
    SaveStaged,
)
from ray_dcp.commit_protocol.plan_cache import PlanMemory
from ray_dcp.core import bounds
from ray_dcp.errors import DeadlineError, ParticipantError
from ray_dcp.options import SaveOptions
from ray_dcp.rank.unchanged import RunHistory
from ray_dcp.session.call_bound import CallBound, longest_s
from ray_dcp.session.names import NAMESPACE
from ray_dcp.session.rank_progress import RankProgress
from ray_dcp.session.transport import Transport

if TYPE_CHECKING:
    from ray_dcp.session.ray_actors import RayActors


class Session:
    """The operations of one rank in one group of ranks, over one coordinator.

    Calls may come from several threads.

    Args:
        transport: Carries the messages. Its session has a name that was never used before, and is
            the same on all ranks.

    Attributes:
        name: Name of the session.
        rank: This rank, from 0.
        world_size: Number of ranks.
        node: Name of this rank's node; empty for a process that is alone.
        plans: Plans of this rank's earlier saves.
        history: What this rank knows of the runs that it saved to.
        own_values: The rank whose `PerRank` values this process loads, and the number of ranks.
            Others than its own where it loads alone what several save together.
        skipped_calls: How many calls of the others this rank has missed, as far as it knows.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._presence = transport, transport.presence()
        self._member = transport.member
        self.name, self.node = transport.session, transport.node
        self.rank, self.world_size = transport.rank, transport.world_size
        self.on_close: Callable[[], None] = lambda: None
        """Called when this process leaves the session."""
        self._lock = threading.Lock()
        self._next_seq, self.skipped_calls = 0, 0
        self.plans, self.history = PlanMemory(), RunHistory()
        self.own_values = self.rank, self.world_size

    def __repr__(self) -> str:
        return repr(self._member)

    @property
    def closed(self) -> bool:
        """Whether this process has left the session."""
        return self._member.closed

    @property
    def ray(self) -> RayActors | None:
        """The actors of this session; None without Ray.

        The stager of this node holds the bytes of asynchronous saves; without Ray, this process.
        """
        return self._transport.ray

    @property
    def namespace(self) -> str:
        """Ray namespace of the actors of this session, and of the memory that its loads look in."""
        return NAMESPACE if self.ray is None else self.ray.namespace

    def next_key(self) -> OpKey:
        """Returns the key of the next call of this rank's user.

        Ranks that make the same calls in the same order get the same keys.

        Raises:
            InvalidRequestError: The session is closed.
        """
        self._member.check()
        with self._lock:
            self._next_seq += 1
            return OpKey(self.name, self._next_seq - 1)

    def call(
        self, request: Request, *, silence_s: float | None = None, timeout_s: float | None = None
    ) -> Reply:
        """Returns the coordinator's reply to a request.

        Args:
            request: A request of this rank, with a key of this session.
            silence_s: Silence, in seconds, after which the coordinator may mark this rank as
                frozen, because it sends heartbeats in a call of the user. None: it sends none.
            timeout_s: How long the coordinator may take to answer, in seconds; by default
                `longest_s` for the default options.

        Raises:
            DeadlineError: The coordinator is frozen, or did not answer within `MARGIN_S` after its
                own deadline.
            ParticipantError: The coordinator is out of reach, or died and does not know the
                operation.
            InvalidRequestError: The session is closed.
        """
        self._member.check()
        is_held = isinstance(request, SaveStaged)
        outlives_restart = is_held or isinstance(request, Opening)
        staged = request.key if is_held else None
        bound = CallBound(
            longest_s(request, SaveOptions()) if timeout_s is None else timeout_s,
            lambda failed: self._presence.failure(failed, outlives_restart, staged),
            lambda: self._presence.queued_s(request.key),
        )
        try:
            return self._transport.call(request, silence_s, bound)
        except (ParticipantError, DeadlineError) as error:
            self.leave(Left(request.key, f"{type(error).__name__}: {error.message}"))
            raise

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
        self._member.check()
        bound = CallBound(bounds.MARGIN_S)
        cancelled: bool = self._transport.ask("cancel", key, reason, bound=bound)
        if cancelled:
            self._presence.cancelled(key)
        return cancelled

    # For a call of the user

    def begin_call(self, progress: RankProgress, timeout_s: float) -> None:
        """Lets the coordinator know that this rank is in a call of the user; see `Presence.add`."""
        self._presence.add(progress, timeout_s)

    def end_call(self, progress: RankProgress) -> None:
        """Ends that; see `Presence.remove`."""
        self._presence.remove(progress)

    def leave(self, left: Left, wait_s: float = 0.0) -> None:
        """Reports that this rank leaves an operation before its end; see `Presence.leave`.

        Args:
            left: The operation and the reason.
            wait_s: How long to wait until the coordinator has acted on it, in seconds.
        """
        if self._member.process.is_this:
            self._presence.leave(left, wait_s)

    def coordinator_info(self) -> dict[str, Any]:
        """Returns the coordinator's `epoch`, `pid`, `node_id` and `active` operations."""
        self._member.check()
        info: dict[str, Any] = self._transport.ask("info", bound=CallBound(bounds.MARGIN_S))
        return info

    @property
    def is_outlived(self) -> bool:
        """Whether this process has left what the session stands on, and can make another one."""
        return self.closed or self._transport.is_replaced

    def close(self) -> None:
        """Leaves the session. Never raises because the coordinator is gone."""
        if not self.closed:
            self._member.closed = True
            if self._member.process.is_this:
                self.history.close()
                self.on_close()
                self._transport.close()
