"""What stands at a target: the records in its slots, its `.metadata`, what attempts left there.

Reads only, but for `confirm_record`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import (
    AbortRecord,
    DeleteRecord,
    Manifest,
    decode_record,
    record_key,
)
from ray_dcp.format.metadata_in import decode_metadata
from ray_dcp.protocol.commands import Overtaken, RecordsRead
from ray_dcp.protocol.sweep import attempts_of, left_by_others, verdicts, was_committed
from ray_dcp.protocol.vote import Fenced, Lost, Won
from ray_dcp.store.storage import (
    Entry,
    KeyExistsError,
    KeyMissingError,
    Storage,
    read_traits_of,
)
from ray_dcp.transfer.opening import METADATA_KEY
from ray_dcp.transfer.slots import Slots, read_slots, used_slots

__all__ = [
    "Standing",
    "confirm_record",
    "decision_of",
    "everything",
    "foreign_metadata",
    "overtaken",
    "read_standing",
    "standing_records",
    "without_stock_files",
]

STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")


@runtime_checkable
class _ShowsUnpublished(Protocol):
    """A storage whose writers leave files behind when they crash."""

    def unpublished(self) -> tuple[Entry, ...]: ...


@dataclass(frozen=True)
class Standing:
    """The records of a target, as far down as is needed to know what stands."""

    slots: Slots
    slot: int = 0
    """Slot of the commit or delete that decides; 0 when there is none."""
    record: Manifest | DeleteRecord | None = None
    """What is in it."""
    unreadable: dict[int, DamagedCheckpointError] = field(default_factory=dict)
    """Records above it that can't be read."""

    @property
    def last_slot(self) -> int:
        """Highest slot in use; 0 when there is none."""
        return self.slots.last_slot

    @property
    def manifest(self) -> Manifest | None:
        """Of the checkpoint; None when nothing stands."""
        return self.record if isinstance(self.record, Manifest) else None


def standing_records(storage: Storage, *, whole: bool = False) -> Standing:
    """Returns the newest commit or delete of a target; passes by what can't be read.

    Args:
        storage: Of the target.
        whole: Read the older records as well.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.

    Complexity:
        As `read_slots`.
    """
    slots = read_slots(storage, tolerant=True, whole=whole)
    found = slots.decides
    if found is None:
        return Standing(slots, unreadable=slots.unreadable)
    above = {slot: error for slot, error in slots.unreadable.items() if slot > found.slot}
    return Standing(slots, found.slot, found.record, above)


def read_standing(storage: Storage) -> RecordsRead:
    """Returns what a save has to know of the place that it saves to.

    Args:
        storage: Of the target.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.
    """
    standing = standing_records(storage)
    digest, foreign_files = foreign_metadata(storage, standing.manifest)
    keys = [entry.key for entry in everything(storage)]
    present = attempts_of(keys)
    if not storage.traits.create_if_absent:
        # Why: two saves may both believe to have won there; the files of neither may go.
        known = {record.attempt for record in standing.slots.records.values()}
        if standing.record is not None:
            known |= {verdict.attempt for verdict in standing.record.decided}
        keys = [key for key in keys if attempts_of([key]) <= known]
    left = left_by_others(keys, last_slot=standing.last_slot)
    # Why not told where a record can't be read: it may be the commit of one of them.
    told = storage.traits.create_if_absent and not standing.slots.unreadable
    return RecordsRead(
        last_slot=standing.last_slot,
        committed=_in_words(standing, digest),
        foreign_metadata=digest,
        replaced=tuple(dict.fromkeys((*_files(standing.manifest), *foreign_files, *left))),
        warnings=(
            *(
                f"The record in slot {slot} can't be read and is replaced: {error}"
                for slot, error in sorted(standing.unreadable.items())
            ),
            *_unprotected(storage),
        ),
        create_if_absent=storage.traits.create_if_absent,
        decided=verdicts(standing.slots.records, present if told else ()),
    )


def everything(storage: Storage) -> list[Entry]:
    """Returns all files at a place, with those that writers have not published.

    Args:
        storage: Of the place.

    Raises:
        StorageError: It can't be listed.
    """
    hidden = storage.unpublished() if isinstance(storage, _ShowsUnpublished) else ()
    return [*storage.list(), *hidden]


