"""A large chunk table of which a load takes only the chunks that it needs.

Of a table in groups these are read (`format.table_groups`); of one that has the rows of few ranks,
those of the other ranks that are needed are made (`plan.structure_part`). Python's collector is
paused where much is made, never while storage is waited for: that may hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

from ray_dcp.collector import collector_paused
from ray_dcp.format.manifest import Manifest
from ray_dcp.format.table import decode_few
from ray_dcp.format.table_groups import GroupedTable
from ray_dcp.format.table_places import DeferredRows
from ray_dcp.format.table_structure import expanded
from ray_dcp.plan.grouping import offsets_of, within
from ray_dcp.plan.reading import Wanted
from ray_dcp.plan.structure import Structure, num_chunks_of
from ray_dcp.plan.structure_part import ranks_around
from ray_dcp.plan.values import ChunkTable, Int64Array
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.check_file import CheckFile, check_against
from ray_dcp.transfer.verified import same_as, verified, verified_bytes, verified_end

__all__ = ["TableParts", "table_parts"]


class _Rows(Protocol):
    """The part of a chunk table that all saves of the plan share."""

    tensors: ChunkTable
    """Without chunks."""
    num_chunks: int

    def around(
        self, wanted: Sequence[Wanted], tensors: Sequence[int]
    ) -> tuple[ChunkTable, DeferredRows]:
        """Returns the chunks of what is wanted, with all others of the same files."""
        ...

    def whole(self) -> ChunkTable:
        """Returns all chunks."""
        ...


class TableParts:
    """The chunk table of a checkpoint, in parts.

    Args:
        storage: Where it is.
        manifest: Of the checkpoint.
        rows: What all saves of its plan share.

    Attributes:
        tensors: The table without chunks.

    Raises:
        DamagedCheckpointError: They do not belong together.
    """

    def __init__(self, storage: Storage, manifest: Manifest, rows: _Rows) -> None:
        self._storage = storage
        self._manifest = manifest
        self._rows = rows
        self.tensors = rows.tensors
        files = [key.replace("{attempt}", manifest.attempt) for key in rows.tensors.files]
        check_against(manifest, rows.tensors.num_tensors, rows.num_chunks, files)

    def around(self, wanted: Sequence[Wanted], tensors: Sequence[int]) -> CheckFile:
        """Returns the chunks of what is wanted, with more of the same files.

        Args:
            wanted: Boxes.
            tensors: Of which every chunk is wanted.

        Raises:
            DamagedCheckpointError: They are damaged or missing.
            StorageError: They can't be read.
        """
        return CheckFile(self._storage, self._manifest, *self._rows.around(wanted, tensors))

    def whole(self) -> CheckFile:
        """Returns all chunks.

        Raises:
            CheckpointError: As `around` does.
        """
        return CheckFile(self._storage, self._manifest, self._rows.whole())


def table_parts(storage: Storage, manifest: Manifest, table: bytes = b"") -> TableParts | CheckFile:
    """Returns the chunk table of a checkpoint, in parts if it can.

    Args:
        storage: Where it is.
        manifest: Of the checkpoint.
        table: All of it, if it was read already.

    Raises:
        DamagedCheckpointError: It is damaged or missing.
        StorageError: It can't be read.
    """
    if manifest.table_end is not None:
        return TableParts(storage, manifest, _Grouped(storage, manifest))
    data = same_as(manifest.table, table) if table else verified(storage, manifest.table)
    with collector_paused():
        rows, structure = decode_few(data)
    if structure is not None:
        return TableParts(storage, manifest, _Structured(rows, structure))
    found = CheckFile(storage, manifest, rows)
    check_against(manifest, rows.num_tensors, rows.num_chunks, found.table.files)
    return found


class _Grouped:
    """Rows in groups that are read."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._key = manifest.table.key
        end = verified_end(storage, manifest)
        with collector_paused():
            self._table = GroupedTable.from_end(end, manifest.table.num_bytes)
        self.tensors = self._table.tensors
        self.num_chunks = self._table.num_chunks

    def around(
        self, wanted: Sequence[Wanted], tensors: Sequence[int]
    ) -> tuple[ChunkTable, DeferredRows]:
        groups = self._table.index.around(wanted, tensors)
        table = self._read(groups)
        first = self._table.index.first_deferred
        counts = np.diff(first)[groups]
        return table, DeferredRows(
            np.repeat(first[groups], counts) + within(counts), int(first[-1])
        )

    def whole(self) -> ChunkTable:
        return self._read(np.arange(self._table.index.num_groups))

    def _read(self, groups: Int64Array) -> ChunkTable:
        # Groups that follow each other are read together.
        for _, run in groupby(enumerate(groups.tolist()), lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            low, high = self._table.span(numbers[0])[0], self._table.span(numbers[-1])[1]
            data = memoryview(verified_bytes(self._storage, self._key, low, high - low))
            for number in numbers:
                begin, end = self._table.span(number)
                self._table.take(number, data[begin - low : end - low])
        with collector_paused():
            return self._table.chunks(groups.tolist())


class _Structured:
    """Rows that follow from those of few ranks."""

    def __init__(self, table: ChunkTable, structure: Structure) -> None:
        self._table = table
        self._structure = structure
        with collector_paused():
            self.tensors = expanded(table, structure, np.zeros(0, dtype=np.int64))
        self.num_chunks = num_chunks_of(table, structure)

    def around(
        self, wanted: Sequence[Wanted], tensors: Sequence[int]
    ) -> tuple[ChunkTable, DeferredRows]:
        structure = self._structure
        ranks = ranks_around(self._table, structure, wanted, tensors)
        late = structure.file_kind[self._table.file[self._table.payload_offset < 0]]
        of_class = np.bincount(late, minlength=len(structure.leaders))
        first = offsets_of(of_class[structure.kind])
        counts = of_class[structure.kind[ranks]]
        rows = np.repeat(first[ranks], counts) + within(counts)
        with collector_paused():
            table = expanded(self._table, structure, ranks)
        return table, DeferredRows(rows, int(first[-1]))

    def whole(self) -> ChunkTable:
        with collector_paused():
            return expanded(self._table, self._structure)
