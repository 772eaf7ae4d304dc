"""What the machines ask of their executor: commands, the tasks that they name, and task results.

All are frozen values. A machine never touches storage, a clock or a rank: it returns commands, and
receives their results later as events. `ray_dcp.runtime` is the executor: `tasks` carries out the
tasks; `inline` and the coordinator actor do the rest.

What an executor does with a batch of commands, in order:

* `Answer`: resolve the call in which each of `ranks` waits with `(key, step)`, where `step` is the
  `step_of` its request; all such calls, if it arrived twice. If nobody waits, drop it.
* `Perform`: start the task in a thread, as it blocks; pass its result to `Coordination.performed`,
  once. Tasks of one operation follow each other, except one that took too long.
* `Arm`: replace the operation's one timer; when it expires, call `Coordination.expired` with the
  key and phase that it was armed with. A late expiry does no harm. `Disarm`: drop the timer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_dcp.commit_protocol.messages import (
    FileReceipt,
    FileReceipts,
    LoadGo,
    OpKey,
    PartsWritten,
    Reply,
    Request,
    SaveJoin,
    Target,
)
from ray_dcp.core.values import GlobalPlan, RankPlan
from ray_dcp.errors import CheckpointError
from ray_dcp.format.manifest import Verdict
from ray_dcp.planning.reads import ReadNeeds, ReadShares


@dataclass(frozen=True)
class ReadCheckpoint:
    """Find the checkpoint that a load is to read. Result: `LoadGo`.

    Where its `.metadata` is missing or older, it is published again, if that works.
    """

    target: Target


@dataclass(frozen=True)
class ShareReads:
    """Decide which rank reads what several need. Pure, but long. Result: `ReadShares`."""

    needs: Mapping[int, ReadNeeds]
    """Of the ranks that take part."""
    world_size: int


@dataclass(frozen=True)
class ReadRecords:
    """Look at what stands at the target before a save. Result: `RecordsRead`."""

    target: Target


@dataclass(frozen=True)
class MakePlan:
    """Merge the ranks' columns into one plan. Pure, but long. Result: `Planned`, `RowsMissing`."""

    columns: tuple[bytes, ...]
    """Encoded `Columns` by rank; empty where they may follow from the others'."""
    part_bytes: int
    to_lowest_rank: bool = False
    """`SaveOptions.dedup_save_to_lowest_rank`."""
    contents: tuple[bytes, ...] = ()
    """`SaveJoin.contents` by rank, which `columns` lack."""
    fingerprints: tuple[bytes, ...] = ()
    """`SaveJoin.fingerprint` by rank: what its columns must have."""
    nodes: tuple[int, ...] = ()
    """Number of each rank's node."""


@dataclass(frozen=True, eq=False)
class BuildCommit:
    """Check the receipts, build all bytes of the commit. Pure, but long. Result: `CommitBuilt`."""

    target: Target
    attempt: str
    epoch: int
    plan: GlobalPlan
    receipts: tuple[FileReceipt | FileReceipts, ...]
    previous_slot: int
    """Highest slot in use at planning."""
    replaced_metadata: str | None
    """Digest of the foreign `.metadata` that stood at planning."""
    decided: tuple[Verdict, ...] = ()
    """`RecordsRead.decided`."""
    stock_metadata: bool = True
    """`SaveOptions.stock_metadata`."""


@dataclass(frozen=True, eq=False)
class WriteTable:
    """Write the chunk table, and look whether all data files are visible. Result: `Finished`.

    The table is durable when it is done.
    """

    target: Target
    key: str
    table: bytes
    receipts: tuple[FileReceipt | FileReceipts, ...] = ()
    """Of the data files."""
    attempt: str = ""
    previous_slot: int = 0
    """Highest slot in use at planning."""


@dataclass(frozen=True)
class CreateRecord:
    """*The commit*: create the manifest in this slot. Result: `RecordCreated` or `SlotTaken`."""

    target: Target
    slot: int
    record: bytes
    create_if_absent: bool = True
    """`RecordsRead.create_if_absent`, as the save was planned by it."""


@dataclass(frozen=True)
class ReadRecord:
    """Read what is in a slot. Result: `SlotTaken` or `SlotFree`."""

    target: Target
    slot: int


@dataclass(frozen=True)
class ReadOutcome:
    """Read whether a record decides an attempt already. Result: `OutcomeRead`.

    Publishes the `.metadata` of the commit that stands, where whoever committed it did not.
    """

    target: Target
    attempt: str


@dataclass(frozen=True)
class CreateAbort:
    """Create an abort record in this slot. Result: `RecordCreated` or `SlotTaken`."""

    target: Target
    slot: int
    attempt: str
    reason: str
    rank: int | None
    create_if_absent: bool = True
    """`RecordsRead.create_if_absent`, as the save was planned by it."""


@dataclass(frozen=True)
class PublishMetadata:
    """Replace `.metadata` by that of the committed checkpoint. Result: `Published`.

    Left as it is, or put back, when a higher slot holds a commit or delete.
    """

    target: Target
    slot: int
    """Where this attempt's manifest is."""
    metadata: bytes | None
    """None removes a `.metadata`: the save made none."""


