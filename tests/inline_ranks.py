"""Runs any number of ranks against one coordination, in one thread and in virtual time.

Every order of events can be chosen, ranks can freeze or die, and everything can stop at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from ray_dcp.commit_protocol.aggregation import Batch, Batches, MessageBatch
from ray_dcp.commit_protocol.commands import Answer, Arm, Command, step_of
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.liveness import Doing, Heartbeat
from ray_dcp.commit_protocol.messages import LoadJoin, OpKey, Reply, Request, SaveJoin
from ray_dcp.errors import CheckpointError, InternalError
from ray_dcp.runtime import inline
from ray_dcp.runtime.inline import Performer
from ray_dcp.runtime.tasks import new_attempt, perform


class Time:
    """Virtual time: seconds, changed by who lets it pass."""

    now_s = 0.0

    def __call__(self) -> float:
        """Returns the seconds that have passed."""
        return self.now_s


class Shell(inline.Shell):
    """Carries out the commands of a coordination in virtual time, with messages of gatherers.

    Attributes:
        batches: Messages of several ranks that wait; their answers are in no other place.
    """

    def __init__(
        self, coordination: Coordination, performer: Performer, time: Time | None = None
    ) -> None:
        super().__init__(coordination)
        self.batches = Batches()
        self._performer = performer
        self._time = time or Time()
        self._listens = time is not None

    def receive_batch(self, message: MessageBatch, silence_s: float | None = None) -> Batch:
        """Hands over what several ranks say; returns what they are told, as it comes."""
        batch = self.batches.add(message)
        commands, refused = self.coordination.receive_batch(message, silence_s=silence_s)
        for rank, reply in refused.items():
            batch.put((rank,), reply)
        self._carry_out(commands)
        return batch

    def lose(self, request: Request) -> None:
        """Tells that the rank of a request died."""
        session, reason = request.key.session, f"it died before {step_of(request)}"
        self._carry_out(self.coordination.lost(session, [request.rank], reason))

    def perform(self, index: int) -> None:
        """Performs a task that waits."""
        todo = self.tasks.pop(index)
        self.performed(todo, self._performer(todo.task))

    def expire(self, beating: Sequence[tuple[str, int, float]] = ()) -> bool:
        """Lets the time pass to the next deadline or silence; returns false when there is none.

        Args:
            beating: Ranks that live: session, rank and what silence is allowed.
        """
        key = min(self._timers, key=lambda key: self._timers[key][0], default=None)
        silence_s = next_silence_s(self.coordination) if self._listens else None
        if silence_s is not None and (key is None or silence_s < self._timers[key][0]):
            self._time.now_s = silence_s
            doings = (Doing(0, 1 << 60, "waiting"),)
            for session, rank, timeout_s in beating:
                self.coordination.heartbeat(Heartbeat(session, rank, timeout_s, doings))
            self._carry_out(self.coordination.check_silence())
            return True
        if key is None:
            return False
        self._time.now_s = self._timers[key][0]
        self.expire_one(key)
        return True

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Arm):
                command = replace(command, after_s=self._time.now_s + command.after_s)
            elif isinstance(command, Answer):
                command = replace(command, ranks=tuple(sorted(self.batches.answer(command))))
            super()._carry_out([command])


def next_silence_s(coordination: Coordination) -> float | None:
    """Returns when, by the clock, somebody could be found silent; None when nobody could."""
    due = [
        at_s
        for key, machine in coordination._active.items()
        for rank, at_s in coordination._liveness.due_s(key).items()
        if machine.needs(rank)
    ]
    return min(due, default=None)


T = TypeVar("T")
Waiting = tuple[OpKey, int, str]

Fate = Literal["live", "twice", "slow", "freeze", "die"]
"""What becomes of a request and its rank: it arrives; it arrives twice; it is never sent, but the
rank lives and sends heartbeats; the same, but without heartbeats; the same, and the coordination is
told that the rank died."""

HEARTBEAT_S = 60.0
"""Silence that is allowed to a rank whose options don't say, in seconds."""


@dataclass(frozen=True)
class RankResult(Generic[T]):
    """How a rank ended: with a value, with an error, or not at all."""

    value: T | None = None
    error: BaseException | None = None
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


