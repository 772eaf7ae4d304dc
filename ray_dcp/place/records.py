"""The records in the slots of a place, which decide what stands there."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from ray_dcp.commit_protocol.commands import Overtaken
from ray_dcp.commit_protocol.garbage import was_committed
from ray_dcp.commit_protocol.vote import Fenced, Lost, Won
from ray_dcp.errors import (
    DamagedCheckpointError,
)
from ray_dcp.format.manifest import (
    AbortRecord,
    DeleteRecord,
    Manifest,
    decode_record,
    record_key,
)
from ray_dcp.io.records import Slots, read_slots, used_slots
from ray_dcp.store.storage import KeyExistsError, Storage, read_traits_of


@dataclass(frozen=True)
class Standing:
    """The records of a target, as far down as needed to know the current checkpoint."""

    slots: Slots
    slot: int = 0
    """Slot of the commit or delete that decides; 0 if there is none."""
    record: Manifest | DeleteRecord | None = None
    """The record in that slot."""
    unreadable: dict[int, DamagedCheckpointError] = field(default_factory=dict)
    """Higher records that can't be read."""

    @property
    def last_slot(self) -> int:
        """Highest slot in use; 0 if there is none."""
        return self.slots.last_slot

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the current checkpoint; None if there is none."""
        return self.record if isinstance(self.record, Manifest) else None


def standing_records(
    storage: Storage, *, whole: bool = False, used: tuple[int, ...] | None = None
) -> Standing:
    """Returns the newest commit or delete of a target; skips records that can't be read.

    Args:
        storage: The storage of the target.
        whole: Whether to read the older records as well.
        used: As for `read_slots`.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.

    Complexity:
        As `read_slots`.
    """
    slots = read_slots(storage, tolerant=True, whole=whole, used=used)
    found = slots.decides
    if found is None:
        return Standing(slots, unreadable=slots.unreadable)
    above = {slot: error for slot, error in slots.unreadable.items() if slot > found.slot}
    return Standing(slots, found.slot, found.record, above)


def overtaken(
    storage: Storage, slot: int, record: bytes, before: tuple[int, ...] | None = None
) -> Overtaken | None:
    """Returns the deciding record above a record that was just created or found.

    Args:
        storage: The storage of the target.
        slot: Slot of the record.
        record: The record, as on storage.
        before: The slots in use, by a listing that was made while the record was created.

    Returns:
        None if no higher record decides: a later commit or delete then finds this record.

    Raises:
        CheckpointError: The storage fails.
    """
    # Why twice: a listing may show neither a record that goes nor the one that makes it go.
    looks = (used_slots(storage) if before is None else before, used_slots(storage))
    if not any(used[-1] > slot for used in looks if used):
        return None
    found = read_slots(storage, tolerant=True).decides
    if found is None or found.slot <= slot:
        return None
    return Overtaken(
        found.slot,
        found.record.attempt,
        was_committed(found.record, decode_record(record).attempt),
        isinstance(found.record, DeleteRecord),
    )


def confirm_record(storage: Storage, slot: int, data: bytes) -> None:
    """Makes a record durable that another process created.

    Its creator may have died, or failed, when its name was visible but not durable yet; the
    decision must not be reported before it is.

    Args:
        storage: The storage of the target.
        slot: Slot of the record.
        data: The record as read.

    Raises:
        StorageError: It could not be made durable.
    """
    if not read_traits_of(storage).durable and storage.traits.create_if_absent:
        # A storage reports that a key is taken only when it is so for good. If it was removed
        # meanwhile, a higher record decides, and one more below that does no harm.
        with suppress(KeyExistsError):
            storage.write(record_key(slot), data, create=True)


def decision_of(slots: Slots, attempt: str) -> Won | Fenced | Lost | None:
    """Returns what the records of a target decide about an attempt; None while it is open.

    Args:
        slots: All slots of the target.
        attempt: Id of the attempt.
    """
    decides = slots.decides
    if decides is not None:
        for verdict in decides.record.decided:
            if verdict.attempt == attempt:
                is_delete = isinstance(decides.record, DeleteRecord)
                replaced = Lost(decides.slot, decides.record.attempt, is_delete)
                return replaced if verdict.committed else Fenced(decides.slot)
    # Careful: upwards, as the first record that names the attempt decides.
    for slot, record in sorted(slots.records.items()):
        if record.attempt == attempt and isinstance(record, AbortRecord):
            return Fenced(slot)
        if record.attempt == attempt:
            return Won(slot, slots.data[slot])
    # Further down, a commit came too late, or is long replaced: the one that decides forgot it.
    named = any(record.attempt == attempt for record in slots.older.values())
    return Fenced(decides.slot) if decides is not None and named else None
