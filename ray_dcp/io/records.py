"""Reads the records of a checkpoint.

Records are stored in numbered slots. `read_slots` determines the *deciding* record: the commit
or delete record that defines the current state.

A record may be removed while it is read, by a save or delete that now decides, and whose own record
an earlier listing may not show. If a listed record is missing, or no record decides, the result is
therefore compared with another listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from ray_dcp.errors import (
    CheckpointError,
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
    record_key,
    slot_of,
)
from ray_dcp.format.step_info import StepInfo, decode_info, info_key
from ray_dcp.store.storage import KeyMissingError, Storage, read_if_there

T = TypeVar("T")

MOST_TRIES = 20
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
    for _ in range(MOST_TRIES):
        slots = used_slots(storage) if used is None else used
        found = _read(storage, slots, tolerant, whole, known or {})
        if found is not None and (found.decides is not None or used is not None):
            return found
        if found is not None and before is not None and found.used == before.used:
            return found
        before, used, known = found, None, None
    raise StorageError(
        f"The records in {storage.url} changed {MOST_TRIES} times while they were read: who saves "
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
