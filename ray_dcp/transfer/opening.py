"""Decides which checkpoint stands at a place, and reads its chunk table.

Order of truth: the highest commit; where there is none or a delete came after it, the `.metadata`
of stock DCP; where there is neither, plain safetensors files. What a place without any of them
holds is told by `lookaround`.
"""

from __future__ import annotations

from typing import NamedTuple

from ray_dcp.collector import collector_paused
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InternalError,
)
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import (
    DeleteRecord,
    Manifest,
    Record,
    decode_record,
    record_key,
)
from ray_dcp.format.metadata_out import ATTEMPT_ATTRIBUTE
from ray_dcp.format.safe_pickle import MAX_PICKLE_BYTES
from ray_dcp.format.table import decode_table
from ray_dcp.format.table_places import with_places
from ray_dcp.plan.values import ChunkTable
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.transfer.check_file import CheckFile, check_against
from ray_dcp.transfer.checkpoint import Checkpoint, CheckpointKind
from ray_dcp.transfer.lookaround import not_found
from ray_dcp.transfer.metadata_beside import (
    METADATA_KEY,
    decode_foreign,
    is_ours,
    is_stale,
    projects,
)
from ray_dcp.transfer.plain_files import plain_files, plain_table
from ray_dcp.transfer.slots import Deciding, read_slots
from ray_dcp.transfer.table_parts import TableParts, table_parts
from ray_dcp.transfer.verified import verified_table

__all__ = [
    "METADATA_KEY",
    "Committed",
    "Found",
    "checkpoint_from",
    "find_checkpoint",
    "newest_record",
    "read_checkpoint",
    "read_records",
]


class Committed(NamedTuple):
    """The record that decides what the checkpoint is."""

    slot: int
    data: bytes
    """The record as on storage."""
    manifest: Manifest


class Found(NamedTuple):
    """A checkpoint that stands, before its chunk table is looked into; see `Checkpoint`."""

    kind: CheckpointKind
    slot: int
    record: bytes
    manifest: Manifest | None = None
    table: bytes = b""
    """The chunk table as on storage, verified; empty for a checkpoint that is not ours."""
    metadata_is_stale: bool = False

    def decoded(self) -> ChunkTable:
        """Returns the chunk table of a checkpoint that is ours.

        Checksums that are at the ends of the data files are 0.

        Raises:
            DamagedCheckpointError: It contradicts itself.
        """
        with collector_paused():
            table = decode_table(self.table)
            return table if self.manifest is None else with_places(table, self.manifest)


def read_checkpoint(
    storage: Storage, *, checkpoint_id: str | None = None, checks_later: bool = False
) -> Checkpoint:
    """Returns the checkpoint that stands in a storage.

    Args:
        storage: Where to look.
        checkpoint_id: Path or URL for messages; the storage's own by default.
        checks_later: Leave checksums at the ends of data files to `Checkpoint.check_file`.

    Raises:
        CheckpointNotFoundError: There is none; the message says what is there instead.
        UncommittedCheckpointError: There are files of a save that never committed.
        DamagedCheckpointError: What decides, or the chunk table, is damaged or missing; or stock
            DCP saved over our checkpoint.
        StorageError: The storage can't be read.
    """
    found = find_checkpoint(storage, checkpoint_id=checkpoint_id)
    name = storage.url if checkpoint_id is None else checkpoint_id
    try:
        return _opened(storage, name, found, checks_later)
    except CheckpointError as exc:
        exc.checkpoint_id = name
        raise


def find_checkpoint(storage: Storage, *, checkpoint_id: str | None = None) -> Found:
    """Returns which checkpoint stands in a storage, without decoding what it holds.

    For who decides and leaves the decoding to those who need it: a chunk table is only verified
    against its manifest, and of a `.metadata` or of safetensors files it is only seen that they
    are there.

    Args:
        storage: Where to look.
        checkpoint_id: Path or URL for messages; the storage's own by default.

    Raises:
        CheckpointError: As `read_checkpoint`, but for what only decoding shows.
    """
    name = storage.url if checkpoint_id is None else checkpoint_id
    try:
        # Why `.metadata` first: a commit meanwhile then makes it look older, never newer.
        metadata = _read_or_none(storage, METADATA_KEY)
        decides = read_slots(storage).decides
        while (committed := _committed(decides)) is not None:
            try:
                return _newest_native(storage, committed, metadata)
            except DamagedCheckpointError:
                # Why: after two commits meanwhile, a foreign one that both replaced looks new.
                before, metadata = metadata, _read_or_none(storage, METADATA_KEY)
                decides = read_slots(storage).decides
                if metadata == before and decides is not None and decides.slot <= committed.slot:
                    raise
        return _not_native(storage, metadata, decides)
    except CheckpointError as exc:
        exc.checkpoint_id = name
        raise


