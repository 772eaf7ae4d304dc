"""What to read: which stored chunks meet which wanted boxes, and whether that is everything.

The byte side of a pair (extents, checksum blocks, slabs, coalesced reads) is in `extents`, and
importable from here too. Reading, verifying and copying belong to `transfer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ray_dcp.errors import InvalidRequestError
from ray_dcp.plan.boxes import intersect, volume, widen
from ray_dcp.plan.coverage import missing_volumes
from ray_dcp.plan.extents import (
    Slab,
    block_ranges,
    byte_runs,
    coalesce,
    needed_blocks,
    slabs,
)
from ray_dcp.plan.grouping import offsets_of, within
from ray_dcp.plan.values import BoolArray, ChunkTable, Int32Array, Int64Array

__all__ = [
    "Boxes",
    "PairBytes",
    "ReadPlan",
    "Slab",
    "Wanted",
    "block_ranges",
    "byte_runs",
    "coalesce",
    "meetings",
    "needed_blocks",
    "pair_bytes",
    "plan_reads",
    "slabs",
]

_BATCH_PAIRS = 2_000_000
"""Candidate pairs looked at together: about 200 MB of temporaries in two dimensions."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """The boxes that a caller wants filled, one row a target buffer.

    Attributes:
        tensor: int32[w], index into the chunk table's `names`; a tensor, never an object.
        offset: int64[w, D], where the box starts in the global tensor, padded with 0.
        size: int64[w, D], lengths of the box, padded with 1. Volume 0 needs nothing.
        itemsize: int64[w], bytes of an element as stored.
    """

    tensor: Int32Array
    offset: Int64Array
    size: Int64Array
    itemsize: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Every (chunk, wanted) pair with a common part, sorted by (file, place in it).

    The place is `payload_offset`, or `item_offset` where that is unknown. Pairs of one chunk are
    adjacent, in the order of the wanted rows.

    Attributes:
        chunk: int32[p], row of the chunk table.
        wanted: int32[p], row of the `Wanted`.
        offset: int64[p, D], where the common part starts in the global tensor.
        size: int64[p, D], its lengths, all above 0.
        uncovered: `(wanted row, missing bytes)` for each wanted box that the chunks do not fill.
        bytes_needed: Bytes of all wanted boxes together.
    """

    chunk: Int32Array
    wanted: Int32Array
    offset: Int64Array
    size: Int64Array
    uncovered: tuple[tuple[int, int], ...]
    bytes_needed: int

    def __len__(self) -> int:
        return len(self.chunk)


@dataclass(frozen=True, eq=False)
class PairBytes:
    """The bytes of each pair of a read plan, in its chunk and in its target.

    Both are counted from 0 at the first C-order byte of the chunk's box and of the wanted box.

    Attributes:
        num_bytes: int64[p], bytes of the common part.
        chunk_low: int64[p], first byte needed of the chunk.
        chunk_high: int64[p], behind the last byte needed of the chunk.
        chunk_contiguous: bool[p], every byte of `[chunk_low, chunk_high)` is needed.
        target_low: int64[p], first byte filled of the target.
        target_high: int64[p], behind the last byte filled of the target.
        target_contiguous: bool[p], every byte of `[target_low, target_high)` is filled.
        read_low: int64[p], `chunk_low` moved down to a checksum block bound.
        read_high: int64[p], `chunk_high` moved up to a block bound or the chunk's end.
    """

    num_bytes: Int64Array
    chunk_low: Int64Array
    chunk_high: Int64Array
    chunk_contiguous: BoolArray
    target_low: Int64Array
    target_high: Int64Array
    target_contiguous: BoolArray
    read_low: Int64Array
    read_high: Int64Array


class Boxes(NamedTuple):
    """Boxes of tensors, as those of chunks."""

    tensor: Int32Array
    """int32[n]."""
    offset: Int64Array
    """int64[n, D]."""
    size: Int64Array
    """int64[n, D]."""
    num_tensors: int


