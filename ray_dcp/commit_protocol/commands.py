"""Commands of the machines to their executor, the tasks in them, and the results of tasks.

All are frozen values. A machine never accesses storage, a clock or a rank: it returns commands, and
receives their results later as events. `ray_dcp.coordinator` is the executor: `tasks` runs the
tasks; `loop` executes the other commands.

An executor handles the commands of a batch in order:

* `Answer`: resolve the call in which each of `ranks` waits with `(key, step)`, where `step` is the
  `step_of` its request; all such calls, if the request arrived twice. If no call waits, drop it.
* `Perform`: run the task in a thread, as it blocks, and pass its result to
  `Coordination.performed`, once. Tasks of one operation run one after another, unless one of them
  exceeded its time.
* `Arm`: replace the operation's only timer; when it expires, call `Coordination.expired` with the
  key and phase that it was armed with. A late expiry does no harm. `Disarm`: drop the timer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_dcp.commit_protocol.messages import (
    FileReceipt,
    LoadGo,
    OpKey,
    PartsHeld,
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
    """Find the checkpoint that a load reads. Result: `LoadGo`.

    If its `.metadata` is missing or outdated, the task tries to publish it again.
    """

    target: Target


@dataclass(frozen=True)
class ShareReads:
    """Assign reads that several ranks need to one of them. Pure, but slow. Result: `ReadShares`."""

    needs: Mapping[int, ReadNeeds]
    """Needs of the ranks that take part."""
    world_size: int


@dataclass(frozen=True)
class ReadRecords:
    """Read the records at the target before a save. Result: `RecordsRead`."""

    target: Target


@dataclass(frozen=True)
class MakePlan:
    """Merge the ranks' columns into a plan. Pure, but slow. Result: `Planned` or `RowsMissing`."""

    columns: tuple[bytes, ...]
    """Encoded `Columns` by rank; empty for ranks whose rows may follow from those of others."""
    part_bytes: int
    to_lowest_rank: bool = False
    """`SaveOptions.dedup_save_to_lowest_rank`."""
    contents: tuple[bytes, ...] = ()
    """`SaveJoin.contents` by rank, which `columns` does not include."""
    fingerprints: tuple[bytes, ...] = ()
    """`SaveJoin.fingerprint` by rank, which its columns must match."""
    nodes: tuple[int, ...] = ()
    """Number of each rank's node."""


@dataclass(frozen=True, eq=False)
class BuildCommit:
    """Check receipts and build all bytes of the commit. Pure, but slow. Result: `CommitBuilt`."""

    target: Target
    attempt: str
    epoch: int
    plan: GlobalPlan
    receipts: tuple[FileReceipt, ...]
    previous_slot: int
    """Highest slot in use at planning."""
    replaced_metadata: str | None
    """Digest of the foreign `.metadata` that existed at planning."""
    decided: tuple[Verdict, ...] = ()
    """`RecordsRead.decided`."""
    stock_metadata: bool = True
    """`SaveOptions.stock_metadata`."""
    about: Mapping[str, Any] | None = None
    """`Manifest.about`."""


@dataclass(frozen=True, eq=False)
class WriteTable:
    """Write the chunk table, durably, and check that all data files are visible.

    Result: `Finished`.
    """

    target: Target
    key: str
    table: bytes
    receipts: tuple[FileReceipt, ...] = ()
    """Receipts of the data files."""
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
    """`RecordsRead.create_if_absent`, as it was at planning."""


@dataclass(frozen=True)
class ReadRecord:
    """Read the record in a slot. Result: `SlotTaken` or `SlotFree`."""

    target: Target
    slot: int


@dataclass(frozen=True)
class ReadOutcome:
    """Read whether a record already decides an attempt. Result: `OutcomeRead`.

    Also publishes the `.metadata` of the current commit, if its coordinator had not.
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
    """`RecordsRead.create_if_absent`, as it was at planning."""


@dataclass(frozen=True)
class PublishMetadata:
    """Replace `.metadata` by that of the committed checkpoint. Result: `Published`.

    If a higher slot holds a commit or delete, `.metadata` is left unchanged or restored.
    """

    target: Target
    slot: int
    """Slot of this attempt's manifest."""
    metadata: bytes | None
    """The new bytes; None if the save has no `.metadata`, which deletes an existing one."""


@dataclass(frozen=True)
class CollectReplaced:
    """Delete files that no commit references any more. Result: `Finished`.

    Files with names of stock DCP are kept if the current `.metadata` names them.
    """

    target: Target
    keys: tuple[str, ...]
    """Keys, in the order in which they are deleted."""


Writing = WriteTable | CreateRecord | CreateAbort | PublishMetadata
Reading = ReadCheckpoint | ReadOutcome | ShareReads
Task = ReadRecords | MakePlan | BuildCommit | ReadRecord | Reading | Writing | CollectReplaced


