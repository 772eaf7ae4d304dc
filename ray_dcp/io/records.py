"""Reads the records of a checkpoint, aborts announced deletions, and reserves disk space.

**Records** are stored in numbered slots. `read_slots` determines the *deciding* record: the commit
or delete record that defines the current state.

A record may be removed while it is read, by a save or delete that now decides, and whose own record
an earlier listing may not show. If a listed record is missing, or no record decides, the result is
therefore compared with another listing.

**Announced deletions** can be aborted by a process that protects a step, before they are committed:

    deletes the step                        protects the step (tag, reader, writer lease)
    1. announce, under an attempt id        1. write the protection
    2. read all protections                 2. fence: abort all announced attempts
    3. commit the delete record

At least one of the two sees the other, in whatever order and with whatever delays the steps happen.
The abort record occupies the attempt, so that its delete record can't be committed any more.

A storage without conditional creation allows no such abort record. There, `fence` removes the
announcement, and the deleting process checks it immediately before step 3. A deletion between that
check and its record can't be stopped; `fence` reports this.

An announcement is an empty file whose name contains all its data. The announcement of a crashed
process is aborted in the same way, so that no liveness check is needed.

**The reserve** of a run is a file that is deleted on a full disk to make room for the records of a
deletion, and created again when there is space.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    DamagedCheckpointError,
    StorageError,
)
from ray_dcp.format.manifest import (
    MAX_RECORD_BYTES,
    AbortRecord,
    DeleteRecord,
    Manifest,
    Record,
    deciding,
    decode_record,
    encode_record,
    record_key,
    slot_of,
)
from ray_dcp.format.step_info import StepInfo, decode_info, info_key
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, Storage, is_full, read_if_there

T = TypeVar("T")

_MOST_TRIES = 20
"""How often the slots are listed again. Each retry means that a save or delete intervened."""


class Deciding(NamedTuple):
    """The record that defines the current state of a checkpoint."""

    slot: int
    data: bytes
    """The record as stored."""
    record: Manifest | DeleteRecord


@dataclass(frozen=True)
class Slots:
    """The newest records of a checkpoint, down to the slot that can still matter."""

    used: tuple[int, ...] = ()
    """Slots in use, ascending, including those whose records were not read."""
    records: dict[int, Record] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    """The records as stored."""
    unreadable: dict[int, DamagedCheckpointError] = field(default_factory=dict)
    older: dict[int, Record] = field(default_factory=dict)
    """Older records, if requested. They have no effect any more."""

    @property
    def last_slot(self) -> int:
        """Highest slot in use; 0 if there is none."""
        return self.used[-1] if self.used else 0

    @property
    def decides(self) -> Deciding | None:
        """The deciding record; None if nothing was ever committed."""
        # Why first: there may be many abort records above the deciding one.
        if all(isinstance(record, AbortRecord) for record in self.records.values()):
            return None
        found = deciding(self.records)
        return None if found is None else Deciding(found[0], self.data[found[0]], found[1])


def used_slots(storage: Storage) -> tuple[int, ...]:
    """Returns the slots in use, ascending.

    Args:
        storage: Storage of the checkpoint.

    Raises:
        StorageError: The storage can't be listed.
    """
    return slots_in(entry.key for entry in storage.list("manifest-"))


def slots_in(keys: Iterable[str]) -> tuple[int, ...]:
    """Returns the slots in use, ascending.

    Args:
        keys: Keys of a listing of the checkpoint.
    """
    return tuple(sorted(slot for key in keys if (slot := slot_of(key)) is not None))


def read_slots(
    storage: Storage,
    *,
    tolerant: bool = False,
    whole: bool = False,
    used: tuple[int, ...] | None = None,
    known: Mapping[int, bytes] | None = None,
) -> Slots:
    """Returns the newest records of a checkpoint, down to those that determine its state.

    Slots are read in descending order, down to `previous_slot` of the deciding record:

        slot     1  2  3   4  5  6  7      A: abort record
        record   -  -  -   A  C  A  A      C: deciding commit, with previous_slot=3
        read               <---------      -: older record, without effect

    No older record can refer to the deciding one, and no older commit was ever in force unless the
    deciding record says so.

    Args:
        storage: Storage of the checkpoint.
        tolerant: Skip damaged records instead of raising.
        whole: Read the older records, too.
        used: The slots in use, if the caller has listed them. A result without a deciding record is
            then not compared with another listing: the caller creates a record above these slots,
            and checks afterwards.
        known: Records that were read already, by slot.

    Raises:
        DamagedCheckpointError: A record is damaged; older records are not used instead.
        CheckpointError: A newer version of ray_dcp wrote the records.
        StorageError: The storage can't be read, or the records kept changing.

    Complexity:
        O(records above `previous_slot`): one, plus aborted and superseded attempts.
    """
    before: Slots | None = None
    for _ in range(_MOST_TRIES):
        slots = used_slots(storage) if used is None else used
        found = _read(storage, slots, tolerant, whole, known or {})
        if found is not None and (found.decides is not None or used is not None):
            return found
        if found is not None and before is not None and found.used == before.used:
            return found
        before, used, known = found, None, None
    raise StorageError(
        f"The records in {storage.url} changed {_MOST_TRIES} times while they were read: who saves "
        f"or deletes there all the time? Try again when that is over"
    )


def _read(
    storage: Storage,
    used: tuple[int, ...],
    tolerant: bool,
    whole: bool,
    known: Mapping[int, bytes],
) -> Slots | None:
    """Reads the slots; None if a listed record is gone."""
    found = Slots(used)
    decides: Deciding | None = None
    for slot in reversed(found.used):
        is_older = decides is not None and slot <= decides.record.previous_slot
        if is_older and not whole:
            break
        first = [known[slot]] if slot in known else []
        try:
            data, record = read_again(partial(_record_in, storage, slot, first))
        except KeyMissingError:
            if not is_older:
                return None
        except DamagedCheckpointError as error:
            if is_older:
                continue  # it has no effect
            if not tolerant:
                error.message += (
                    f". It may decide which checkpoint is valid: move {record_key(slot)} away to "
                    f"fall back to the records before it"
                )
                raise
            found.unreadable[slot] = error
        else:
            if is_older:
                found.older[slot] = record
                continue
            found.records[slot], found.data[slot] = record, data
            decides = found.decides
    return found


def _record_in(storage: Storage, slot: int, known: list[bytes]) -> tuple[bytes, Record]:
    """Returns the record in a slot, as stored and decoded; takes its bytes from `known` once."""
    key = record_key(slot)
    # Why one more: a longer file is refused, and need not be read to its end.
    data = known.pop() if known else storage.read(key, 0, MAX_RECORD_BYTES + 1)
    record = decode_record(data, key=key)
    if not isinstance(record, AbortRecord) and record.previous_slot >= slot:
        raise DamagedCheckpointError(
            f"expected in slot {slot} a record that was planned before it, found the one of "
            f"{record.attempt}, which saw slot {record.previous_slot}: files changed places",
            key=key,
        )
    return data, record


def read_again(read: Callable[[], T]) -> T:
    """Calls a function that reads, once more if the result is damaged, and returns the result.

    *Why*: the bytes may have been altered or cut off in transit.

    Args:
        read: Reads and decodes.

    Raises:
        DamagedCheckpointError: The result is damaged both times.
    """
    try:
        return read()
    except DamagedCheckpointError:
        return read()


def highest_record(storage: Storage, folder: str, last: int) -> Manifest | DeleteRecord | None:
    """Returns the record in the highest slot of a folder; None if it does not decide by itself.

    *Why*: it nearly always decides, and this takes one read instead of a listing and several reads.

    Args:
        storage: Storage of the run.
        folder: Folder in the run; "" for the run itself.
        last: The highest slot.

    Raises:
        StorageError: The storage can't be read.
    """
    key = record_key(last)
    data = read_if_there(storage, _key_below(folder, key), MAX_RECORD_BYTES + 1)
    try:
        record = None if data is None else decode_record(data, key=key)
    except CheckpointError:
        return None
    # Careful: a record in a slot between the two may have decided against this one's attempt.
    decides = isinstance(record, Manifest | DeleteRecord) and record.previous_slot == last - 1
    return record if decides else None  # type: ignore[return-value]


def read_info(storage: Storage, folder: str, slot: int) -> StepInfo | None:
    """Returns the step info that a manager wrote when a slot was the highest one; None if missing.

    Args:
        storage: Storage of the run.
        folder: Folder as for `highest_record`.
        slot: Slot in the name of the info.

    Raises:
        DamagedCheckpointError: The info is damaged. The checkpoint does not need it.
        StorageError: The storage can't be read.
    """
    key = info_key(slot)

    def read() -> StepInfo | None:
        data = read_if_there(storage, _key_below(folder, key), MAX_RECORD_BYTES)
        return None if data is None else decode_info(data, key=key)

    return read_again(read)


def info_below(
    storage: Storage, folder: str, slots: Iterable[int | None], slot: int
) -> StepInfo | None:
    """Returns the step info of the manifest in a slot; None if there is none.

    Args:
        storage: Storage of the run.
        folder: Folder as for `highest_record`.
        slots: Slots of the infos in the folder. The highest one below the manifest's belongs to it.
        slot: Slot of the manifest.

    Raises:
        DamagedCheckpointError: As `read_info`.
        StorageError: The storage can't be read.
    """
    below = max((one for one in slots if one is not None and one < slot), default=None)
    return None if below is None else read_info(storage, folder, below)


def _key_below(folder: str, key: str) -> str:
    return f"{folder}/{key}" if folder else key


_PREFIX = "deleting/"
_KEY = re.compile(
    r"deleting/(?P<step>\d{1,18})\.(?P<attempt>[0-9a-f]{16})\.(?P<name>(?!\.\.?$)[^/]+)"
)


class Announced(NamedTuple):
    """An announced deletion."""

    step: int
    attempt: str
    """Attempt id of its delete record."""
    name: str
    """Folder of the step."""

    @property
    def key(self) -> str:
        """Key of the announcement in the shared folder of the run.

        Examples:
            >>> Announced(5, "0123456789abcdef", "step-5").key
            'deleting/5.0123456789abcdef.step-5'
        """
        return f"{_PREFIX}{self.step}.{self.attempt}.{self.name}"


def announced(shared: Storage, step: int | None = None) -> list[Announced]:
    """Returns the announced deletions.

    Args:
        shared: Shared storage of the run's managers.
        step: Only those of this step; of all steps if None.

    Raises:
        StorageError: The storage can't be listed.
    """
    prefix = _PREFIX if step is None else f"{_PREFIX}{step}."
    found = (_KEY.fullmatch(entry.key) for entry in shared.list(prefix))
    return [Announced(int(one["step"]), one["attempt"], one["name"]) for one in found if one]


def ended(url: str) -> CheckpointExistsError:
    """Returns the error of a deletion that another process aborted."""
    return CheckpointExistsError(
        "Expected to delete the checkpoint, but its deletion was aborted by a tag, a reader, or "
        "another process that writes to its run",
        checkpoint_id=url,
    )


def check_announced(shared: Storage, mark: Announced) -> None:
    """Checks that the announcement of a deletion still exists.

    Raises:
        CheckpointExistsError: Another process removed it.
        StorageError: The storage can't be read.
    """
    if read_if_there(shared, mark.key) is None:
        raise ended(mark.name)


def fence(
    shared: Storage,
    open_folder: Callable[[str], Storage],
    reason: str,
    step: int | None = None,
) -> str:
    """Aborts the announced deletions: none of them can be committed after this returns.

    Must be called after the protection has been written.

    Args:
        shared: Shared storage of the run's managers.
        open_folder: Opens a step folder of the run.
        reason: Reason, stored in the abort record.
        step: Only deletions of this step; of all steps if None.

    Returns:
        A message about deletions that may still be committed, because the storage has no
        conditional creation; "" if there are none.

    Raises:
        StorageError: The storage failed; some deletions may still be committed.
    """
    marks = announced(shared, step)
    unsure = [
        one
        for one in marks
        if not freeing(shared, partial(_abort, open_folder(one.name), one.attempt, reason))
    ]
    shared.delete([one.key for one in marks])
    if not unsure:
        return ""
    return (
        f"{', '.join(sorted({one.name for one in unsure}))} of {shared.url.rpartition('/')[0]} was "
        f"about to be deleted, and the deletion was called off. But this storage can't create a "
        f"file only if there is none: a deletion whose record is being written now still happens. "
        f"Look whether the step still exists"
    )


def _abort(storage: Storage, attempt: str, reason: str) -> bool:
    """Aborts a deletion by a record; returns whether its outcome is now decided."""
    record = encode_record(AbortRecord(attempt=attempt, reason=reason, rank=None))
    for _ in range(_MOST_TRIES):
        slots = read_slots(storage, tolerant=True)
        if any(one.attempt == attempt for one in slots.records.values()):
            return True
        # Why: an empty folder has nothing to delete. Another program, such as one that makes
        # copies, may have written a file of this name.
        if not slots.used and not storage.list():
            return True
        # Why no record: without conditional creation, it could replace another process's record.
        if not storage.traits.create_if_absent:
            return False
        with suppress(KeyExistsError):
            storage.write(record_key(slots.last_slot + 1), record, create=True)
    raise StorageError(
        f"The records in {storage.url} changed {_MOST_TRIES} times while a deletion was to be "
        f"ended there. Who saves or deletes there all the time? Try again when that is over"
    )


RESERVE = "reserve"
RESERVE_BYTES = 64 << 10
"""Enough for a lease, an announcement and some records, with the overhead of any filesystem."""


def keep_reserve(shared: Storage) -> None:
    """Creates the reserve of a run; does nothing if there is no space for it.

    Args:
        shared: Shared storage of the run's managers.
    """
    # Why not on an object store: it does not fill up, and each request costs a round trip.
    if hasattr(shared, "request_bytes"):
        return
    with suppress(CheckpointError):
        # Why random: a compressing filesystem would reserve nothing for zeros.
        shared.write(RESERVE, os.urandom(RESERVE_BYTES))


def freeing(shared: Storage, work: Callable[[], T]) -> T:
    """Calls `work` and returns its result; if the disk is full, retries without the reserve.

    Args:
        shared: Shared storage of the run's managers.
        work: The call; may be repeated once.

    Raises:
        CheckpointError: The error of `work`.
    """
    try:
        return work()
    except CheckpointError as error:
        if not is_full(error) or read_if_there(shared, RESERVE, 0) is None:
            raise
    shared.delete([RESERVE])
    try:
        return work()
    finally:
        keep_reserve(shared)
