"""A job of n ranks in one thread and in virtual time, without Ray.

`World` runs the generators of ranks against one coordination, in one thread: every order of events
can be chosen, requests and ranks can get lost, gatherers can stand between, and everything can stop
at any point. `save_ranks` and `load_ranks` make such generators of states of numpy arrays
(`arrays`), `save_state` and `load_state` run them. `Warm` saves again and again. Ranks that are
threads are in `threads`.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from ray_dcp.commit_protocol.commands import (
    Answer,
    Arm,
    Command,
    Disarm,
    MakePlan,
    Perform,
    Result,
    step_of,
)
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.liveness import Doing, Heartbeat
from ray_dcp.commit_protocol.messages import (
    BatchedReplies,
    LoadJoin,
    MessageBatch,
    OpKey,
    PartsHeld,
    PartsWritten,
    Refused,
    Reply,
    Request,
    SaveGo,
    SaveJoin,
    SaveOutcome,
    SaveStaged,
    SendItems,
    Target,
)
from ray_dcp.commit_protocol.plan_cache import PlanMemory
from ray_dcp.coordinator.gatherer import BatchWindow, is_gathered
from ray_dcp.coordinator.metrics import Performer
from ray_dcp.coordinator.tasks import perform
from ray_dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    InternalError,
)
from ray_dcp.io.checkpoint import Checkpoint
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.place.attempt_id import new_attempt
from ray_dcp.rank.captured import Captured
from ray_dcp.rank.rank_load import LoadResult, RankLoad
from ray_dcp.rank.rank_save import RankSave
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from tests.support.arrays import ArrayCapture, ArrayWork, State, same_state, same_value

T = TypeVar("T")
SaveSteps = Generator[Request, Reply, SaveOutcome]

# --- The parts of ranks ---------------------------------------------------------------------------


def rank_save(key: OpKey, **how: Any) -> RankSave:
    """Returns the part of a rank in a save; `how` has its fields, None stands for the default."""
    return RankSave(key, **{name: value for name, value in how.items() if value is not None})


def save_rank(key: OpKey, *, capture: Callable[[], Captured], **how: Any) -> SaveSteps:
    """Returns what a rank says from its join to the outcome."""
    return rank_save(key, **how).run(capture)


def join_save(
    key: OpKey, *, capture: Callable[[], Captured], **how: Any
) -> Generator[Request, Reply, tuple[SaveGo, Captured]]:
    """Returns what a rank says until it knows what to write."""
    return rank_save(key, **how).join(capture)


def load_rank(key: OpKey, **how: Any) -> Generator[Request, Reply, LoadResult]:
    """Returns what a rank says from its join to a load to the outcome."""
    given = {name: value for name, value in how.items() if value is not None}
    return RankLoad(key=key, **given).run()


def save_ranks(
    state: State,
    world_size: int,
    url: str,
    *,
    session: str = "save",
    seq: int = 0,
    options: SaveOptions | None = None,
    states: Sequence[State] | None = None,
    capture: Callable[[State, int, int], Captured] = ArrayCapture,
    staged: bool = False,
    nodes: Sequence[str] = (),
    memories: Sequence[PlanMemory] = (),
    **more: Any,
) -> list[SaveSteps]:
    """Returns the generators of a save, for `run_ranks`.

    Args:
        state: What to save.
        world_size: Number of ranks.
        url: Where.
        session: Of the ranks.
        seq: Number of the operation in the session.
        options: How.
        states: Gives each rank a state of its own.
        capture: From state, rank and world size to what a rank captures.
        staged: As `async_save` does: a stager reports each file, which here is the rank itself.
        nodes: Names the node of each rank; what they write together is balanced.
        memories: Of each rank: what it knows of earlier saves.
        **more: As for `save_rank`, of each rank.
    """
    save = _save_staged if staged else save_rank
    return [
        save(
            OpKey(session, seq), rank=rank, world_size=world_size, target=Target(url),
            options=options or SaveOptions(),
            capture=partial(capture, states[rank] if states else state, rank, world_size),
            node=nodes[rank] if nodes else "",
            memory=memories[rank] if memories else None, **more,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def _save_staged(key: OpKey, *, capture: Callable[[], Captured], **how: Any) -> SaveSteps:
    """What a rank and its stager say and do in an asynchronous save, one after the other."""
    save = rank_save(key, staged=True, **how)
    go, captured = yield from save.join(capture)
    about = key, save.rank, go.attempt, go.epoch
    yield PartsHeld(*about, f"stager {save.rank}")
    written = save.write(go, captured.source, captured.deferred)
    yield PartsWritten(*about, written.files, written.error)
    return (yield from save.outcome(go, SaveStaged(*about, stager=f"stager {save.rank}")))


def load_ranks(
    like: State,
    world_size: int,
    url: str,
    *,
    session: str = "load",
    seq: int = 0,
    options: LoadOptions | None = None,
    **more: Any,
) -> tuple[list[Generator[Request, Reply, LoadResult]], list[ArrayWork]]:
    """Returns the generators of a load, and the list that will hold each rank's work.

    Args:
        like: A state with the names, dtypes and shapes that are wanted.
        world_size: Number of ranks.
        url: Where.
        session: Of the ranks.
        seq: Number of the operation in the session.
        options: How.
        **more: As for `load_rank`, of each rank.
    """
    works: list[Any] = [None] * world_size

    def plan(checkpoint: Checkpoint, rank: int) -> ArrayWork:
        works[rank] = ArrayWork(checkpoint, like, rank, world_size)
        return works[rank]  # type: ignore[no-any-return]

    ranks = [
        load_rank(
            OpKey(session, seq), rank=rank, world_size=world_size, target=Target(url),
            options=options or LoadOptions(), plan=partial(plan, rank=rank), **more,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    return ranks, works


# --- Ranks in virtual time ------------------------------------------------------------------------


class Time:
    """Virtual time: seconds, changed by whoever lets it pass."""

    now_s = 0.0

    def __call__(self) -> float:
        """Returns the seconds that have passed."""
        return self.now_s


@dataclass(eq=False)
class Batch:
    """A message of a gatherer that waits for replies."""

    key: OpKey
    step: str
    waiting: set[int]
    replies: list[tuple[int, Reply]] = field(default_factory=list)

    def put(self, rank: int, reply: Reply) -> None:
        """Takes the reply to a rank that waits in it."""
        if rank in self.waiting:
            self.waiting.remove(rank)
            self.replies.append((rank, reply))


class Shell:
    """Carries out the commands of a coordination in virtual time, with messages of gatherers.

    Attributes:
        answers: Answers that were not taken yet, oldest first, each for one rank.
        tasks: Tasks to perform, oldest first.
        batches: Messages of several ranks that wait; their answers are in no other place.
    """

    def __init__(
        self, coordination: Coordination, performer: Performer, time: Time | None = None
    ) -> None:
        self.coordination = coordination
        self.answers: list[Answer] = []
        self.tasks: list[Perform] = []
        self._timers: dict[OpKey, tuple[float, str]] = {}
        self.batches: list[Batch] = []
        self._performer = performer
        self._time = time or Time()
        self._listens = time is not None

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

    def receive_batch(self, message: MessageBatch, silence_s: float | None = None) -> Batch:
        """Hands over what several ranks say; returns what they are told, as it comes."""
        batch = Batch(message.key, message.step, set(message.ranks))
        self.batches.append(batch)
        for request in message.requests:
            refused = self.receive(request, silence_s)
            if refused is not None:
                batch.put(request.rank, refused)
        return batch

    def ready(self) -> list[Batch]:
        """Removes and returns the messages that have replies."""
        found = [batch for batch in self.batches if batch.replies]
        self.batches = [batch for batch in self.batches if not batch.replies]
        return found

    def _answer_batches(self, answer: Answer) -> list[int]:
        """Answers the ranks that wait in a message; returns the others."""
        left = set(answer.ranks)
        for batch in self.batches:
            if (batch.key, batch.step) == (answer.key, answer.step):
                for rank in left & batch.waiting:
                    left.discard(rank)
                    batch.put(rank, answer.reply)
        return sorted(left)

    def lose(self, request: Request) -> None:
        """Reports that the rank of a request died."""
        session, reason = request.key.session, f"it died before {step_of(request)}"
        self._carry_out(self.coordination.lost(session, [request.rank], reason))

    def perform(self, index: int) -> None:
        """Performs a task that waits."""
        todo = self.tasks.pop(index)
        self.performed(todo, self._performer(todo.task))

    def performed(self, todo: Perform, result: Result) -> None:
        """Passes on the result of a task."""
        self._carry_out(self.coordination.performed(todo.key, todo.task, result))

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
        self._time.now_s, phase = self._timers.pop(key)
        self._carry_out(self.coordination.expired(key, phase))
        return True

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Answer(key, _, step, reply):
                    ranks = self._answer_batches(command)
                    self.answers += [Answer(key, (rank,), step, reply) for rank in ranks]
                case Perform():
                    self.tasks.append(command)
                case Arm(key, phase, after_s):
                    self._timers[key] = (self._time.now_s + after_s, phase)
                case Disarm(key):
                    self._timers.pop(key, None)


def next_silence_s(coordination: Coordination) -> float | None:
    """Returns when, by the clock, somebody could be found silent; None when nobody could."""
    due = [
        at_s
        for key, machine in coordination._active.items()
        for rank, at_s in coordination._liveness.due_s(key).items()
        if machine.needs(rank)
    ]
    return min(due, default=None)


Fate = Literal["live", "twice", "slow", "freeze", "die"]
"""What becomes of a request and its rank: it arrives; it arrives twice; it is never sent, but the
rank lives and sends heartbeats; the same, but without heartbeats; the same, and the coordination
receives the report that the rank died."""

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


@dataclass
class Group:
    """The ranks of one gatherer, and what it holds."""

    ranks: range
    gathering: BatchWindow
    is_dead: bool = False
    outbox: list[MessageBatch] = field(default_factory=list)
    asking: list[tuple[MessageBatch, Batch]] = field(default_factory=list)
    asked: dict[int, Request] = field(default_factory=dict)


def run_ranks(
    ranks: Sequence[Generator[Request, Reply, T]],
    *,
    choose: Callable[[int], int] | None = None,
    crash_at: int | None = None,
    **how: Any,
) -> list[RankResult[T]]:
    """Runs rank generators to their ends; see `World` and `World.run`."""
    return World(**how).run(ranks, choose, crash_at)


class World:
    """Rank generators, the coordination that they speak to, and what may happen next.

    Args:
        groups: The ranks of each gatherer.
        coordination: To go on with one that has a past.
        performer: What carries out tasks.
        fate: What becomes of a request; by default it arrives. Not asked for one that comes
            twice already.
        catches: What a rank may end with; anything else is raised.
        kill: From a gatherer to whether it dies; asked before each of its events.

    Attributes:
        messages: How many messages of gatherers the coordinator received, by step.
        direct: How many it received from ranks, by type.
        batches: The messages of gatherers, in order.
    """

    def __init__(
        self,
        groups: Sequence[range] = (),
        coordination: Coordination | None = None,
        *,
        performer: Performer = perform,
        fate: Callable[[Request], Fate] | None = None,
        catches: type[BaseException] = CheckpointError,
        kill: Callable[[Group], bool] = lambda _: False,
    ) -> None:
        self.time = Time()
        self.coordination = coordination or Coordination(
            epoch=1, new_attempt=new_attempt, clock=self.time
        )
        listens = coordination is None or groups
        self.shell = Shell(self.coordination, performer, self.time if listens else None)
        self._fate, self._catches, self._kill = fate or (lambda _: "live"), catches, kill
        self.groups = [Group(ranks, BatchWindow(ranks, self.time)) for ranks in groups]
        self.messages: Counter[str] = Counter()
        self.direct: Counter[str] = Counter()
        self.batches: list[MessageBatch] = []

    def run(
        self,
        ranks: Sequence[Generator[Request, Reply, Any]],
        choose: Callable[[int], int] | None = None,
        crash_at: int | None = None,
    ) -> list[RankResult[Any]]:
        """Runs ranks to their ends.

        An event is one of: a rank goes on to its next request; a request arrives; a task is
        performed; a gatherer passes a message on. When there is none and a rank waits, the next
        deadline passes.

        Args:
            ranks: As `rank_save` and `rank_load` make them; of one session or of several.
            choose: From the number of possible events to the index of the next one. By default the
                oldest.
            crash_at: Everything stops for ever before the event of this number (from 0) that can
                touch storage: a task, or a rank going on.

        Returns:
            How each of `ranks` ended, in their order.

        Raises:
            InternalError: A rank waits, and nothing will ever happen.
        """
        choose = choose or (lambda _: 0)
        self.results: list[RankResult[Any]] = [RankResult(ended=False) for _ in ranks]
        self._ranks = ranks
        self._ready: list[tuple[int, Reply | None]] = [(index, None) for index in range(len(ranks))]
        self._mail: list[tuple[int | None, Request]] = []
        self._waiting: dict[tuple[OpKey, int, str], int] = {}
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
            *((self._pass_on, group) for group in self.groups if group.outbox),
        ]

    def _let_time_pass(self) -> bool:
        living = [group for group in self.groups if not group.is_dead]
        due = [at_s for group in living if (at_s := group.gathering.next_s) is not None]
        if not due:
            return self.shell.expire([(*who, s) for who, s in self._beats_s.items()])
        self.time.now_s = max(self.time.now_s, min(due))
        for group in living:
            group.outbox += group.gathering.due()
        return True

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
        group = next((g for g in self.groups if request.rank in g.ranks), None)
        if group is None or group.is_dead or not is_gathered(request):
            self.direct[type(request).__name__] += 1
            self._mail.append((which, request))
            return
        self._waiting[request.key, request.rank, step_of(request)] = which
        group.asked[request.rank] = request
        group.outbox += group.gathering.take(pickle.loads(pickle.dumps(request)))

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

    def _pass_on(self, group: Group) -> None:
        if self._kill(group):
            self._die(group)
            return
        message = pickle.loads(pickle.dumps(group.outbox.pop(0)))
        self.messages[message.step] += 1
        self.batches.append(message)
        group.asking.append((message, self.shell.receive_batch(message, HEARTBEAT_S)))

    def _die(self, group: Group) -> None:
        """What a gatherer holds is lost; its ranks notice, and say the same to the coordinator."""
        group.is_dead = True
        group.outbox.clear()
        for _, batch in group.asking:
            if not batch.replies:
                self.shell.batches.remove(batch)
        self.shell.ready()
        group.asking.clear()
        asked, group.asked = group.asked, {}
        for request in asked.values():
            which = self._waiting.pop((request.key, request.rank, step_of(request)), None)
            if which is not None:
                self._send(which, request)

    def _hand_out(self) -> None:
        answers, self.shell.answers = self.shell.answers, []
        for answer in answers:
            for rank in answer.ranks:
                self._told(answer.key, rank, answer.step, answer.reply)
        self.shell.ready()
        for group in self.groups:
            for message, batch in [one for one in group.asking if one[1].replies]:
                group.asking.remove((message, batch))
                told = pickle.loads(pickle.dumps(BatchedReplies(tuple(batch.replies))))
                for rank, reply in told.replies:
                    group.asked.pop(rank, None)
                    self._told(message.key, rank, message.step, reply)
                if batch.waiting:  # others wait still: the same is said again, for them
                    group.outbox.append(message.only(batch.waiting))

    def _told(self, key: OpKey, rank: int, step: str, reply: Reply) -> None:
        which = self._waiting.pop((key, rank, step), None)
        if which is not None:
            self._ready.append((which, reply))


# --- Whole saves and loads ------------------------------------------------------------------------


def committed(results: Iterable[RankResult[T]]) -> list[T]:
    """Returns what each rank of a save or load returned, and raises what one raised."""
    return [result.get() for result in results]


def save(state: State, world_size: int, url: str, **more: Any) -> list[SaveOutcome]:
    """Returns each rank's outcome of a save that works; `more` as for `save_ranks`."""
    return committed(run_ranks(save_ranks(state, world_size, url, **more)))


