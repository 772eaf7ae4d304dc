"""A large chunk table, of which a reader takes what tells of the boxes that it needs.

Its rows are in groups of the Parquet file, each the chunks of some files, in their order. After
them, in a last group, comes a row without file for every tensor. So the end of the file, from that
group on, tells all tensors, and by its index which groups have chunks of which part of each
(`table_index`). The manifest has the digest of that end, and the index those of the groups.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow.parquet

from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.table_check import check_table
from ray_dcp.format.table_columns import damaged
from ray_dcp.format.table_index import (
    TableIndex,
    boxes_of_groups,
    decode_index,
    encode_index,
    fits,
)
from ray_dcp.format.table_parquet import (
    INDEX_KEY,
    MAX_ROWS,
    MAX_TABLE_BYTES,
    SAYS_CORRUPT,
    WRITING,
    TableFile,
    no_table,
    own_metadata,
)
from ray_dcp.format.table_rows import (
    SCHEMA,
    chunks_of_rows,
    count_of,
    rows_of,
    tensors_of_rows,
    with_rows,
)
from ray_dcp.plan.grouping import offsets_of
from ray_dcp.plan.values import ChunkTable, Int64Array

__all__ = ["GroupedTable", "encode_groups", "end_of", "extra_of"]

pq: Any = pyarrow.parquet

_FOOTER_BYTES = 8
"""Of its length and the magic, at the very end."""


def extra_of(table: ChunkTable) -> dict[str, Any]:
    """Returns the vocabularies and counts of a table."""
    return {
        "dtypes": table.dtypes,
        "files": table.files,
        "num_chunks": table.num_chunks,
        "num_tensors": table.num_tensors,
        "width": int(table.shape.shape[1]),
    }


def encode_groups(table: ChunkTable, bounds: Int64Array) -> bytes | None:
    """Returns the Parquet file of a chunk table with its rows in groups; None: too long an index.

    Args:
        table: Checked.
        bounds: int64[g + 1], where to cut its chunks.
    """
    group, boxes = boxes_of_groups(table, bounds)
    if not fits(len(bounds) - 1, boxes):
        return None
    sink = io.BytesIO()
    deferred = np.concatenate([[0], np.cumsum(table.payload_offset < 0)]).astype(np.int64)
    start, digests = [], []
    with pq.ParquetWriter(sink, SCHEMA, **WRITING) as writer:
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            part = _slice(table, low, high)
            begin = sink.tell()
            writer.write_table(rows_of(part, part.tensor, part=True), row_group_size=MAX_ROWS)
            start.append(begin)
            digests.append(digest_bytes(sink.getbuffer()[begin : sink.tell()]))
        start.append(sink.tell())
        every = np.arange(table.num_tensors, dtype=np.int32)
        writer.write_table(rows_of(_slice(table, 0, 0), every), row_group_size=MAX_ROWS)
        index = TableIndex(
            bounds, deferred[bounds], np.array(start, dtype=np.int64), tuple(digests), group, boxes
        )
        # Why not in the schema: Arrow would keep it there and, once more, in the schema's copy.
        metadata = own_metadata(extra_of(table))
        writer.add_key_value_metadata({**metadata, INDEX_KEY: encode_index(index)})
    return sink.getvalue()


def end_of(data: bytes) -> int | None:
    """Returns where the end of a table begins that tells of its groups; None: it has none.

    Args:
        data: The whole file, that `encode_table` gave.
    """
    file = TableFile(data)
    if not file.index:
        return None
    return int(GroupedTable(data, file).index.start[-1])


class GroupedTable:
    """A chunk table whose groups are read when they are needed.

    Args:
        data: The file, of as many bytes as it has; those of the groups may come later (`take`).
        file: The same, opened.
        there: How many bytes of its end there are; by default all.

    Attributes:
        tensors: The table without chunks.
        index: Where the chunks are.

    Raises:
        DamagedCheckpointError: It contradicts itself.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
    """

    def __init__(self, data: Any, file: TableFile, there: int | None = None) -> None:
        self._data = data
        self._there = len(data) if there is None else there
        self._file = file
        last = file.num_groups - 1
        self._tensors = tensors_of_rows(file.rows(last, self._there), file.extra, file.max_values)
        self.tensors = self._tensors.table
        check_table(self.tensors)
        self.index = decode_index(file.index, self.tensors, len(data))
        rows = count_of(file.extra, "num_chunks", MAX_ROWS)
        if self.index.num_groups != last or rows != int(self.index.first_row[-1]):
            raise damaged(f"an index of {rows} chunks in {last} groups", "another")

    @classmethod
    def from_end(cls, end: bytes, num_bytes: int) -> GroupedTable:
        """Returns a table of which only the end is there.

        Args:
            end: The last bytes of the file, from its tensors' rows on; verified.
            num_bytes: Of the whole file.

        Raises:
            DamagedCheckpointError: They are no such end.
            CheckpointError: As the class does.
        """
        if not _FOOTER_BYTES < len(end) <= num_bytes <= MAX_TABLE_BYTES:
            raise damaged("the end of a chunk table", f"{len(end)} bytes")
        # Why zeros: memory that is never touched is never taken.
        data = np.zeros(num_bytes, dtype=np.uint8)
        data[num_bytes - len(end) :] = np.frombuffer(end, np.uint8)
        data[:4] = np.frombuffer(b"PAR1", np.uint8)
        view = data.data
        try:
            found = cls(view, TableFile(view), len(end))
        except SAYS_CORRUPT as exc:
            raise no_table(exc) from exc
        if int(found.index.start[-1]) > num_bytes - len(end):
            raise damaged("groups of rows before the end of a chunk table", "one in it")
        return found

    @property
    def num_chunks(self) -> int:
        """How many chunks there are in all."""
        return int(self.index.first_row[-1])

    def span(self, group: int) -> tuple[int, int]:
        """Returns the first byte of a group, and the one after its last."""
        low, high = self.index.start[group : group + 2].tolist()
        return low, high

    def take(self, group: int, data: bytes | memoryview) -> None:
        """Takes the bytes of a group.

        Raises:
            DamagedCheckpointError: They are not those of which the index has the digest.
        """
        low, high = self.span(group)
        if len(data) != high - low or digest_bytes(data) != self.index.digests[group]:
            raise damaged(f"the rows of group {group} that its index names", "other bytes")
        self._data[low:high] = data

    def chunks(self, groups: Iterable[int]) -> ChunkTable:
        """Returns the table with the chunks of some groups, whose bytes are there.

        Args:
            groups: Ascending.

        Raises:
            CheckpointError: As the class does.
        """
        found = []
        for group in groups:
            try:
                low, high = self.span(group)
                rows = self._file.rows(group, self._there + high - low)
                part = chunks_of_rows(rows, self._tensors)
            except SAYS_CORRUPT as exc:
                raise no_table(exc) from exc
            low, high = self.index.first_row[group : group + 2].tolist()
            if part.num_chunks != high - low:
                raise damaged(f"{high - low} chunks in group {group}", str(part.num_chunks))
            low, high = self.index.first_deferred[group : group + 2].tolist()
            late = int((part.payload_offset < 0).sum())
            if late != high - low:
                # Why here: of several groups the sum may be right, and places would be mixed up.
                raise damaged(f"{high - low} deferred chunks in group {group}", str(late))
            found.append(part)
        if not found:
            return self.tensors

        def joined(name: str) -> Any:
            if name == "check_start":
                return offsets_of(np.concatenate([np.diff(part.check_start) for part in found]))
            return np.concatenate([getattr(part, name) for part in found])

        return with_rows(self.tensors, joined)

    def whole(self) -> ChunkTable:
        """Returns the table with all chunks, whose bytes are there."""
        return self.chunks(range(self.index.num_groups))

    def checked(self) -> ChunkTable:
        """Returns the same, after comparing the index with what it is of.

        Raises:
            DamagedCheckpointError: Who believed the index would not find all chunks.
            CheckpointError: As the class does.
        """
        for group, digest in enumerate(self.index.digests):
            low, high = self.span(group)
            if digest_bytes(self._data[low:high]) != digest:
                raise damaged(f"the rows of group {group} that its index names", "other bytes")
        table = self.whole()
        of_boxes, boxes = boxes_of_groups(table, self.index.first_row)
        mine = self.index.boxes
        same = (
            np.array_equal(self.index.group, of_boxes)
            and np.array_equal(mine.tensor, boxes.tensor)
            and np.array_equal(mine.offset, boxes.offset)
            and np.array_equal(mine.size, boxes.size)
        )
        if not same:
            raise damaged("an index with the boxes around the chunks of each group", "others")
        return table


def _slice(table: ChunkTable, low: int, high: int) -> ChunkTable:
    starts = table.check_start[low : high + 1]
    more = {"check_start": starts - starts[0], "checks": table.checks[starts[0] : starts[-1]]}
    return with_rows(table, lambda name: more.get(name, getattr(table, name)[low:high]))