@dataclass(frozen=True)
class RecordsRead:
    """The records and files at a target."""

    last_slot: int
    """Highest slot in use, by a commit or an abort; 0 if there is none."""
    committed: str | None
    """Description of the checkpoint that a reader would get; None if there is none."""
    foreign_metadata: str | None
    """Hex digest of a `.metadata` that ray_dcp did not write; None if there is none."""
    replaced: tuple[str, ...]
    """Keys that are unreferenced once another checkpoint replaces this one: the files of all other
    attempts, and the records. In the order in which to delete them."""
    warnings: tuple[str, ...] = ()
    decided: tuple[Verdict, ...] = ()
    """Verdicts on attempts whose records the next commit makes superfluous; it includes them."""
    create_if_absent: bool = True
    """Whether the storage creates a record only if it is absent. If not, the last writer wins, and
    only this save may write."""


@dataclass(frozen=True, eq=False)
class Planned:
    """The global plan and each rank's part of it."""

    plan: GlobalPlan
    parts: Sequence[RankPlan]
    """Parts, indexed by rank."""
    warnings: tuple[str, ...] = ()
    disagreements: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """What `SaveOptions(replicas="check")` refuses: as `GlobalPlan.disagreements`, of this save,
    while those of `plan` are of the save that it was made for."""


@dataclass(frozen=True)
class RowsMissing:
    """There is no plan yet: the rows of these ranks do not follow from those of the others."""

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
    """A commit or delete above the slot of a record, which decides what the place holds.

    Slots below the one that decides become free again, so that an attempt that was paused for a
    long time may create its record in one of them. Such a record was never in force.
    """

    slot: int
    """Slot of the deciding record."""
    attempt: str
    """Attempt of the deciding record."""
    was_committed: bool
    """Whether, by the deciding record, the attempt of the lower record had been committed."""
    is_delete: bool = False
    """Whether the deciding record is a delete, so that there is no checkpoint."""


@dataclass(frozen=True)
class RecordCreated:
    """This call created the record in its slot, durably."""

    slot: int
    overtaken: Overtaken | None = None
    """None if no higher slot decides."""


@dataclass(frozen=True)
class SlotTaken:
    """The slot already holds this record."""

    slot: int
    attempt: str
    """The attempt that the record names."""
    is_abort: bool
    record: bytes
    is_delete: bool = False
    overtaken: Overtaken | None = None
    """None if no higher slot decides."""


@dataclass(frozen=True)
class SlotFree:
    """The slot is free now. A write whose fate is unknown may still arrive."""

    slot: int


@dataclass(frozen=True)
class OutcomeRead:
    """The outcome of one attempt, by the records of a target."""

    slot: int = 0
    """Slot of the record that decides the attempt; 0 if none does yet."""
    record: bytes = b""
    """The attempt's manifest, if it was committed and has not been replaced since."""


@dataclass(frozen=True)
class Published:
    """`.metadata` is up to date."""

    superseded: bool = False
    """Whether a higher commit or delete decides; `.metadata` is then that of the higher record."""


@dataclass(frozen=True)
class Finished:
    """The task succeeded."""


@dataclass(frozen=True)
class Failed:
    """The task failed; its writes may or may not have happened."""

    error: CheckpointError


Seen = RecordsRead | RecordCreated | SlotTaken | SlotFree | LoadGo | ReadShares
Result = Seen | OutcomeRead | Planned | RowsMissing | CommitBuilt | Published | Finished | Failed


@dataclass(frozen=True)
class Answer:
    """Send ranks the same reply to their requests of one step (`step_of` each request)."""

    key: OpKey
    ranks: tuple[int, ...]
    step: str
    reply: Reply


@dataclass(frozen=True)
class Perform:
    """Run a task and pass its result to `Coordination.performed`."""

    key: OpKey
    task: Task


@dataclass(frozen=True)
class Arm:
    """Set the operation's timer, replacing the current one."""

    key: OpKey
    phase: str
    after_s: float


@dataclass(frozen=True)
class Disarm:
    """Drop the operation's timer."""

    key: OpKey


Command = Answer | Perform | Arm | Disarm


def step_of(request: Request) -> str:
    """Returns the step of its operation that a request belongs to: the `step` of its `Answer`.

    The requests of one rank in an operation, and those of stagers for it, all have different steps.
    """
    match request:
        case PartsHeld():
            return f"PartsHeld {request.stager}"
        case PartsWritten():
            files = ",".join(str(receipt.file) for receipt in request.files)
            return f"PartsWritten {files or 'failed'}"
        case SaveJoin(asked=asked) if asked:
            return f"SaveJoin {asked}"
    return type(request).__name__