def load_and_check(state: State, world_size: int, url: str, **more: Any) -> list[LoadResult]:
    """Loads on some world size and compares every rank's part; `more` as for `load_ranks`."""
    loading, works = load_ranks(state, world_size, url, **more)
    results = committed(run_ranks(loading))
    for work in works:
        work.check(state)
    return results


def loads_whole(url: str, states: Sequence[State], world_size: int = 2) -> int | None:
    """Returns the index of the one state that stands at a place, whole; None when none does.

    Raises:
        AssertionError: What stands there is a mixture.
        CheckpointError: It can't be loaded.
    """
    try:
        found = load_state(open_storage(url), states[0], world_size)
    except CheckpointNotFoundError:
        return None
    standing = [number for number, state in enumerate(states) if same_state(found, state)]
    assert standing, f"{url} holds none of {len(states)} states, but {found}"
    return standing[0]


def save_state(
    storage: Storage,
    state: State,
    world_size: int = 2,
    *,
    options: SaveOptions | None = None,
    **how: Any,
) -> SaveOutcome:
    """Saves a state to a storage, by several ranks in this thread.

    Args:
        storage: Where; also one that `open_storage` does not know.
        state: What to save.
        world_size: Number of ranks.
        options: How; by default with one thread.
        **how: As for `save_ranks`.

    Raises:
        CheckpointError: What the ranks raised.
        AssertionError: They ended differently.
    """
    opener = Opener(storage)
    options = options or SaveOptions(num_threads=1)  # so that all calls come in one order
    ranks = save_ranks(state, world_size, storage.url, options=options, opener=opener, **how)
    return one_outcome(run_ranks(ranks, performer=partial(perform, opener=opener)))


