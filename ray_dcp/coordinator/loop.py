"""The event loop of a coordinator: executes the commands of `Coordination`, without Ray.

It decides nothing: `ray_dcp.commit_protocol` decides, and `tasks` accesses the storage. A task that
may hang runs in a thread of its own, so that the event loop never blocks. `Coordinator`, the actor
of a Ray session, adds what Ray knows; a socket session runs this loop in a thread of rank 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from ray_dcp.commit_protocol.commands import Answer, Arm, Command, Disarm, Failed, Perform, step_of
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.liveness import AwakeClock, Heartbeat, HeartbeatAck
from ray_dcp.commit_protocol.messages import (
    BatchedReplies,
    MessageBatch,
    OpKey,
    Refused,
    Reply,
    Request,
)
from ray_dcp.coordinator.metrics import Performer, Tracing
from ray_dcp.coordinator.tasks import perform
from ray_dcp.core.processes import TaskThread, start_thread
from ray_dcp.core.wire_error import to_wire
from ray_dcp.errors import CheckpointError, InternalError, LimitError, ParticipantError
from ray_dcp.place.attempt_id import new_attempt

SILENCE_LOOK_S = 1.0
"""Interval at which silent ranks are looked for, in seconds."""

logger = logging.getLogger(__name__)

Member = tuple[str, int]
"""Name of a session, and a rank."""

Waiting = tuple[OpKey, int, str]

T = TypeVar("T")


class CoordinatorLoop:
    """Answers the requests of a session's ranks. Must be created in the event loop that runs it.

    *Invariant*: except for `tasks.perform`, everything happens in the event loop's thread, one
    event after another, as `Coordination` requires.

    Args:
        epoch: See `Coordination`.
        performer: Performs tasks; by default `tasks.perform`.
        new_attempt: Returns attempt ids.
    """

    _grace_s = 0.0
    """How much later than its deadline a phase is ended, in seconds."""

    def __init__(
        self,
        epoch: int = 1,
        *,
        performer: Performer | None = None,
        new_attempt: Callable[[], str] = new_attempt,
    ) -> None:
        self.epoch = epoch
        self._performer = performer
        self._loop = asyncio.get_running_loop()
        self._awake = AwakeClock(self._loop.time, SILENCE_LOOK_S)
        self._coordination = Coordination(epoch=epoch, new_attempt=new_attempt, clock=self._awake)
        self._tracing = Tracing()
        self._waiting: dict[Waiting, list[asyncio.Future[Reply]]] = {}
        self._timers: dict[OpKey, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._called = asyncio.Event()
        self._threads: dict[OpKey, TaskThread] = {}
        """The idle thread of each operation, which performs its next task."""
        self._performing: list[OpKey] = []
        """The operation of each task in progress."""
        self._resumed = asyncio.Event()
        """Set once the saves that an earlier incarnation planned are resumed."""
        self._watching: dict[OpKey, asyncio.Future[None]] = {}
        self._beats: dict[Member, asyncio.Future[None]] = {}
        """The heartbeat of each rank whose answer is delayed."""
        self._last_call_s = self._loop.time()
        self._ack = HeartbeatAck("", 0, f"pid {os.getpid()} on {platform.node()}")

    async def info(self) -> dict[str, Any]:
        """Returns this incarnation's `epoch`, `pid` and `node_id`, and the `active` operations."""
        active = self._coordination.active
        return {
            "epoch": self.epoch,
            "pid": os.getpid(),
            "node_id": self._node_id,
            "active": active,
        }

    @property
    def _node_id(self) -> str:
        return platform.node()

    async def call(
        self, request: Request, caller: Any = None, silence_s: float | None = None
    ) -> Reply:
        """Returns the reply to a request, once there is one.

        Args:
            request: The request of a rank; it may arrive again meanwhile.
            caller: The rank's process; its string is used in messages.
            silence_s: See `Coordination.receive`.
        """
        at, future = await self._start_request(request, caller, silence_s)
        try:
            return await future
        finally:
            self._forget(at, future)
            self._last_call_s = self._loop.time()

    async def call_batch(
        self, message: MessageBatch, callers: Sequence[Any], silence_s: float | None = None
    ) -> BatchedReplies:
        """Returns replies to ranks of a gatherer, as soon as there are any; otherwise as `call`.

        Args:
            message: The batch; it may arrive again, with those of its ranks that have no reply.
            callers: The processes of the ranks, in order.
            silence_s: See `Coordination.receive`.
        """
        begun = [
            await self._start_request(request, caller, silence_s)
            for request, caller in zip(message.requests, callers, strict=True)
        ]
        try:
            futures = [future for _, future in begun]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            return BatchedReplies(
                tuple(
                    (rank, future.result())
                    for rank, future in zip(message.ranks, futures, strict=True)
                    if future.done()
                )
            )
        finally:
            for at, future in begun:
                self._forget(at, future)

    async def _start_request(
        self, request: Request, caller: Any, silence_s: float | None
    ) -> tuple[Waiting, asyncio.Future[Reply]]:
        """Passes a request to the coordination; returns its key and the future of its reply."""
        self._note_call()
        if caller is not None:
            self._register(request.key.session, request.rank, caller)
        self._tracing.record_request(request, caller)
        await self._resumed.wait()
        at = (request.key, request.rank, step_of(request))
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._waiting.setdefault(at, []).append(future)
        try:
            self._carry_out(self._coordination.receive(request, silence_s=silence_s))
        except CheckpointError as error:
            self._forget(at, future)
            future.set_result(Refused(error))
        return at, future

    async def register(self, session: str, rank: int, caller: Any) -> None:
        """Registers a rank, so that its death is detected even before its first request.

        Args:
            session: Name of the session.
            rank: The rank.
            caller: The rank's process.
        """
        self._note_call()
        self._register(session, rank, caller)

    async def beat(self, beat: Heartbeat) -> HeartbeatAck:
        """Accepts a heartbeat; answers when an operation that the rank awaits has an outcome.

        It answers earlier if the rank sends its next heartbeat, or `beat.hold_s` has passed.
        """
        waits = self._coordination.heartbeat(beat)
        end_s = self._loop.time() + beat.hold_s
        at, answered = (beat.session, beat.rank), self._loop.create_future()
        before = self._beats.get(at)
        if before is not None and not before.done():
            before.set_result(None)
        self._beats[at] = answered
        try:
            if not self._resumed.is_set():
                # Suppressed: the answer says so.
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._resumed.wait(), beat.hold_s)
            if not self._resumed.is_set():
                return replace(self._ack, waits=waits, is_up_to_date=False)
            self._carry_out(self._coordination.present(beat))
            outcomes = [
                self._watching.setdefault(key, self._loop.create_future())
                for key in beat.awaits
                if self._coordination.outcome(key) is None
            ]
            if outcomes and len(outcomes) == len(beat.awaits) and not beat.left:
                await asyncio.wait(
                    [answered, *outcomes],
                    timeout=max(0.0, end_s - self._loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            return self._coordination.ack(beat, replace(self._ack, waits=waits))
        finally:
            if self._beats.get(at) is answered:
                del self._beats[at]

    async def cancel(self, key: OpKey, reason: str) -> bool:
        """Cancels a save; returns whether that was possible, the same if called again."""
        self._called.set()
        await self._resumed.wait()
        self._carry_out(self._coordination.cancel(key, reason))
        return self._coordination.is_cancelled(key)

    async def leave(self, session: str, rank: int) -> None:
        """Removes a rank that has closed its session and sends no more requests.

        *Why* it counts as lost: operations that it joined and that have not ended would wait for
        it.
        """
        self._called.set()
        await self._resumed.wait()
        self._report_lost(session, rank, "it has closed its session")

    def _note_call(self) -> None:
        self._last_call_s = self._loop.time()
        self._called.set()

    def _register(self, session: str, rank: int, caller: Any) -> None:
        self._coordination.place(session, rank, str(caller))

    def _report_lost(self, session: str, rank: int, reason: str) -> None:
        self._carry_out(self._coordination.lost(session, [rank], reason))

    def _forget(self, at: Waiting, future: asyncio.Future[Reply]) -> None:
        futures = self._waiting.get(at, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._waiting.pop(at, None)

    # Commands

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Answer(key, ranks, step, reply):
                    self._tracing.record_answer(command)
                    for rank in ranks:
                        self._resolve((key, rank, step), reply)
                case Perform():
                    self._performing.append(command.key)
                    self._start_task(self._perform(command))
                case Arm():
                    self._disarm(command.key)
                    after_s = command.after_s + self._grace_s
                    self._timers[command.key] = self._loop.call_later(
                        after_s, self._expire, command.key, command.phase
                    )
                case Disarm():
                    self._disarm(command.key)
        for key in [*self._threads]:
            if key not in self._coordination.active:
                self._threads.pop(key).end()
        for key in [*self._watching]:
            if self._coordination.outcome(key) is not None:
                self._watching.pop(key).set_result(None)

    def _resolve(self, at: Waiting, reply: Reply) -> None:
        for future in self._waiting.pop(at, []):
            if not future.done():
                future.set_result(reply)

    def _disarm(self, key: OpKey) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, key: OpKey, phase: str) -> None:
        self._timers.pop(key, None)
        self._carry_out(self._coordination.expired(key, phase))

    async def _perform(self, command: Perform) -> None:
        # Why one thread of each operation: its tasks follow each other. Why not asyncio.to_thread:
        # a few tasks that hang would fill its pool. Behind one that hangs, no other one waits.
        thread = self._threads.pop(command.key, None) or TaskThread("ray_dcp task")
        try:
            try:
                performer = self._performer or perform
                work = thread.begin(partial(self._tracing.perform, command, performer))
                result = await asyncio.wrap_future(work)
            except LimitError as error:
                result = Failed(error)
            except asyncio.CancelledError:
                thread.end()
                raise
            if self._threads.setdefault(command.key, thread) is not thread:
                thread.end()
            self._carry_out(self._coordination.performed(command.key, command.task, result))
        except Exception as error:  # noqa: BLE001 - nobody else would ever see it
            self._fail_operation(command.key, error)
        finally:
            self._performing.remove(command.key)

    def _fail_operation(self, key: OpKey, error: Exception) -> None:
        """Fails an operation that contradicted itself, on every rank that waits for it."""
        doing = f"The coordinator's part of operation {key.seq}"
        refused = Refused(to_wire(error, doing, kind=InternalError))
        for at in [at for at in self._waiting if at[0] == key]:
            self._resolve(at, refused)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        # Why kept: the event loop itself holds tasks weakly.
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._log_failure)

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("A task of the coordinator ended early", exc_info=task.exception())

    async def _check_silence(self) -> None:
        """Looks for silent ranks.

        *Why* apart from `Coordinator._watch`: that may wait for Ray's tables.
        """
        while True:
            await asyncio.sleep(SILENCE_LOOK_S)
            self._awake.tick()
            try:
                self._carry_out(self._coordination.check_silence())
            except CheckpointError as error:
                logger.warning("Ranks that freeze are only seen at deadlines: %s", error)


class LoopThread(Generic[T]):
    """An event loop in a thread of its own, and the object that it runs.

    Args:
        make: Called in the loop; returns the object.

    Raises:
        Exception: `make` raised it.
        LimitError: No thread can be started.

    Attributes:
        inner: The object; used in the loop only.
        loop: The event loop.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.loop = asyncio.new_event_loop()
        self._ending = threading.Lock()
        self._has_ended = False
        self._stops = [self.loop.stop]
        ready: Future[T] = Future()
        try:
            start_thread(partial(self._run, make, ready), "ray_dcp coordinator")
        except LimitError:
            self.loop.close()
            raise
        self.inner = ready.result()

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Returns the future result of an asynchronous method of the object.

        It is cancelled if the loop ends before the method does.
        """
        work = getattr(self.inner, method)(*arguments)
        # Why under a lock: what is scheduled behind the last turn of the loop would never end.
        with self._ending:
            if not self._has_ended:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        answer: Future[Any] = Future()
        answer.set_exception(ParticipantError("The coordinator was closed", rank=0))
        return answer

    def stop(self) -> None:
        """Cancels what the loop runs, and ends its thread."""
        # Suppressed: it is stopped already. Why once: a second stop would end the loop in the
        # middle of its last turn. Why no lock: the garbage collector may call this anywhere.
        with suppress(RuntimeError, IndexError):
            self.loop.call_soon_threadsafe(self._stops.pop())

    def _run(self, make: Callable[[], T], ready: Future[T]) -> None:
        async def begin() -> T:
            return make()

        try:
            try:
                ready.set_result(self.loop.run_until_complete(begin()))
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                ready.set_exception(error)
                return
            self.loop.run_forever()
            with self._ending:
                self._has_ended = True
            self.loop.run_until_complete(_cancel_all())
        finally:
            self.loop.close()


async def _cancel_all() -> None:
    """Cancels all other tasks of the loop, and returns once their callers have the outcome."""
    await asyncio.sleep(0)  # begins what was asked until now
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    await asyncio.sleep(0)  # hands out the results of those that had ended before
