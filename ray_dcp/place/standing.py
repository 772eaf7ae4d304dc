"""The contents of a place: the records in its slots, its `.metadata`, and files of attempts.

`standing_records` and the functions beside it only read, except `confirm_record`. `publish`,
`republish` and `withdraw` update `.metadata`, which stock DCP reads, to the checkpoint that the
records decide; `write_metadata` creates the one that a save omitted, without torch or ray.
`Listing` and `remove` list a place and remove files for `delete` and `collect`;
`ray_dcp.commit_protocol.vote` decides which.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from ray_dcp.commit_protocol.commands import Overtaken, Published, RecordsRead
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.commit_protocol.vote import (
    Fenced,
    GarbagePlan,
    KeptFile,
    Lost,
    Won,
    attempts_of,
    left_by_others,
    owner_of,
    verdicts,
    was_committed,
)
from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.processes import collector_paused
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InvalidRequestError,
)
from ray_dcp.format.manifest import (
    AbortRecord,
    DeleteRecord,
    Manifest,
    decode_record,
    record_key,
    slot_of,
)
from ray_dcp.format.metadata import decode_metadata, encode_metadata
from ray_dcp.io.checkpoint import METADATA_KEY, Found, find_checkpoint, is_ours, not_found
from ray_dcp.io.records import Slots, read_slots, slots_in, used_slots
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import as_target, open_storage
from ray_dcp.store.storage import (
    Entry,
    KeyExistsError,
    KeyMissingError,
    Storage,
    read_if_there,
    read_traits_of,
)
from ray_dcp.view.wording import count_text, size_text

STOCK_FILE = re.compile(r"__\d+_\d+\.distcp")


@runtime_checkable
class _ShowsUnpublished(Protocol):
    """A storage whose writers leave files behind if they crash."""

    def unpublished(self) -> tuple[Entry, ...]: ...


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


def read_standing(storage: Storage) -> RecordsRead:
    """Returns the state of a place that a save needs before it is planned.

    Args:
        storage: The storage of the target.

    Raises:
        CheckpointError: A newer ray_dcp wrote here, or the storage fails.
    """
    keys = [entry.key for entry in everything(storage)]
    standing = standing_records(storage, used=slots_in(keys))
    digest, foreign_files = None, tuple[str, ...]()
    if METADATA_KEY in keys:
        digest, foreign_files = foreign_metadata(storage, standing.manifest)
    present = attempts_of(keys)
    if not storage.traits.create_if_absent:
        # Why: two saves may both believe to have won there; the files of neither may go.
        known = {record.attempt for record in standing.slots.records.values()}
        if standing.record is not None:
            known |= {verdict.attempt for verdict in standing.record.decided}
        keys = [key for key in keys if attempts_of([key]) <= known]
    left = left_by_others(keys, last_slot=standing.last_slot)
    # Why none where a record can't be read: it may be the commit of one of them.
    is_known = storage.traits.create_if_absent and not standing.slots.unreadable
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
        decided=verdicts(standing.slots.records, present if is_known else ()),
    )


def everything(storage: Storage) -> list[Entry]:
    """Returns all files at a place, including those that writers have not published.

    Args:
        storage: The storage of the place.

    Raises:
        StorageError: It can't be listed.
    """
    hidden = storage.unpublished() if isinstance(storage, _ShowsUnpublished) else ()
    return [*storage.list(), *hidden]


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


def without_stock_files(storage: Storage, keys: Iterable[str]) -> list[str]:
    """Returns the keys that the current `.metadata` of stock DCP, if there is one, does not name.

    *Why*: stock DCP uses the same names again, so that a file to be collected may belong to its
    next checkpoint.

    Args:
        storage: The storage of the target.
        keys: Keys to be collected.

    Raises:
        StorageError: `.metadata` can't be read.
    """
    keys = list(keys)
    named: set[str] = set()
    if any(map(STOCK_FILE.fullmatch, keys)):
        data = read_if_there(storage, METADATA_KEY)
        try:
            foreign = None if data is None else decode_metadata(data)
        except CheckpointError:
            named = {key for key in keys if STOCK_FILE.fullmatch(key)}
        else:
            if foreign is not None and foreign.attempt is None:
                named = set(foreign.table.files)
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
    # manifest has.
    keys = (*(e.key for e in manifest.files), manifest.table.key)
    return (key for key in keys if manifest.attempt in key)


def foreign_metadata(
    storage: Storage, manifest: Manifest | None
) -> tuple[str | None, tuple[str, ...]]:
    """Returns the hex digest of a `.metadata` that ray_dcp did not write, and its files.

    Args:
        storage: The storage of the target.
        manifest: Manifest of the current checkpoint.

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
    """Removes the `.metadata` of a deleted checkpoint; keeps one that another program wrote since.

    Args:
        storage: The storage of the target.
        record: The deciding delete record.

    Returns:
        Whether there was one.

    Raises:
        StorageError: The storage fails.
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


def target_of(path: AnyPlace, storage_options: Mapping[str, object] | None) -> Target:
    """Returns the absolute location of a path.

    Args:
        path: Path, URL or target.
        storage_options: More options for the storage.

    Raises:
        InvalidRequestError: It is not a path or a URL that a storage serves.
    """
    options = storage_options or {}
    place = as_target(path)
    place = replace(place, storage_options={**place.storage_options, **options})
    return replace(place, url=open_storage(place).url)  # raises for what is no path


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


def named_by_metadata(place: Listing, record: Manifest | DeleteRecord | None) -> dict[str, str]:
    """Returns the attempts whose files an outdated or foreign `.metadata` names.

    Args:
        place: The listing.
        record: The deciding record.

    Returns:
        By attempt, the reason to keep its files.

    Raises:
        StorageError: `.metadata` can't be read.
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
        >>> from ray_dcp.store.storage import MemoryStorage
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
            return republish(storage, target.url)
        with collector_paused():
            metadata = encode_metadata(
                found.decoded(), checkpoint_id=target.url, attempt=manifest.attempt
            )
        return not publish(storage, found.slot, metadata, target.url).superseded
    except CheckpointError as error:
        error.checkpoint_id = error.checkpoint_id or target.url
        raise
