"""The chunk table on storage: a Parquet file with one row a chunk, for people and for reading.

Flat columns, so that DuckDB, polars or pandas show a checkpoint's inside without ray_dcp. Tensors
without any chunk follow as rows without file. Vocabularies and the format version are in the file's
own metadata. What belongs to one save alone is in its manifest (`table_places`). `table_file`
writes and checks the Parquet file itself.

**Groups** (`GroupedTable`). The rows of a large table are in groups of the Parquet file, each the
chunks of some whole files, in their order. After them, in a last group, comes a row without file
for every tensor. So a reader takes the end of the file, from that group on, which holds all tensors
and the index, and then only the groups that have chunks of the boxes that it needs. The manifest
has the digest of that end, the index those of the groups.

**The index** (`TableIndex`). For each group, and each tensor of which the group has chunks, it
names the box around them. In the Parquet file's own metadata it is, in base64, zlib's stream of
whole numbers of 8 bytes, little-endian: how many groups, boxes and dimensions there are; the first
row, the first deferred row and the first byte of each group, with the ends; the digests of their
bytes; and column by column, as steps from box to box, group, tensor, offset and size of each box.
"""

from __future__ import annotations

import base64
import binascii
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from ray_dcp.core.checksums import DIGEST_BYTES, digest_bytes
from ray_dcp.core.grouping import offsets_of
from ray_dcp.core.values import ChunkTable, Int32Array, Int64Array, widen
from ray_dcp.format.table_check import check_table
from ray_dcp.format.table_file import (
    INDEX_KEY,
    MAX_ROWS,
    MAX_TABLE_BYTES,
    SAYS_CORRUPT,
    SCHEMA,
    WRITING,
    TableFile,
    chunkless,
    chunks_of_rows,
    count_of,
    damaged,
    no_table,
    own_metadata,
    rows_of,
    table_of_rows,
    tensors_of_rows,
    with_rows,
)
from ray_dcp.planning.reads import Boxes, Wanted, meetings

MOST_GROUPS = 1 << 16
MOST_INDEX_BYTES = 1 << 29
_HEAD_WORDS = 3
_WORD = 8


@dataclass(frozen=True, eq=False)
class TableIndex:
    """Where the rows of which chunks are.

    Attributes:
        first_row: int64[g + 1], the first row of each group, and how many rows there are.
        first_deferred: int64[g + 1], how many deferred chunks are before each group, and in all.
        start: int64[g + 1], the first byte of each group, and where the last one ends.
        digests: Of the bytes of each group.
        group: int32[b], ascending within a tensor.
        boxes: Around the chunks that a group has of a tensor.
    """

    first_row: Int64Array
    first_deferred: Int64Array
    start: Int64Array
    digests: tuple[bytes, ...]
    group: Int32Array
    boxes: Boxes

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self.digests)

    def around(self, wanted: Sequence[Wanted], tensors: Sequence[int]) -> Int64Array:
        """Returns the groups that have chunks of what is wanted, ascending.

        Args:
            wanted: Boxes.
            tensors: Of which every chunk is wanted.
        """
        used = np.isin(self.boxes.tensor, np.array(tensors, dtype=np.int64))
        found = [self.group[used]]
        for boxes in wanted:
            width = max(self.boxes.offset.shape[1], boxes.offset.shape[1])
            offset, size = widen(self.boxes.offset, self.boxes.size, width)
            there = self.boxes._replace(offset=offset, size=size)
            box, *_ = meetings(there, boxes.tensor, widen(boxes.offset, boxes.size, width))
            found.append(self.group[box])
        return np.unique(np.concatenate(found)).astype(np.int64)


