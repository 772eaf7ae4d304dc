"""Finds the checkpoint at a storage location, with its chunk table.

`find_checkpoint` determines the valid checkpoint; `read_checkpoint` also reads its chunk table. In
order of precedence, it is the highest commit record that no later delete record revokes; else the
`.metadata` of stock DCP; else plain safetensors files. If there is none, the error says what the
location contains and where a checkpoint might be instead (`not_found`).

`TableParts` reads only the groups of a chunk table that a load needs, `CheckFile` only the
checksums that it needs, from the ends of the data files. All parts are verified by the manifest.
Python's garbage collector is paused while many objects are created, but never during storage calls,
which may hang.

A `.metadata` beside commit records is one of these:

- current: it is the projection of the manifest into DCP's format.
- stale: it should be that projection, but is missing or older.
- foreign: another program wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np

from ray_dcp.core.checksums import CHECK_BYTES, digest_bytes, end_checks
from ray_dcp.core.processes import collector_paused, run_tasks
from ray_dcp.core.values import ChunkTable, Int64Array, within
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    InternalError,
    StorageError,
    UncommittedCheckpointError,
)
from ray_dcp.format import damaged
from ray_dcp.format.manifest import (
    MAX_RECORD_BYTES,
    DeleteRecord,
    FileEntry,
    Manifest,
    decode_record,
    record_key,
)
from ray_dcp.format.metadata import (
    ATTEMPT_ATTRIBUTE,
    ForeignMetadata,
    decode_metadata,
    encode_metadata,
)
from ray_dcp.format.safe_pickle import MAX_PICKLE_BYTES
from ray_dcp.format.table import (
    MAX_TABLE_BYTES,
    DeferredRows,
    GroupedTable,
    decode_table,
    with_places,
)
from ray_dcp.io.not_found import not_found
from ray_dcp.io.plain_files import plain_files, plain_table
from ray_dcp.io.reader import Transforms
from ray_dcp.io.records import Deciding, read_again, read_slots, used_slots
from ray_dcp.planning.reads import Wanted
from ray_dcp.store.storage import KeyMissingError, Storage, ask_at_once, threads_for

CheckpointKind = Literal["native", "stock", "safetensors"]


def _at_once(read: Callable[[], CheckFile]) -> CheckFile:
    # Why not a lambda: a `Checkpoint` is pickled as part of a view.
    return read()


@dataclass(eq=False)
class Checkpoint:
    """A valid checkpoint, with the locations of its chunks."""

    kind: CheckpointKind
    """`native`: saved by ray_dcp. `stock`: DCP's `.metadata`. `safetensors`: plain files."""
    checkpoint_id: str
    """Path or URL, for messages."""
    slot: int
    """Slot of the manifest; 0 unless `native`."""
    record: bytes
    """The manifest or the foreign `.metadata` as stored; empty for plain files."""
    chunks: ChunkTable | TableParts = field(repr=False)
    """The whole chunk table or, for a large checkpoint, an object that reads the parts needed."""
    attempt: str | None = None
    """Id of the attempt that committed the checkpoint; None unless `native`."""
    manifest: Manifest | None = None
    """None unless `native`."""
    foreign: ForeignMetadata | None = None
    """The decoded `.metadata`; None unless `stock`."""
    metadata_is_stale: bool = False
    """`.metadata` should be the projection of this manifest, but is missing or older. It should be
    published again."""
    check_file: CheckFile | None = None
    """Reads checksums that the table lacks, file by file; None if the table is complete."""
    in_time: Callable[[Callable[[], CheckFile]], CheckFile] = field(default=_at_once, repr=False)
    """Runs a function that reads chunks, under a deadline."""

    @property
    def tensors(self) -> ChunkTable:
        """Table of the tensors, possibly without chunks. Never reads from storage."""
        return self.chunks.tensors if isinstance(self.chunks, TableParts) else self.chunks

    @property
    def table(self) -> ChunkTable:
        """The chunk table: the part selected by `narrow`, else all of it, read on first access.

        Raises:
            DamagedCheckpointError: The table is damaged or missing.
            StorageError: The table can't be read.
        """
        if isinstance(self.chunks, TableParts):
            return self._set_chunks(self.chunks.whole)
        return self.chunks

    def narrow(self, wanted: Sequence[Wanted], tensors: Sequence[int]) -> ChunkTable:
        """Restricts a table that is not yet read to the needed chunks; returns the chunk table.

        Args:
            wanted: Boxes that are needed.
            tensors: Tensors of which every chunk is needed.

        Raises:
            CheckpointError: As for `table`.
        """
        parts = self.chunks
        if isinstance(parts, TableParts):
            return self._set_chunks(lambda: parts.around(wanted, tensors))
        return parts

    @property
    def transforms(self) -> Transforms:
        """Transforms applied to the stored items, for `reader`."""
        return None if self.foreign is None else self.foreign.transforms

    def know_checks(self, chunks: Iterable[int] | None = None) -> None:
        """Reads the checksums of some chunks (by default all) that the table still lacks.

        Raises:
            DamagedCheckpointError: The checksums do not match their digest in the manifest.
            StorageError: The checksums can't be read.
        """
        table = self.table
        if self.check_file is None:
            return
        if chunks is None:
            self.check_file.read(range(len(table.files)))
        else:
            self.check_file.read(table.file[[*chunks]].tolist())

    def _set_chunks(self, read: Callable[[], CheckFile]) -> ChunkTable:
        self.check_file = self.in_time(read)
        self.chunks = self.check_file.table
        return self.chunks


