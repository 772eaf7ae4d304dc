"""Saves and loads without Ray: one coordination, its tasks and its ranks in one thread.

This executor is the specification of what a shell has to do; the coordinator actor does the same
with time and processes. `InlineSession` serves single-process use, `run_ranks` plays any number
of ranks for offline tools and property tests: time is virtual, every order of events can be
chosen, ranks can freeze or die, and everything can stop at any point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from ray_dcp.errors import CheckpointError, InternalError, SaveCancelledError
from ray_dcp.protocol.commands import Perform, Result, step_of
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import LoadJoin, OpKey, Reply, Request, SaveJoin
from ray_dcp.runtime.activity import LEAVING_S, Activity
from ray_dcp.runtime.perform import new_attempt, perform
from ray_dcp.runtime.plan_memory import PlanMemory
from ray_dcp.runtime.shell import Performer, Shell, Time
from ray_dcp.runtime.tracing import Tracing
from ray_dcp.runtime.vitals import Vitals

__all__ = ["Fate", "InlineSession", "RankResult", "run_ranks"]

T = TypeVar("T")
Waiting = tuple[OpKey, int, str]

Fate = Literal["live", "twice", "slow", "freeze", "die"]
"""What becomes of a request and its rank: it arrives; it arrives twice; it is never sent, but the
rank lives and beats; the same, but the rank does not beat; the same, and the coordination is told
that the rank died."""

HEARTBEAT_S = 60.0
"""Silence that is allowed to a rank whose options don't say, in seconds."""


@dataclass(frozen=True)
class RankResult(Generic[T]):
    """How a rank ended: with a value, with an error, or not at all."""

    value: T | None = None
    error: CheckpointError | None = None
    ended: bool = True

    def get(self) -> T:
        """Returns the value.

        Raises:
            CheckpointError: What the rank raised.
            InternalError: The rank never ended.
        """
        if self.error is not None:
            raise self.error
        if not self.ended:
            raise InternalError("Expected the rank to end, but it was stopped, froze or died")
        return self.value  # type: ignore[return-value]


