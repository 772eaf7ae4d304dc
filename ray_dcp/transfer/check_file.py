"""The file of checksums of a large chunk table, of which a rank reads only what it needs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.manifest import Manifest
from ray_dcp.format.table_checks import ChecksHead, MoreOfHead, decode_head, join_head
from ray_dcp.plan.values import ChunkTable
from ray_dcp.store.storage import KeyMissingError, Storage

__all__ = ["CheckFile"]

_HEAD_BYTES = 64 << 10


class CheckFile:
    """Checksums that are read file by file, each verified by what the manifest says of it.

    The head is verified by that too: what it says wrongly leads to other checksums.

    Args:
        storage: Where it is.
        manifest: Of a checkpoint with such a file.
        table: The part of the chunk table that all saves of the plan share.

    Attributes:
        table: The chunk table; checksums are 0 until `read` was called for their file.
        bytes_read: Bytes that were read so far.

    Raises:
        DamagedCheckpointError: The file is missing or cut off, or does not belong to the table.
        StorageError: It can't be read.
    """

    def __init__(self, storage: Storage, manifest: Manifest, table: ChunkTable) -> None:
        if manifest.checks is None:
            raise DamagedCheckpointError("expected a manifest with a file of checksums")
        self.bytes_read = 0
        self._storage = storage
        self._key = manifest.checks.key
        self._file_bytes = manifest.checks.num_bytes
        self._digests = {entry.key: entry.digest for entry in manifest.files}
        self._head = self._read_head()
        # Why zeros: memory that is never touched is never taken.
        checks = np.zeros(self._head.num_checks, np.uint64)
        self.table = join_head(table, self._head, manifest.attempt, checks)
        self._known: set[int] = set()

    def read(self, files: Iterable[int]) -> None:
        """Fills in the checksums of some files; those that are there already cost nothing.

        Args:
            files: Indices into the table's `files`.

        Raises:
            DamagedCheckpointError: They are not those of which the manifest has the digest.
            StorageError: They can't be read.
        """
        todo = sorted(set(files) - self._known)
        # Files that follow each other are read together.
        for _, run in groupby(enumerate(todo), lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            self._read_run(numbers[0], numbers[-1] + 1)
            self._known.update(numbers)

    def _read_run(self, first: int, stop: int) -> None:
        starts = self._head.file_start
        low, high = int(starts[first]), int(starts[stop])
        data = self._bytes(self._head.num_bytes + 8 * low, 8 * (high - low))
        for number in range(first, stop):
            a, b = 8 * (int(starts[number]) - low), 8 * (int(starts[number + 1]) - low)
            key = self.table.files[number]
            if digest_bytes(data[a:b]).hex() != self._digests.get(key):
                raise DamagedCheckpointError(
                    f"the checksums of {key} in {self._key} are not those that the manifest "
                    f"names; load an earlier step",
                    key=self._key,
                )
        self.table.checks[low:high] = np.frombuffer(data, "<u8")

    def _read_head(self) -> ChecksHead:
        data = self._bytes(0, min(_HEAD_BYTES, self._file_bytes))
        try:
            return decode_head(data, self._file_bytes)
        except MoreOfHead as more:
            return decode_head(self._bytes(0, more.num_bytes), self._file_bytes)

    def _bytes(self, start: int, num_bytes: int) -> bytes:
        try:
            data = self._storage.read(self._key, start, num_bytes) if num_bytes else b""
        except KeyMissingError as exc:
            raise DamagedCheckpointError(
                f"the manifest names {self._key}, but there is no such file; load an earlier step",
                key=self._key,
            ) from exc
        if len(data) != num_bytes:
            raise DamagedCheckpointError(
                f"expected bytes [{start}, {start + num_bytes}) in {self._key}, but it was cut "
                f"off; load an earlier step",
                key=self._key,
            )
        self.bytes_read += num_bytes
        return data