@dataclass(frozen=True)
class CollectReplaced:
    """Delete files that no commit references any more. Result: `Finished`.

    Files with names of stock DCP stay when a `.metadata` that names them stands by now.
    """

    target: Target
    keys: tuple[str, ...]
    """In the order in which they are deleted."""


Writing = WriteTable | CreateRecord | CreateAbort | PublishMetadata
Reading = ReadCheckpoint | ReadOutcome | ShareReads
Task = ReadRecords | MakePlan | BuildCommit | ReadRecord | Reading | Writing | CollectReplaced


@dataclass(frozen=True)
class RecordsRead:
    """What stands at a target."""

    last_slot: int
    """Highest slot in use, by a commit or an abort; 0 when there is none."""
    committed: str | None
    """The checkpoint that a reader would be given, in words for a message; None when none."""
    foreign_metadata: str | None
    """Hex digest of a `.metadata` that is not ours."""
    replaced: tuple[str, ...]
    """Keys that nothing references once another checkpoint has replaced this one: what any other
    attempt left, and the records. In the order in which to delete them."""
    warnings: tuple[str, ...] = ()
    decided: tuple[Verdict, ...] = ()
    """What the next commit records of attempts whose records it makes superfluous."""
    create_if_absent: bool = True
    """A record has one winner; else whoever writes last wins, and only this save may write."""


@dataclass(frozen=True, eq=False)
class Planned:
    """The global plan and each rank's part of it."""

    plan: GlobalPlan
    parts: Sequence[RankPlan]
    """The index is the rank."""
    warnings: tuple[str, ...] = ()
    disagreements: str = ""
    """What `SaveOptions(replicas="check")` refuses, in words; empty when all ranks agree."""


@dataclass(frozen=True)
class RowsMissing:
    """No plan: these ranks' rows do not follow from those of the others."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CommitBuilt:
    """All bytes that the commit writes."""

    table_key: str
    table: bytes
    record: bytes
    metadata: bytes | None


@dataclass(frozen=True)
class Overtaken:
    """A commit or delete in a higher slot than that of a record: it decides what stands.

    Slots below the one that decides become free again, so that an attempt which lay still for
    long may create its record in one of them. Such a record was never in force.
    """

    slot: int
    """Of the record that decides."""
    attempt: str
    """Of that record."""
    was_committed: bool
    """The attempt of the lower record was in force before, by the record that decides."""
    is_delete: bool = False
    """What decides is a delete: nothing stands."""


@dataclass(frozen=True)
class RecordCreated:
    """The record is durable in its slot, and this call put it there."""

    slot: int
    overtaken: Overtaken | None = None
    """None when no higher slot decides."""


@dataclass(frozen=True)
class SlotTaken:
    """A slot holds this record."""

    slot: int
    attempt: str
    """The attempt that the record names."""
    is_abort: bool
    record: bytes
    is_delete: bool = False
    overtaken: Overtaken | None = None
    """None when no higher slot decides."""


@dataclass(frozen=True)
class SlotFree:
    """Nothing is in the slot now. A write whose fate is unknown may still arrive."""

    slot: int


@dataclass(frozen=True)
class OutcomeRead:
    """What the records of a target decide about one attempt."""

    slot: int = 0
    """Slot of the record that decides it; 0 while none does."""
    record: bytes = b""
    """Its manifest, where that was committed and not replaced since."""


@dataclass(frozen=True)
class Published:
    """`.metadata` was dealt with."""

    superseded: bool = False
    """A higher commit or delete decides, and `.metadata` is as that wants it."""


@dataclass(frozen=True)
class Finished:
    """The task was done."""


@dataclass(frozen=True)
class Failed:
    """The task failed; whether what it was to write was written is unknown."""

    error: CheckpointError


Seen = RecordsRead | RecordCreated | SlotTaken | SlotFree | LoadGo | ReadShares
Result = Seen | OutcomeRead | Planned | RowsMissing | CommitBuilt | Published | Finished | Failed


@dataclass(frozen=True)
class Answer:
    """Give ranks the same reply to their requests of one step, which is the `step_of` each."""

    key: OpKey
    ranks: tuple[int, ...]
    step: str
    reply: Reply


@dataclass(frozen=True)
class Perform:
    """Carry out a task and pass its result to `Coordination.performed`."""

    key: OpKey
    task: Task


@dataclass(frozen=True)
class Arm:
    """Set the operation's timer, in place of one that is set."""

    key: OpKey
    phase: str
    after_s: float


@dataclass(frozen=True)
class Disarm:
    """Drop the operation's timer."""

    key: OpKey


Command = Answer | Perform | Arm | Disarm


def step_of(request: Request) -> str:
    """Returns which step of its operation a request is: the `step` of its `Answer`.

    Different for each request of one rank, and of stagers, for an operation.
    """
    match request:
        case PartsWritten():
            files = ",".join(str(receipt.file) for receipt in request.files)
            return f"PartsWritten {files or 'failed'}"
        case SaveJoin(asked=asked) if asked:
            return f"SaveJoin {asked}"
    return type(request).__name__