METADATA_KEY = ".metadata"


def is_ours(metadata: bytes, manifest: Manifest | None = None) -> bool:
    """Returns whether ray_dcp wrote a `.metadata`; False if it can't be decoded.

    Args:
        metadata: Content of the file.
        manifest: That of the save which may have written it; its digest spares the decoding.
    """
    written = None if manifest is None else manifest.metadata
    if written is not None and written.digest == digest_bytes(metadata).hex():
        return True
    # Why search first: decoding costs 20 us per tensor.
    if ATTEMPT_ATTRIBUTE.encode() not in metadata:
        return False
    try:
        return decode_metadata(metadata).attempt is not None
    except CheckpointError:
        return False


def decode_foreign(metadata: bytes) -> ForeignMetadata:
    """Decodes the `.metadata` of a location without a valid manifest.

    Args:
        metadata: Content of the file.

    Raises:
        UncommittedCheckpointError: ray_dcp wrote the file.
        DamagedCheckpointError: The file can't be decoded.
    """
    foreign = decode_metadata(metadata)
    if foreign.attempt is not None:
        raise UncommittedCheckpointError(
            f"expected a manifest beside .metadata, found none: the save {foreign.attempt} never "
            f"committed, or its manifest was deleted; load an earlier step",
            key=METADATA_KEY,
        )
    return foreign


def is_stale(slot: int, manifest: Manifest, metadata: bytes | None) -> bool:
    """Returns whether `.metadata` should be the projection of a manifest, but is not.

    Args:
        slot: Slot of the manifest, for messages.
        manifest: The valid manifest.
        metadata: Content of the file; None if it does not exist.

    Raises:
        DamagedCheckpointError: The `.metadata` is foreign, and is not the one that the manifest
            replaced.
    """
    expected = None if manifest.metadata is None else manifest.metadata.digest
    if metadata is None:
        return expected is not None
    found = digest_bytes(metadata).hex()
    if found == expected:
        return False
    if found != manifest.replaced_metadata:
        _refuse_foreign(slot, manifest, metadata)
    return expected is not None


def projects(metadata: bytes, attempt: str, table: ChunkTable) -> bool:
    """Returns whether a `.metadata` is the projection of a checkpoint made at any location.

    A `.metadata` contains its location, so that one made from a copy of the checkpoint has another
    digest than the manifest names.

    Args:
        metadata: Content of the file.
        attempt: Id of the committed attempt.
        table: Chunk table of the checkpoint.

    Complexity:
        That of `decode_metadata` and `encode_metadata`.
    """
    # Why search first: decoding costs 20 us per tensor.
    if attempt.encode() not in metadata:
        return False
    try:
        told = decode_metadata(metadata)
    except CheckpointError:
        return False
    if told.attempt != attempt or told.checkpoint_id is None:
        return False
    return encode_metadata(table, checkpoint_id=told.checkpoint_id, attempt=attempt) == metadata