def load_state(storage: Storage, like: State, world_size: int = 2) -> dict[str, Any]:
    """Returns the state that stands in a storage, put together from what several ranks load.

    Args:
        storage: Where.
        like: A state with the names, dtypes and shapes that are wanted.
        world_size: Number of ranks.

    Raises:
        CheckpointError: It can't be loaded.
        AssertionError: Ranks loaded different objects.
    """
    opener = Opener(storage)
    ranks, works = load_ranks(
        like, world_size, storage.url, options=LoadOptions(num_threads=1), opener=opener
    )
    committed(run_ranks(ranks, performer=partial(perform, opener=opener)))
    whole: dict[str, Any] = {}
    for name, value in like.items():
        parts = [work.state[name] for work in works]
        if not isinstance(value, np.ndarray):
            if any(not same_value(parts[0], part) for part in parts):
                raise AssertionError(f"ranks loaded different values of {name}: {parts}")
            whole[name] = parts[0]
            continue
        whole[name] = np.full_like(value, 0)
        for work, part in zip(works, parts, strict=True):
            box = tuple(slice(o, o + s) for o, s in zip(work.boxes[name], part.shape, strict=True))
            whole[name][box] = part
    return whole


@dataclass(frozen=True)
class Opener:
    """Opens one storage, whatever the target."""

    storage: Storage

    def __call__(self, target: Target) -> Storage:
        """Returns the storage."""
        return self.storage


