"""`.metadata` of a place, which stock DCP reads: publishes that of the checkpoint that stands.

`publish`, `republish` and `withdraw` update it to the checkpoint that the records decide;
`write_metadata` creates the one that a save omitted, without torch or ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ray_dcp.commit_protocol.commands import Published
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.processes import collector_paused
from ray_dcp.errors import (
    CheckpointError,
    InvalidRequestError,
)
from ray_dcp.format.manifest import (
    DeleteRecord,
    Manifest,
)
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from ray_dcp.io.checkpoint import METADATA_KEY, Found, find_checkpoint, is_ours
from ray_dcp.io.records import used_slots
from ray_dcp.place.files import unpublished
from ray_dcp.place.records import standing_records
from ray_dcp.store.opening import open_storage, target_of
from ray_dcp.store.storage import Storage, read_if_there


def publish(storage: Storage, slot: int, metadata: bytes | None, url: str) -> Published:
    """Replaces `.metadata` by that of the commit in a slot, unless a later record decides.

    Args:
        storage: The storage of the target.
        slot: Slot of the manifest.
        metadata: The new `.metadata`; None removes the existing one.
        url: URL of the target, as at the commit.

    Raises:
        CheckpointError: The storage fails.
    """
    # Why: this save may have lain still since its commit, and a later one has published by now.
    if _decides_above(storage, slot):
        return Published(superseded=True)
    _write_metadata(storage, metadata)
    if _decides_above(storage, slot):
        # Why: it may have lain still since it looked, and has replaced what the later one
        # published, whose files are the only ones that are left.
        republish(storage, url)
        return Published(superseded=True)
    return Published()


def _decides_above(storage: Storage, slot: int) -> bool:
    """Returns whether a commit or delete is above a slot that holds one."""
    # Why first a listing: nearly always nothing is above it, and no record has to be read.
    return used_slots(storage)[-1:] != (slot,) and standing_records(storage).slot > slot


def republish(storage: Storage, url: str) -> bool:
    """Publishes the `.metadata` of the current checkpoint, if that is missing or outdated.

    Called by a process that finds that the committing process did not do it. If a delete decides,
    ours is removed.

    Args:
        storage: The storage of the target.
        url: URL of the target, which `.metadata` contains.

    Returns:
        Whether `.metadata` is now that of the checkpoint.

    Raises:
        CheckpointError: The storage fails, nothing was ever committed, or two checkpoints claim the
            place.
    """
    while True:
        standing = standing_records(storage)
        if isinstance(standing.record, DeleteRecord):
            withdraw(storage, standing.record, read_if_there(storage, METADATA_KEY))
            if standing_records(storage).slot <= standing.slot:
                return True
            continue
        found = find_checkpoint(storage, checkpoint_id=url)
        if found.manifest is None:
            return False
        done = _project(storage, found, found.manifest, url)
        if standing_records(storage).slot <= found.slot:
            return done


def withdraw(
    storage: Storage, record: DeleteRecord, data: bytes | None, deleted: Manifest | None = None
) -> bool:
    """Removes the `.metadata` of a deleted checkpoint; keeps one that another program wrote since.

    Args:
        storage: The storage of the target.
        record: The deciding delete record.
        data: `.metadata` as it was just read; None if there is none.
        deleted: Manifest of the checkpoint that was deleted, if it is known.

    Returns:
        Whether there was one.

    Raises:
        StorageError: The storage fails.
    """
    if data is None:
        return False
    if digest_bytes(data).hex() != record.replaced_metadata and not is_ours(data, deleted):
        return False
    storage.delete([METADATA_KEY])
    return True


def _project(storage: Storage, found: Found, manifest: Manifest, url: str) -> bool:
    if manifest.metadata is None:
        # Why kept: the save left it out, and somebody has made it since (`write_metadata`).
        if not _is_of(storage, manifest.attempt):
            _write_metadata(storage, None)
        return True
    if not found.metadata_is_stale:
        return True
    with collector_paused():
        metadata = encode_metadata(found.decoded(), checkpoint_id=url, attempt=manifest.attempt)
    # Why not held against the manifest's digest: `.metadata` of a copy has another place in it.
    _write_metadata(storage, metadata)
    return True


def _is_of(storage: Storage, attempt: str) -> bool:
    data = read_if_there(storage, METADATA_KEY)
    try:
        return data is not None and decode_metadata(data).attempt == attempt
    except CheckpointError:
        return False


def _write_metadata(storage: Storage, metadata: bytes | None) -> None:
    if metadata is None:
        storage.delete([METADATA_KEY])
    else:
        storage.write(METADATA_KEY, metadata)


def write_metadata(
    path: str | os.PathLike[str] | Target,
    *,
    storage_options: Mapping[str, object] | None = None,
) -> bool:
    """Writes DCP's `.metadata` for a checkpoint that was saved with `stock_metadata=False`.

    If one exists, or is missing or outdated although the save wrote it, it is repaired; so is a
    copy that was made without it. A save that commits meanwhile decides the final content.

    Args:
        path: Path or URL of one checkpoint.
        storage_options: Options for the storage.

    Returns:
        Whether stock DCP can read the checkpoint now. False: a later save, which omits `.metadata`,
        replaced it meanwhile.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        InvalidRequestError: ray_dcp did not write it.
        DamagedCheckpointError: Its chunk table is damaged.
        StorageError: The storage fails.

    Examples:
        >>> from ray_dcp.options import SaveOptions
        >>> from ray_dcp.saving import save
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> storage = MemoryStorage("doc-metadata")
        >>> options = SaveOptions(stock_metadata=False)
        >>> _ = save({"step": 7}, checkpoint_id="memory://doc-metadata", options=options)
        >>> ".metadata" in {entry.key for entry in storage.list()}
        False
        >>> write_metadata("memory://doc-metadata")
        True
        >>> ".metadata" in {entry.key for entry in storage.list()}
        True
    """
    target = target_of(path, storage_options)
    storage = open_storage(target)
    try:
        found = find_checkpoint(storage, checkpoint_id=target.url)
        manifest = found.manifest
        if manifest is None:
            raise InvalidRequestError(
                "expected a checkpoint of ray_dcp, found one of another program, which has no use "
                "for another .metadata",
                key="path",
            )
        if manifest.metadata is not None:
            is_published = republish(storage, target.url)
        else:
            with collector_paused():
                metadata = encode_metadata(
                    found.decoded(), checkpoint_id=target.url, attempt=manifest.attempt
                )
            is_published = not publish(storage, found.slot, metadata, target.url).superseded
        # What a process left that was killed while it wrote one. Another's write that fails by
        # this is retried.
        left = [e.key for e in unpublished(storage) if e.key.endswith(f"-{METADATA_KEY}")]
        storage.delete(left)
        return is_published
    except CheckpointError as error:
        error.checkpoint_id = error.checkpoint_id or target.url
        raise
