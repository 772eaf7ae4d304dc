"""Processes that take turns over one storage: saves, loads and whatever else uses a checkpoint.

Ranks and coordinators are those of the package, without Ray. Only one process moves at a time,
and every call of the storage is a point at which another may go on, or at which something goes
wrong: a process dies or freezes, an answer is lost, a coordinator is replaced. A frozen process
keeps its place and may go on much later, as a zombie."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch.distributed.checkpoint.api import CheckpointException

from ray_dcp.commit_protocol.commands import Perform, step_of
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import OpKey, Request, SaveGo, SaveOutcome
from ray_dcp.coordinator.tasks import perform
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DeadlineError,
    InternalError,
    ParticipantError,
)
from ray_dcp.rank.rank_load import drive
from ray_dcp.store.opening import open_storage
from tests.crash.invariants import loaded_by_stock
from tests.support.arrays import State, same_state
from tests.support.storages import CrashError, FaultyStorage
from tests.support.turns import MOVING, Turn, TurnScript
from tests.support.world import HEARTBEAT_S, Shell, load_state

# --- Processes that take turns --------------------------------------------------------------------


MOST_STEPS = 20_000


class RankTurn(Turn):
    """Work of one process; it may wait for an answer, and has no turn before that."""

    def __init__(self, process: Process, work: Callable[[], Any]) -> None:
        super().__init__(process.name, work)
        self.process = process
        self.waits = False
        self._answer: Any = None
        process.turns.append(self)

    def take(self, effect: str | None = None) -> None:
        """Lets it move to its next call; raises what no code of ours may raise."""
        self.killed = self.process.state == "dead"
        super().take(effect)
        if self.over:
            self.process.turns.remove(self)
        if self.error is not None:
            raise self.error

    def wait(self) -> Any:
        """In its thread: ends the turn until there is an answer, and returns or raises that."""
        self.waits = True
        self.pause(("call", ""))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def answer(self, reply: Any) -> None:
        self._answer, self.waits = reply, False


class Process:
    """One process: a rank, a coordinator or a tool.

    Attributes:
        state: `running`, `frozen` or `dead`.
        broken: Every call of the storage fails.
        turns: Its threads that have not ended.
    """

    def __init__(self, name: str, world: World) -> None:
        self.name, self.state, self.broken = name, "running", False
        self.turns: list[RankTurn] = []
        self._world = world
        self._script = TurnScript(self._pause)

    def ready(self) -> list[RankTurn]:
        return [turn for turn in self.turns if not turn.waits] if self.state == "running" else []

    def opener(self, target: Any) -> FaultyStorage:
        """Opens a storage as this process sees it."""
        return self._script.wrap(self._world.storage_of(getattr(target, "url", str(target))))

    def _pause(self, operation: str, key: str) -> str | None:
        if self.state == "dead":
            self._script._stopped = True
            raise CrashError
        effect = MOVING[0].pause((operation, key)) if MOVING else None
        return "before" if self.broken or self._world.broken else effect


@dataclass(frozen=True)
class Lost:
    """Tells a coordinator that the rank of a request died."""

    request: Request


class Session:
    """A group of ranks and the lives of its coordinator."""

    def __init__(self, world: World, name: str, world_size: int) -> None:
        self.world, self.name, self.world_size = world, name, world_size
        self.lives: list[Life] = []
        self.ranks: list[Process] = []
        self.mail: list[Request | Lost] = []
        self.waiting: dict[tuple[Any, int, str], tuple[RankTurn, Request]] = {}
        self.next_seq = 0
        self.reaches_old = False
        """What ranks say reaches the coordinator before the last one as well."""
        self.begin_life()

    def begin_life(self) -> None:
        self.lives.append(Life(self, len(self.lives) + 1))
        self.mail += [request for _, request in self.waiting.values() if request not in self.mail]

    @property
    def is_used(self) -> bool:
        """Some rank, or some life of the coordinator, has something to do."""
        lives = any(life.process.turns or life.coordination.active for life in self.lives)
        return lives or any(rank.turns for rank in self.ranks)

    @property
    def coordinator(self) -> Life:
        return self.lives[-1]

    def call(self, request: Request) -> Any:
        """In the thread of a rank: returns what the coordinator replies."""
        turn = MOVING[0]
        self.waiting[request.key, request.rank, step_of(request)] = turn, request
        self.mail.append(request)
        return turn.wait()

    def deliver(self, index: int) -> None:
        letter = self.mail.pop(index)
        if isinstance(letter, Lost):
            self.coordinator.shell.lose(letter.request)
            return
        if self.reaches_old and self.lives[-2:-1] and self.lives[-2].process.state == "running":
            self.lives[-2].shell.receive(letter, HEARTBEAT_S)
        refused = self.coordinator.shell.receive(letter, HEARTBEAT_S)
        if refused is not None:
            self.hand_over((letter.key, letter.rank, step_of(letter)), refused)

    def hand_over(self, at: tuple[Any, int, str], reply: Any) -> None:
        turn, _ = self.waiting.pop(at, (None, None))
        if turn is not None and turn.process.state != "dead":
            turn.answer(reply)

    def hand_out(self) -> None:
        for life in self.lives:
            answers, life.shell.answers = life.shell.answers, []
            for answer in answers:
                if isinstance(answer.reply, SaveGo):
                    self.world.attempts[answer.reply.attempt] = answer.key
                # Nobody hears a coordinator that was replaced.
                if life is self.coordinator:
                    if isinstance(answer.reply, SaveGo):
                        self.world.planned.setdefault(answer.key, self.world.tick)
                    self.hand_over((answer.key, *answer.ranks, answer.step), answer.reply)


class Life:
    """One incarnation of a coordinator."""

    def __init__(self, session: Session, epoch: int) -> None:
        self.session, self.epoch = session, epoch
        world = session.world
        self.process = Process(f"coordinator {epoch} of {session.name}", world)
        self.coordination = Coordination(epoch=epoch, new_attempt=world.new_attempt)
        self.shell = Shell(self.coordination, perform)

    def begin_tasks(self) -> None:
        """Gives each new task a thread, as the actor does."""
        if self.process.state != "dead":
            for todo in self.shell.tasks:
                RankTurn(self.process, partial(self._perform, todo))
        self.shell.tasks.clear()

    def _perform(self, todo: Perform) -> None:
        self.shell.performed(todo, perform(todo.task, self.process.opener))

    def expire(self) -> bool:
        """Lets the time pass to its next deadline, or to when a rank has been silent too long."""
        beating = [
            (at[0].session, at[1], HEARTBEAT_S)
            for at, (turn, _) in self.session.waiting.items()
            if turn.process.state == "running"
        ]
        return bool(self.coordination.active) and self.shell.expire(beating)

    @property
    def idle(self) -> bool:
        return not self.process.turns


@dataclass(frozen=True)
class Order:
    """Who moves next: who moved last, but for switches that a seed decides."""

    seed: int = 0
    switch: float = 0.0
    """How often somebody else may move, from never (but for need) to at every step."""

    def chooser(self) -> Callable[[int], int]:
        numbers = random.Random(self.seed)
        return lambda n: numbers.randrange(n) if numbers.random() < self.switch else 0


@dataclass(frozen=True)
class Incident:
    """What goes wrong before the step of a number."""

    at: int
    what: str
    who: int = 0
    """Which of the processes concerned, modulo their number."""


class World:
    """Everything that lives: sessions, processes and what they still have to do.

    Args:
        storage_of: Returns the storage of a url.
    """

    def __init__(self, storage_of: Callable[[str], Any]) -> None:
        self.storage_of = storage_of
        self.sessions: list[Session] = []
        self.processes: list[Process] = []
        """Ranks and tools; coordinators are in the lives of their sessions."""
        self.attempts: dict[str, OpKey] = {}
        """The operation of each attempt."""
        self.planned: dict[OpKey, int] = {}
        """The step at which ranks were told to write: they will not join another attempt."""
        self.tick = 0
        self.broken = False
        """Every call of every storage fails."""
        self.happened: list[str] = []
        """Incidents that took place."""
        self._last: Any = None
        self._attempt_number = self._session_number = 0

    def new_attempt(self) -> str:
        self._attempt_number += 1
        return f"{self._attempt_number:016x}"

    def session(self, world_size: int) -> Session:
        """Returns a new session."""
        self._session_number += 1
        session = Session(self, f"s{self._session_number}", world_size)
        self.sessions.append(session)
        return session

    def start(
        self, name: str, work: Callable[[Process], Any], session: Session | None = None
    ) -> Process:
        """Returns a process that will do some work when it is its turn, as a rank or alone."""
        process = Process(name, self)
        self.processes.append(process)
        if session is not None:
            session.ranks.append(process)
        RankTurn(process, lambda: work(process))
        return process

    def lives(self) -> list[Life]:
        return [life for session in self.sessions for life in session.lives]

    def everybody(self) -> list[Process]:
        """Returns the processes that live and have something to do."""
        found = [process for process in self.processes if process.turns]
        found += [life.process for life in self.lives() if not life.idle]
        return [process for process in found if process.state != "dead"]

    def running(self) -> list[Process]:
        return [process for process in self.everybody() if process.state == "running"]

    def frozen(self) -> list[Process]:
        """Returns the processes that are frozen, also those that have nothing to do."""
        found = [*self.processes, *(life.process for life in self.lives())]
        return [process for process in found if process.state == "frozen"]

    # Moving

    def run(self, order: Order, incidents: list[Incident]) -> int:
        """Lets everybody who is not frozen move to the end; returns the number of steps."""
        choose = order.chooser()
        due = sorted(incidents, key=lambda incident: incident.at)
        self.happened.clear()
        step = 0
        while step < MOST_STEPS:
            effect = None
            while due and due[0].at <= step:
                effect = self._strike(due.pop(0), choose) or effect
            self._hand_out()
            events = self._events()
            if events:
                event = events[choose(len(events))]
                self._last = event
                event[0](effect) if isinstance(event[1], RankTurn) else event[0]()
            elif not self._let_time_pass(choose):
                return step
            step += 1
            self.tick += 1
            self._hand_out()
        raise AssertionError(f"it never ends; there wait {[p.name for p in self.everybody()]}")

    def _hand_out(self) -> None:
        for session in self.sessions:
            session.hand_out()

    def _events(self) -> list[tuple[Callable[..., None], Any]]:
        for life in self.lives():
            life.begin_tasks()
        turns = [(turn.take, turn) for process in self.running() for turn in process.ready()]
        mail = [
            (partial(session.deliver, index), (session, index))
            for session in self.sessions
            if session.coordinator.process.state == "running"
            for index in range(len(session.mail))
        ]
        last = self._last[1] if self._last else None
        return sorted([*turns, *mail], key=lambda event: event[1] is not last)

    def _let_time_pass(self, choose: Callable[[int], int]) -> bool:
        """Lets the next deadline pass: a coordinator's, or that of a rank nobody answers."""
        lives = [life for life in self.lives() if life.process.state == "running"]
        first = choose(len(lives)) if lives else 0
        if any(life.expire() for life in [*lives[first:], *lives[:first]]):
            return True
        for session in self.sessions:
            waiting = [
                (at, turn)
                for at, (turn, _) in session.waiting.items()
                if turn.process.state == "running"
            ]
            if waiting:
                state = session.coordinator.process.state
                assert state != "running", f"nothing will ever happen, but there wait {waiting}"
                at, _ = waiting[choose(len(waiting))]
                error = DeadlineError if state == "frozen" else ParticipantError
                session.hand_over(at, error("the coordinator does not answer"))
                return True
        return False

    # Going wrong

    def _strike(self, incident: Incident, choose: Callable[[int], int]) -> str | None:
        """Makes something go wrong; returns the effect that the next call is to have."""
        what = incident.what
        if what in ("before", "after", "torn"):
            self.happened.append(what)
            return what
        session = self._session_concerned(incident.who)
        process = self._concerned(incident.who)
        if what.startswith("replaced") and session:
            old = session.coordinator
            if what == "replaced":
                self.kill(old.process)
            elif what == "replaced and frozen":
                old.process.state = "frozen"
            session.reaches_old = what == "replaced and hears"
            session.begin_life()
        elif what == "twice" and session and session.waiting:
            requests = [request for _, request in session.waiting.values()]
            session.mail.append(requests[incident.who % len(requests)])
        elif what == "late" and session and session.coordinator.process.state == "running":
            session.coordinator.expire()
        elif what == "cancel" and session and session.coordinator.process.state == "running":
            session.coordinator.shell.cancel(next(iter(session.waiting))[0], "asked to")
        elif what == "impatient" and session and session.waiting:
            at = list(session.waiting)[incident.who % len(session.waiting)]
            session.hand_over(at, DeadlineError("the coordinator does not answer"))
        elif what == "power":
            for victim in self.running():
                self.kill(victim)
        elif what == "pause":
            busy = [life.process for life in self.lives() if life.coordination.active]
            for paused in [*self.running(), *busy]:
                paused.state = "frozen" if paused.state == "running" else paused.state
        elif what == "kill" and process:
            self.kill(process)
        elif what == "freeze" and process:
            process.state = "frozen"
        elif what == "broken" and process:
            process.broken = True
        elif what == "all broken":
            self.broken = True
        else:
            return None
        self.happened.append(what)
        return None

    def _concerned(self, who: int) -> Process | None:
        processes = self.running()
        return processes[who % len(processes)] if processes else None

    def _session_concerned(self, who: int) -> Session | None:
        sessions = [session for session in self.sessions if session.waiting]
        return sessions[who % len(sessions)] if sessions else None

    def kill(self, process: Process) -> None:
        """Ends a process where it is; its coordinator is told when it was a rank."""
        process.state = "dead"
        for turn in list(process.turns):
            turn.take()
        for session in self.sessions:
            for life in session.lives:
                if life.process is process:
                    life.shell.tasks.clear()
            for at, (turn, request) in list(session.waiting.items()):
                if turn.process is process:
                    del session.waiting[at]
                    session.mail.append(Lost(request))

    def heal(self) -> None:
        """Ends what was wrong with the storage."""
        self.broken = False
        for process in [*self.processes, *(life.process for life in self.lives())]:
            process.broken = False

    def forget(self, kept: Collection[Session]) -> None:
        """Drops what has ended, but for sessions that are kept for later."""
        for session in self.sessions:
            session.lives[:-1] = [life for life in session.lives[:-1] if life.process.turns]
            session.ranks = [rank for rank in session.ranks if rank.turns]
        self.sessions = [s for s in self.sessions if s in kept or s.is_used]
        self.processes = [process for process in self.processes if process.turns]

    def end(self) -> None:
        """Ends everything."""
        for process in [*self.processes, *(life.process for life in self.lives())]:
            self.kill(process)


