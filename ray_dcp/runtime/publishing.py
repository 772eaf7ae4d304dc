"""Brings `.metadata`, which stock DCP reads, up to the checkpoint that stands."""

from __future__ import annotations

from ray_dcp.collector import collector_paused
from ray_dcp.errors import DamagedCheckpointError, UnsafeCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import DeleteRecord, Manifest
from ray_dcp.format.metadata_in import decode_metadata
from ray_dcp.format.metadata_out import encode_metadata
from ray_dcp.protocol.commands import Published
from ray_dcp.runtime.records import standing_records
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.transfer.metadata_beside import is_ours
from ray_dcp.transfer.opening import METADATA_KEY, Found, find_checkpoint

__all__ = ["publish", "republish", "withdraw"]


def publish(storage: Storage, slot: int, metadata: bytes | None, url: str) -> Published:
    """Replaces `.metadata` by that of the commit in a slot, unless a later record decides.

    Args:
        storage: Of the target.
        slot: Where the manifest is.
        metadata: Its `.metadata`; None removes the one that is there.
        url: Of the target, as at the commit.

    Raises:
        CheckpointError: The storage fails.
    """
    # Why: this save may have lain still since its commit, and a later one has published by now.
    if standing_records(storage).slot > slot:
        return Published(superseded=True)
    _put(storage, metadata)
    if standing_records(storage).slot > slot:
        # Why: it may have lain still since it looked, and has replaced what the later one
        # published, whose files are the only ones that are left.
        republish(storage, url)
        return Published(superseded=True)
    return Published()


def republish(storage: Storage, url: str) -> bool:
    """Publishes the `.metadata` of the checkpoint that stands, if that is missing or older.

    For who finds that the one who committed it did not come to that. Where a delete decides, what
    is left of ours is removed.

    Args:
        storage: Of the target.
        url: Of the target: it is in the `.metadata`.

    Returns:
        Whether `.metadata` is that of the checkpoint now.

    Raises:
        CheckpointError: The storage fails, nothing was ever committed, or two checkpoints claim
            the place.
    """
    while True:
        standing = standing_records(storage)
        if isinstance(standing.record, DeleteRecord):
            withdraw(storage, standing.record)
            if standing_records(storage).slot <= standing.slot:
                return True
            continue
        found = find_checkpoint(storage, checkpoint_id=url)
        if found.manifest is None:
            return False
        done = _project(storage, found, found.manifest, url)
        if standing_records(storage).slot <= found.slot:
            return done


def withdraw(storage: Storage, record: DeleteRecord) -> bool:
    """Removes the `.metadata` of what was deleted; one that somebody else wrote since stays.

    Args:
        storage: Of the target.
        record: The delete, which decides.

    Returns:
        Whether there was one.

    Raises:
        StorageError: It fails.
    """
    try:
        data = storage.read(METADATA_KEY)
    except KeyMissingError:
        return False
    if digest_bytes(data).hex() != record.replaced_metadata and not is_ours(data):
        return False
    storage.delete([METADATA_KEY])
    return True


def _project(storage: Storage, found: Found, manifest: Manifest, url: str) -> bool:
    if manifest.metadata is None:
        # Why kept: the save left it out, and somebody has made it since (`metadata_later`).
        if not _is_of(storage, manifest.attempt):
            _put(storage, None)
        return True
    if not found.metadata_is_stale:
        return True
    with collector_paused():
        metadata = encode_metadata(found.decoded(), checkpoint_id=url, attempt=manifest.attempt)
    # Why not held against the manifest's digest: a copy lies elsewhere, and `.metadata` says where.
    _put(storage, metadata)
    return True


def _is_of(storage: Storage, attempt: str) -> bool:
    try:
        return decode_metadata(storage.read(METADATA_KEY)).attempt == attempt
    except (KeyMissingError, DamagedCheckpointError, UnsafeCheckpointError):
        return False


def _put(storage: Storage, metadata: bytes | None) -> None:
    if metadata is None:
        storage.delete([METADATA_KEY])
    else:
        storage.write(METADATA_KEY, metadata)