def group_bounds(table: ChunkTable, least_rows: int) -> Int64Array | None:
    """Returns where to cut the rows of a table: int64[g + 1]; None where that gains nothing.

    Args:
        table: Its chunks in the order of their files.
        least_rows: Of a group: it has whole files, and no more of them than are needed for that.
    """
    if (np.diff(table.file) < 0).any():
        return None
    first = np.searchsorted(table.file, np.arange(len(table.files)))
    first = first[first < table.num_chunks]
    bounds = np.append(first[np.unique(first // least_rows, return_index=True)[1]], len(table.file))
    return bounds.astype(np.int64) if 2 < len(bounds) <= MOST_GROUPS + 1 else None


def boxes_of_groups(table: ChunkTable, bounds: Int64Array) -> tuple[Int32Array, Boxes]:
    """Returns group, and box around its chunks, of each tensor in each group.

    Args:
        table: All chunks.
        bounds: int64[g + 1], as from `group_bounds`.

    Complexity:
        One sort of each group.
    """
    group, tensor, offset, end = [], [], [], []
    for number, (low, high) in enumerate(
        zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ):
        order = np.argsort(table.tensor[low:high], kind="stable") + low
        sorted_tensor = table.tensor[order]
        first = np.flatnonzero(np.diff(sorted_tensor, prepend=-1))
        begins = table.offset[order]
        group.append(np.full(len(first), number, dtype=np.int32))
        tensor.append(sorted_tensor[first])
        offset.append(np.minimum.reduceat(begins, first, axis=0))
        end.append(np.maximum.reduceat(begins + table.size[order], first, axis=0))
    groups, tensors = np.concatenate(group), np.concatenate(tensor)
    order = np.lexsort((groups, tensors))
    low, high = np.concatenate(offset)[order], np.concatenate(end)[order]
    return groups[order], Boxes(tensors[order], low, high - low, table.num_tensors)


def fits(num_groups: int, boxes: Boxes) -> bool:
    """Whether an index is one that `decode_index` reads: of more tensors a rank it would be longer.

    Args:
        num_groups: How many groups there are.
        boxes: In them.
    """
    return _num_bytes(num_groups, *boxes.offset.shape) <= MOST_INDEX_BYTES


def _num_bytes(num_groups: int, num_boxes: int, width: int) -> int:
    return _WORD * (3 * (num_groups + 1) + 2 * num_groups + (2 + 2 * width) * num_boxes)


def encode_index(index: TableIndex) -> bytes:
    """Returns what `decode_index` reads, in ASCII."""
    boxes = index.boxes
    columns = [index.group, boxes.tensor, *boxes.offset.T, *boxes.size.T]
    words = [
        np.array([index.num_groups, len(index.group), boxes.offset.shape[1]]),
        index.first_row,
        index.first_deferred,
        index.start,
        np.frombuffer(b"".join(index.digests), "<i8"),
        *(np.diff(column.astype(np.int64), prepend=0) for column in columns),
    ]
    data = b"".join(np.ascontiguousarray(part, dtype="<i8").tobytes() for part in words)
    return base64.b64encode(zlib.compress(data, 1))


def decode_index(data: bytes, table: ChunkTable, end: int) -> TableIndex:
    """Returns the index of a chunk table.

    Args:
        data: What `encode_index` gave.
        table: Its tensors.
        end: Bytes before its tensors' rows at most.

    Raises:
        DamagedCheckpointError: It is none, or not of this table.
    """
    words = _unpacked(data)
    groups, count, width = words[:_HEAD_WORDS].tolist()
    if width != table.shape.shape[1]:
        raise damaged(f"an index of {table.shape.shape[1]} dimensions", str(width))
    bounds = words[_HEAD_WORDS:][: 3 * (groups + 1)].reshape(3, groups + 1)
    first_digest = _HEAD_WORDS + 3 * (groups + 1)
    first_box = first_digest + 2 * groups
    digests = words[first_digest:first_box].astype("<i8").tobytes()
    with np.errstate(over="ignore"):
        columns = np.cumsum(words[first_box:].reshape(2 + 2 * width, count), axis=1)
    group, tensor = columns[:2]
    offset, size = columns[2 : 2 + width].T, columns[2 + width :].T
    fits = (
        (bounds[:, 0] >= 0).all()
        # Why not by differences: they may overflow.
        and (bounds[:, 1:] >= bounds[:, :-1]).all()
        and int(bounds[0, 0]) == int(bounds[1, 0]) == 0
        and (np.diff(bounds[0]) > 0).all()
        and (np.diff(bounds[1]) <= np.diff(bounds[0])).all()
        and int(bounds[2, -1]) <= end
        and ((group >= 0) & (group < groups)).all()
        and ((tensor >= 0) & (tensor < table.num_tensors)).all()
        and (offset >= 0).all()
        and (size >= 0).all()
    )
    if not fits:
        raise damaged("an index that fits its table", "another")
    return TableIndex(
        first_row=bounds[0],
        first_deferred=bounds[1],
        start=bounds[2],
        digests=tuple(
            digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)
        ),
        group=group.astype(np.int32),
        boxes=Boxes(
            tensor.astype(np.int32),
            np.ascontiguousarray(offset),
            np.ascontiguousarray(size),
            table.num_tensors,
        ),
    )


def _unpacked(data: bytes) -> Int64Array:
    """Returns the numbers, after comparing how many there are with what their head says."""
    unpacker = zlib.decompressobj()
    try:
        packed = base64.b64decode(data, validate=True)
        head = unpacker.decompress(packed, _WORD * _HEAD_WORDS)
        if len(head) < _WORD * _HEAD_WORDS:
            raise damaged("an index of a chunk table", "a shorter one")
        groups, boxes, width = np.frombuffer(head, "<i8").tolist()
        if not (0 < groups <= MOST_GROUPS and 0 <= boxes <= MOST_INDEX_BYTES and 0 <= width <= 127):
            raise damaged("an index of a chunk table", "impossible counts")
        num_bytes = _num_bytes(groups, boxes, width)
        if num_bytes > MOST_INDEX_BYTES:
            raise damaged(f"an index of at most {MOST_INDEX_BYTES >> 20} MiB", f"{num_bytes} bytes")
        rest = unpacker.decompress(unpacker.unconsumed_tail, num_bytes + 1)
    except (zlib.error, binascii.Error, ValueError) as error:
        raise damaged("an index of a chunk table", str(error)) from error
    if len(rest) != num_bytes or not unpacker.eof:
        raise damaged(f"{num_bytes} bytes in the index of a chunk table", "others")
    return np.frombuffer(head + rest, "<i8").astype(np.int64)


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


pa: Any = pyarrow

GROUP_ROWS = 1 << 16
"""Fewest rows of a group, but for the last: 0.04 s to decode, and 0.6 MB."""


def encode_table(table: ChunkTable) -> bytes:
    """Returns the Parquet file of a chunk table; `decode_table` gives back an equal one.

    Args:
        table: All of it.

    Raises:
        DamagedCheckpointError: The table contradicts itself, and would not be read back.

    Complexity:
        O(chunks + checksums); about 1 us a chunk.
    """
    check_table(table)
    bounds = group_bounds(table, GROUP_ROWS)
    grouped = None if bounds is None else encode_groups(table, bounds)
    if grouped is not None:
        return grouped
    tensor = np.concatenate([table.tensor, chunkless(table)]).astype(np.int32)
    arrow = rows_of(table, tensor).replace_schema_metadata(own_metadata(extra_of(table)))
    sink = pa.BufferOutputStream()
    pq.write_table(arrow, sink, row_group_size=MAX_ROWS, **WRITING)
    return bytes(sink.getvalue())


def decode_table(data: bytes) -> ChunkTable:
    """Returns the chunk table that a Parquet file holds, after checking it.

    The caller compares the digest of `data` with the manifest first; what is checked here is that
    the table can be used: types, counts before anything is allocated, boxes inside their
    tensors, indices in range, checksums for every block.

    Raises:
        DamagedCheckpointError: The bytes are no chunk table, or one that contradicts itself.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: Its format has another version.

    Complexity:
        O(chunks + checksums); about 1 us a chunk.
    """
    try:
        file = TableFile(data)
        if file.index:
            table = GroupedTable(data, file).checked()
        else:
            table = table_of_rows(file.rows(), file.extra, file.max_values)
    except SAYS_CORRUPT as exc:
        raise no_table(exc) from exc
    check_table(table)
    return table
