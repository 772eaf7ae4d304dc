"""`InlineSession`: the session of a process that is alone, without Ray.

Its coordinator is a `CoordinatorLoop`, as of every session, in a thread of this process. All
threads share it.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections.abc import Callable

from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import Left, OpKey, Reply, Request
from ray_dcp.core.processes import OwnProcess
from ray_dcp.errors import InternalError, SaveCancelledError
from ray_dcp.io.threads import UNWIND_S
from ray_dcp.runtime.coordinator_loop import CoordinatorLoop, LoopThread
from ray_dcp.runtime.metrics import Performer
from ray_dcp.runtime.rank_progress import RankProgress
from ray_dcp.runtime.session import LinkSession
from ray_dcp.runtime.tasks import new_attempt

RANK = 0


class _InlineLoop(CoordinatorLoop):
    """The loop, with a call by which its only rank leaves an operation."""

    _grace_s = 2 * UNWIND_S  # Why: the rank reports its own deadline first, with the file.

    def __init__(self, performer: Performer | None, new_attempt: Callable[[], str]) -> None:
        super().__init__(performer=performer, new_attempt=new_attempt)
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
        new_attempt: Returns attempt ids.

    Examples:
        >>> InlineSession("doc").next_key()
        OpKey(session='doc', seq=0, step=0)
    """

    def __init__(
        self,
        name: str = "inline",
        *,
        performer: Performer | None = None,
        new_attempt: Callable[[], str] = new_attempt,
    ) -> None:
        super().__init__(name, RANK, 1, who="the coordinator of this process", node="")
        self._make = lambda: _InlineLoop(performer, new_attempt)
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
        self._ask("withdraw", left, wait_s, timeout_s=math.inf)

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
