"""Saves and loads without Ray: one coordination, its tasks and its ranks in one thread.

This executor is the specification of what an executor has to do; the coordinator actor does the
same with time and processes. `InlineSession` serves a process that is alone.

`Shell` carries out the commands of a coordination, one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

from ray_dcp.commit_protocol.commands import (
    Answer,
    Arm,
    Command,
    Disarm,
    Perform,
    Result,
    step_of,
)
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import Left, OpKey, Refused, Reply, Request
from ray_dcp.errors import CheckpointError, InternalError, SaveCancelledError
from ray_dcp.runtime.metrics import Performer, Tracing
from ray_dcp.runtime.rank_progress import Activity, RankProgress
from ray_dcp.runtime.rank_save import PlanMemory
from ray_dcp.runtime.tasks import new_attempt, perform


class Shell:
    """Carries out the commands of a coordination, one at a time. Whoever uses it has the time.

    Attributes:
        answers: Given and not yet taken, oldest first, each to one rank.
        tasks: To be performed, oldest first.
    """

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination
        self.answers: list[Answer] = []
        self.tasks: list[Perform] = []
        self._timers: dict[OpKey, tuple[float, str]] = {}

    def receive(self, request: Request, silence_s: float | None = None) -> Refused | None:
        """Hands over a request; returns the reply to this very call when it is refused."""
        try:
            self._carry_out(self.coordination.receive(request, silence_s=silence_s))
        except CheckpointError as error:
            return Refused(error)
        return None

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Cancels a save; returns whether that was still possible."""
        self._carry_out(self.coordination.cancel(key, reason))
        return self.coordination.is_cancelled(key)

    def withdraw(self, rank: int, left: Left) -> None:
        """Removes a rank from an operation before its end."""
        self._carry_out(self.coordination.withdraw(rank, left))

    def performed(self, todo: Perform, result: Result) -> None:
        """Takes the result of a task."""
        self._carry_out(self.coordination.performed(todo.key, todo.task, result))

    def due_s(self, key: OpKey) -> float | None:
        """Returns how long an operation's phase may last, in seconds."""
        timer = self._timers.get(key)
        return None if timer is None else timer[0]

    def expire_one(self, key: OpKey) -> None:
        """Lets the timer of an operation run out."""
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
    """The session of a process that is alone: world size 1, no Ray.

    Calls from several threads come one after the other. Tasks have the deadlines of their phases,
    in real time: one that hangs in the storage is left to itself, and ends the call.

    Args:
        name: Of the session.
        performer: What carries out tasks.
        new_attempt: Names attempts.

    Examples:
        >>> InlineSession("doc").next_key()
        OpKey(session='doc', seq=0, step=0)
    """

    rank = 0
    world_size = 1
    node = ""
    skipped_calls = 0

    def __init__(
        self,
        name: str = "inline",
        *,
        performer: Performer = perform,
        new_attempt: Callable[[], str] = new_attempt,
    ) -> None:
        self.name = name
        self._shell = Shell(Coordination(epoch=1, new_attempt=new_attempt))
        self._performer = performer
        self._tracing = Tracing()
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._under_way: set[Future[Result]] = set()
        self._calls: set[RankProgress] = set()
        self._next_seq = 0
        self.plans = PlanMemory()

    def next_key(self) -> OpKey:
        """Returns the key of the next call."""
        with self._lock:
            self._next_seq += 1
            return OpKey(self.name, self._next_seq - 1)

    def activity(self, timeout_s: float, key: OpKey | None = None) -> Activity:
        """Returns what a call of the user uses this session through; see `Session.activity`."""
        return Activity(self, timeout_s, key)

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Cancels a save; returns whether that was still possible. See `Session.cancel`."""
        with self._lock:
            cancelled = self._shell.cancel(key, reason)
            for progress in self._calls:
                if cancelled and progress.key == key:
                    progress.stop.because(SaveCancelledError(f"The save was cancelled: {reason}"))
            self._work_off()
            return cancelled

    def begin_call(self, progress: RankProgress, timeout_s: float) -> None:
        """Registers a call of the user."""
        with self._lock:
            self._calls.add(progress)

    def end_call(self, progress: RankProgress) -> None:
        """Removes a call that has ended."""
        with self._lock:
            self._calls.discard(progress)

    def leave(self, left: Left, wait_s: float = 0.0) -> None:
        """Ends an operation that its caller has left.

        Args:
            left: Which operation, and why. One that is over is fine.
            wait_s: How long to wait until what is under way is done, in seconds.
        """
        with self._lock:
            self._shell.withdraw(self.rank, left)
            self._work_off()
            self._quiet.wait_for(lambda: not self._under_way, wait_s)

    def call(self, request: Request, *, silence_s: float | None = None) -> Reply:
        """Returns the reply to a request, when all that it leads to is done.

        Args:
            request: Of rank 0 in a world of 1.
            silence_s: Ignored: nobody listens but this process itself.

        Raises:
            InternalError: No reply came.
        """
        with self._lock:
            shell = self._shell
            self._tracing.record_request(request)
            refused = shell.receive(request)
            self._work_off()
            answers, shell.answers = shell.answers, []
            for answer in answers:
                self._tracing.record_answer(answer)
        at = (request.key, request.rank, step_of(request))
        for answer in answers:
            if (answer.key, *answer.ranks, answer.step) == at:
                return answer.reply
        if refused is not None:
            return refused
        raise InternalError(
            f"Expected a reply to {step_of(request)}, but none came: a session of one process "
            f"takes rank 0 of world size 1"
        )

    def _work_off(self) -> None:
        """Does all tasks, each until its phase's deadline."""
        shell = self._shell
        while shell.tasks:
            todo = shell.tasks.pop(0)
            done: Future[Result] = Future()
            try:
                self._start(todo, done)
                result = done.result(shell.due_s(todo.key))
            except FutureTimeoutError:
                done.add_done_callback(partial(self._came_late, todo))
                shell.expire_one(todo.key)
            except BaseException:
                # Why: the caller was interrupted, and the task goes on.
                done.add_done_callback(partial(self._came_late, todo))
                raise
            else:
                shell.performed(todo, result)

    def _start(self, todo: Perform, done: Future[Result]) -> None:
        self._under_way.add(done)

        def run() -> None:
            try:
                result = self._tracing.perform(todo, self._performer)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                done.set_exception(error)
            else:
                done.set_result(result)
            with self._lock:
                self._under_way.discard(done)
                self._quiet.notify_all()

        # Why a thread: one that hangs in the kernel can't be ended, but it can be left.
        threading.Thread(target=run, daemon=True).start()

    def _came_late(self, todo: Perform, done: Future[Result]) -> None:
        """Takes the result of a task that its caller did not wait for."""
        if done.exception() is None:
            with self._lock:
                self._shell.performed(todo, done.result())
                self._work_off()
