"""The files at a place beside its records."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ray_dcp.commit_protocol.garbage import GarbagePlan, KeptFile, attempts_of, owner_of
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.quantities import count_text, size_text
from ray_dcp.errors import (
    CheckpointError,
    InvalidRequestError,
)
from ray_dcp.format.manifest import (
    DeleteRecord,
    Manifest,
    slot_of,
)
from ray_dcp.format.metadata import decode_metadata
from ray_dcp.io.checkpoint import METADATA_KEY, is_ours
from ray_dcp.io.not_found import not_found
from ray_dcp.place.files import everything
from ray_dcp.place.records import Standing, standing_records
from ray_dcp.place.stock_files import foreign_metadata
from ray_dcp.store.storage import Storage


@dataclass(frozen=True, repr=False)
class CollectReport:
    """What `delete` or `collect` did, or would do."""

    path: str
    """Absolute path or URL."""
    deleted: tuple[str, ...]
    """Keys of the files that were deleted, in that order."""
    num_bytes: int
    """Total size of these files, in bytes."""
    kept: tuple[KeptFile, ...]
    """Files that remain besides the current checkpoint and its records, each with the reason."""
    fenced: tuple[str, ...] = ()
    """Attempts that could still have been committed before, and can't any more."""
    checkpoint: str | None = None
    """Attempt of the checkpoint that was deleted."""
    warnings: tuple[str, ...] = ()
    dry_run: bool = False
    """Whether nothing was changed."""

    def __repr__(self) -> str:
        told = f"{count_text(len(self.deleted), 'file')}, {size_text(self.num_bytes)}"
        others = {"kept": self.kept, "fenced": self.fenced, "warnings": self.warnings}
        more = [f"{len(some)} {name}" for name, some in others.items() if some]
        verb = "would delete" if self.dry_run else "deleted"
        return f"CollectReport({', '.join([repr(self.path), f'{verb} {told}', *more])})"


@dataclass(frozen=True)
class Listing:
    """All files at a place."""

    storage: Storage
    standing: Standing
    sizes: dict[str, int]
    """Size of each file by key, in bytes, including unpublished files."""
    foreign: str | None
    """Digest of a `.metadata` that ray_dcp did not write."""
    foreign_files: tuple[str, ...]
    """Files that it names and that have names of stock DCP."""

    @property
    def known(self) -> frozenset[str]:
        """Attempts that records name, including verdicts."""
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


def look_at(storage: Storage) -> Listing:
    """Lists all files at a place, and reads its records.

    Args:
        storage: The storage of the place.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.
    """
    # Careful: files first. What is listed and committed meanwhile is then seen to stand.
    sizes = {entry.key: entry.num_bytes for entry in everything(storage)}
    standing = standing_records(storage, whole=True)
    return Listing(storage, standing, sizes, *foreign_metadata(storage, standing.manifest))


def check_ours(place: Listing) -> None:
    """Checks that the place has files of ray_dcp.

    Args:
        place: The listing.

    Raises:
        CheckpointNotFoundError: There is no file, or no checkpoint.
        InvalidRequestError: Another program wrote the files.
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


def named_by_metadata(
    place: Listing, record: Manifest | DeleteRecord | None, data: bytes | None
) -> dict[str, str]:
    """Returns the attempts whose files an outdated or foreign `.metadata` names.

    Args:
        place: The listing.
        record: The deciding record.
        data: `.metadata` as it is now; None if there is none.

    Returns:
        By attempt, the reason to keep its files.
    """
    if data is None:
        return {}
    attempts = attempts_of(place.sizes)
    if isinstance(record, Manifest):
        attempts -= {record.attempt}
        if record.metadata is not None and record.metadata.digest == digest_bytes(data).hex():
            return {}
    if isinstance(record, DeleteRecord) and is_ours(data, place.standing.manifest):
        return {}  # it is removed
    try:
        found = decode_metadata(data)
    except CheckpointError:
        return dict.fromkeys(attempts, "a .metadata that can't be read may name it")
    named = attempts_of(found.table.files)
    named |= {found.attempt} if found.attempt is not None else set()
    return dict.fromkeys(attempts & named, "the .metadata that stands there names it")


def remove(place: Listing, found: GarbagePlan, dry_run: bool) -> CollectReport:
    """Deletes files in order, and no record while a file that it may name remains.

    Args:
        place: The listing.
        found: The files to delete.
        dry_run: Whether only to report.

    Returns:
        The report; a failure is one of its warnings.
    """
    files = tuple(key for key in found.delete if slot_of(key) is None)
    kept, deleted = list(found.kept), list[str]()
    warnings = list[str]()
    for keys in (files, found.delete[len(files) :]):
        left, error = (set[str](), None) if dry_run else _try_delete(place.storage, keys)
        deleted += [key for key in keys if key not in left]
        if error is not None:
            warnings.append(f"Not everything could be deleted: {error}. Collect again later")
            kept += [KeptFile(key, "it could not be deleted") for key in sorted(left)]
            break
    return CollectReport(
        path=place.storage.url,
        deleted=tuple(deleted),
        num_bytes=sum(place.sizes.get(key, 0) for key in deleted),
        kept=tuple(kept),
        warnings=tuple(warnings),
        dry_run=dry_run,
    )


def _try_delete(storage: Storage, keys: Collection[str]) -> tuple[set[str], CheckpointError | None]:
    """Deletes keys; returns those that remain, and the error."""
    try:
        storage.delete(keys)
    except CheckpointError as error:
        try:
            return {entry.key for entry in everything(storage)} & set(keys), error
        except CheckpointError:
            return set(keys), error
    return set(), None