def drive_rank(session: Session, generator: Any) -> Any:
    """In the thread of a rank: returns what its part of an operation ends with."""
    return drive(generator, session.call)


# --- The model ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Change:
    """Something that may change what stands at a place: a save, or a delete."""

    value: int | None
    """What stands when it succeeds; None for a delete."""
    started: int
    """The step at which it began."""
    key: OpKey | None = None
    overwrite: bool = True
    reports: dict[int, Any] = field(default_factory=dict)
    """What each rank was told that ended."""
    planned: int | None = None
    """The step at which its ranks were told to write: later commits are in its way."""
    stood: bool = False
    """Its value was seen."""
    settled: bool = False
    """Nothing is left that could still commit it."""

    @property
    def status(self) -> str:
        """`committed`, `failed` or `open`, as the ranks were told."""
        kinds = {kind_of(report) for report in self.reports.values()}
        return next((kind for kind in ("committed", "failed") if kind in kinds), "open")

    @property
    def slot(self) -> int:
        """The highest slot that was told; 0 when none was."""
        told = (r for r in self.reports.values() if isinstance(r, SaveOutcome))
        return max((outcome.slot for outcome in told), default=0)

    @property
    def attempts(self) -> set[str]:
        """Attempts of which the ranks were told that they are committed."""
        return {r.attempt for r in self.reports.values() if isinstance(r, SaveOutcome)}