def _refuse_foreign(slot: int, manifest: Manifest, metadata: bytes) -> None:
    try:
        if decode_metadata(metadata).attempt is not None:
            return  # of an earlier save by ray_dcp
        what = "one of another program"
    except CheckpointError as exc:
        what = f"one that can't be read ({exc.message})"
    key = record_key(slot)
    raise DamagedCheckpointError(
        f"two checkpoints claim this place: {key} of the save {manifest.attempt}, and "
        f"a .metadata that does not belong to it, but is {what}. If stock DCP saved here last, "
        f"move the manifest-*.json files away to load what it saved; if not, move .metadata away "
        f"to load the save {manifest.attempt}",
        key=METADATA_KEY,
    )


class Committed(NamedTuple):
    """The valid commit record of a checkpoint."""

    slot: int
    data: bytes
    """The record as stored."""
    manifest: Manifest


class Found(NamedTuple):
    """A valid checkpoint whose chunk table is not yet decoded; see `Checkpoint`."""

    kind: CheckpointKind
    slot: int
    record: bytes
    manifest: Manifest | None = None
    table: bytes = b""
    """The chunk table as stored, verified; empty unless `native`."""
    metadata_is_stale: bool = False

    def decoded(self) -> ChunkTable:
        """Returns the decoded chunk table of a native checkpoint.

        Checksums that are stored at the ends of the data files are 0.

        Raises:
            DamagedCheckpointError: The table is inconsistent.
        """
        with collector_paused():
            table = decode_table(self.table)
            return table if self.manifest is None else with_places(table, self.manifest)


@contextmanager
def _add_checkpoint_id(checkpoint_id: str) -> Iterator[None]:
    """Adds the checkpoint to errors raised in the block."""
    try:
        yield
    except CheckpointError as exc:
        exc.checkpoint_id = checkpoint_id
        raise


def read_checkpoint(
    storage: Storage, *, checkpoint_id: str | None = None, checks_later: bool = False
) -> Checkpoint:
    """Returns the valid checkpoint of a storage.

    Args:
        storage: Storage of the checkpoint.
        checkpoint_id: Path or URL for messages; the storage's own by default.
        checks_later: Do not read checksums at the ends of data files; `Checkpoint.check_file` reads
            them when needed.

    Raises:
        CheckpointNotFoundError: There is none; the message says what the location contains.
        UncommittedCheckpointError: There are files of a save that never committed.
        DamagedCheckpointError: The deciding record or the chunk table is damaged or missing; or
            stock DCP overwrote a checkpoint of ray_dcp.
        StorageError: The storage can't be read.
    """
    found = find_checkpoint(storage, checkpoint_id=checkpoint_id)
    name = storage.url if checkpoint_id is None else checkpoint_id
    with _add_checkpoint_id(name):
        return _decode_checkpoint(storage, name, found, checks_later)


def find_checkpoint(storage: Storage, *, checkpoint_id: str | None = None) -> Found:
    """Returns the valid checkpoint of a storage without decoding it.

    The rank that determines the checkpoint leaves the decoding to the ranks that need it. The chunk
    table is only verified against its manifest; a `.metadata` or safetensors files only have to
    exist.

    Args:
        storage: Storage of the checkpoint.
        checkpoint_id: Path or URL for messages; the storage's own by default.

    Raises:
        CheckpointError: As `read_checkpoint`, except for errors found by decoding.
    """
    name = storage.url if checkpoint_id is None else checkpoint_id
    with _add_checkpoint_id(name):
        # Why slot 1: most locations are saved to once, and this avoids another round trip for them.
        metadata, first, used = ask_at_once(
            storage,
            lambda: _read_or_none(storage, METADATA_KEY),
            lambda: _read_or_none(storage, record_key(1), MAX_RECORD_BYTES),
            lambda: used_slots(storage),
        )
        known = {} if first is None else {1: first}
        decides = read_slots(storage, used=used, known=known).decides
        # Why again: a single listing may miss both a removed record and the one that replaced it.
        decides = read_slots(storage).decides if decides is None else decides
        while (committed := _committed_of(decides)) is not None:
            try:
                return _native(storage, committed, metadata)
            except DamagedCheckpointError:
                # Why retried: a newer commit may have replaced the table. `.metadata` was read at
                # another moment than the records: it may belong to a later commit, or be a foreign
                # one that two commits have replaced.
                before, metadata = metadata, _read_or_none(storage, METADATA_KEY)
                decides = read_slots(storage).decides
                if metadata == before and decides is not None and decides.slot <= committed.slot:
                    raise
        return _not_native(storage, metadata, decides)


