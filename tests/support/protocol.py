"""One coordination whose messages and tasks are played by hand, without ranks, storage and bytes.

`Play` feeds events to a `Coordination` and keeps what it commands. `StagedWorld` plays the ranks,
stagers and coordinators of one asynchronous save, in any order of events.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from ray_dcp.commit_protocol.commands import (
    Answer,
    Arm,
    CommitBuilt,
    Disarm,
    Failed,
    Finished,
    OutcomeRead,
    Perform,
    Planned,
    Published,
    RecordCreated,
    RecordsRead,
    step_of,
)
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import (
    FileReceipt,
    LoadJoin,
    OpKey,
    PartsHeld,
    PartsWritten,
    Refused,
    Reply,
    Request,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
    Target,
)
from ray_dcp.core.values import ChunkTable, FilePlan, GlobalPlan, RankPlan
from ray_dcp.errors import CheckpointError
from ray_dcp.options import LoadOptions, SaveOptions

KEY = OpKey("run", 0)
TARGET = Target("memory://ckpt")
NOTHING = RecordsRead(0, None, None, ())
BUILT = CommitBuilt("chunks.a1.table", b"table", b"manifest", b"metadata")


def empty_table(files=()) -> ChunkTable:
    def ints(*shape):
        return np.zeros(shape, np.int64)

    return ChunkTable(
        names=(), paths=(), dtypes=(), files=tuple(files), kind=np.zeros(0, np.int8),
        dtype=np.zeros(0, np.int8), ndim=np.zeros(0, np.int8), shape=ints(0, 1),
        requires_grad=np.zeros(0, bool), tensor=np.zeros(0, np.int32), offset=ints(0, 1),
        size=ints(0, 1), file=np.zeros(0, np.int32), item_offset=ints(0), item_bytes=ints(0),
        payload_offset=ints(0), payload_bytes=ints(0), block_bytes=ints(0), check_start=ints(1),
        checks=np.zeros(0, np.uint64),
    )  # fmt: skip


def planned(world_size, disagreements="", files=0) -> Planned:
    """Returns a plan in which each rank writes the next `files` files."""
    table = empty_table(f"__{rank}_0.{{attempt}}.distcp" for rank in range(world_size))
    plan = GlobalPlan(
        world_size, table, np.zeros(0, np.int32), np.zeros(0, np.int32),
        np.zeros(0, np.int64), np.arange(world_size, dtype=np.int32),
        np.zeros(world_size, np.int64), (), bytes(32),
    )  # fmt: skip
    parts = tuple(
        RankPlan(rank, tuple(map(file_plan, range(files * rank, files * rank + files))))
        for rank in range(world_size)
    )
    return Planned(plan, parts, disagreements=disagreements)


def receipt_file(rank) -> FileReceipt:
    return FileReceipt(rank, f"__{rank}_0.a1.distcp", 4, bytes(16))


def file_plan(file) -> FilePlan:
    return FilePlan(file, f"__{file}.{{attempt}}.distcp", 0, (), *(np.zeros(0, np.int64),) * 12)


def join_of(rank, world_size=2, *, key=KEY, rows=b"c", **changed) -> SaveJoin:
    """Returns the join of a rank that is like no other one."""
    name = hashlib.blake2b(repr((key, rank, rows)).encode(), digest_size=32).digest()
    fields = {"target": TARGET, "options": SaveOptions(), "columns": rows, "fingerprint": name}
    return SaveJoin(key, rank, world_size, **{**fields, **changed})


@dataclass
class Play:
    """One coordination, and all that it has said so far."""

    world_size: int = 2
    options: SaveOptions = field(default_factory=SaveOptions)
    load_options: LoadOptions = field(default_factory=LoadOptions)
    epoch: int = 1
    silence_s: float | None = None
    now_s: float = 0.0

    def __post_init__(self):
        numbers = count(1)
        self.coordination = Coordination(
            epoch=self.epoch,
            new_attempt=lambda: f"a{next(numbers)}",
            clock=lambda: self.now_s,
        )
        self.commands: list = []
        self.todo: list[Perform] = []
        self.replies: dict = {}
        self.timer: Arm | None = None

    # Events

    def send(self, request):
        """Returns the reply to this request, if it came at once."""
        commands = self.coordination.receive(request, silence_s=self.silence_s)
        return self._take(commands, request.rank)

    def join(self, rank, **changed):
        plain = {"world_size": self.world_size, "options": self.options}
        return self.send(join_of(rank, **{**plain, **changed}))

    def join_load(self, rank, *, key=KEY, error=None, target=TARGET):
        return self.send(LoadJoin(key, rank, self.world_size, target, self.load_options, error))

    def receipt(self, rank, *, key=KEY, attempt="a1", epoch=None, error=None):
        files = () if error else (receipt_file(rank),)
        epoch = self.epoch if epoch is None else epoch
        return self.send(SaveReceipt(key, rank, attempt, epoch, files, error))

    def done(self, result, index=0):
        """Ends the oldest task."""
        todo = self.todo.pop(index)
        self._take(self.coordination.performed(todo.key, todo.task, result))
        return todo.task

    def fail(self, error):
        return self.done(Failed(error))

    def expire(self):
        timer, self.timer = self.timer, None
        assert timer is not None, "no timer is armed"
        self._take(self.coordination.expired(timer.key, timer.phase))
        return timer

    def lose(self, *ranks, reason="killed"):
        self._take(self.coordination.lost(KEY.session, ranks, reason))

    # The way up to a phase

    def to_writing(self, seen=NOTHING):
        for rank in range(self.world_size):
            self.join(rank)
        self.done(seen)
        self.done(planned(self.world_size))

    def to_record(self, seen=NOTHING):
        self.to_writing(seen)
        for rank in range(self.world_size):
            self.receipt(rank)
        self.done(BUILT)
        self.done(Finished())

    def to_end(self, seen=NOTHING):
        self.to_record(seen)
        self.done(RecordCreated(seen.last_slot + 1))
        self.done(Published())
        if self.todo:
            self.done(Finished())

    # What was said

    @property
    def task(self):
        return self.todo[0].task if self.todo else None

    def reply(self, rank, step):
        return self.replies.get((rank, step))

    def errors(self, step) -> dict[int, CheckpointError]:
        return {
            rank: reply.error
            for (rank, at), reply in self.replies.items()
            if at == step and isinstance(reply, Refused)
        }

    def _take(self, commands, rank=None):
        self.commands.extend(commands)
        mine = None
        for command in commands:
            match command:
                case Answer(_, ranks, step, reply):
                    self.replies.update({(one, step): reply for one in ranks})
                    mine = reply if rank in ranks else mine
                case Perform():
                    self.todo.append(command)
                case Arm():
                    self.timer = command
                case Disarm():
                    self.timer = None
        return mine


# --- Asynchronous saves ---------------------------------------------------------------------------


RESULTS = {
    "ReadRecords": NOTHING,
    "BuildCommit": BUILT,
    "CreateRecord": RecordCreated(1),
    "CreateAbort": RecordCreated(1),
    "PublishMetadata": Published(),
}
"""By the name of a task; others are `Finished`."""


@dataclass(eq=False)
class Stager:
    """One process of a node's stager."""

    name: str
    is_dead: bool = False
    shares: dict[int, set[int]] = field(default_factory=dict)
    """By rank the files that are to be written of it."""
    written: dict[int, PartsWritten] = field(default_factory=dict)


