"""`lay_out`: in which file, at which offset, each piece of a save lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ray_dcp.core.checksums import block_bytes_for_many
from ray_dcp.core.values import (
    BoolArray,
    ChunkTable,
    Int32Array,
    Int64Array,
    Kind,
)
from ray_dcp.format.torch_items import frames_of
from ray_dcp.planning.merge import (
    Held,
)
from ray_dcp.planning.share_out import ITEM_COST_BYTES, Pieces

LARGE_BYTES = 64 << 10
"""Payloads of at least this length start on a page, for direct I/O and mmap."""
LARGE_ALIGNMENT = 4096
SMALL_ALIGNMENT = 64
"""Alignment of all other payloads: the one that `torch.save` uses."""


class FileLayout(NamedTuple):
    """The place of every piece.

    Attributes:
        table: The planned chunk table; file keys have `{attempt}` where the attempt id goes.
        piece: int64[c], row of `Pieces`; sorted by (file, place), a file's deferred pieces last.
        file_rank: int32[f], the rank that writes the file.
        file_bytes: int64[f], where the last fixed item of the file ends.
        settled: bool[f], whether no item of the file is expected to change between saves.
    """

    table: ChunkTable
    piece: Int64Array
    file_rank: Int32Array
    file_bytes: Int64Array
    settled: BoolArray


def lay_out(held: Held, pieces: Pieces, *, part_bytes: int) -> FileLayout:
    """Assigns every piece to a part file of its rank and to a place in that file.

    A file begins with the small payloads, each 64-aligned, so that one read covers many of them.
    The large payloads follow, each on a page, and then the deferred items:

        | small, 64-aligned | large, page-aligned | deferred | block checksums |
                                                  ^ `file_bytes`

    What is not expected to change between saves lies in files of its own, behind the others.

    Args:
        held: Items of all ranks.
        pieces: What is written.
        part_bytes: Target length of a file; a rank's share is cut into nearly equal parts.

    Examples:
        Tensors of 70,000, 5 and 3 bytes, and an object. A frame of 320 bytes, the head of a zip, is
        before each payload (384 before that on a page: it is padded). The small ones come first, at
        320 and 960, which are multiples of 64; the large one begins on the page at 4,096. The
        object has no place yet: it follows where the file's fixed bytes end.

        >>> from ray_dcp.core.columns import ColumnsBuilder
        >>> from ray_dcp.planning.merge import distinct_boxes, merge
        >>> from ray_dcp.planning.share_out import share_out
        >>> builder = ColumnsBuilder()
        >>> for name, num_bytes in (("large", 70_000), ("small", 5), ("tiny", 3)):
        ...     _ = builder.tensor(name, "uint8", (num_bytes,))
        >>> _ = builder.object("object")
        >>> held = merge([builder.build()])
        >>> pieces = share_out(held, distinct_boxes(held), world_size=1, min_piece_bytes=1)
        >>> layout = lay_out(held, pieces, part_bytes=1 << 30)
        >>> table = layout.table
        >>> for tensor, item, payload in zip(table.tensor, table.item_offset, table.payload_offset):
        ...     print(f"{table.names[tensor]}: item at {item}, payload at {payload}")
        small: item at 0, payload at 320
        tiny: item at 640, payload at 960
        large: item at 3712, payload at 4096
        object: item at -1, payload at -1
        >>> table.files, layout.file_bytes.tolist()
        (('__0_0.{attempt}.distcp',), [74364])
    """
    order = _in_file_order(held, pieces)
    file, part = _in_parts(held, pieces, order, part_bytes)
    first = np.flatnonzero(np.diff(file, prepend=-1))
    file_rank = held.rank[pieces.held[order[first]]]
    keys = tuple(
        f"__{rank}_{index}.{{attempt}}.distcp"
        for rank, index in zip(file_rank.tolist(), part.tolist(), strict=True)
    )
    payload, head, foot, end = _places(held, pieces, order, file, len(keys))
    late, row = payload < 0, pieces.held[order]
    length = np.where(late, -1, pieces.num_bytes[order])
    table = ChunkTable(
        names=held.names,
        paths=held.paths,
        dtypes=held.dtypes,
        files=keys,
        kind=held.kind[held.first],
        dtype=held.dtype[held.first],
        ndim=held.ndim[held.first],
        shape=held.shape[held.first],
        requires_grad=held.requires_grad[held.first],
        tensor=held.name[row],
        offset=pieces.offset[order],
        size=pieces.size[order],
        file=file.astype(np.int32),
        item_offset=np.where(late, -1, payload - head),
        item_bytes=np.where(late, -1, head + length + foot),
        payload_offset=payload,
        payload_bytes=length,
        block_bytes=np.where(late, 0, block_bytes_for_many(np.maximum(length, 0))),
        check_start=np.zeros(len(row) + 1, dtype=np.int64),
        checks=np.zeros(0, dtype=np.uint64),
    )
    return FileLayout(table, order, file_rank, end, pieces.settled[order[first]])


def _in_file_order(held: Held, pieces: Pieces) -> Int64Array:
    """Returns the pieces sorted by rank, whether they change, section of the file, and row."""
    section = np.where(pieces.num_bytes >= LARGE_BYTES, 1, 0)
    section[held.kind[pieces.held] != Kind.TENSOR] = 2
    section[pieces.settled] += 3
    rank = held.rank[pieces.held].astype(np.int64)
    code = (rank * 6 + section) * len(held.rank) + pieces.held
    # Why stable: pieces of one row stay in the order of their bytes.
    return np.argsort(code, kind="stable")


def _in_parts(
    held: Held, pieces: Pieces, order: Int64Array, part_bytes: int
) -> tuple[Int64Array, Int64Array]:
    """Returns `(file of each piece, part number of each file)`."""
    if len(order) == 0:
        return order, order
    rank = held.rank[pieces.held[order]]
    weight = pieces.num_bytes[order] + ITEM_COST_BYTES
    group = rank.astype(np.int64) * 2 + pieces.settled[order]
    first = np.flatnonzero(np.diff(group, prepend=-1))
    starts = np.append(first, len(order))
    total = np.add.reduceat(weight, first)
    parts = np.maximum(-(-total // part_bytes), 1)
    step = -(-total // parts)
    line = np.cumsum(weight)
    before = np.repeat(line[first] - weight[first], np.diff(starts))
    part = (line - before - weight // 2) // np.repeat(step, np.diff(starts))
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (np.diff(group) != 0) | (np.diff(part) != 0)
    file = np.cumsum(fresh) - 1
    owner = rank[fresh]
    leaders = np.flatnonzero(np.diff(owner, prepend=-1))
    number = np.arange(len(owner)) - np.repeat(leaders, np.diff(np.append(leaders, len(owner))))
    return file, number


def _places(
    held: Held, pieces: Pieces, order: Int64Array, file: Int64Array, num_files: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Returns `(payload offset, header bytes, footer bytes, end of each file's fixed area)`."""
    rows = pieces.held[order]
    length = pieces.num_bytes[order]
    fixed = held.kind[rows] == Kind.TENSOR
    framed = np.flatnonzero(fixed)
    head, foot = np.zeros((2, len(order)), dtype=np.int64)
    head[framed], foot[framed] = _frames(held, rows[framed], pieces.size[order[framed]])
    payload = np.full(len(order), -1, dtype=np.int64)
    end = np.zeros(num_files, dtype=np.int64)
    large = length >= LARGE_BYTES
    for which, alignment in (
        (fixed & ~large, SMALL_ALIGNMENT),
        (fixed & large, LARGE_ALIGNMENT),
    ):
        at = np.flatnonzero(which)
        tail = length[at] + foot[at]
        payload[at] = _one_after_another(file[at], head[at], tail, end, alignment)
        # Careful: of repeated indices, numpy keeps the last assignment, here the file's last item.
        end[file[at]] = payload[at] + tail
    return payload, head, foot, end