def checkpoint_from(
    storage: Storage,
    kind: str,
    slot: int,
    record: bytes,
    *,
    table: bytes = b"",
    checks_later: bool = False,
) -> Checkpoint:
    """Returns the checkpoint that another rank has determined.

    Args:
        storage: Storage of the checkpoint.
        kind: `Checkpoint.kind`.
        slot: `Checkpoint.slot`.
        record: `Checkpoint.record`.
        table: The chunk table as stored, if it was read already.
        checks_later: Read chunks and checksums of a large table only when they are needed.

    Raises:
        DamagedCheckpointError: The record, the chunk table or a header is damaged or missing.
        InternalError: `kind` is unknown, or the record is not a manifest.
        StorageError: The storage can't be read.
    """
    name = storage.url
    with _add_checkpoint_id(name):
        match kind:
            case "native":
                manifest = decode_record(record, key=record_key(slot))
                if not isinstance(manifest, Manifest):
                    raise InternalError(f"expected a manifest in slot {slot}, found an abort")
                if not checks_later:
                    table = verified_table(storage, manifest)
                found = Found(kind, slot, record, manifest, table)
                return _decode_checkpoint(storage, name, found, checks_later, in_part=checks_later)
            case "stock" | "safetensors":
                return _decode_checkpoint(storage, name, Found(kind, slot, record))
            case _:
                raise InternalError(f"expected a kind of checkpoint, found {kind!r}")


def newest_record(storage: Storage) -> Committed | None:
    """Returns the valid manifest, or None if nothing was committed or it was deleted.

    Reads only the newest records, as `read_slots` does.

    Raises:
        DamagedCheckpointError: A record is damaged; older records are not used instead.
        StorageError: The storage can't be read.
    """
    return _committed_of(read_slots(storage).decides)


class CheckpointReplacedError(StorageError):
    """Another save replaced the checkpoint while it was read. The read should be repeated."""


def what_became_of(storage: Storage, checkpoint: Checkpoint) -> CheckpointError | None:
    """Returns the reason why a checkpoint is no longer valid, or None if none is known.

    A reader that found a checkpoint damaged calls this, as files are missing, too, if the
    checkpoint was replaced or deleted meanwhile.

    Args:
        storage: Storage of the checkpoint.
        checkpoint: The checkpoint as it was read.

    Raises:
        StorageError: The storage can't be read.
    """
    try:
        decides = read_slots(storage).decides
    except DamagedCheckpointError:
        return None
    committed = _committed_of(decides)
    if checkpoint.manifest is not None:
        stands = committed is not None and committed.manifest.attempt == checkpoint.attempt
    else:
        own = checkpoint.record or None
        stands = committed is None and (own is None or own == _read_or_none(storage, METADATA_KEY))
    if stands:
        return None
    if committed is None and checkpoint.manifest is not None:
        return not_found(storage, decides)
    return CheckpointReplacedError(
        f"the checkpoint in {storage.url} was replaced or removed while it was read; read it again",
        checkpoint_id=storage.url,
    )


def _read_or_none(storage: Storage, key: str, most_bytes: int = MAX_PICKLE_BYTES) -> bytes | None:
    """Returns a file, or None. A file over the limit gives `most_bytes + 1` bytes, never valid."""
    try:
        return storage.read(key, 0, most_bytes + 1)
    except KeyMissingError:
        return None


def _native(storage: Storage, committed: Committed, metadata: bytes | None) -> Found:
    """Reads the chunk table of a manifest, and compares its `.metadata`."""
    stale = is_stale(committed.slot, committed.manifest, metadata)
    found = Found("native", *committed, verified_table(storage, committed.manifest), stale)
    if stale and metadata is not None:
        is_its = projects(metadata, committed.manifest.attempt, found.decoded())
        return found._replace(metadata_is_stale=not is_its)
    return found


def _committed_of(decides: Deciding | None) -> Committed | None:
    if decides is None or isinstance(decides.record, DeleteRecord):
        return None
    return Committed(decides.slot, decides.data, decides.record)


