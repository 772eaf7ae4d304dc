"""Plays a shell by hand: feeds events to a `Coordination` and keeps what it commands."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ray_dcp.commit_protocol.commands import (
    Answer,
    Arm,
    CommitBuilt,
    Disarm,
    Failed,
    Finished,
    Perform,
    Planned,
    Published,
    RecordCreated,
    RecordsRead,
)
from ray_dcp.commit_protocol.coordination import Coordination
from ray_dcp.commit_protocol.messages import (
    FileReceipt,
    LoadJoin,
    OpKey,
    Refused,
    SaveJoin,
    SaveReceipt,
    Target,
)
from ray_dcp.core.values import ChunkTable, GlobalPlan, RankPlan
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


def planned(world_size, disagreements="") -> Planned:
    table = empty_table(f"__{rank}_0.{{attempt}}.distcp" for rank in range(world_size))
    plan = GlobalPlan(
        world_size, table, np.zeros(0, np.int32), np.zeros(0, np.int32),
        np.zeros(0, np.int64), np.arange(world_size, dtype=np.int32),
        np.zeros(world_size, np.int64), (), bytes(32),
    )  # fmt: skip
    parts = tuple(RankPlan(rank, ()) for rank in range(world_size))
    return Planned(plan, parts, disagreements=disagreements)


def receipt_file(rank) -> FileReceipt:
    return FileReceipt(rank, f"__{rank}_0.a1.distcp", 4, bytes(16))


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

    def __post_init__(self):
        numbers = count(1)
        self.coordination = Coordination(epoch=self.epoch, new_attempt=lambda: f"a{next(numbers)}")
        self.commands: list = []
        self.todo: list[Perform] = []
        self.replies: dict = {}
        self.timer: Arm | None = None

    # Events

    def send(self, request):
        """Returns the reply to this request, if it came at once."""
        return self._take(self.coordination.receive(request), request.rank)

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
