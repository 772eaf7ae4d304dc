"""Reads the parts of a chunk table and of the checksums that a load needs, and verifies them.

`TableParts` reads only the groups of rows (`format.table.GroupedTable`) that are needed. Python's
garbage collector is paused while many objects are created, but never during storage calls, which
may hang.

`CheckFile` reads block checksums at the ends of data files; a rank reads only those that it needs.
All parts are compared with lengths and digests in the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from ray_dcp.core.checksums import CHECK_BYTES, digest_bytes, end_checks
from ray_dcp.core.processes import collector_paused
from ray_dcp.core.values import ChunkTable, Int64Array, within
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.manifest import FileEntry, Manifest
from ray_dcp.format.table import (
    MAX_TABLE_BYTES,
    DeferredRows,
    GroupedTable,
    checks_follow,
    decode_table,
    starts_of_files,
    with_places,
)
from ray_dcp.io.threads import run_tasks, threads_for
from ray_dcp.planning.reads import Wanted
from ray_dcp.store.storage import KeyMissingError, Storage


def verified(storage: Storage, entry: FileEntry, data: bytes = b"") -> bytes:
    """Returns the content of a file that a manifest names, verified.

    Args:
        storage: Storage of the checkpoint.
        entry: The file's entry in the manifest.
        data: Content of the file, if it was read already.

    Raises:
        DamagedCheckpointError: The file is missing, or does not match the manifest.
        StorageError: The file can't be read.
    """

    def read() -> bytes:
        return _read(storage, entry.key, 0, min(entry.num_bytes, MAX_TABLE_BYTES) + 1)

    return _checked(data or read(), read, entry.num_bytes, entry.digest, entry.key, "")


def verified_table(storage: Storage, manifest: Manifest) -> bytes:
    """Returns the whole chunk table that a manifest names, verified.

    Raises:
        DamagedCheckpointError: The table is missing, or the table or its end does not match the
            manifest.
        StorageError: The table can't be read.
    """
    data, end = verified(storage, manifest.table), manifest.table_end
    if end is not None:
        _check(data[-end.num_bytes :], end.num_bytes, end.digest, manifest.table.key, "last ")
    return data


def verified_end(storage: Storage, manifest: Manifest, table: bytes = b"") -> bytes:
    """Returns the end of a grouped chunk table, which contains the index of its groups.

    Args:
        storage: Storage of the checkpoint.
        manifest: Manifest of the checkpoint.
        table: The whole table, if it was read already.

    Raises:
        DamagedCheckpointError: The table is missing, or its end does not match the manifest.
        StorageError: The table can't be read.
    """
    entry, end = manifest.table, manifest.table_end
    if end is None or end.num_bytes > min(entry.num_bytes, MAX_TABLE_BYTES):
        raise DamagedCheckpointError(
            f"expected a chunk table with an end as {entry.key}; load an earlier step",
            key=entry.key,
        )
    start = entry.num_bytes - end.num_bytes

    def read() -> bytes:
        return _read(storage, entry.key, start, end.num_bytes + 1)

    data = table[start:] if table else read()
    return _checked(data, read, end.num_bytes, end.digest, entry.key, "last ")


def verified_bytes(storage: Storage, key: str, start: int, num_bytes: int) -> bytes:
    """Returns exactly `num_bytes` bytes of a file.

    Raises:
        DamagedCheckpointError: The file is missing or too short.
        StorageError: The file can't be read.
    """
    data = _read(storage, key, start, num_bytes) if num_bytes else b""
    if len(data) != num_bytes:
        raise DamagedCheckpointError(
            f"expected bytes [{start}, {start + num_bytes}) in {key}, but it was cut "
            f"off; load an earlier step",
            key=key,
        )
    return data


def _read(storage: Storage, key: str, start: int, num_bytes: int) -> bytes:
    try:
        return storage.read(key, start, num_bytes)
    except KeyMissingError as exc:
        raise DamagedCheckpointError(
            f"the manifest names {key}, but there is no such file; load an earlier step", key=key
        ) from exc


def _checked(
    data: bytes, read: Callable[[], bytes], num_bytes: int, digest: str, key: str, which: str
) -> bytes:
    """Returns bytes after verifying them; bytes that do not match are read once more."""
    if len(data) != num_bytes or digest_bytes(data).hex() != digest:
        data = read()
    _check(data, num_bytes, digest, key, which)
    return data


def _check(data: bytes, num_bytes: int, digest: str, key: str, which: str) -> None:
    if len(data) != num_bytes or digest_bytes(data).hex() != digest:
        raise DamagedCheckpointError(
            f"expected the {which}{num_bytes} bytes of digest {digest} that the manifest "
            f"names, found {len(data)} bytes of digest {digest_bytes(data).hex()}; load an "
            f"earlier step",
            key=key,
        )


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
        at_end: The data files end with their checksums; otherwise the table contains them.
        bytes_read: Number of bytes read so far.

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
        self.bytes_read = 0
        self.at_end = checks_follow(manifest)
        self._storage = storage
        self._entries = {entry.key: entry for entry in manifest.files}
        with collector_paused():
            self.table = with_places(table, manifest, deferred)
        # Start of each file's checksums in `table.checks`.
        self._place = self.table.check_start[starts_of_files(self.table)]
        self._there = {*np.unique(self.table.file).tolist()} if self.at_end else set()
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

        if self.at_end:
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
        if not self.at_end:
            return b""
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
            raise DamagedCheckpointError(
                f"expected a file with {high - low} checksums as {key}, but the manifest names "
                f"none of this length; load an earlier step",
                key=key,
            )
        end = entry.num_bytes if file_bytes is None else max(file_bytes, length)
        data = self._bytes(key, end - length, length)
        if digest_bytes(data).hex() != entry.digest:
            data = self._bytes(key, end - length, length)  # may have been altered in transit
        if digest_bytes(data).hex() != entry.digest:
            raise DamagedCheckpointError(
                f"the checksums of {key} at its end are not those that the manifest names; load an "
                f"earlier step",
                key=key,
            )
        self.table.checks[low:high] = np.frombuffer(data, "<u8")

    def _bytes(self, key: str, start: int, num_bytes: int) -> bytes:
        data = verified_bytes(self._storage, key, start, num_bytes)
        self.bytes_read += num_bytes
        return data


def check_against(
    manifest: Manifest, num_tensors: int, num_chunks: int, files: Iterable[str]
) -> None:
    """Checks that a chunk table belongs to a manifest.

    Args:
        manifest: Manifest of the checkpoint.
        num_tensors: Number of tensors in the table.
        num_chunks: Number of chunks in the whole table.
        files: Files of the table.

    Raises:
        DamagedCheckpointError: The table does not belong to the manifest.
    """
    unknown = sorted(set(files) - {entry.key for entry in manifest.files})
    found = (num_tensors, num_chunks)
    if found != (manifest.num_tensors, manifest.num_chunks) or unknown:
        raise DamagedCheckpointError(
            f"expected {manifest.num_tensors} tensors in {manifest.num_chunks} chunks of the "
            f"manifest's files, found {found[0]} in {found[1]}"
            + (f" and files that it does not name: {', '.join(unknown[:4])}" if unknown else "")
            + "; load an earlier step",
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
        end = verified_end(storage, manifest, table)
        with collector_paused():
            self._table = GroupedTable(end, manifest.table.num_bytes)
        self.tensors = self._table.tensors
        files = [key.replace("{attempt}", manifest.attempt) for key in self.tensors.files]
        check_against(manifest, self.tensors.num_tensors, self._table.num_chunks, files)

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
            spans = [(number, *self._table.span(number)) for _, number in run]
            first, end = spans[0][1], spans[-1][2]
            data = memoryview(self._bytes(first, end))
            found |= {number: data[low - first : high - first] for number, low, high in spans}
        with collector_paused():
            return self._table.chunks(found)

    def _bytes(self, first: int, end: int) -> bytes:
        if self._known:
            return self._known[first:end]
        return verified_bytes(self._storage, self._manifest.table.key, first, end - first)


def table_parts(storage: Storage, manifest: Manifest, table: bytes = b"") -> TableParts | CheckFile:
    """Returns the chunk table of a checkpoint, in parts if it is grouped.

    Args:
        storage: Storage of the checkpoint.
        manifest: Manifest of the checkpoint.
        table: The whole table, if it was read already.

    Raises:
        DamagedCheckpointError: The table is damaged or missing.
        StorageError: The table can't be read.
    """
    if manifest.table_end is not None:
        return TableParts(storage, manifest, table)
    return whole_table(storage, manifest, verified(storage, manifest.table, table))


def whole_table(storage: Storage, manifest: Manifest, data: bytes) -> CheckFile:
    """Returns all chunks of a checkpoint.

    Args:
        storage: Storage of the checkpoint.
        manifest: Manifest of the checkpoint.
        data: The chunk table as stored, verified.

    Raises:
        DamagedCheckpointError: The table is inconsistent, or does not belong to the manifest.
    """
    with collector_paused():
        rows = decode_table(data)
    found = CheckFile(storage, manifest, rows)
    check_against(manifest, rows.num_tensors, rows.num_chunks, found.table.files)
    return found
