"""Performs a vote on storage: creates a record in a slot, or reads the one that is there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ray_dcp.commit_protocol.commands import (
    CreateAbort,
    CreateRecord,
    Failed,
    OutcomeRead,
    ReadOutcome,
    ReadRecord,
    RecordCreated,
    Result,
    SlotFree,
    SlotTaken,
    Task,
)
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won
from ray_dcp.core.processes import at_once
from ray_dcp.core.wire_error import to_wire
from ray_dcp.errors import (
    CheckpointError,
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
from ray_dcp.io.records import read_slots, used_slots
from ray_dcp.place.records import confirm_record, decision_of, overtaken
from ray_dcp.place.stock_metadata import republish
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, Storage

Opener = Callable[[Target], Storage]
"""Opens the storage of a target."""

_RecordTask = VoteTask | ReadOutcome


def decide(vote: Vote, task: VoteTask, opener: Opener) -> Decision:
    """Performs the tasks of a vote from the first one on, and returns the decision.

    Args:
        vote: The vote.
        task: Its first task.
        opener: Opens the storage.
    """
    step: VoteTask | Decision = task
    while not isinstance(step, Won | Fenced | Lost | Open):
        step = vote.advance(result_of(step, partial(perform_on_records, step, opener)))
    return step


def result_of(task: Task, action: Callable[[], Result]) -> Result:
    """Returns what an action that performs a task returns; its error as `Failed`.

    Args:
        task: The task.
        action: Performs it.
    """
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - a raw error would end the coordinator
        return Failed(to_wire(error, f"The task {type(task).__name__}", kind=InternalError))


def perform_on_records(task: _RecordTask, opener: Opener) -> Result:
    """Performs a task that creates or reads records.

    Args:
        task: The task.
        opener: Opens the storage.

    Raises:
        CheckpointError: The storage fails, or a record can't be read.
    """
    storage = opener(task.target)
    match task:
        case CreateRecord():
            return _create(storage, task.slot, task.record, task.create_if_absent)
        case CreateAbort():
            record = AbortRecord(attempt=task.attempt, reason=task.reason, rank=task.rank)
            return _create(storage, task.slot, encode_record(record), task.create_if_absent)
        case ReadRecord():
            return _confirmed_record(storage, task.slot)
        case ReadOutcome():
            return _outcome(storage, task)


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
    before: tuple[int, ...] | None = None
    try:
        # Why looked meanwhile: see `overtaken`.
        _, before = at_once(
            lambda: storage.write(record_key(slot), record, create=can_create),
            lambda: used_slots(storage),
        )
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
    return RecordCreated(slot, overtaken(storage, slot, record, before))


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
