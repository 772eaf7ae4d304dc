"""Carries out the tasks of the machines: thin code over plan, format, store and transfer.

Nothing is decided here, and nothing raw escapes: an error becomes a `Failed` result.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable
from contextlib import suppress

from ray_dcp.collector import collector_paused
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    InternalError,
    StorageError,
)
from ray_dcp.format.manifest import (
    AbortRecord,
    DeleteRecord,
    decode_record,
    encode_record,
    record_key,
)
from ray_dcp.plan.read_once import Ranges, share_reads
from ray_dcp.protocol.commands import (
    BuildCommit,
    CheckpointRead,
    CollectReplaced,
    CreateAbort,
    CreateRecord,
    Failed,
    Finished,
    MakeMetadata,
    MakePlan,
    OutcomeRead,
    PublishMetadata,
    ReadCheckpoint,
    ReadOutcome,
    ReadRecord,
    ReadRecords,
    ReadsShared,
    RecordCreated,
    Result,
    ShareReads,
    SlotFree,
    SlotTaken,
    Task,
    WriteTable,
)
from ray_dcp.protocol.messages import FileReceipt, Target
from ray_dcp.protocol.receipts import FileReceipts
from ray_dcp.protocol.vote import Won
from ray_dcp.runtime.commit_files import build_commit
from ray_dcp.runtime.metadata_later import write_metadata
from ray_dcp.runtime.planning_task import plan_of
from ray_dcp.runtime.publishing import publish, republish
from ray_dcp.runtime.records import (
    confirm_record,
    decision_of,
    overtaken,
    read_standing,
    standing_records,
    without_stock_files,
)
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, Storage
from ray_dcp.transfer.opening import find_checkpoint
from ray_dcp.transfer.slots import read_slots
from ray_dcp.transfer.threads import run_tasks

__all__ = ["new_attempt", "perform"]

MOST_NAMED = 20
CHECK_THREADS = 16
MOST_SENT_BYTES = 64 << 10
"""Longest chunk table that is sent to the ranks. Why: one that reads it pays a request, which takes
as long as so many bytes; of a longer one most ranks need a part."""


def new_attempt() -> str:
    """Returns an attempt id that no other save ever had: 16 random hex digits."""
    return secrets.token_hex(8)


def perform(task: Task, opener: Callable[[Target], Storage] = open_storage) -> Result:
    """Returns what came of a task. Blocks as long as the storage does.

    Args:
        task: Of a `Perform` command.
        opener: What opens the storage.

    Returns:
        The result that the task's docstring names, or `Failed`. Never raises.
    """
    try:
        return _perform(task, opener)
    except CheckpointError as error:
        return Failed(error)
    except Exception as error:  # noqa: BLE001 - a raw error would end the coordinator
        internal = InternalError(
            f"{type(task).__name__} failed with {type(error).__name__}: {error}. Please report this"
        )
        internal.__notes__ = [traceback.format_exc()]
        return Failed(internal)


def _perform(task: Task, opener: Callable[[Target], Storage]) -> Result:
    match task:
        case ShareReads():
            return _share_reads(task)
        case ReadRecords():
            return read_standing(opener(task.target))
        case MakePlan():
            with collector_paused():
                return plan_of(task)
        case BuildCommit():
            _check_complete(opener(task.target), task)
            with collector_paused():
                return build_commit(task)
        case WriteTable():
            storage = opener(task.target)
            for key, data in task.files:
                storage.write(key, data)
            return Finished()
        case CreateRecord():
            storage = opener(task.target)
            return _create(storage, task.slot, task.record, task.create_if_absent)
        case ReadRecord():
            return _confirmed_record(opener(task.target), task.slot)
        case ReadOutcome():
            return _outcome(opener(task.target), task)
        case CreateAbort():
            record = AbortRecord(attempt=task.attempt, reason=task.reason, rank=task.rank)
            storage = opener(task.target)
            return _create(storage, task.slot, encode_record(record), task.create_if_absent)
        case PublishMetadata():
            return publish(opener(task.target), task.slot, task.metadata, task.target.url)
        case MakeMetadata():
            write_metadata(task.target, opener=opener)
            return Finished()
        case CollectReplaced():
            storage = opener(task.target)
            storage.delete(without_stock_files(storage, task.keys))
            return Finished()
        case ReadCheckpoint():
            storage = opener(task.target)
            found = find_checkpoint(storage, checkpoint_id=task.target.url)
            if found.metadata_is_stale:
                # Why here: whoever committed it is gone, and no save may follow. Suppressed: a
                # load needs no `.metadata`, and may have no right to write.
                with suppress(CheckpointError):
                    republish(storage, task.target.url)
            table = found.table if len(found.table) <= MOST_SENT_BYTES else b""
            return CheckpointRead(found.kind, found.slot, found.record, table)


def _check_complete(storage: Storage, task: BuildCommit) -> None:
    """Checks that all files are here, and if not, whether somebody may have removed them.

    Raises:
        CheckpointExistsError: Another save or a delete came since this one was planned.
        StorageError: Some are missing or have another length.
    """
    try:
        _check_visible(storage, task.receipts)
    except StorageError as error:
        standing = standing_records(storage)
        if standing.record is None or standing.slot <= task.previous_slot:
            raise
        what = "committed" if standing.manifest is not None else "deleted"
        raise CheckpointExistsError(
            f"Expected attempt {task.attempt} to be the only one of this checkpoint id, but "
            f"attempt {standing.record.attempt} {what} it in slot {standing.slot} meanwhile, which "
            f"removes the files of all others ({error.message}). Only one save at a time can have "
            f"an id",
            checkpoint_id=task.target.url,
        ) from error


def _share_reads(task: ShareReads) -> ReadsShared:
    ranks, needs = range(task.world_size), task.needs
    shares = share_reads(
        {rank: Ranges.decode(each.ranges) for rank, each in needs.items()},
        world_size=task.world_size,
        nodes=[needs[rank].node if rank in needs else "" for rank in ranks],
        # Why one: all ranks read the same storage, with the same options.
        cost=needs[min(needs)].cost,
    )
    return ReadsShared(shares)


def _check_visible(storage: Storage, receipts: tuple[FileReceipt | FileReceipts, ...]) -> None:
    """Checks that the files of the ranks are here as well, where the commit is made.

    Why: with a path that is not shared between the nodes every rank writes without an error, and
    the checkpoint would be committed without its files.

    Raises:
        StorageError: Some are missing or have another length.
    """
    wrong: list[str] = []

    def check(file: tuple[str, int]) -> None:
        # Why not a list: network filesystems show an old one for a while.
        key, num_bytes = file
        try:
            start = max(num_bytes - 1, 0)
            tail = storage.read(key, start, 2)
        except KeyMissingError:
            wrong.append(f"{key} is missing")
            return
        if len(tail) != num_bytes - start:
            wrong.append(f"{key} has another length than {num_bytes} bytes")

    files = [(told.key, told.num_bytes) for told in receipts if isinstance(told, FileReceipt)]
    files += [file for told in receipts if isinstance(told, FileReceipts) for file in told.lengths]
    run_tasks(files, check, min(CHECK_THREADS, max(len(files) // CHECK_THREADS, 1)))
    if wrong:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise StorageError(
            f"Expected every file that the ranks wrote in {storage.url}, as the coordinator sees "
            f"it, but {', '.join(sorted(wrong)[:MOST_NAMED])}{more}. Save to a place that all "
            f"nodes share"
        )


def _create(
    storage: Storage, slot: int, record: bytes, can_create: bool
) -> RecordCreated | SlotTaken:
    if can_create and not storage.traits.create_if_absent:
        raise StorageError(
            f"Expected that {storage.url} creates a file only if there is none, as it did when "
            f"this save was planned, but on this machine it does not. Mount it in the same way on "
            f"all machines"
        )
    if not can_create:
        # Why: such a storage leaves the decision to the coordinator alone, which asks first.
        found = _read_record(storage, slot)
        if isinstance(found, SlotTaken):
            return found
    try:
        storage.write(record_key(slot), record, create=can_create)
    except KeyExistsError:
        found = _read_record(storage, slot)
        if isinstance(found, SlotTaken):
            return found
        above = overtaken(storage, slot, record)
        if above is None:
            raise InternalError(
                f"Slot {slot} was taken and is free again, but records are only removed below one "
                f"that decides. Somebody else deleted {record_key(slot)}",
                key=record_key(slot),
            ) from None
        # Why not once more: below what decides it is all the same whether this record is there.
        return RecordCreated(slot, above)
    if not can_create:
        # Why: somebody else may have looked at the same time, and written since.
        found = _read_record(storage, slot)
        if isinstance(found, SlotFree):
            raise StorageError(
                f"{storage.url} answered that {record_key(slot)} was written, but it is not "
                f"there. Save to another storage, or repair this one",
                key=record_key(slot),
            )
        if found.record != record:
            return found
    return RecordCreated(slot, overtaken(storage, slot, record))


def _outcome(storage: Storage, task: ReadOutcome) -> OutcomeRead:
    decision = decision_of(read_slots(storage, whole=True), task.attempt)
    if not isinstance(decision, Won):
        return OutcomeRead(0 if decision is None else decision.slot)
    confirm_record(storage, decision.slot, decision.record)
    # Suppressed: it is committed, and the next save or load publishes it.
    with suppress(CheckpointError):
        republish(storage, task.target.url)
    return OutcomeRead(decision.slot, decision.record)


def _confirmed_record(storage: Storage, slot: int) -> SlotTaken | SlotFree:
    found = _read_record(storage, slot)
    if isinstance(found, SlotTaken):
        confirm_record(storage, slot, found.record)
    return found


def _read_record(storage: Storage, slot: int) -> SlotTaken | SlotFree:
    key = record_key(slot)
    try:
        data = storage.read(key)
    except KeyMissingError:
        return SlotFree(slot)
    record = decode_record(data, key=key)
    return SlotTaken(
        slot,
        record.attempt,
        isinstance(record, AbortRecord),
        data,
        isinstance(record, DeleteRecord),
        overtaken(storage, slot, data),
    )