def _frames(held: Held, rows: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array]:
    # Why: a vocabulary may contain dtypes of opaque tensors alone, which have no frame.
    used, code = np.unique(held.dtype[rows], return_inverse=True)
    names = [held.dtypes[index] for index in used.tolist()]
    frames, index = frames_of(names, code, held.ndim[rows], size)
    lengths = np.array([(len(one.header), len(one.footer)) for one in frames], dtype=np.int64)
    head, foot = lengths.reshape(-1, 2)[index].T
    return head, foot


def _one_after_another(
    file: Int64Array, head: Int64Array, tail: Int64Array, end: Int64Array, alignment: int
) -> Int64Array:
    """Returns the payload offsets of items that follow each other, file by file.

    Once a payload is aligned, the next one starts a multiple of the alignment later. These steps
    add up, so one cumulative sum places all items:

        | head | tail       | pad | head | tail       |
               ^ payload                 ^ next payload
               |<--------- step -------->|

    Args:
        file: int64[k], ascending.
        head: int64[k], bytes before each payload.
        tail: int64[k], bytes from each payload's start to its item's end.
        end: int64[f], where each file's first item may start.
        alignment: A power of two.
    """
    if len(file) == 0:
        return file
    before = np.append(0, tail[:-1])
    leads = np.diff(file, prepend=-1) != 0
    before[leads] = end[file[leads]]
    step = -(-(before + head) // alignment) * alignment
    line = np.cumsum(step)
    first = np.flatnonzero(leads)
    counts = np.diff(np.append(first, len(file)))
    return line - np.repeat(line[first] - step[first], counts)
