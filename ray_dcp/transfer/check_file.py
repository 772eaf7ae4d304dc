"""The checksums of a large chunk table, of which a rank reads only those that it needs.

They are in a file of their own, or at the end of the data file that they are of.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from ray_dcp.collector import collector_paused
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.end_checks import CHECK_BYTES, end_checks
from ray_dcp.format.manifest import FileEntry, Manifest
from ray_dcp.format.table_checks import (
    ChecksHead,
    DeferredRows,
    MoreOfHead,
    decode_head,
    join_head,
    starts_of_files,
)
from ray_dcp.plan.values import ChunkTable
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.threads import run_tasks
from ray_dcp.transfer.verified import verified_bytes

__all__ = ["CheckFile", "check_against"]

_HEAD_BYTES = 64 << 10
_THREADS = 16
"""Most that read the ends of data files at a time; a file each, as it is another request."""
_FILES_A_THREAD = 16


class CheckFile:
    """Checksums that are read file by file, each verified by what the manifest says of it.

    The head is verified by that too: what it says wrongly leads to other checksums.

    Args:
        storage: Where it is.
        manifest: Of a checkpoint with such a file.
        table: What all saves of the plan share of the chunk table, or a part of it.
        deferred: Of a part: which deferred chunks it has.

    Attributes:
        table: The chunk table; checksums are 0 until `read` was called for their file.
        at_end: The data files end with their checksums.
        bytes_read: Bytes that were read so far.

    Raises:
        DamagedCheckpointError: The file is missing or cut off, or does not belong to the table.
        StorageError: It can't be read.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        table: ChunkTable,
        deferred: DeferredRows | None = None,
    ) -> None:
        if manifest.checks is None:
            raise DamagedCheckpointError("expected a manifest with a file of checksums")
        self.bytes_read = 0
        self._storage = storage
        self._key = manifest.checks.key
        self._file_bytes = manifest.checks.num_bytes
        self._entries = {entry.key: entry for entry in manifest.files}
        self._head = self._read_head()
        self.at_end = self._head.at_end
        with collector_paused():
            self.table = join_head(table, self._head, manifest.attempt, deferred=deferred)
        # Where those of each file are in `table.checks`.
        self._place = self.table.check_start[starts_of_files(self.table)]
        self._there = None if deferred is None else {*np.unique(self.table.file).tolist()}
        self._known: set[int] = set()

    def read(self, files: Iterable[int]) -> None:
        """Fills in the checksums of some files; those that are there already cost nothing.

        Args:
            files: Indices into the table's `files`; of a part, others than its own have none.

        Raises:
            DamagedCheckpointError: They are not those of which the manifest has the digest.
            StorageError: They can't be read.
        """
        todo = sorted((set(files) if self._there is None else self._there & {*files}) - self._known)
        if self.at_end:
            threads = min(_THREADS, max(1, len(todo) // _FILES_A_THREAD))
            run_tasks(todo, self._read_end, threads)
        else:
            # Files that follow each other are read together.
            for _, run in groupby(enumerate(todo), lambda pair: pair[1] - pair[0]):
                numbers = [number for _, number in run]
                self._read_run(numbers[0], numbers[-1] + 1)
        self._known.update(todo)

    def ends(self) -> list[bytes | str]:
        """Returns with which checksums each data file ends, or what is wrong with them.

        Raises:
            StorageError: They can't be read.
        """
        found: list[bytes | str] = [b""] * len(self.table.files)

        def look(number: int) -> None:
            try:
                self.read([number])
            except DamagedCheckpointError as error:
                found[number] = error.message
                return
            low, high = self._place[number : number + 2].tolist()
            found[number] = end_checks(0, self.table.checks[low:high])

        if self.at_end:
            run_tasks(range(len(found)), look, _THREADS)
        return found

    def _read_end(self, number: int) -> None:
        low, high = self._head.file_start[number : number + 2].tolist()
        key, length = self.table.files[number], CHECK_BYTES * (high - low)
        entry = self._entries.get(key)
        if entry is None or entry.num_bytes < length:
            raise DamagedCheckpointError(
                f"expected a file with {high - low} checksums as {key}, but the manifest names "
                f"none of this length; load an earlier step",
                key=key,
            )
        data = self._bytes(key, entry.num_bytes - length, length)
        self._check_digest(entry, data, key)
        place = int(self._place[number])
        self.table.checks[place : place + high - low] = np.frombuffer(data, "<u8")

    def _read_run(self, first: int, stop: int) -> None:
        starts = self._head.file_start
        low, high = int(starts[first]), int(starts[stop])
        data = self._bytes(self._key, self._head.num_bytes + 8 * low, 8 * (high - low))
        for number in range(first, stop):
            a, b = 8 * (int(starts[number]) - low), 8 * (int(starts[number + 1]) - low)
            entry = self._entries.get(self.table.files[number])
            self._check_digest(entry, data[a:b], self.table.files[number])
        place = int(self._place[first])
        self.table.checks[place : place + high - low] = np.frombuffer(data, "<u8")

    def _check_digest(self, entry: FileEntry | None, data: bytes, of: str) -> None:
        if entry is None or digest_bytes(data).hex() != entry.digest:
            key = of if self.at_end else self._key
            where = "at its end" if self.at_end else f"in {key}"
            raise DamagedCheckpointError(
                f"the checksums of {of} {where} are not those that the manifest names; load an "
                f"earlier step",
                key=key,
            )

    def _read_head(self) -> ChecksHead:
        data = self._bytes(self._key, 0, min(_HEAD_BYTES, self._file_bytes))
        try:
            return decode_head(data, self._file_bytes)
        except MoreOfHead as more:
            return decode_head(self._bytes(self._key, 0, more.num_bytes), self._file_bytes)

    def _bytes(self, key: str, start: int, num_bytes: int) -> bytes:
        data = verified_bytes(self._storage, key, start, num_bytes)
        self.bytes_read += num_bytes
        return data


def check_against(
    manifest: Manifest, num_tensors: int, num_chunks: int, files: Iterable[str]
) -> None:
    """Checks that a chunk table is the one that a manifest speaks of.

    Args:
        manifest: Of the checkpoint.
        num_tensors: Of the table.
        num_chunks: Of the whole table.
        files: Of the table.

    Raises:
        DamagedCheckpointError: It is not.
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
