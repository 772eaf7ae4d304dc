"""What stands at a target: the records in its slots and its `.metadata`. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ray_dcp.errors import CheckpointError, DamagedCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import Manifest, Record, decode_record, newest, record_key, slot_of
from ray_dcp.format.metadata_in import decode_metadata
from ray_dcp.protocol.commands import RecordsRead
from ray_dcp.store.storage import KeyExistsError, KeyMissingError, Storage
from ray_dcp.transfer.opening import METADATA_KEY

__all__ = [
    "Standing",
    "confirm_record",
    "read_standing",
    "slots",
    "standing_records",
    "without_stock_files",
]

STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True)
class Standing:
    """The records of a target, as far down as is needed to know what is committed."""

    last_slot: int
    """Highest slot in use; 0 when there is none."""
    slot: int = 0
    """Slot of the checkpoint; 0 when nothing is committed."""
    manifest: Manifest | None = None
    """Of the checkpoint."""
    unreadable: dict[int, DamagedCheckpointError] = field(default_factory=dict)
    """Records above it that can't be read."""


def slots(storage: Storage) -> list[int]:
    """Returns the slots that are in use, ascending.

    Args:
        storage: Of the target.

    Raises:
        StorageError: It can't be listed.
    """
    found = (slot_of(entry.key) for entry in storage.list("manifest-"))
    return sorted(slot for slot in found if slot is not None)


def standing_records(storage: Storage) -> Standing:
    """Returns the newest commit of a target.

    Reads downwards, and no further than the slot that the newest attempt saw when it was
    planned: no record below that one can name it.

    Args:
        storage: Of the target.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.

    Complexity:
        O(records above that slot): one, but for aborted and overtaken attempts.
    """
    used = slots(storage)
    last_slot = used[-1] if used else 0
    records: dict[int, Record] = {}
    unreadable: dict[int, DamagedCheckpointError] = {}
    for slot in reversed(used):
        found = newest(records)
        if found is not None and slot <= found[1].previous_slot:
            break
        try:
            key = record_key(slot)
            data = storage.read(key)
            if data:  # else it was claimed and never filled, on a filesystem without hard links
                records[slot] = decode_record(data, key=key)
        except DamagedCheckpointError as error:
            unreadable[slot] = error
        except KeyMissingError:
            continue
    found = newest(records)
    if found is None:
        return Standing(last_slot, unreadable=unreadable)
    above = {slot: error for slot, error in unreadable.items() if slot > found[0]}
    return Standing(last_slot, found[0], found[1], above)


def read_standing(storage: Storage) -> RecordsRead:
    """Returns what a save has to know of the place that it saves to.

    Args:
        storage: Of the target.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.
    """
    standing = standing_records(storage)
    digest, foreign_files = _foreign_metadata(storage, standing.manifest)
    return RecordsRead(
        last_slot=standing.last_slot,
        committed=_in_words(standing, digest),
        foreign_metadata=digest,
        replaced=(*_files(standing.manifest), *foreign_files),
        warnings=tuple(
            f"The record in slot {slot} can't be read and is replaced: {error}"
            for slot, error in sorted(standing.unreadable.items())
        ),
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
    if storage.traits.create_if_absent:
        # A storage says that a key is taken only when it is so for good.
        with suppress(KeyExistsError):
            storage.write(record_key(slot), data, create=True)


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
    # The manifest itself stays: a slot is never freed (see `ray_dcp.protocol.vote`).
    if manifest is None:
        return ()
    # Careful: all our names bear the attempt. Another one is that of somebody else, whatever the
    # manifest says.
    keys = (*(e.key for e in manifest.files), manifest.table.key)
    return (key for key in keys if manifest.attempt in key)


def _foreign_metadata(
    storage: Storage, manifest: Manifest | None
) -> tuple[str | None, tuple[str, ...]]:
    """Returns the hex digest of a `.metadata` that is not ours, and the files that it names."""
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