def plan_reads(table: ChunkTable, wanted: Wanted) -> ReadPlan:
    """Returns which part of which chunk goes to which target.

    Chunks may overlap (third-party checkpoints): then each of them is listed, and the last one
    read fills the common part.

    Args:
        table: What is stored.
        wanted: What is asked for. A box that reaches out of its tensor is uncovered there.

    Raises:
        InvalidRequestError: A wanted row names no tensor of the table, or has a negative offset
            or length.

    Complexity:
        O(chunks) plus O(pairs of a wanted box and a chunk of its tensor), in numpy; memory for
        two million pairs at a time.
    """
    _check(table, wanted)
    width = max(1, table.offset.shape[1], wanted.offset.shape[1])
    box = widen(wanted.offset, wanted.size, width)
    chunk_box = widen(table.offset, table.size, width)
    by_tensor = Boxes(table.tensor, *chunk_box, table.num_tensors)
    chunk, row, offset, size = meetings(by_tensor, wanted.tensor, box)
    elements = volume(box[1])
    missing = missing_volumes(row, offset, size, *box)
    place = np.where(table.payload_offset < 0, table.item_offset, table.payload_offset)
    order = np.lexsort((row, chunk, place[chunk], table.file[chunk]))
    lacking = np.flatnonzero(missing)
    uncovered = zip(lacking.tolist(), (missing * wanted.itemsize)[lacking].tolist(), strict=True)
    return ReadPlan(
        chunk=chunk[order].astype(np.int32),
        wanted=row[order].astype(np.int32),
        offset=offset[order],
        size=size[order],
        uncovered=tuple(uncovered),
        bytes_needed=int((elements * wanted.itemsize).sum()),
    )


def pair_bytes(table: ChunkTable, wanted: Wanted, plan: ReadPlan) -> PairBytes:
    """Returns the byte geometry of every pair of a plan.

    Args:
        table: The table that was planned with.
        wanted: The boxes that were planned for.
        plan: `plan_reads(table, wanted)`.
    """
    width = plan.offset.shape[1]
    chunk_box = widen(table.offset[plan.chunk], table.size[plan.chunk], width)
    target_box = widen(wanted.offset[plan.wanted], wanted.size[plan.wanted], width)
    itemsize = wanted.itemsize[plan.wanted]
    num_bytes = volume(plan.size) * itemsize
    low, high, contiguous = byte_runs(*chunk_box, plan.offset, plan.size, itemsize)
    target_low, target_high, filled = byte_runs(*target_box, plan.offset, plan.size, itemsize)
    length = volume(chunk_box[1]) * itemsize
    read_low, read_high = needed_blocks(low, high, table.block_bytes[plan.chunk], length)
    return PairBytes(
        num_bytes=num_bytes,
        chunk_low=low,
        chunk_high=high,
        chunk_contiguous=contiguous,
        target_low=target_low,
        target_high=target_high,
        target_contiguous=filled,
        read_low=read_low,
        read_high=read_high,
    )


def _check(table: ChunkTable, wanted: Wanted) -> None:
    bad = np.flatnonzero(
        (wanted.tensor < 0)
        | (wanted.tensor >= table.num_tensors)
        | (wanted.offset < 0).any(axis=1)
        | (wanted.size < 0).any(axis=1)
    )
    if len(bad):
        row = bad[0]
        raise InvalidRequestError(
            f"expected boxes of the checkpoint's {table.num_tensors} tensors, but {len(bad)} "
            f"wanted rows are none; the first, row {row}, asks for tensor {wanted.tensor[row]}, "
            f"offset {tuple(wanted.offset[row].tolist())}, size {tuple(wanted.size[row].tolist())}"
        )


def meetings(
    boxes: Boxes, tensor: Int32Array, wanted: tuple[Int64Array, Int64Array]
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Returns all pairs of a box and a wanted box of the same tensor that have a common part.

    Args:
        boxes: What there is.
        tensor: int32[w], of the wanted boxes.
        wanted: Their offsets and sizes, int64[w, D] as those of `boxes`.

    Returns:
        `(box, wanted row, offset, size)`, the last two of the common part.
    """
    order = np.argsort(boxes.tensor, kind="stable")
    starts = offsets_of(np.bincount(boxes.tensor, minlength=boxes.num_tensors))
    counts = (starts[1:] - starts[:-1])[tensor]
    found = []
    for low, high in _batches(counts):
        rows = np.repeat(np.arange(low, high), counts[low:high])
        box = order[starts[tensor[rows]] + within(counts[low:high])]
        pair = (boxes.offset[box], boxes.size[box], wanted[0][rows], wanted[1][rows])
        offset, size, meets = intersect(*pair)
        found.append((box[meets], rows[meets], offset[meets], size[meets]))
    box, rows, offset, size = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return box, rows, offset, size


def _batches(counts: Int64Array) -> list[tuple[int, int]]:
    """Returns runs of wanted rows with few enough candidate pairs each; at least one run."""
    ends = np.cumsum(counts)
    bounds = [0]
    while bounds[-1] < len(counts):
        done = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
        stop = int(np.searchsorted(ends, done + _BATCH_PAIRS, side="right"))
        bounds.append(max(stop, bounds[-1] + 1))
    return list(pairwise(bounds)) or [(0, 0)]