def one_outcome(results: Sequence[RankResult[SaveOutcome]]) -> SaveOutcome:
    """Returns the outcome of a save that all its ranks have in common.

    Args:
        results: Of all ranks.

    Raises:
        CommitUnknownError: No rank knows of a commit, and for one the outcome is unknown.
        CheckpointError: It failed on all.
        AssertionError: It is committed on some, and failed on others.
    """
    unknown = [r.error for r in results if isinstance(r.error, CommitUnknownError)]
    failed = [r.error for r in results if r.error is not None and r.error not in unknown]
    told = [result for result in results if result.error is None]
    if told and failed:
        raise AssertionError(f"committed on {len(told)} ranks, but also: {failed[0]}")
    if not told:
        raise (*unknown, *failed)[0]
    return told[0].get()


class Warm:
    """Ranks that save again and again through one coordination, and what they say meanwhile.

    Attributes:
        joins: Of the last save.
        replies: To them.
        plans_made: In the last save.
        nodes: Names of the nodes that the ranks are on.
        staged: Whether stagers write what they save.
    """

    def __init__(self, world_size: int, url: str) -> None:
        self.url = url
        self.staged = False
        self.numbers = count()
        self.restart(world_size)
        self.restart_coordinator()

    def restart(self, world_size: int) -> None:
        """Begins with other processes."""
        self.world_size = world_size
        self.memories = [PlanMemory() for _ in range(world_size)]
        self.nodes = [""] * world_size

    def restart_coordinator(self) -> None:
        """Begins with another coordinator."""
        self.coordination = Coordination(epoch=next(self.numbers) + 1, new_attempt=new_attempt)

    def save(self, states, *, options=None, capture=ArrayCapture, choose=None, fate=None, url=None):
        """Saves; returns how each rank ended. `states`: one of all ranks, or one each."""
        states = states if isinstance(states, list) else [states] * self.world_size
        self.joins, self.replies, self.plans_made = [], [], 0
        ranks = save_ranks(
            {}, self.world_size, url or self.url, session="warm", seq=next(self.numbers),
            options=options or SaveOptions(num_threads=1), states=states, capture=capture,
            staged=self.staged, nodes=self.nodes, memories=self.memories,
        )  # fmt: skip
        return run_ranks(
            [self._listened(rank) for rank in ranks], performer=self.perform,
            coordination=self.coordination, choose=choose, fate=fate,
        )  # fmt: skip

    def _listened(self, steps: SaveSteps) -> SaveSteps:
        request = next(steps)
        while True:
            try:
                if isinstance(request, SaveJoin):
                    self.joins.append(request)
                try:
                    reply = yield request
                except CheckpointError as error:
                    request = steps.throw(error)
                    continue
                if isinstance(reply, SaveGo | SendItems):
                    self.replies.append(reply)
                request = steps.send(reply)
            except StopIteration as end:
                return end.value

    def perform(self, task):
        self.plans_made += isinstance(task, MakePlan)
        return perform(task)

    @property
    def senders(self) -> set[int]:
        """Ranks that sent rows."""
        return {join.rank for join in self.joins if join.columns}

    @property
    def was_warm(self) -> bool:
        """No rows, no values, no plan moved, and none was made."""
        quiet = not self.senders and not any(join.contents for join in self.joins)
        again = all(isinstance(r, SaveGo) and r.part is None for r in self.replies)
        return quiet and again and not self.plans_made