def checkpoint_from(
    storage: Storage,
    kind: str,
    slot: int,
    record: bytes,
    *,
    table: bytes = b"",
    checkpoint_id: str | None = None,
    checks_later: bool = False,
) -> Checkpoint:
    """Returns the checkpoint that somebody else decided on, without deciding again.

    Args:
        storage: Where it is.
        kind: `Checkpoint.kind`.
        slot: `Checkpoint.slot`.
        record: `Checkpoint.record`.
        table: The chunk table as on storage, if it was read already.
        checkpoint_id: Path or URL for messages; the storage's own by default.
        checks_later: Leave chunks and checksums of a large table for when they are needed.

    Raises:
        DamagedCheckpointError: The record, the chunk table or a header is damaged or missing.
        InternalError: `kind` is none, or the record is no manifest.
        StorageError: The storage can't be read.
    """
    name = storage.url if checkpoint_id is None else checkpoint_id
    try:
        match kind:
            case "native":
                manifest = decode_record(record, key=record_key(slot))
                if not isinstance(manifest, Manifest):
                    raise InternalError(f"expected a manifest in slot {slot}, found an abort")
                committed = Committed(slot, record, manifest)
                if checks_later:
                    return _opened_in_part(storage, name, committed, table)
                return _opened(storage, name, _native(storage, committed))
            case "stock" | "safetensors":
                return _opened(storage, name, Found(kind, slot, record))
            case _:
                raise InternalError(f"expected a kind of checkpoint, found {kind!r}")
    except CheckpointError as exc:
        exc.checkpoint_id = name
        raise


def newest_record(storage: Storage) -> Committed | None:
    """Returns the manifest that stands, None when nothing was ever committed or it was deleted.

    Reads only the newest records, as `read_slots` does.

    Raises:
        DamagedCheckpointError: A record is damaged; nothing is decided past it.
        StorageError: The storage can't be read.
    """
    return _committed(read_slots(storage).decides)


def read_records(storage: Storage) -> dict[int, Record]:
    """Returns all records by slot that were written and not removed since.

    Raises:
        DamagedCheckpointError: One is damaged.
        StorageError: The storage can't be read.
    """
    slots = read_slots(storage, whole=True)
    return {**slots.older, **slots.records}


def _read_or_none(storage: Storage, key: str, most_bytes: int = MAX_PICKLE_BYTES) -> bytes | None:
    """Returns a file; of a longer one, a byte more than it may have, which nobody accepts."""
    try:
        return storage.read(key, 0, most_bytes + 1)
    except KeyMissingError:
        return None


def _newest_native(storage: Storage, committed: Committed, metadata: bytes | None) -> Found:
    """Reads what a manifest names; if that was collected meanwhile, what replaced it."""
    while True:
        stale = is_stale(committed.slot, committed.manifest, metadata)
        try:
            found = _native(storage, committed, metadata_is_stale=stale)
            if stale and metadata is not None:
                is_its = projects(metadata, committed.manifest.attempt, found.decoded())
                return found._replace(metadata_is_stale=not is_its)
            return found
        except DamagedCheckpointError:
            newer = newest_record(storage)
            if newer is None or newer.slot <= committed.slot:
                raise
            committed = newer


def _committed(decides: Deciding | None) -> Committed | None:
    if decides is None or isinstance(decides.record, DeleteRecord):
        return None
    return Committed(decides.slot, decides.data, decides.record)


def _not_native(storage: Storage, metadata: bytes | None, decides: Deciding | None) -> Found:
    """Returns what stands where no commit of ours does."""
    if decides is not None:
        # Why again: what was read before a delete may be what that has removed since.
        metadata = _metadata_after_delete(storage, decides.record)
    if metadata is not None:
        # Why only then: decoding costs 20 us a tensor, and a stock one does not say this.
        if ATTEMPT_ATTRIBUTE.encode() in metadata:
            decode_foreign(metadata)
        return Found("stock", 0, metadata)
    if plain_files(storage):
        return Found("safetensors", 0, b"")
    raise not_found(storage, decides)


def _metadata_after_delete(storage: Storage, record: Manifest | DeleteRecord) -> bytes | None:
    """Returns the `.metadata` that somebody else wrote after a delete; None for a left-over."""
    data = _read_or_none(storage, METADATA_KEY)
    if data is None or digest_bytes(data).hex() == record.replaced_metadata:
        return None
    return None if is_ours(data) else data


def _native(storage: Storage, committed: Committed, *, metadata_is_stale: bool = False) -> Found:
    slot, data, manifest = committed
    table = verified_table(storage, manifest)
    return Found("native", slot, data, manifest, table, metadata_is_stale)


def _opened(storage: Storage, name: str, found: Found, checks_later: bool = False) -> Checkpoint:
    """Decodes what was found."""
    manifest, foreign, check_file = found.manifest, None, None
    if manifest is not None:
        with collector_paused():
            check_file = CheckFile(storage, manifest, decode_table(found.table))
        table = check_file.table
        check_against(manifest, table.num_tensors, table.num_chunks, table.files)
    elif found.kind == "stock":
        foreign = decode_foreign(found.record)
        table = foreign.table
    else:
        table = plain_table(storage)
    checkpoint = Checkpoint(
        kind=found.kind,
        checkpoint_id=name,
        slot=found.slot,
        record=found.record,
        chunks=table,
        attempt=None if manifest is None else manifest.attempt,
        manifest=manifest,
        foreign=foreign,
        metadata_is_stale=found.metadata_is_stale,
        check_file=check_file,
    )
    if not checks_later:
        checkpoint.know_checks()
    return checkpoint


def _opened_in_part(storage: Storage, name: str, committed: Committed, table: bytes) -> Checkpoint:
    slot, data, manifest = committed
    found = table_parts(storage, manifest, table)
    return Checkpoint(
        kind="native",
        checkpoint_id=name,
        slot=slot,
        record=data,
        chunks=found if isinstance(found, TableParts) else found.table,
        attempt=manifest.attempt,
        manifest=manifest,
        check_file=None if isinstance(found, TableParts) else found,
    )
