"""Block checksums at the ends of data files, of which a rank reads only those that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ray_dcp.collector import collector_paused
from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.end_checks import CHECK_BYTES, end_checks
from ray_dcp.format.manifest import Manifest
from ray_dcp.format.table_places import (
    DeferredRows,
    checks_follow,
    starts_of_files,
    with_places,
)
from ray_dcp.plan.values import ChunkTable
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.threads import run_tasks
from ray_dcp.transfer.verified import verified_bytes

__all__ = ["CheckFile", "check_against"]

_THREADS = 16
"""Most that read the ends of data files at a time; a file each, as it is another request."""
_FILES_A_THREAD = 16


class CheckFile:
    """Checksums that are read file by file, each verified by what the manifest says of it.

    Args:
        storage: Where the files are.
        manifest: Of the checkpoint.
        table: What all saves of the plan share of the chunk table, or a part of it.
        deferred: Of a part: which deferred chunks it has.

    Attributes:
        table: The chunk table; checksums that data files end with are 0 until `read` was called
            for their file.
        at_end: The data files end with their checksums; else the table has them.
        bytes_read: Bytes that were read so far.

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
        # Where those of each file are in `table.checks`.
        self._place = self.table.check_start[starts_of_files(self.table)]
        self._there = {*np.unique(self.table.file).tolist()} if self.at_end else set()
        self._known: set[int] = set()

    def read(self, files: Iterable[int]) -> None:
        """Fills in the checksums of some files; those that are there already cost nothing.

        Args:
            files: Indices into the table's `files`; of a part, others than its own have none.

        Raises:
            DamagedCheckpointError: They are not those of which the manifest has the digest.
            StorageError: They can't be read.
        """
        todo = sorted((self._there & {*files}) - self._known)
        threads = min(_THREADS, max(1, len(todo) // _FILES_A_THREAD))
        run_tasks(todo, self._read_end, threads)
        self._known.update(todo)

    def ends(self, sizes: Mapping[str, int]) -> list[bytes | str]:
        """Returns with which checksums each data file ends, or what is wrong with them.

        Args:
            sizes: Lengths of the files that are there, by key. Why: a file that lost a byte may
                end as it should, and where it is spoiled is told by these.

        Raises:
            StorageError: They can't be read.
        """
        found: list[bytes | str] = [b""] * len(self.table.files)

        def look(number: int) -> None:
            try:
                self._read_end(number, sizes.get(self.table.files[number]))
            except DamagedCheckpointError as error:
                found[number] = error.message
                return
            self._known.add(number)
            low, high = self._place[number : number + 2].tolist()
            found[number] = end_checks(0, self.table.checks[low:high])

        if self.at_end:
            run_tasks(range(len(found)), look, _THREADS)
        return found

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
