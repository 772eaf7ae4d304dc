"""The shell of a coordination without Ray: carries out its commands, one at a time.

What the coordinator actor does with time and processes, for `inline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray_dcp.errors import CheckpointError
from ray_dcp.protocol.beats import Beat
from ray_dcp.protocol.commands import (
    Answer,
    Answers,
    Arm,
    Command,
    Disarm,
    Perform,
    Result,
    Task,
    step_of,
)
from ray_dcp.protocol.coordination import Coordination
from ray_dcp.protocol.messages import OpKey, Refused, Request
from ray_dcp.protocol.together import Batch, Batches, Together

__all__ = ["Performer", "Shell", "Time"]

Performer = Callable[[Task], Result]


class Time:
    """Virtual time: seconds, changed by who lets it pass."""

    now_s = 0.0

    def __call__(self) -> float:
        """Returns the seconds that have passed."""
        return self.now_s


class Shell:
    """Carries out the commands of a coordination, one at a time and in virtual time.

    Attributes:
        answers: Given and not yet taken, oldest first.
        tasks: To be performed, oldest first.
        batches: Messages of several ranks that wait; their answers are in no other place.
    """

    def __init__(
        self, coordination: Coordination, performer: Performer, time: Time | None = None
    ) -> None:
        self.coordination = coordination
        self.answers: list[Answer] = []
        self.tasks: list[Perform] = []
        self.batches = Batches()
        self._performer = performer
        self._time = time or Time()
        self._listens = time is not None
        self._timers: dict[OpKey, tuple[float, str]] = {}

    def receive(self, request: Request, beats_s: float | None = None) -> Refused | None:
        """Hands over a request; returns the reply to this very call when it is refused."""
        try:
            self._carry_out(self.coordination.receive(request, beats_s=beats_s))
        except CheckpointError as error:
            return Refused(error)
        return None

    def receive_together(self, message: Together, beats_s: float | None = None) -> Batch:
        """Hands over what several ranks say; returns what they are told, as it comes."""
        batch = self.batches.add(message)
        commands, refused = self.coordination.receive_together(message, beats_s=beats_s)
        for rank, reply in refused.items():
            batch.put((rank,), reply)
        self._carry_out(commands)
        return batch

    def cancel(self, key: OpKey, reason: str) -> bool:
        """Cancels a save; returns whether that was still possible."""
        self._carry_out(self.coordination.cancel(key, reason))
        return self.coordination.is_cancelled(key)

    def withdraw(self, key: OpKey, rank: int, reason: str) -> None:
        """Tells that a rank leaves an operation."""
        self._carry_out(self.coordination.withdraw(key, rank, reason))

    def lose(self, request: Request) -> None:
        """Tells that the rank of a request died."""
        session, reason = request.key.session, f"it died before {step_of(request)}"
        self._carry_out(self.coordination.lost(session, [request.rank], reason))

    def perform(self, index: int) -> None:
        """Performs a task that waits."""
        todo = self.tasks.pop(index)
        self.performed(todo, self._performer(todo.task))

    def performed(self, todo: Perform, result: Result) -> None:
        """Takes the result of a task."""
        self._carry_out(self.coordination.performed(todo.key, todo.task, result))

    def expire(self, beating: Sequence[tuple[str, int, float]] = ()) -> bool:
        """Lets the time pass to the next deadline or silence; returns false when there is none.

        Args:
            beating: Ranks that live: session, rank and what silence is allowed.
        """
        key = min(self._timers, key=lambda key: self._timers[key][0], default=None)
        silence_s = self.coordination.next_silence_s if self._listens else None
        if silence_s is not None and (key is None or silence_s < self._timers[key][0]):
            self._time.now_s = silence_s
            for session, rank, timeout_s in beating:
                self.coordination.hear(Beat(session, rank, timeout_s))
            self._carry_out(self.coordination.listen())
            return True
        if key is None:
            return False
        self._time.now_s = self._timers[key][0]
        self.expire_one(key)
        return True

    def due_s(self, key: OpKey) -> float | None:
        """Returns how long an operation's phase may last from now on, in seconds."""
        timer = self._timers.get(key)
        return None if timer is None else timer[0] - self._time.now_s

    def expire_one(self, key: OpKey) -> None:
        """Lets the timer of an operation run out."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            self._carry_out(self.coordination.expired(key, timer[1]))

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Answer():
                    if self.batches.answer(command):
                        self.answers.append(command)
                case Answers(key, _, step, reply):
                    alone = sorted(self.batches.answer(command))
                    self.answers += [Answer(key, rank, step, reply) for rank in alone]
                case Perform():
                    self.tasks.append(command)
                case Arm():
                    at_s = self._time.now_s + command.after_s
                    self._timers[command.key] = (at_s, command.phase)
                case Disarm():
                    self._timers.pop(command.key, None)
