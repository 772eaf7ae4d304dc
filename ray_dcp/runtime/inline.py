"""Saves and loads without Ray: one coordination, its tasks and its ranks in one thread.

This executor is the specification of what a shell has to do; the coordinator actor does the same
with time and processes. `InlineSession` serves single-process use, `run_ranks` plays any number
of ranks for offline tools and property tests: time is virtual, every order of events can be
chosen, ranks can freeze or die, and everything can stop at any point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ray_dcp.errors import CheckpointError, InternalError
from ray_dcp.protocol.commands import (
    Answer,
    Arm,
    Command,
    Disarm,
    Perform,
    Result,
    Task,
    step_of,
)
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import OpKey, Refused, Reply, Request
from ray_dcp.runtime.perform import new_attempt, perform

__all__ = ["Fate", "InlineSession", "RankResult", "run_ranks"]

T = TypeVar("T")
Performer = Callable[[Task], Result]
Waiting = tuple[OpKey, int, str]

Fate = Literal["live", "twice", "freeze", "die"]
"""What becomes of a request and its rank: it arrives; it arrives twice; it is lost and its rank
never goes on; the same, and the coordination is told that the rank died."""


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


class _Shell:
    """Carries out the commands of a coordination, one at a time and in virtual time.

    Attributes:
        answers: Given and not yet taken, oldest first.
        tasks: To be performed, oldest first.
    """

    def __init__(self, coordination: Coordination, performer: Performer) -> None:
        self.coordination = coordination
        self.answers: list[Answer] = []
        self.tasks: list[Perform] = []
        self._performer = performer
        self._now_s = 0.0
        self._timers: dict[OpKey, tuple[float, str]] = {}

    def receive(self, request: Request) -> Refused | None:
        """Hands over a request; returns the reply to this very call when it is refused."""
        try:
            self._carry_out(self.coordination.receive(request))
        except CheckpointError as error:
            return Refused(error)
        return None

    def lose(self, request: Request) -> None:
        """Tells that the rank of a request died."""
        session, reason = request.key.session, f"it died before {step_of(request)}"
        self._carry_out(self.coordination.lost(session, [request.rank], reason))

    def perform(self, index: int) -> None:
        """Performs a task that waits."""
        todo = self.tasks.pop(index)
        result = self._performer(todo.task)
        self._carry_out(self.coordination.performed(todo.key, todo.task, result))

    def expire(self) -> bool:
        """Lets the time pass to the next deadline; returns false when there is none."""
        if not self._timers:
            return False
        key, (at_s, phase) = min(self._timers.items(), key=lambda item: item[1][0])
        del self._timers[key]
        self._now_s = at_s
        self._carry_out(self.coordination.expired(key, phase))
        return True

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Answer():
                    self.answers.append(command)
                case Perform():
                    self.tasks.append(command)
                case Arm():
                    self._timers[command.key] = (self._now_s + command.after_s, command.phase)
                case Disarm():
                    self._timers.pop(command.key, None)


class InlineSession:
    """The session of a process that is alone: world size 1, no Ray.

    Calls from several threads come one after the other.

    Args:
        name: Of the session.
        performer: What carries out tasks.

    Example:
        >>> InlineSession("doc").next_key()
        OpKey(session='doc', seq=0)
    """

    rank = 0
    world_size = 1

    def __init__(self, name: str = "inline", *, performer: Performer = perform) -> None:
        self.name = name
        self._shell = _Shell(Coordination(epoch=1, new_attempt=new_attempt), performer)
        self._lock = threading.Lock()
        self._next_seq = 0

    def next_key(self) -> OpKey:
        """Returns the key of the next operation."""
        with self._lock:
            self._next_seq += 1
            return OpKey(self.name, self._next_seq - 1)

    def call(self, request: Request) -> Reply:
        """Returns the reply to a request, when all that it leads to is done.

        Args:
            request: Of rank 0 in a world of 1.

        Raises:
            InternalError: No reply came.
        """
        with self._lock:
            shell = self._shell
            refused = shell.receive(request)
            while shell.tasks:
                shell.perform(0)
            answers, shell.answers = shell.answers, []
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
    if coordination is None:
        coordination = Coordination(epoch=1, new_attempt=new_attempt)
    world = _World(ranks, _Shell(coordination, performer), fate or (lambda _: "live"))
    world.run(choose or (lambda _: 0), crash_at)
    return world.results


class _World:
    def __init__(
        self, ranks: Sequence[Generator[Request, Reply, Any]], shell: _Shell, fate: Any
    ) -> None:
        self.results: list[RankResult[Any]] = [RankResult(ended=False) for _ in ranks]
        self._ranks = ranks
        self._shell = shell
        self._fate = fate
        self._ready: list[tuple[int, Reply | None]] = [(index, None) for index in range(len(ranks))]
        self._mail: list[tuple[int | None, Request]] = []
        self._waiting: dict[Waiting, int] = {}

    def run(self, choose: Callable[[int], int], crash_at: int | None) -> None:
        touched = 0
        while True:
            events = self._events()
            if not events:
                if not self._waiting:
                    return
                if not self._shell.expire():
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
        if which is not None:
            fate = self._fate(request)
            if fate == "die":
                self._shell.lose(request)
            if fate in ("die", "freeze"):
                return
            self._waiting[at] = which
            if fate == "twice":
                self._mail.append((None, request))
        refused = self._shell.receive(request)
        if refused is not None and which is not None:
            del self._waiting[at]
            self._ready.append((which, refused))

    def _hand_out(self) -> None:
        answers, self._shell.answers = self._shell.answers, []
        for answer in answers:
            which = self._waiting.pop((answer.key, answer.rank, answer.step), None)
            if which is not None:
                self._ready.append((which, answer.reply))