def _not_native(storage: Storage, metadata: bytes | None, decides: Deciding | None) -> Found:
    """Returns the checkpoint of a location without a valid manifest."""
    if decides is not None:
        # Why read again: the delete may have removed the file after the first read. What it left
        # is no checkpoint; what another program wrote since is one.
        metadata = _read_or_none(storage, METADATA_KEY)
        if metadata is not None and (
            digest_bytes(metadata).hex() == decides.record.replaced_metadata or is_ours(metadata)
        ):
            metadata = None
    if metadata is not None:
        # Why only then: decoding costs 20 us per tensor, and stock DCP never writes this attribute.
        if ATTEMPT_ATTRIBUTE.encode() in metadata:
            decode_foreign(metadata)
        return Found("stock", 0, metadata)
    if plain_files(storage):
        return Found("safetensors", 0, b"")
    raise not_found(storage, decides)


def _decode_checkpoint(
    storage: Storage, name: str, found: Found, checks_later: bool = False, *, in_part: bool = False
) -> Checkpoint:
    """Decodes a found checkpoint; with `in_part`, only the end of a large native table."""
    manifest, foreign, check_file = found.manifest, None, None
    chunks: ChunkTable | TableParts
    if manifest is not None and in_part and manifest.table_end is not None:
        chunks = TableParts(storage, manifest, found.table)
    elif manifest is not None:
        table = verified(storage, manifest.table, found.table) if in_part else found.table
        check_file = _whole_table(storage, manifest, table)
        chunks = check_file.table
    elif found.kind == "stock":
        foreign = decode_foreign(found.record)
        chunks = foreign.table
    else:
        chunks = plain_table(storage)
    checkpoint = Checkpoint(
        kind=found.kind,
        checkpoint_id=name,
        slot=found.slot,
        record=found.record,
        chunks=chunks,
        attempt=None if manifest is None else manifest.attempt,
        manifest=manifest,
        foreign=foreign,
        metadata_is_stale=found.metadata_is_stale,
        check_file=check_file,
    )
    if not checks_later:
        checkpoint.know_checks()
    return checkpoint


def verified(storage: Storage, entry: FileEntry, data: bytes = b"", start: int = 0) -> bytes:
    """Returns the content of a file that a manifest names, verified.

    Bytes that do not match are read once more, as they may have been altered in transit.

    Args:
        storage: Storage of the checkpoint.
        entry: The file's entry in the manifest.
        data: The content, if it was read already.
        start: First byte, for an entry of the end of a file.

    Raises:
        DamagedCheckpointError: The file is missing, or does not match the manifest.
        StorageError: The file can't be read.
    """
    for is_last in (False, True):
        if is_last or not data:
            # Why one more: a longer file does not match.
            data = _read(storage, entry.key, start, min(entry.num_bytes, MAX_TABLE_BYTES) + 1)
        if len(data) == entry.num_bytes and digest_bytes(data).hex() == entry.digest:
            return data
    which = f"the {'last ' * bool(start)}{entry.num_bytes} bytes of digest {entry.digest}"
    found = f"{len(data)} bytes of digest {digest_bytes(data).hex()}"
    raise damaged(f"{which} that the manifest names", found, key=entry.key)


def verified_table(storage: Storage, manifest: Manifest) -> bytes:
    """Returns the whole chunk table that a manifest names, verified.

    Raises:
        DamagedCheckpointError: The table is missing, or the table or its end does not match the
            manifest.
        StorageError: The table can't be read.
    """
    data = verified(storage, manifest.table)
    if manifest.table_end is not None:
        _verified_end(storage, manifest, data)
    return data


def _verified_end(storage: Storage, manifest: Manifest, table: bytes = b"") -> bytes:
    """Returns the end of a grouped chunk table, of which `table` is all if it was read already."""
    entry, end = manifest.table, manifest.table_end
    if end is None or end.num_bytes > min(entry.num_bytes, MAX_TABLE_BYTES):
        raise damaged(f"a chunk table with an end as {entry.key}", "none", key=entry.key)
    start = entry.num_bytes - end.num_bytes
    return verified(storage, replace(end, key=entry.key), table and table[start:], start)


def _read_exactly(storage: Storage, key: str, start: int, num_bytes: int) -> bytes:
    """Returns exactly `num_bytes` bytes of a file that a manifest names."""
    data = _read(storage, key, start, num_bytes) if num_bytes else b""
    if len(data) != num_bytes:
        expected = f"bytes [{start}, {start + num_bytes}) in {key}"
        raise damaged(expected, f"{len(data)} of them: it was cut off", key=key)
    return data


