"""`InlineTransport`: reaches the coordinator of a process that is alone, in a thread of it.

The coordinator is a `CoordinatorLoop`, as of every session. All threads of the process share it.
Tasks run in threads of their own, and have the deadlines of their phases in real time: one that
hangs in the storage is abandoned, and ends the call.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import Left, OpKey, Reply, Request
from ray_dcp.coordinator.loop import CoordinatorLoop, LoopThread
from ray_dcp.coordinator.metrics import Performer
from ray_dcp.core import bounds
from ray_dcp.core.processes import OwnProcess, wait_any
from ray_dcp.errors import InternalError, SaveCancelledError
from ray_dcp.session.call_bound import CallBound
from ray_dcp.session.rank_progress import RankProgress
from ray_dcp.session.session import Session
from ray_dcp.session.transport import FutureTransport, Presence

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


class InlineTransport(FutureTransport):
    """A transport of world size 1 without Ray; see the module.

    Args:
        session: Name of the session.
        performer: Performs tasks; by default `tasks.perform`.
    """

    after_fork = ("this save or load", "Call save or load anew in the child")

    def __init__(self, session: str, performer: Performer | None = None) -> None:
        super().__init__(session, RANK, 1, who="the coordinator of this process", node="")
        self._make = lambda: _InlineLoop(performer)
        self._thread: LoopThread[_InlineLoop] | None = None
        self._starting = threading.Lock()

    def call(self, request: Request, silence_s: float | None, bound: CallBound) -> Reply:
        """See `Transport.call`.

        Raises:
            InternalError: The request is of another rank or world.
        """
        if request.rank or (isinstance(request, Opening) and request.world_size != 1):
            raise InternalError(
                f"Expected rank 0 of world size 1, as this is a session of one process, but found "
                f"a {type(request).__name__} of rank {request.rank}"
            )
        # Why without a bound of its own: the deadlines of all phases pass in the same process.
        return super().call(request, silence_s=None, bound=replace(bound, timeout_s=math.inf))

    def send(self, method: str, *arguments: Any) -> Future[Any]:
        """See `FutureTransport.send`."""
        with self._starting:
            if self._thread is None:
                self._thread = LoopThread(self._make)
                weakref.finalize(self, _stop, self._thread, OwnProcess()).atexit = False
            thread = self._thread
        return thread.ask(method, *arguments)

    def presence(self) -> InlinePresence:
        """See `Transport.presence`."""
        return InlinePresence(self)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._thread is not None:
            self._thread.stop()


def _stop(thread: LoopThread[_InlineLoop], owner: OwnProcess) -> None:
    if owner.is_this:
        thread.stop()


class InlinePresence(Presence):
    """The calls of a process that is alone, which needs no heartbeats.

    Args:
        transport: Reaches the coordinator.
    """

    def __init__(self, transport: InlineTransport) -> None:
        self._transport = transport
        self._calls: set[RankProgress] = set()

    def add(self, progress: RankProgress, timeout_s: float) -> None:
        """See `Presence.add`."""
        self._calls.add(progress)

    def remove(self, progress: RankProgress) -> None:
        """See `Presence.remove`."""
        self._calls.discard(progress)

    def leave(self, left: Left, wait_s: float) -> None:
        """See `Presence.leave`; waits until the tasks of the operation have ended."""
        if not self._transport.member.closed:
            # Why not `ask`: a second Ctrl-C would cancel the call before the loop has begun it.
            wait_any([self._transport.send("withdraw", left, wait_s)], wait_s + bounds.UNWIND_S)

    def cancelled(self, key: OpKey) -> None:
        """See `Presence.cancelled`."""
        for progress in list(self._calls):
            if progress.key == key:
                progress.stop.because(SaveCancelledError("The save was cancelled"))


def inline_session(name: str = "inline", *, performer: Performer | None = None) -> Session:
    """Returns a new session of a process that is alone: world size 1, no Ray.

    Args:
        name: Name of the session.
        performer: Performs tasks; by default `tasks.perform`.

    Examples:
        >>> inline_session("doc").next_key()
        OpKey(session='doc', seq=0, step=0)
    """
    return Session(InlineTransport(name, performer))


_alone: list[Session] = []
"""The session of this process."""
os.register_at_fork(after_in_child=_alone.clear)


def session_alone() -> Session:
    """Returns the session of this process if it is alone; always the same one."""
    if not _alone:
        _alone.append(inline_session())
    return _alone[-1]