class InlineSession:
    """The session of a process that is alone: world size 1, no Ray.

    Calls from several threads come one after the other. Tasks have the deadlines of their phases,
    in real time: one that hangs in the storage is left to itself, and ends the call.

    Args:
        name: Of the session.
        performer: What carries out tasks.
        new_attempt: Names attempts.

    Example:
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
        self._shell = Shell(Coordination(epoch=1, new_attempt=new_attempt), performer)
        self._performer = performer
        self._tracing = Tracing()
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._under_way: set[Future[Result]] = set()
        self._vitals: set[Vitals] = set()
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
            for vitals in self._vitals:
                if cancelled and vitals.key == key:
                    vitals.stop.because(SaveCancelledError(f"The save was cancelled: {reason}"))
            self._work_off()
            return cancelled

    def begins(self, vitals: Vitals, timeout_s: float) -> None:
        """Notes a call of the user."""
        with self._lock:
            self._vitals.add(vitals)

    def ends(self, vitals: Vitals) -> None:
        """Notes its end."""
        with self._lock:
            self._vitals.discard(vitals)

    def gave_up(self, key: OpKey) -> None:
        """Does nothing: there never is another coordinator."""

    def withdraw(self, key: OpKey, reason: str) -> None:
        """Ends an operation that its caller has left, and waits a moment until that is done."""
        with self._lock:
            self._shell.withdraw(key, self.rank, reason)
            self._work_off()
            self._quiet.wait_for(lambda: not self._under_way, LEAVING_S)

    def call(self, request: Request, *, beats_s: float | None = None) -> Reply:
        """Returns the reply to a request, when all that it leads to is done.

        Args:
            request: Of rank 0 in a world of 1.
            beats_s: Ignored: nobody listens but this process itself.

        Raises:
            InternalError: No reply came.
        """
        with self._lock:
            shell = self._shell
            self._tracing.hears(request)
            refused = shell.receive(request)
            self._work_off()
            answers, shell.answers = shell.answers, []
            for answer in answers:
                self._tracing.tells(answer)
        at = (request.key, request.rank, step_of(request))
        for answer in answers:
            if (answer.key, answer.rank, answer.step) == at:
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


def run_ranks(
    ranks: Sequence[Generator[Request, Reply, T]],
    *,
    choose: Callable[[int], int] | None = None,
    crash_at: int | None = None,
    fate: Callable[[Request], Fate] | None = None,
    performer: Performer = perform,
    coordination: Coordination | None = None,
) -> list[RankResult[T]]:
    """Runs rank generators against one coordination, in this thread, to their ends.

    An event is one of: a rank goes on to its next request; a request arrives; a task is
    performed. When there is none and a rank waits, the next deadline passes.

    Args:
        ranks: As `ray_dcp.runtime.rank` makes them; of one session or of several.
        choose: Takes the number of possible events and returns the index of the next one. By
            default the oldest.
        crash_at: Everything stops for ever before the event of this number (from 0) that can
            touch storage: a task, or a rank going on.
        fate: What becomes of a request; by default it arrives. Not asked for one that comes
            twice already.
        performer: What carries out tasks.
        coordination: To go on with one that has a past.

    Returns:
        How each of `ranks` ended, in their order.

    Raises:
        InternalError: A rank waits, and nothing will ever happen.
    """
    time = None
    if coordination is None:
        time = Time()
        coordination = Coordination(epoch=1, new_attempt=new_attempt, clock=time)
    world = _World(ranks, Shell(coordination, performer, time), fate or (lambda _: "live"))
    world.run(choose or (lambda _: 0), crash_at)
    return world.results


class _World:
    def __init__(
        self, ranks: Sequence[Generator[Request, Reply, Any]], shell: Shell, fate: Any
    ) -> None:
        self.results: list[RankResult[Any]] = [RankResult(ended=False) for _ in ranks]
        self._ranks = ranks
        self._shell = shell
        self._fate = fate
        self._ready: list[tuple[int, Reply | None]] = [(index, None) for index in range(len(ranks))]
        self._mail: list[tuple[int | None, Request]] = []
        self._waiting: dict[Waiting, int] = {}
        self._beats_s: dict[tuple[str, int], float] = {}

    def run(self, choose: Callable[[int], int], crash_at: int | None) -> None:
        touched = 0
        while True:
            events = self._events()
            if not events:
                if not self._waiting:
                    return
                if not self._shell.expire([(*who, s) for who, s in self._beats_s.items()]):
                    raise InternalError(
                        f"Nothing will ever happen, but there wait {sorted(self._waiting, key=str)}"
                    )
                self._hand_out()
                continue
            what, index = events[choose(len(events))]
            if what != "deliver":
                if touched == crash_at:
                    return
                touched += 1
            match what:
                case "advance":
                    self._advance(index)
                case "deliver":
                    self._deliver(index)
                case "perform":
                    self._shell.perform(index)
            self._hand_out()

    def _events(self) -> list[tuple[str, int]]:
        return [
            *(("advance", index) for index in range(len(self._ready))),
            *(("deliver", index) for index in range(len(self._mail))),
            *(("perform", index) for index in range(len(self._shell.tasks))),
        ]

    def _advance(self, index: int) -> None:
        which, reply = self._ready.pop(index)
        generator = self._ranks[which]
        try:
            request = next(generator) if reply is None else generator.send(reply)
        except StopIteration as end:
            self.results[which] = RankResult(value=end.value)
        except CheckpointError as error:
            self.results[which] = RankResult(error=error)
        else:
            self._mail.append((which, request))

    def _deliver(self, index: int) -> None:
        which, request = self._mail.pop(index)
        at = (request.key, request.rank, step_of(request))
        who = (request.key.session, request.rank)
        if isinstance(request, SaveJoin | LoadJoin):
            self._beats_s[who] = request.options.heartbeat_timeout_s
        if which is not None:
            fate = self._fate(request)
            if fate == "die":
                self._shell.lose(request)
            if fate in ("die", "freeze"):
                self._beats_s.pop(who, None)
            if fate in ("die", "freeze", "slow"):
                return
            self._waiting[at] = which
            if fate == "twice":
                self._mail.append((None, request))
        refused = self._shell.receive(request, self._beats_s.get(who, HEARTBEAT_S))
        if refused is not None and which is not None:
            del self._waiting[at]
            self._ready.append((which, refused))

    def _hand_out(self) -> None:
        answers, self._shell.answers = self._shell.answers, []
        for answer in answers:
            which = self._waiting.pop((answer.key, answer.rank, answer.step), None)
            if which is not None:
                self._ready.append((which, answer.reply))