@dataclass(eq=False)
class Rank:
    """A rank: it hands its bytes in, which its stager reports, then waits for the outcome."""

    number: int
    node: int
    said: Request | None = None
    """The call that it is in."""
    stager: str = ""
    """The stager that it handed its bytes to."""
    outcome: Reply | None = None
    is_dead: bool = False


class StagedWorld:
    """A save that is planned, and whose bytes are to be staged and written.

    Args:
        nodes: Of each rank.
        files: Of each rank.
    """

    def __init__(self, nodes: Sequence[int], files: Sequence[set[int]]) -> None:
        self.files = [set(own) for own in files]
        self.ranks = [Rank(number, node) for number, node in enumerate(nodes)]
        self.stagers = [Stager(f"{node}#0") for node in range(max(nodes) + 1)]
        self.epoch = 0
        self.record: OutcomeRead = OutcomeRead()
        """What the storage says of the attempt."""
        self.dead: list[Stager] = []
        """Those whose place another process has."""
        self._begin_coordinator()
        for rank in range(len(nodes)):
            self.send(join_of(rank, len(nodes), staged=True))
        parts = tuple(
            RankPlan(rank, tuple(map(file_plan, sorted(own))))
            for rank, own in enumerate(self.files)
        )
        self.plan = replace(planned(len(nodes)), parts=parts)
        self.work()
        self.kept = pickle.dumps(self.coordination.staged_plan(KEY))
        """The plan, as Ray's control store has it."""

    # The coordinator

    def _begin_coordinator(self) -> None:
        self.epoch += 1
        self.coordination = Coordination(epoch=self.epoch, new_attempt=lambda: "a1")
        self.todo: list[Perform] = []
        self.armed = False

    def send(self, request: Request) -> None:
        self._take(self.coordination.receive(pickle.loads(pickle.dumps(request))))

    def _take(self, commands) -> None:
        for command in commands:
            match command:
                case Answer():
                    self._answer(command.ranks, command.step, command.reply)
                case Perform():
                    self.todo.append(command)

    def _answer(self, ranks, step: str, reply: Reply) -> None:
        for number in ranks:
            rank = self.ranks[number]
            if rank.is_dead or rank.said is None or step_of(rank.said) != step:
                continue
            said, rank.said = rank.said, None
            if isinstance(said, SaveStaged):
                rank.outcome = reply

    def work(self) -> None:
        """Ends all tasks of the coordinator."""
        while self.todo:
            todo = self.todo.pop(0)
            name = type(todo.task).__name__
            result = {"MakePlan": self.plan, "ReadOutcome": self.record, **RESULTS}.get(
                name, Finished()
            )
            if name in ("CreateRecord", "CreateAbort"):
                self.record = OutcomeRead(1, b"manifest" if name == "CreateRecord" else b"")
            self._take(self.coordination.performed(todo.key, todo.task, result))

    def restart(self) -> None:
        """Another coordinator comes, and takes the save up.

        Also where the one before had ended it, and could not forget its plan any more.
        """
        self._begin_coordinator()
        self._take(self.coordination.resume(pickle.loads(self.kept)))
        for stager in self.stagers:
            self._ask(stager)
        for rank in self.ranks:
            if rank.said is not None and not rank.is_dead:
                self.send(rank.said)
        # Ray's control store has the ranks of a session, and Ray knows who lives.
        dead = [rank.number for rank in self.ranks if rank.is_dead]
        self._take(self.coordination.lost(KEY.session, dead, "killed"))

    def _ask(self, stager: Stager) -> None:
        """A coordinator that took the save up hears what a stager had told the one before."""
        if stager.is_dead:
            return
        # Of the epoch in which it was planned: that is in the names of shares.
        for number in stager.shares:
            self.send(PartsHeld(KEY, number, "a1", 1, stager.name))
        for report in stager.written.values():
            self.send(report)

    def look(self) -> None:
        """The coordinator asks the stagers that it needs whether they live."""
        for name in self.coordination.stagers():
            if self.stager(name).is_dead:
                self._take(self.coordination.stager_lost(name, "it died"))

    # Ranks

    def step(self, number: int) -> bool:
        """A rank goes on by one call; returns False when it has to wait.

        Args:
            number: Which.
        """
        rank = self.ranks[number]
        if rank.is_dead or rank.outcome is not None or rank.said is not None:
            return False
        if not rank.stager:
            stager = self.stagers[rank.node]
            stager.shares[number] = set(self.files[number])
            rank.stager = stager.name
            self._call(rank, PartsHeld(KEY, number, "a1", 1, stager.name))
        else:
            self._call(rank, SaveStaged(KEY, number, "a1", 1, stager=rank.stager))
        return True

    def _call(self, rank: Rank, request: Request) -> None:
        rank.said = request
        try:
            self.send(request)
        except CheckpointError as error:
            rank.said, rank.outcome = None, error

    def turn(self, number: int) -> None:
        """A rank whose stager died before it had its answer hands its bytes to another one."""
        rank = self.ranks[number]
        if rank.is_dead or not rank.stager or not self.stager(rank.stager).is_dead:
            return
        if rank.said is not None or rank.outcome is not None:
            return
        if self.stagers[rank.node].is_dead:
            self.dead.append(self.stagers[rank.node])
            self.stagers[rank.node] = Stager(f"{rank.node}#{len(self.dead)}")
        rank.stager = ""
        self.step(number)

    def kill_rank(self, number: int) -> None:
        rank = self.ranks[number]
        rank.is_dead = True
        self._take(self.coordination.lost(KEY.session, [number], "killed"))

    # Stagers

    def stager(self, name: str) -> Stager:
        return next(one for one in (*self.stagers, *self.dead) if one.name == name)

    def kill_stager(self, node: int) -> None:
        self.stagers[node].is_dead = True

    def write(self, node: int) -> bool:
        """A stager writes one of its files; returns False when there is none."""
        stager = self.stagers[node]
        if stager.is_dead:
            return False
        for rank, file in sorted((r, file) for r, own in stager.shares.items() for file in own):
            if file in stager.written:
                continue
            report = PartsWritten(KEY, rank, "a1", 1, (receipt_file(file),))
            stager.written[file] = report
            try:
                self.send(report)
            except CheckpointError:
                return True  # nobody needs it any more
            return True
        return False

    # The end

    @property
    def is_over(self) -> bool:
        return self.coordination.outcome(KEY) is not None

    def settle(self) -> None:
        """Lets all go on that can, until nothing happens any more."""
        for _ in range(100):
            self.work()
            self.look()
            stepped = [self.step(rank.number) for rank in self.ranks]
            written = [self.write(node) for node in range(len(self.stagers))]
            if not any(stepped) and not any(written) and not self.todo:
                return
        raise AssertionError(f"it never ends: {self.ranks}")

    @property
    def committed(self) -> bool:
        return bool(self.record.record)
