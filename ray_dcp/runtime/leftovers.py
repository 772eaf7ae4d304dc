"""What is at a place that is to be cleaned: looks at it, and removes what may go.

For `delete` and `collect`. What may go is decided by `ray_dcp.protocol.sweep`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ray_dcp.errors import CheckpointError, DamagedCheckpointError, InvalidRequestError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import DeleteRecord, Manifest, slot_of
from ray_dcp.format.metadata_in import decode_metadata
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.sweep import Kept, Sweep, attempts_of, owner_of
from ray_dcp.runtime.records import Standing, everything, foreign_metadata, standing_records
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target, open_storage
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.transfer.lookaround import not_found
from ray_dcp.transfer.metadata_beside import METADATA_KEY, is_ours

__all__ = [
    "CollectReport",
    "Place",
    "check_ours",
    "look_at",
    "named_by_metadata",
    "remove",
    "target_of",
]


@dataclass(frozen=True)
class CollectReport:
    """What `delete` or `collect` did, or would do."""

    path: str
    """Absolute path or URL."""
    deleted: tuple[str, ...]
    """Keys of the files that were deleted, in that order."""
    num_bytes: int
    """Bytes of these files."""
    kept: tuple[Kept, ...]
    """Files that remain beside the checkpoint that stands and its records, each with the reason."""
    fenced: tuple[str, ...] = ()
    """Attempts that might still have been committed before, and can't any more."""
    checkpoint: str | None = None
    """Attempt of the checkpoint that was deleted."""
    warnings: tuple[str, ...] = ()
    dry_run: bool = False
    """Nothing was changed."""


@dataclass(frozen=True)
class Place:
    """All that is at a path, as it was listed."""

    storage: Storage
    standing: Standing
    sizes: dict[str, int]
    """Bytes by key, of all files; also of unpublished ones."""
    foreign: str | None
    """Digest of a `.metadata` that is not ours."""
    foreign_files: tuple[str, ...]
    """What it names, as far as stock DCP wrote it."""

    @property
    def known(self) -> frozenset[str]:
        """Attempts that records name, also those that are named as decided."""
        slots = self.standing.slots
        named = {record.attempt for record in (*slots.records.values(), *slots.older.values())}
        if self.standing.record is not None:
            named |= {verdict.attempt for verdict in self.standing.record.decided}
        return frozenset(named)

    @property
    def previous_slot(self) -> int:
        """Records up to this slot decide nothing any more."""
        record = self.standing.record
        return 0 if record is None else record.previous_slot


def target_of(path: AnyPlace, storage_options: Mapping[str, object] | None) -> Target:
    """Returns where a path is, absolute.

    Args:
        path: Path, URL or target.
        storage_options: More options for the storage.

    Raises:
        InvalidRequestError: It is no path or URL that is served.
    """
    options = storage_options or {}
    place = as_target(path)
    place = replace(place, storage_options={**place.storage_options, **options})
    return replace(place, url=open_storage(place).url)  # tells what is no path


def look_at(storage: Storage) -> Place:
    """Returns all that is at a place.

    Args:
        storage: Of the place.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.
    """
    # Careful: files first. What is listed and committed meanwhile is then seen to stand.
    sizes = {entry.key: entry.num_bytes for entry in everything(storage)}
    standing = standing_records(storage, whole=True)
    return Place(storage, standing, sizes, *foreign_metadata(storage, standing.manifest))


def check_ours(place: Place) -> None:
    """Checks that there is something of ours.

    Args:
        place: As looked at.

    Raises:
        CheckpointNotFoundError: There is nothing, or no checkpoint.
        InvalidRequestError: Another program wrote what is there.
    """
    metadata_is_ours = METADATA_KEY in place.sizes and place.foreign is None
    keys = place.sizes.keys() - {METADATA_KEY}
    if metadata_is_ours or any(owner_of(key) for key in keys):
        return
    written_by_others = (".distcp", ".safetensors", METADATA_KEY)
    if any(key.endswith(written_by_others) and "/" not in key for key in place.sizes):
        raise InvalidRequestError(
            f"Expected a checkpoint of ray_dcp in {place.storage.url}, but another program wrote "
            f"what is there, and ray_dcp deletes only its own files. If you want it gone, remove "
            f"the directory",
            checkpoint_id=place.storage.url,
        )
    raise not_found(place.storage)


def named_by_metadata(place: Place, record: Manifest | DeleteRecord | None) -> dict[str, str]:
    """Returns the attempts whose files a `.metadata` names that is not that of what stands.

    Args:
        place: As looked at.
        record: That decides.

    Returns:
        By attempt, the reason to keep its files.

    Raises:
        StorageError: It can't be read.
    """
    try:
        data = place.storage.read(METADATA_KEY)
    except KeyMissingError:
        return {}
    attempts = attempts_of(place.sizes)
    if isinstance(record, Manifest):
        attempts -= {record.attempt}
        if record.metadata is not None and record.metadata.digest == digest_bytes(data).hex():
            return {}
    if isinstance(record, DeleteRecord) and is_ours(data):
        return {}  # it is removed
    try:
        found = decode_metadata(data)
    except DamagedCheckpointError:
        return dict.fromkeys(attempts, "a .metadata that can't be read may name it")
    named = attempts_of(found.table.files)
    named |= {found.attempt} if found.attempt is not None else set()
    return dict.fromkeys(attempts & named, "the .metadata that stands there names it")


def remove(place: Place, found: Sweep, dry_run: bool) -> CollectReport:
    """Deletes in order, and no record while a file that it may tell of is still there.

    Args:
        place: As looked at.
        found: What to delete.
        dry_run: Only tell.

    Returns:
        What was deleted; a failure is told in its warnings.
    """
    files = tuple(key for key in found.delete if slot_of(key) is None)
    kept, deleted = list(found.kept), list[str]()
    warnings = list[str]()
    for keys in (files, found.delete[len(files) :]):
        left, error = (set[str](), None) if dry_run else _tried(place.storage, keys)
        deleted += [key for key in keys if key not in left]
        if error is not None:
            warnings.append(f"Not everything could be deleted: {error}. Collect again later")
            kept += [Kept(key, "it could not be deleted") for key in sorted(left)]
            break
    return CollectReport(
        path=place.storage.url,
        deleted=tuple(deleted),
        num_bytes=sum(place.sizes.get(key, 0) for key in deleted),
        kept=tuple(kept),
        warnings=tuple(warnings),
        dry_run=dry_run,
    )


def _tried(storage: Storage, keys: Collection[str]) -> tuple[set[str], CheckpointError | None]:
    """Deletes keys; returns which are still there, and why."""
    try:
        storage.delete(keys)
    except CheckpointError as error:
        try:
            return {entry.key for entry in everything(storage)} & set(keys), error
        except CheckpointError:
            return set(keys), error
    return set(), None