def _read(storage: Storage, key: str, start: int, num_bytes: int) -> bytes:
    try:
        return storage.read(key, start, num_bytes)
    except KeyMissingError as exc:
        raise damaged(f"{key}, which the manifest names", "no such file", key=key) from exc


_THREADS = 16
"""Number of threads that read the ends of all data files."""


class CheckFile:
    """Reads checksums at the ends of data files, and verifies them by their digest in the manifest.

    Args:
        storage: Storage of the files.
        manifest: Manifest of the checkpoint.
        table: The part of the chunk table that all saves of the plan share, or some of its rows.
        deferred: The deferred chunks that `table` contains, if it is a part.

    Attributes:
        table: The chunk table. Checksums at the end of a data file are 0 until `read` is called
            for that file.

    Raises:
        DamagedCheckpointError: Table and manifest do not belong together.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        table: ChunkTable,
        deferred: DeferredRows | None = None,
    ) -> None:
        self._storage = storage
        self._entries = {entry.key: entry for entry in manifest.files}
        with collector_paused():
            self.table = with_places(table, manifest, deferred)
        # Start of each file's checksums in `table.checks`.
        files = np.arange(len(self.table.files) + 1)
        self._place = self.table.check_start[np.searchsorted(self.table.file, files)]
        self._there = {*np.unique(self.table.file).tolist()}
        self._known: set[int] = set()

    def read(self, files: Iterable[int]) -> None:
        """Reads the checksums of some files into the table. Each file is read once.

        Args:
            files: Indices into the table's `files`. Files without chunks in a part are ignored.

        Raises:
            DamagedCheckpointError: The checksums do not match their digest in the manifest.
            StorageError: The checksums can't be read.
        """
        todo = sorted((self._there & {*files}) - self._known)
        run_tasks(todo, self._read_end, threads_for(self._storage, len(todo)))
        self._known.update(todo)

    def ends(self, sizes: Mapping[str, int]) -> list[bytes | str]:
        """Returns the checksums at the end of each data file, or a description of their damage.

        Args:
            sizes: Actual lengths of the files, by key. *Why*: a file that lost a byte may still end
                with valid checksums, which then locate the damage.

        Raises:
            StorageError: The checksums can't be read.
        """
        found: list[bytes | str] = [b""] * len(self.table.files)

        def look(number: int) -> None:
            found[number] = self.end_of(number, sizes.get(self.table.files[number]))

        run_tasks(range(len(found)), look, _THREADS)
        return found

    def end_of(self, number: int, file_bytes: int | None) -> bytes | str:
        """Returns the checksums at the end of a data file, or a description of their damage.

        Args:
            number: Index into the table's `files`.
            file_bytes: Actual length of the file; None if it does not exist.

        Raises:
            StorageError: The checksums can't be read.
        """
        try:
            self._read_end(number, file_bytes)
        except DamagedCheckpointError as error:
            return error.message
        self._known.add(number)
        low, high = self._place[number : number + 2].tolist()
        return end_checks(0, self.table.checks[low:high])

    def _read_end(self, number: int, file_bytes: int | None = None) -> None:
        low, high = self._place[number : number + 2].tolist()
        key, length = self.table.files[number], CHECK_BYTES * (high - low)
        entry = self._entries.get(key)
        if entry is None or entry.num_bytes < length:
            expected = f"a file with {high - low} checksums as {key} in the manifest"
            raise damaged(expected, "none of this length", key=key)
        end = entry.num_bytes if file_bytes is None else max(file_bytes, length)

        def read() -> bytes:
            data = _read_exactly(self._storage, key, end - length, length)
            if digest_bytes(data).hex() != entry.digest:
                expected = f"the checksums of {key} at its end that the manifest names"
                raise damaged(expected, "others", key=key)
            return data

        self.table.checks[low:high] = np.frombuffer(read_again(read), "<u8")


def _check_against(
    manifest: Manifest, num_tensors: int, num_chunks: int, files: Iterable[str]
) -> None:
    """Checks that a chunk table of these numbers and files belongs to a manifest."""
    unknown = sorted(set(files) - {entry.key for entry in manifest.files})
    found = (num_tensors, num_chunks)
    if found != (manifest.num_tensors, manifest.num_chunks) or unknown:
        raise damaged(
            f"{manifest.num_tensors} tensors in {manifest.num_chunks} chunks of the manifest's "
            f"files",
            f"{found[0]} in {found[1]}"
            + (f" and files that it does not name: {', '.join(unknown[:4])}" if unknown else ""),
            key=manifest.table.key,
        )


class TableParts:
    """Reads the groups of a chunk table that are needed.

        file   | group 0 | group 1 | ... | group n | end: tensors, index of the groups |

    Args:
        storage: Storage of the checkpoint.
        manifest: Manifest of the checkpoint.
        table: The whole table, verified, if it was read already.

    Attributes:
        tensors: The table without chunks.

    Raises:
        DamagedCheckpointError: Table and manifest do not belong together.
        StorageError: The end of the table can't be read.
    """

    def __init__(self, storage: Storage, manifest: Manifest, table: bytes = b"") -> None:
        self._storage = storage
        self._manifest = manifest
        self._known = table
        end = _verified_end(storage, manifest, table)
        with collector_paused():
            self._table = GroupedTable(end, manifest.table.num_bytes)
        self.tensors = self._table.tensors
        files = [key.replace("{attempt}", manifest.attempt) for key in self.tensors.files]
        _check_against(manifest, self.tensors.num_tensors, self._table.num_chunks, files)

    def around(self, wanted: Sequence[Wanted], tensors: Sequence[int]) -> CheckFile:
        """Reads the groups with the wanted chunks; they contain further chunks of the same files.

        Args:
            wanted: Wanted boxes.
            tensors: Tensors of which every chunk is wanted.

        Raises:
            DamagedCheckpointError: A group is damaged or missing.
            StorageError: A group can't be read.
        """
        groups = self._table.index.around(wanted, tensors)
        first = self._table.index.first_deferred
        counts = np.diff(first)[groups]
        deferred = DeferredRows(np.repeat(first[groups], counts) + within(counts), int(first[-1]))
        return CheckFile(self._storage, self._manifest, self._read(groups), deferred)

    def whole(self) -> CheckFile:
        """Reads all groups.

        Raises:
            CheckpointError: As for `around`.
        """
        groups = np.arange(self._table.index.num_groups)
        return CheckFile(self._storage, self._manifest, self._read(groups))

    def _read(self, groups: Int64Array) -> ChunkTable:
        found: dict[int, memoryview] = {}
        # Adjacent groups are read together.
        for _, run in groupby(enumerate(groups.tolist()), lambda pair: pair[1] - pair[0]):
            spans = [(n, *self._table.index.start[n : n + 2].tolist()) for _, n in run]
            first, end = spans[0][1], spans[-1][2]
            key = self._manifest.table.key
            known = self._known[first:end] or _read_exactly(self._storage, key, first, end - first)
            data = memoryview(known)
            found |= {number: data[low - first : high - first] for number, low, high in spans}
        with collector_paused():
            return self._table.chunks(found)


_SHARED_TABLE_BYTES = 4 << 20
"""Longest chunk table that is kept decoded for the next checkpoint of the same plan."""


@lru_cache(maxsize=2)
def _decode_shared(data: bytes) -> ChunkTable:
    """Returns a decoded chunk table, the same one for equal bytes; its columns are read-only.

    *Why*: all saves of a plan have the same bytes, and decoding is most of what it takes to open a
    small checkpoint.
    """
    table = decode_table(data)
    for column in vars(table).values():
        if isinstance(column, np.ndarray):
            column.flags.writeable = False
    return table


def table_of(storage: Storage, manifest: Manifest) -> CheckFile:
    """Returns the chunk table that a manifest names; its checksums are read when they are needed.

    Raises:
        DamagedCheckpointError: The table is damaged or missing.
        StorageError: The storage can't be read.
    """
    return _whole_table(storage, manifest, verified_table(storage, manifest))


def _whole_table(storage: Storage, manifest: Manifest, data: bytes) -> CheckFile:
    """Returns all chunks of a checkpoint, given its chunk table as stored, verified."""
    with collector_paused():
        rows = (_decode_shared if len(data) <= _SHARED_TABLE_BYTES else decode_table)(data)
    found = CheckFile(storage, manifest, rows)
    _check_against(manifest, rows.num_tensors, rows.num_chunks, found.table.files)
    return found