def run_ranks(
    ranks: Sequence[Generator[Request, Reply, T]],
    *,
    choose: Callable[[int], int] | None = None,
    crash_at: int | None = None,
    fate: Callable[[Request], Fate] | None = None,
    performer: Performer = perform,
    coordination: Coordination | None = None,
    catches: type[BaseException] = CheckpointError,
) -> list[RankResult[T]]:
    """Runs rank generators against one coordination, in this thread, to their ends.

    An event is one of: a rank goes on to its next request; a request arrives; a task is
    performed. When there is none and a rank waits, the next deadline passes.

    Args:
        ranks: As `rank_save` and `rank_load` make them; of one session or of several.
        choose: Takes the number of possible events and returns the index of the next one. By
            default the oldest.
        crash_at: Everything stops for ever before the event of this number (from 0) that can
            touch storage: a task, or a rank going on.
        fate: What becomes of a request; by default it arrives. Not asked for one that comes
            twice already.
        performer: What carries out tasks.
        coordination: To go on with one that has a past.
        catches: What a rank may end with; anything else is raised.

    Returns:
        How each of `ranks` ended, in their order.

    Raises:
        InternalError: A rank waits, and nothing will ever happen.
    """
    time = None
    if coordination is None:
        time = Time()
        coordination = Coordination(epoch=1, new_attempt=new_attempt, clock=time)
    world = World(Shell(coordination, performer, time), fate, catches)
    return world.run(ranks, choose, crash_at)


class World:
    """Rank generators, the coordination that they speak to, and what may happen next.

    Args:
        shell: Of the coordination.
        fate: As for `run_ranks`.
        catches: What a rank may end with.
    """

    def __init__(
        self,
        shell: Shell,
        fate: Callable[[Request], Fate] | None = None,
        catches: type[BaseException] = CheckpointError,
    ) -> None:
        self.shell = shell
        self._fate = fate or (lambda _: "live")
        self._catches = catches

    def run(
        self,
        ranks: Sequence[Generator[Request, Reply, Any]],
        choose: Callable[[int], int] | None = None,
        crash_at: int | None = None,
    ) -> list[RankResult[Any]]:
        """Runs ranks to their ends; see `run_ranks`."""
        choose = choose or (lambda _: 0)
        self.results: list[RankResult[Any]] = [RankResult(ended=False) for _ in ranks]
        self._ranks = ranks
        self._ready: list[tuple[int, Reply | None]] = [(index, None) for index in range(len(ranks))]
        self._mail: list[tuple[int | None, Request]] = []
        self._waiting: dict[Waiting, int] = {}
        self._beats_s: dict[tuple[str, int], float] = {}
        touched = 0
        while True:
            events = self._events()
            if events:
                event, *about = events[choose(len(events))]
                if event != self._deliver:
                    if touched == crash_at:
                        return self.results
                    touched += 1
                event(*about)
            elif not self._waiting:
                return self.results
            elif not self._let_time_pass():
                raise InternalError(
                    f"Nothing will ever happen, but there wait {sorted(self._waiting, key=str)}"
                )
            self._hand_out()

    def _events(self) -> list[tuple[Any, ...]]:
        return [
            *((self._advance, index) for index in range(len(self._ready))),
            *((self._deliver, index) for index in range(len(self._mail))),
            *((self.shell.perform, index) for index in range(len(self.shell.tasks))),
        ]

    def _let_time_pass(self) -> bool:
        return self.shell.expire([(*who, s) for who, s in self._beats_s.items()])

    def _advance(self, index: int) -> None:
        which, reply = self._ready.pop(index)
        generator = self._ranks[which]
        try:
            request = next(generator) if reply is None else generator.send(reply)
        except StopIteration as end:
            self.results[which] = RankResult(value=end.value)
        except self._catches as error:
            self.results[which] = RankResult(error=error)
        else:
            if isinstance(request, SaveJoin | LoadJoin):
                silence_s = request.options.heartbeat_timeout_s
                self._beats_s[request.key.session, request.rank] = silence_s
            self._send(which, request)

    def _send(self, which: int, request: Request) -> None:
        self._mail.append((which, request))

    def _deliver(self, index: int) -> None:
        which, request = self._mail.pop(index)
        at = (request.key, request.rank, step_of(request))
        who = (request.key.session, request.rank)
        if which is not None:
            fate = self._fate(request)
            if fate == "die":
                self.shell.lose(request)
            if fate in ("die", "freeze"):
                self._beats_s.pop(who, None)
            if fate in ("die", "freeze", "slow"):
                return
            self._waiting[at] = which
            if fate == "twice":
                self._mail.append((None, request))
        refused = self.shell.receive(request, self._beats_s.get(who, HEARTBEAT_S))
        if refused is not None and which is not None:
            del self._waiting[at]
            self._ready.append((which, refused))

    def _hand_out(self) -> None:
        answers, self.shell.answers = self.shell.answers, []
        for answer in answers:
            for rank in answer.ranks:
                self._told(answer.key, rank, answer.step, answer.reply)

    def _told(self, key: OpKey, rank: int, step: str, reply: Reply) -> None:
        which = self._waiting.pop((key, rank, step), None)
        if which is not None:
            self._ready.append((which, reply))