def overtaken(storage: Storage, slot: int, record: bytes) -> Overtaken | None:
    """Returns the commit or delete in a higher slot than a record that was just created or met.

    Args:
        storage: Of the target.
        slot: Of that record.
        record: As on storage.

    Returns:
        None when none decides above it: who commits or deletes later meets that record.

    Raises:
        CheckpointError: The storage fails.
    """
    # Why twice: a listing may show neither a record that goes nor the one that makes it go.
    if not any(used[-1] > slot for used in map(used_slots, (storage, storage)) if used):
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
    """Makes sure that a record which somebody else created is durable.

    Whoever created it may have died, or failed, after its name was there and before that was
    durable; what is decided by it must not be told before.

    Args:
        storage: Of the target.
        slot: Of the record.
        data: The record as read.

    Raises:
        StorageError: It could not be made durable.
    """
    if not read_traits_of(storage).durable and storage.traits.create_if_absent:
        # A storage says that a key is taken only when it is so for good. If it was removed
        # meanwhile, a higher record decides, and one more below that does no harm.
        with suppress(KeyExistsError):
            storage.write(record_key(slot), data, create=True)


def decision_of(slots: Slots, attempt: str) -> Won | Fenced | Lost | None:
    """Returns what the records of a target decide about an attempt; None while it is open.

    Args:
        slots: Of the target, read whole.
        attempt: Its id.
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


def without_stock_files(storage: Storage, keys: Iterable[str]) -> list[str]:
    """Returns those keys that a `.metadata` of stock DCP, if one stands now, does not name.

    Stock DCP uses the same names again: what was to be collected may be its next checkpoint.

    Args:
        storage: Of the target.
        keys: To be collected.

    Raises:
        StorageError: It can't be read.
    """
    keys = list(keys)
    named: set[str] = set()
    if any(map(STOCK_FILE.fullmatch, keys)):
        try:
            foreign = decode_metadata(storage.read(METADATA_KEY))
            named = set() if foreign.attempt is not None else set(foreign.table.files)
        except KeyMissingError:
            pass
        except DamagedCheckpointError:
            named = {key for key in keys if STOCK_FILE.fullmatch(key)}
    return [key for key in keys if key not in named]


def _unprotected(storage: Storage) -> tuple[str, ...]:
    if storage.traits.create_if_absent:
        return ()
    return (
        f"{storage.url} can't create a file only if there is none (hard links or conditional "
        f"writes), so that this save's coordinator alone decides what is committed. Two jobs that "
        f"save here at once can overwrite each other's checkpoint unnoticed: let one at a time",
    )


def _in_words(standing: Standing, foreign: str | None) -> str | None:
    found = []
    if standing.manifest is not None:
        found.append(f"attempt {standing.manifest.attempt} committed in slot {standing.slot}")
    if standing.unreadable:
        found.append(f"unreadable records in slots {sorted(standing.unreadable)}")
    if foreign is not None:
        found.append("a .metadata that ray_dcp did not write")
    return " and ".join(found) or None


def _files(manifest: Manifest | None) -> Iterable[str]:
    if manifest is None:
        return ()
    # Careful: all our names bear the attempt. Another one is that of somebody else, whatever the
    # manifest says.
    keys = (*(e.key for e in manifest.files), manifest.table.key)
    return (key for key in keys if manifest.attempt in key)


def foreign_metadata(
    storage: Storage, manifest: Manifest | None
) -> tuple[str | None, tuple[str, ...]]:
    """Returns the hex digest of a `.metadata` that is not ours, and the files that it names.

    Args:
        storage: Of the target.
        manifest: That stands there.

    Raises:
        StorageError: It can't be read.
    """
    try:
        data = storage.read(METADATA_KEY)
    except KeyMissingError:
        return None, ()
    digest = digest_bytes(data).hex()
    ours = manifest.metadata if manifest is not None else None
    if ours is not None and ours.digest == digest:
        return None, ()
    try:
        foreign = decode_metadata(data)
    except CheckpointError:
        return digest, ()
    if foreign.attempt is not None:
        return None, ()
    # Careful: only what DCP itself names so. Other files that a .metadata refers to may belong
    # to somebody else.
    return digest, tuple(key for key in foreign.table.files if STOCK_FILE.fullmatch(key))
