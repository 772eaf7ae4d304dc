"""Saves and loads without Ray: one coordination for the calls of all threads of a process.

This executor is the specification of an executor; the coordinator actor does the same with several
processes. `InlineSession` serves a process that is alone. `Shell` executes the commands of a
coordination, one at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ray_dcp.commit_protocol.commands import (
    Answer,
    Arm,
    Command,
    Disarm,
    Failed,
    Perform,
    Result,
    step_of,
)
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.error_aggregation import Opening
from ray_dcp.commit_protocol.messages import Left, OpKey, Refused, Reply, Request
from ray_dcp.core.processes import OwnProcess, start_thread
from ray_dcp.errors import CheckpointError, InternalError, LimitError, SaveCancelledError
from ray_dcp.runtime.metrics import Performer, Tracing
from ray_dcp.runtime.rank_progress import Activity, RankProgress
from ray_dcp.runtime.rank_save import PlanMemory
from ray_dcp.runtime.tasks import new_attempt, perform
from ray_dcp.runtime.unchanged import RunHistory


class Shell:
    """Executes the commands of a coordination, one at a time. Its user measures the time.

    Attributes:
        answers: Answers that were not taken yet, oldest first, each for one rank.
        tasks: Tasks to perform, oldest first.
    """

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination
        self.answers: list[Answer] = []
        self.tasks: list[Perform] = []
        self._timers: dict[OpKey, tuple[float, str]] = {}

    def receive(self, request: Request, silence_s: float | None = None) -> Refused | None:
        """Passes on a request; returns the reply to this call if the request is refused."""
        try:
            self._carry_out(self.coordination.receive(request, silence_s=silence_s))
        except CheckpointError as error:
            return Refused(error)
        return None

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Cancels a save; returns whether that was possible."""
        self._carry_out(self.coordination.cancel(key, reason))
        return self.coordination.is_cancelled(key)

    def withdraw(self, rank: int, left: Left) -> None:
        """Removes a rank from an operation before its end."""
        self._carry_out(self.coordination.withdraw(rank, left))

    def performed(self, todo: Perform, result: Result) -> None:
        """Passes on the result of a task."""
        self._carry_out(self.coordination.performed(todo.key, todo.task, result))

    @property
    def timers(self) -> Mapping[OpKey, tuple[float, str]]:
        """The length, in seconds, and the phase of each operation's timer."""
        return self._timers

    def expire_one(self, key: OpKey) -> None:
        """Expires the timer of an operation."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            self._carry_out(self.coordination.expired(key, timer[1]))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Answer(key, ranks, step, reply):
                    self.answers += [Answer(key, (rank,), step, reply) for rank in ranks]
                case Perform():
                    self.tasks.append(command)
                case Arm(key, phase, after_s):
                    self._timers[key] = (after_s, phase)
                case Disarm(key):
                    self._timers.pop(key, None)


class InlineSession:
    """The session of a process that is alone: world size 1, no Ray. All threads share it.

    Tasks run in threads of their own, and have the deadlines of their phases in real time: one that
    hangs in the storage is abandoned, and ends the call. A thread that waits for a reply watches
    the deadlines of all operations, so that no call waits for ever behind another one.

    Args:
        name: Name of the session.
        performer: Performs tasks.
        new_attempt: Returns attempt ids.

    Attributes:
        is_whole: False once a caller was interrupted while it changed the session.

    Examples:
        >>> InlineSession("doc").next_key()
        OpKey(session='doc', seq=0, step=0)
    """

    rank = 0
    world_size = 1
    node = ""
    skipped_calls = 0
    stages_itself = True

    def __init__(
        self,
        name: str = "inline",
        *,
        performer: Performer = perform,
        new_attempt: Callable[[], str] = new_attempt,
    ) -> None:
        self.name = name
        self.plans, self.history = PlanMemory(), RunHistory()
        self.is_whole = True
        self._process = OwnProcess()
        self._shell = Shell(Coordination(epoch=1, new_attempt=new_attempt))
        self._performer = performer
        self._tracing = Tracing()
        self._changed = threading.Condition(threading.RLock())
        self._calls: set[RankProgress] = set()
        self._next_seq = 0
        self._awaited: set[_At] = set()
        self._replies: dict[_At, Reply] = {}
        self._running: list[_Running] = []
        self._due: dict[OpKey, tuple[tuple[float, str], float]] = {}

    def next_key(self) -> OpKey:
        """Returns the key of the next call."""
        with self._changing():
            self._next_seq += 1
            return OpKey(self.name, self._next_seq - 1)

    def activity(self, timeout_s: float, key: OpKey | None = None) -> Activity:
        """Returns a context manager for one call of the user; see `Session.activity`."""
        return Activity(self, timeout_s, key)

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Cancels a save; returns whether that was possible. See `Session.cancel`."""
        with self._changing():
            return self._shell.cancel(key, reason)

    def begin_call(self, progress: RankProgress, timeout_s: float) -> None:
        """Registers a call of the user."""
        with self._changing():
            self._calls.add(progress)

    def end_call(self, progress: RankProgress) -> None:
        """Removes a call that has ended."""
        with self._changing():
            self._calls.discard(progress)

    def leave(self, left: Left, wait_s: float = 0.0) -> None:
        """Ends an operation that its caller has left.

        Args:
            left: The operation and the reason. One that has ended does no harm.
            wait_s: How long to wait until its tasks have ended, in seconds.
        """
        with self._changing():
            self._shell.withdraw(self.rank, left)
        if wait_s > 0:
            with self._changed:
                self._changed.wait_for(
                    lambda: all(task.error for task in self._tasks_of(left.key)), wait_s
                )

    def call(self, request: Request, *, silence_s: float | None = None) -> Reply:
        """Returns the reply to a request, once everything that follows from it is done.

        Args:
            request: A request of rank 0 in a world of 1.
            silence_s: Ignored, as no other process listens.

        Raises:
            InternalError: The request is of another rank or world, or no reply can come any more.
        """
        if request.rank or (isinstance(request, Opening) and request.world_size != 1):
            raise InternalError(
                f"Expected rank 0 of world size 1, as this is a session of one process, but found "
                f"a {type(request).__name__} of rank {request.rank}"
            )
        at = (request.key, request.rank, step_of(request))
        try:
            with self._changing():
                self._awaited.add(at)
                self._tracing.record_request(request)
                refused = self._shell.receive(request)
            with self._changed:
                while at not in self._replies or self._is_pending(request.key):
                    if at not in self._replies and refused is not None:
                        return refused
                    self._wait(request.key)
                return self._replies[at]
        finally:
            with self._changed:
                self._awaited.discard(at)
                self._replies.pop(at, None)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lets the caller change the session, and executes the commands that follow."""
        self._process.check("this save or load", "Call save or load anew in the child")
        with self._changed:
            try:
                yield
                self._go_on()
            except BaseException:
                # Why: an interrupt may have come between a decision and its commands.
                self.is_whole = False
                raise
            finally:
                self._changed.notify_all()

    def _go_on(self) -> None:
        """Begins the tasks, hands out answers, and stops cancelled calls."""
        shell = self._shell
        while shell.tasks:
            self._start(shell.tasks.pop(0))
        answers, shell.answers = shell.answers, []
        for answer in answers:
            self._tracing.record_answer(answer)
            at = (answer.key, *answer.ranks, answer.step)
            if at in self._awaited:
                self._replies[at] = answer.reply
        now_s = time.monotonic()
        for key, timer in shell.timers.items():
            # Why by identity: each phase has a timer of its own, also of the same length.
            if key not in self._due or self._due[key][0] is not timer:
                self._due[key] = timer, now_s + timer[0]
        self._due = {key: due for key, due in self._due.items() if key in shell.timers}
        for progress in self._calls:
            own = progress.key
            if own is not None and not progress.stop.asked and shell.coordination.is_cancelled(own):
                progress.stop.because(SaveCancelledError("The save was cancelled"))

    def _tasks_of(self, key: OpKey) -> list[_Running]:
        return [task for task in self._running if task.key == key]

    def _is_pending(self, key: OpKey) -> bool:
        return any(not task.is_late for task in self._tasks_of(key))

    def _wait(self, key: OpKey) -> None:
        """Waits until something has changed, and expires the timers that are due.

        Args:
            key: The operation that is awaited.

        Raises:
            BaseException: The performer failed in this operation.
            InternalError: Nothing that could change is in progress.
        """
        for task in self._tasks_of(key):
            if task.error is not None:
                self._running.remove(task)
                raise task.error
        if not self._running and not self._due:
            raise InternalError(
                f"Expected a reply in operation {key.seq}, but nothing that could give one is "
                f"under way. Please report this"
            )
        next_s = min((due_s for _, due_s in self._due.values()), default=None)
        self._changed.wait(None if next_s is None else max(0.0, next_s - time.monotonic()))
        now_s = time.monotonic()
        for late in [late for late, (_, due_s) in self._due.items() if due_s <= now_s]:
            for task in self._tasks_of(late):
                task.is_late = True
            with self._changing():
                self._shell.expire_one(late)

    def _start(self, todo: Perform) -> None:
        task = _Running(todo.key)
        self._running.append(task)

        def run() -> None:
            try:
                result = self._tracing.perform(todo, self._performer)
                with self._changing():
                    self._running.remove(task)
                    self._shell.performed(todo, result)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                with self._changed:
                    task.error = error
                    self._running = [one for one in self._running if one is not task]
                    if not task.is_late:  # else nobody waits for it
                        self._running.append(task)
                    self._changed.notify_all()

        # Why a thread: one that hangs in the kernel can't be ended, but it can be left.
        try:
            start_thread(run, "ray_dcp task")
        except LimitError as error:
            self._running.remove(task)
            self._shell.performed(todo, Failed(error))


_At = tuple[OpKey, int, str]


@dataclass(eq=False)
class _Running:
    """A task in progress."""

    key: OpKey
    is_late: bool = False
    error: BaseException | None = None


_alone: list[InlineSession] = []
"""The session of this process."""
os.register_at_fork(after_in_child=_alone.clear)


def session_alone() -> InlineSession:
    """Returns the session of this process if it is alone; always the same one."""
    if not (_alone and _alone[-1].is_whole):
        _alone[:] = [InlineSession()]
    return _alone[-1]