def kind_of(report: Any) -> str:
    """Returns what one rank was told: `committed`, `failed`, `unknown` or `late`."""
    if not isinstance(report, CheckpointError):
        return "committed"
    if isinstance(report, CommitUnknownError):
        return "unknown"
    if isinstance(report, CheckpointExistsError) and "learned it late" in report.message:
        return "late"  # it was committed, and is replaced or deleted by now
    return "failed"


class Place:
    """One checkpoint id."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stands: int | None = None
        """The value that was seen to stand last."""
        self.changes: list[Change] = []
        self.over: set[int] = set()
        """Values that stood and were replaced, or never will stand."""
        self.were_told: dict[str, str] = {}
        """What `outcome` said of an attempt."""
        self.stood: set[int] = set()
        """Values that were seen, or whose ranks were told that they are committed."""
        self.slots: dict[int | None, int] = {}
        """Where the values were committed, as their ranks were told."""
        self.stock_saw = "None"
        """What stock DCP saw last."""
        self.unquiet = False
        """Something died or went wrong since the last quiet change."""

    def begin(self, change: Change) -> Change:
        self.changes.append(change)
        return change

    def allowed(self, moved: list[Change], resumed: list[Change]) -> set[int | None]:
        """Returns what may stand after those changes moved that could, and nothing else.

        Args:
            moved: All of them.
            resumed: Those that began earlier: what they did may be seen already, and replaced.
        """
        committed = [change for change in moved if change.status == "committed"]
        for change in committed:
            self.slots.setdefault(change.value, change.slot)
        # What was committed earlier and is told only now may be replaced by what stands already.
        standing = self.slots.get(self.stands, 0)
        top = max((change.slot for change in committed), default=0)
        last = {c.value for c in committed if c.value is None or c.slot == top}
        last -= self.over
        if committed and all(change in resumed for change in committed):
            if None in last or standing == 0:
                last |= {self.stands}
            elif top < standing:
                last = set()
        still_open = {change.value for change in moved if change.status == "open"}
        return (last or {self.stands}) | (still_open - self.over)

    def check_told(self, change: Change) -> None:
        """Checks what the ranks of one change were told against each other and the past."""
        errors = [e for e in change.reports.values() if isinstance(e, CheckpointError)]
        for error in errors:
            assert not isinstance(error, InternalError), error
        kinds = {kind_of(report) for report in change.reports.values()}
        assert not {"committed", "failed"} <= kinds, f"ranks were told both: {change.reports}"
        assert not (change.stood and "failed" in kinds), f"it stood: {change.reports}"
        assert len(change.attempts) <= 1, change.attempts

    def see(self, found: int | None, moved: list[Change], resumed: list[Change]) -> None:
        """Checks what was seen to stand, and holds it against all that comes later."""
        allowed = self.allowed(moved, resumed)
        assert found in allowed, (
            f"expected one of {allowed} at {self.url}, found {found}; "
            f"{[(c.value, c.status, c.reports) for c in moved]}"
        )
        if found != self.stands and self.stands is not None:
            self.over.add(self.stands)
        self.stands = found
        told = [change.value for change in moved if change.status == "committed"]
        self.stood |= {value for value in (found, *told) if value is not None}
        for change in self.changes:
            if change.value == found and found is not None:
                change.stood = True
            elif change.status != "open" or change.settled:
                self._close(change)
        self.changes = [c for c in self.changes if not c.settled or c.stood]

    def _close(self, change: Change) -> None:
        if change.value is not None:
            self.over.add(change.value)

    def overtaken(self, by: Change) -> None:
        """Closes the changes that were planned before a quiet one began that is committed."""
        for change in self.changes:
            if change is not by and change.planned is not None and change.planned < by.started:
                self._close(change)

    def check_outcome(self, attempt: str, told: str, change: Change | None) -> None:
        """Checks what `outcome` says of an attempt."""
        before = self.were_told.get(attempt)
        assert {before, told} != {"committed", "aborted"}, (attempt, before, told)
        if change is not None and attempt in change.attempts:
            assert told == "committed", change.reports
        if change is not None and change.status == "failed":
            assert told != "committed", change.reports
        if told != "open":
            self.were_told[attempt] = told


def tally(changes: list[Change], count: Counter[str]) -> None:
    """Counts what the ranks were told."""
    for change in changes:
        count[f"{'save' if change.value is not None else 'delete'} {change.status}"] += 1
        kinds = {kind_of(report) for report in change.reports.values()}
        count["told unknown"] += "unknown" in kinds
        count["told late"] += "late" in kinds
        if any(isinstance(r, CheckpointExistsError) for r in change.reports.values()):
            count["told exists"] += 1


# --- The readers ----------------------------------------------------------------------------------


def state_of(value: int) -> dict:
    """Returns a state in which every element tells its value."""
    return {
        "a": np.arange(35, dtype=np.float32).reshape(7, 5) + value * 100,
        "rep.large": np.arange(620, dtype=np.float64).reshape(31, 20) + value * 1000,
        "rep.bias": np.full(5, value, np.int32),
        "step": {"step": value},
    }


SHAPES = state_of(0)


def contents(storage) -> dict[str, bytes]:
    """Returns every file of a storage."""
    return {entry.key: storage.read(entry.key) for entry in storage.list()}


def value_of(state: State) -> int:
    """Returns which value a state is of, whole."""
    value = state["step"]["step"]
    assert same_state(state, state_of(value)), f"a mixture with {value}: {state}"
    return value


def loaded(work) -> int:
    """Returns which value the work of a rank loaded, whole."""
    value = work.state["step"]["step"]
    work.check(state_of(value))
    return value


def what_stands(url: str, world_size: int) -> int | None:
    """Returns the value that loads, the same on every rank; None when there is no checkpoint."""
    try:
        return value_of(load_state(open_storage(url), SHAPES, world_size))
    except CheckpointNotFoundError:
        return None


def stock_sees(storage):
    """Returns the value that stock DCP loads, None if it sees no checkpoint, or its error."""
    try:
        found = loaded_by_stock(storage, SHAPES)
    except (Exception, CheckpointException) as error:
        return error
    return None if found is None else value_of(found)
