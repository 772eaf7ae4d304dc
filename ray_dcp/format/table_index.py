"""Which rows of a large chunk table tell of which part of each tensor, and where they are.

The rows are in groups of whole files, in their order. For each group and tensor of which it has
chunks the index names the box around them. In the Parquet file's own metadata it is, in base64,
zlib's stream of whole numbers of 8 bytes, little-endian: how many groups, boxes and dimensions
there are; the first row, the first deferred row and the first byte of each group, with the ends;
the digests of their bytes; and column by column, as steps from box to box, group, tensor, offset
and size of each box.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_dcp.format.checksums import DIGEST_BYTES
from ray_dcp.format.table_columns import damaged
from ray_dcp.plan.boxes import widen
from ray_dcp.plan.reading import Boxes, Wanted, meetings
from ray_dcp.plan.values import ChunkTable, Int32Array, Int64Array

__all__ = ["TableIndex", "boxes_of_groups", "decode_index", "encode_index", "fits", "group_bounds"]

MOST_GROUPS = 1 << 16
MOST_BYTES = 1 << 29
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
    return _num_bytes(num_groups, *boxes.offset.shape) <= MOST_BYTES


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
            tensor.astype(np.int32), np.ascontiguousarray(offset), np.ascontiguousarray(size),
            table.num_tensors,
        ),
    )  # fmt: skip


def _unpacked(data: bytes) -> Int64Array:
    """Returns the numbers, after comparing how many there are with what their head says."""
    unpacker = zlib.decompressobj()
    try:
        packed = base64.b64decode(data, validate=True)
        head = unpacker.decompress(packed, _WORD * _HEAD_WORDS)
        if len(head) < _WORD * _HEAD_WORDS:
            raise damaged("an index of a chunk table", "a shorter one")
        groups, boxes, width = np.frombuffer(head, "<i8").tolist()
        if not (0 < groups <= MOST_GROUPS and 0 <= boxes <= MOST_BYTES and 0 <= width <= 127):
            raise damaged("an index of a chunk table", "impossible counts")
        num_bytes = _num_bytes(groups, boxes, width)
        if num_bytes > MOST_BYTES:
            raise damaged(f"an index of at most {MOST_BYTES >> 20} MiB", f"{num_bytes} bytes")
        rest = unpacker.decompress(unpacker.unconsumed_tail, num_bytes + 1)
    except (zlib.error, binascii.Error, ValueError) as error:
        raise damaged("an index of a chunk table", str(error)) from error
    if len(rest) != num_bytes or not unpacker.eof:
        raise damaged(f"{num_bytes} bytes in the index of a chunk table", "others")
    return np.frombuffer(head + rest, "<i8").astype(np.int64)
