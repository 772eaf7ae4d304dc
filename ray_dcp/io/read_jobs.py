"""Turns a read plan into jobs for threads. Pure; `reader` executes the jobs.

A pair is one row of the read plan: the common part of a stored chunk and a wanted box (the target).
Bytes of a chunk are counted from 0 at its first raw byte, in C order ("chunk-local").
There are three kinds of jobs:

- `SpanRead`: one read that serves several small pairs.
- `DirectRead`: a slice of a large pair, contiguous in chunk and target, read into the target.
- `StridedRead`: a slab of any other large pair, read into scratch memory and copied by elements.

    file      |item|item|gap|item|......|======================|..|--  --  --  --|
               `-- SpanRead ---'         `DirectRead' `DirectRead'   `- StridedRead -'

`PairNumbers` has the columns of all pairs as lists, for the loops over small pairs, and determines
which pairs can take the fastest path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ray_dcp.core.values import (
    BoolArray,
    ChunkTable,
    Int32Array,
    Int64Array,
    group_rows,
    running_max,
    strides,
    volume,
    widen,
)
from ray_dcp.options import Verify
from ray_dcp.planning.reads import ReadPlan, Wanted

SPAN_BYTES = 2 << 20
"""Maximum length of a span. *Why*: its pairs are copied while it is in the processor's cache."""
FREE_GAP_BYTES = 2 << 10
"""A gap up to this length, such as a frame between two tensors, is always read through."""
MOST_GAP_BYTES = 8 << 20
"""A longer gap is never read through, whatever the latency of the storage."""
GAP_SHARE = 0.05
"""Maximum number of bytes read in other gaps, as a share of the bytes needed."""
DIRECT_BYTES = 256 << 10
"""Contiguous pairs from this length on are read directly into the target. Others without checksums
are mapped from this length on, where the storage can do that."""
SLICE_BYTES = 8 << 20
"""A direct read is cut into slices of about this length, for several threads.

*Why not shorter*: for each slice, a thread waits for Python's global lock, which another thread
holds while it hashes blocks of up to 64 KiB. With 8 MiB, a load from memory takes a quarter less
time than with 2 MiB, and one from the page cache an eighth less. *Why not longer*: it gains nothing
more and leaves fewer slices to distribute. The throughput of a disk does not depend on it, as
`READ_AHEAD_BYTES` are requested in advance."""
READ_AHEAD_BYTES = 64 << 20
"""Distance by which read-ahead requests precede the reads."""
AHEAD_BYTES = 8 << 20
"""Maximum length of one read-ahead request."""
SCRATCH_BYTES = 64 << 20
"""Maximum temporary memory of a job for regions that are not contiguous, unless one checksum block
is longer."""


@dataclass(frozen=True, slots=True)
class SpanRead:
    """One read that serves several small pairs."""

    file: int
    low: int
    """First byte in the file."""
    high: int
    pairs: list[int]


@dataclass(frozen=True, slots=True)
class DirectRead:
    """A read of bytes that are contiguous in chunk and target."""

    pair: int
    low: int
    """First byte, chunk-local."""
    high: int


@dataclass(frozen=True, slots=True)
class StridedRead:
    """A read of a slab of a pair into scratch memory, from which it is copied by elements."""

    pair: int
    offset: Int64Array
    """int64[D], where the slab starts in the tensor."""
    size: Int64Array
    """int64[D], lengths of the slab."""
    low: int
    """First byte that it needs, chunk-local."""


Job = SpanRead | DirectRead | StridedRead


@dataclass(frozen=True, eq=False)
class Geometry:
    """Locations of the bytes of every pair of a read plan.

    Offsets in a chunk, for a chunk whose raw bytes start at `place` in its file:

        blocks       |.......|.......|.......|.......|...|
                     0       |   |        |  |           payload_bytes
                             |   |        |  read_high
                             |   |        chunk_high
                             |   chunk_low
                             read_low

    Attributes:
        plan: The read plan.
        chunk_offset: int64[p, D], offset of the pair's chunk in its tensor.
        chunk_size: int64[p, D].
        target_offset: int64[p, D], offset of the pair's target in its tensor.
        target_size: int64[p, D].
        itemsize: int64[p], bytes per element.
        file: int32[p], index of the file.
        place: int64[p], offset of the chunk's raw bytes in the file; undefined if unparsed.
        block_bytes: int64[p], length of a checksum block; 0 if nothing is verified.
        payload_bytes: int64[p], length of the chunk's raw bytes.
        num_bytes: int64[p], length of the common part of chunk and target.
        chunk_low: int64[p], first byte of the chunk that is needed, relative to `place`.
        chunk_high: int64[p], end of the last byte that is needed.
        chunk_contiguous: bool[p], every byte of `[chunk_low, chunk_high)` is needed.
        target_low: int64[p], first byte of the target that is filled.
        target_contiguous: bool[p], every byte of the target between the first and the last one
            that is filled is filled.
        read_low: int64[p], `chunk_low` rounded down to a block bound.
        read_high: int64[p], `chunk_high` rounded up to a block bound or the chunk's end.
        unparsed: bool[p], the whole item must be read to locate its elements.
        item_low: int64[p], start of the item in the file.
        item_high: int64[p], end of the item in the file.
    """

    plan: ReadPlan
    chunk_offset: Int64Array
    chunk_size: Int64Array
    target_offset: Int64Array
    target_size: Int64Array
    itemsize: Int64Array
    file: Int32Array
    place: Int64Array
    block_bytes: Int64Array
    payload_bytes: Int64Array
    num_bytes: Int64Array
    chunk_low: Int64Array
    chunk_high: Int64Array
    chunk_contiguous: BoolArray
    target_low: Int64Array
    target_contiguous: BoolArray
    read_low: Int64Array
    read_high: Int64Array
    unparsed: BoolArray
    item_low: Int64Array
    item_high: Int64Array


def geometry(
    table: ChunkTable, wanted: Wanted, plan: ReadPlan, place: Int64Array, verify: Verify
) -> Geometry:
    """Returns the locations of the bytes of every pair.

    Args:
        table: Chunk table of the checkpoint.
        wanted: Wanted boxes.
        plan: `plan_reads(table, wanted)`, or some of its rows.
        place: int64[c], offset of each chunk's raw bytes in its file; -1 if the whole item must be
            read.
        verify: With `"never"`, reads are not widened to whole blocks.
    """
    width = plan.offset.shape[1]
    chunk, row = plan.chunk, plan.wanted
    chunk_box = widen(table.offset[chunk], table.size[chunk], width)
    target_box = widen(wanted.offset[row], wanted.size[row], width)
    # Why 0: with blocks of length 0, reads are not widened.
    blocks = np.zeros(len(plan), np.int64) if verify == "never" else table.block_bytes[chunk]
    itemsize = wanted.itemsize[row]
    payload_bytes = volume(chunk_box[1]) * itemsize
    low, high, contiguous = byte_runs(*chunk_box, plan.offset, plan.size, itemsize)
    target_low, _, filled = byte_runs(*target_box, plan.offset, plan.size, itemsize)
    read_low, read_high = needed_blocks(low, high, blocks, payload_bytes)
    return Geometry(
        plan=plan,
        chunk_offset=chunk_box[0],
        chunk_size=chunk_box[1],
        target_offset=target_box[0],
        target_size=target_box[1],
        itemsize=itemsize,
        file=table.file[chunk],
        place=place[chunk],
        block_bytes=blocks,
        payload_bytes=payload_bytes,
        num_bytes=volume(plan.size) * itemsize,
        chunk_low=low,
        chunk_high=high,
        chunk_contiguous=contiguous,
        target_low=target_low,
        target_contiguous=filled,
        read_low=read_low,
        read_high=read_high,
        unparsed=place[chunk] < 0,
        item_low=table.item_offset[chunk],
        item_high=table.item_offset[chunk] + table.item_bytes[chunk],
    )


def byte_runs(
    box_offset: Int64Array,
    box_size: Int64Array,
    offset: Int64Array,
    size: Int64Array,
    itemsize: Int64Array,
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Returns the extent of each intersection in the C-order bytes of a box that holds it.

    Works for both sides of a read: `box` is the chunk's box, or the wanted (target) box.

    Args:
        box_offset: int64[p, D], the box whose bytes are counted, in global coordinates.
        box_size: int64[p, D].
        offset: int64[p, D], the intersection, in global coordinates; within the box, not empty.
        size: int64[p, D].
        itemsize: int64[p], bytes of an element.

    Returns:
        `(low int64[p], high int64[p], contiguous bool[p])`: `[low, high)` is the shortest range of
        the box's bytes that contains the intersection; contiguous means that the intersection
        needs every byte of the range.

    Examples:
        A column block of a 4 x 8 box of 2-byte elements; `#` are the elements wanted.

            byte  0  . . . . . . . .
                 16  . . . . # # # #   low = 16 + 4 * 2 = 24
                 32  . . . . # # # #   high = 48
                 48  . . . . . . . .

        >>> a = lambda *v: np.array([v])
        >>> byte_runs(a(0, 0), a(4, 8), a(1, 4), a(2, 4), np.array([2]))
        (array([24]), array([48]), array([False]))
    """
    step = strides(box_size)
    low = ((offset - box_offset) * step).sum(axis=1) * itemsize
    last = ((size - 1) * step).sum(axis=1)
    high = low + (last + 1) * itemsize
    return low, high, (last + 1) == volume(size)


def needed_blocks(
    low: Int64Array, high: Int64Array, block_bytes: Int64Array, payload_bytes: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Returns byte ranges widened to whole checksum blocks, so that they can be verified.

    Args:
        low: int64[p], chunk-local.
        high: int64[p], not below `low`.
        block_bytes: int64[p], the chunk's block length; 0 for a chunk without checksums, whose
            ranges stay as they are.
        payload_bytes: int64[p], the chunk's length, at which the last block ends.

    Returns:
        `(low int64[p], high int64[p])`; the blocks are `low // block_bytes` up to, but without,
        `ceil(high / block_bytes)`.

    Examples:
        >>> one = lambda v: np.array([v])
        >>> needed_blocks(one(5000), one(9000), one(4096), one(10000))
        (array([4096]), array([10000]))
    """
    step = np.where(block_bytes > 0, block_bytes, 1)
    return low // step * step, np.minimum(-(-high // step) * step, payload_bytes)


@dataclass(frozen=True)
class ReadCost:
    """Cost of reads, which determines the gaps that are read through.

    Examples:
        >>> ReadCost(request_s=20e-6, bytes_per_s=3e9).gap_bytes, ReadCost(0.03, 1e8).gap_bytes
        (60000, 3000000)
    """

    request_s: float
    """Latency of a request until its first byte, in seconds."""
    bytes_per_s: float
    """Throughput of one request."""
    request_bytes: int = 0
    """Minimum length of a request, if as many contiguous bytes are needed."""
    maps: bool = False
    """Whether ranges are mapped instead of read into scratch memory."""

    @property
    def gap_bytes(self) -> int:
        """Longest gap that takes no longer to read than another request."""
        gap = round(self.request_s * self.bytes_per_s)
        return min(max(gap, FREE_GAP_BYTES), MOST_GAP_BYTES)


def make_jobs(geo: Geometry, num_rows: int, cost: ReadCost) -> tuple[list[Job], Int64Array]:
    """Returns the jobs, sorted by file and offset, and the number of parts of each wanted row.

    Args:
        geo: Locations of the bytes.
        num_rows: Number of wanted rows.
        cost: Cost of a request, which determines the gaps that are read through.

    Returns:
        `(jobs, parts int64[num_rows])`; a pair in a span counts as one part.
    """
    straight = geo.chunk_contiguous & geo.target_contiguous & ~geo.unparsed
    direct = straight & (geo.num_bytes >= DIRECT_BYTES)
    length, limit = geo.read_high - geo.read_low, min(SPAN_BYTES, SCRATCH_BYTES)
    mapped = cost.maps & ~straight & (geo.block_bytes == 0) & (length >= DIRECT_BYTES)
    span = geo.unparsed | (~direct & ~mapped & (length <= limit))
    placed: list[tuple[int, int, Job]] = []
    span_bytes = min(max(SPAN_BYTES, cost.request_bytes), SCRATCH_BYTES)
    for job in _spans(geo, np.flatnonzero(span), span_bytes, cost):
        placed.append((job.file, job.low, job))
    parts = np.bincount(geo.plan.wanted[span], minlength=num_rows)
    cut: list[DirectRead | StridedRead] = []
    for pair in np.flatnonzero(~span).tolist():
        cut += _slices(geo, pair, cost) if direct[pair] else _cut_to_scratch(geo, pair)
    for piece in cut:
        low = int(geo.place[piece.pair]) + piece.low
        placed.append((int(geo.file[piece.pair]), low, piece))
        parts[geo.plan.wanted[piece.pair]] += 1
    placed.sort(key=lambda entry: entry[:2])
    return [job for _, _, job in placed], parts


def job_reads(
    geo: Geometry, jobs: Sequence[Job], cost: ReadCost
) -> tuple[Int32Array, Int64Array, Int64Array]:
    """Returns the ranges that the jobs read, in the order of the jobs; see `Prepared.reads`.

    A read that is made in steps counts as one range.

    Args:
        geo: Locations of the bytes.
        jobs: Result of `make_jobs`.
        cost: As for `make_jobs`.
    """
    return _columns([each for job in jobs for each in _ranges(geo, job, cost)])


def _columns(ranges: Sequence[tuple[int, int, int]]) -> tuple[Int32Array, Int64Array, Int64Array]:
    file, low, high = np.array(ranges, np.int64).reshape(-1, 3).T
    return file.astype(np.int32), low, high


def _ranges(geo: Geometry, job: Job, cost: ReadCost) -> list[tuple[int, int, int]]:
    if isinstance(job, SpanRead):
        return [(job.file, job.low, job.high)]
    place, file = int(geo.place[job.pair]), int(geo.file[job.pair])
    found = (
        [_whole_blocks(geo, job)]
        if isinstance(job, DirectRead)
        else slab_reads(geo, job, cost).tolist()
    )
    return [(file, place + low, place + high) for low, high in found]


def read_ahead(
    geo: Geometry, jobs: Sequence[Job], cost: ReadCost, begin: Callable[[int, int, int], object]
) -> Iterator[Job]:
    """Yields the jobs, and issues read-ahead requests for the jobs that follow.

    Args:
        geo: Locations of the bytes.
        jobs: Result of `make_jobs`.
        cost: As for `make_jobs`.
        begin: Requests a range: called with file, first byte and length.
    """
    found = [_ranges(geo, job, cost) for job in jobs]
    file, low, high = _columns([each for some in found for each in some])
    bounds = coalesce(file, low, high, max_gap_bytes=FREE_GAP_BYTES, max_bytes=AHEAD_BYTES)
    first = bounds[:-1]
    before = np.cumsum(high - low) - (high - low)
    ends = np.maximum.reduceat(high, first) if len(first) else high
    starts = (before[first], file[first], low[first], ends)
    ahead = zip(*(column.tolist() for column in starts), strict=True)
    places, upcoming, number = before.tolist(), next(ahead, None), 0
    for job, some in zip(jobs, found, strict=True):
        place, number = places[number], number + len(some)
        while upcoming is not None and upcoming[0] < place + READ_AHEAD_BYTES:
            _, in_file, start, end = upcoming
            begin(in_file, start, end - start)
            upcoming = next(ahead, None)
        yield job


def slab_reads(geo: Geometry, job: StridedRead, cost: ReadCost) -> Int64Array:
    """Returns the byte ranges to read for a slab, on block boundaries.

    Args:
        geo: Locations of the bytes.
        job: The slab.
        cost: Determines the longest gap that is read through rather than split into two reads.

    Returns:
        int64[r, 2], half-open, chunk-local, ascending, not touching; every byte of the slab is in
        one of them. One row if the slab is contiguous.

    Complexity:
        O(r) where the ranges are more than a block and a gap apart.
    """
    pair, size, gap = job.pair, job.size, cost.gap_bytes
    itemsize, block = int(geo.itemsize[pair]), int(geo.block_bytes[pair])
    step = strides(geo.chunk_size[pair][None])[0] * itemsize
    length, outer = _merged_run(size, step, itemsize, max(gap, block - 1))
    starts = np.array([(job.offset - geo.chunk_offset[pair]) @ step], dtype=np.int64)
    for dim in range(outer):
        starts = (starts[:, None] + np.arange(size[dim], dtype=np.int64) * step[dim]).reshape(-1)
    low, high = needed_blocks(
        starts, starts + length, geo.block_bytes[[pair]], geo.payload_bytes[[pair]]
    )
    first = np.flatnonzero(np.append(True, low[1:] - high[:-1] > gap))
    return np.stack([low[first], high[np.append(first[1:], len(high)) - 1]], axis=1)


def _merged_run(
    size: Int64Array, step: Int64Array, itemsize: int, max_gap_bytes: int
) -> tuple[int, int]:
    """Returns the length of the longest run without a large gap, and how many dims repeat the run.

    Why from the innermost dimension: gaps never shrink on the way out, since a dimension's
    stride is at least the length of the wanted part plus the gap inside it.
    """
    length = itemsize
    for dim in range(len(size) - 1, -1, -1):
        if size[dim] > 1:
            if step[dim] - length > max_gap_bytes:
                return length, dim + 1
            length += int((size[dim] - 1) * step[dim])
    return length, 0


def _whole_blocks(geo: Geometry, job: DirectRead) -> tuple[int, int]:
    block = max(int(geo.block_bytes[job.pair]), 1)
    stop = min(-(-job.high // block) * block, int(geo.payload_bytes[job.pair]))
    return job.low // block * block, stop


def affordable_gap(
    file: Int32Array,
    low: Int64Array,
    high: Int64Array,
    *,
    free_gap_bytes: int,
    max_gap_bytes: int,
    share: float,
) -> int:
    """Returns the longest gap to read through, so that few unneeded bytes are read.

    Args:
        file: int32[r], the file of each range.
        low: int64[r], first byte in the file; ranges are sorted by (file, low).
        high: int64[r], end of the last byte, exclusive.
        free_gap_bytes: Gaps up to this length always cost less than another request.
        max_gap_bytes: Longer gaps always cost more than another request.
        share: Most unneeded bytes in gaps between the two, as a share of the ranges' own bytes.

    Returns:
        The argument `max_gap_bytes` of `coalesce`, between `free_gap_bytes` and `max_gap_bytes`.

    Examples:
        >>> low, high = np.array([0, 100, 1000]), np.array([90, 900, 1500])
        >>> for share in (0.01, 0.1):
        ...     affordable_gap(np.zeros(3, np.int32), low, high,
        ...                    free_gap_bytes=8, max_gap_bytes=1000, share=share)
        10
        1000
    """
    if len(low) < 2:
        return max_gap_bytes
    same_file = file[1:] == file[:-1]
    reach = running_max(high, np.cumsum(np.append(True, ~same_file)) - 1)
    gaps = np.sort((low[1:] - reach[:-1])[same_file])
    gaps = gaps[(gaps > free_gap_bytes) & (gaps <= max_gap_bytes)]
    affordable = np.searchsorted(np.cumsum(gaps), share * float((high - low).sum()), side="right")
    if affordable == len(gaps):
        return max_gap_bytes
    return int(gaps[affordable - 1]) if affordable else free_gap_bytes


def coalesce(
    file: Int32Array,
    low: Int64Array,
    high: Int64Array,
    *,
    max_gap_bytes: int,
    max_bytes: int,
) -> Int64Array:
    """Returns which byte ranges of files are read by one request.

    Args:
        file: int32[r], the file of each range.
        low: int64[r], first byte in the file; ranges are sorted by (file, low) and may overlap.
        high: int64[r], end of the last byte, exclusive.
        max_gap_bytes: Longest gap that is read through.
        max_bytes: Longest read that joins several ranges; a single longer range stays whole.

    Returns:
        int64[g + 1]: read `i` serves the ranges `[bounds[i], bounds[i + 1])` and reaches from the
        first one's `low` to their greatest `high`.

    Examples:
        >>> bounds = coalesce(np.array([0, 0, 0, 1]), np.array([0, 10, 90, 0]),
        ...                   np.array([8, 20, 95, 4]), max_gap_bytes=4, max_bytes=100)
        >>> bounds.tolist()
        [0, 2, 3, 4]
    """
    count = len(low)
    if count == 0:
        return np.zeros(1, dtype=np.int64)
    # Careful: ranges may contain one another, so a range's end is the greatest one so far.
    new_file = np.append(True, file[1:] != file[:-1])
    reach = running_max(high, np.cumsum(new_file) - 1)
    apart = new_file.copy()
    apart[1:] |= low[1:] - reach[:-1] > max_gap_bytes
    bounds: list[int] = []
    starts = np.append(np.flatnonzero(apart), count)
    too_long = reach[starts[1:] - 1] - low[starts[:-1]] > max_bytes
    if not too_long.any():
        return starts.astype(np.int64)
    for start, stop, long in zip(starts[:-1], starts[1:], too_long, strict=True):
        bounds.append(int(start))
        while long:
            limit = low[bounds[-1]] + max_bytes
            cut = bounds[-1] + max(
                1, int(np.searchsorted(reach[bounds[-1] : stop], limit, side="right"))
            )
            if cut >= stop:
                break
            bounds.append(cut)
    return np.array([*bounds, count], dtype=np.int64)


def _spans(geo: Geometry, chosen: Int64Array, max_bytes: int, cost: ReadCost) -> list[SpanRead]:
    unparsed = geo.unparsed[chosen]
    low = np.where(unparsed, geo.item_low[chosen], geo.place[chosen] + geo.read_low[chosen])
    high = np.where(unparsed, geo.item_high[chosen], geo.place[chosen] + geo.read_high[chosen])
    file = geo.file[chosen]
    order = np.lexsort((low, file))
    low, high, file = low[order], high[order], file[order]
    gap = affordable_gap(
        file,
        low,
        high,
        free_gap_bytes=FREE_GAP_BYTES,
        max_gap_bytes=cost.gap_bytes,
        share=GAP_SHARE,
    )
    bounds = coalesce(file, low, high, max_gap_bytes=gap, max_bytes=max_bytes)
    pairs = chosen[order].tolist()
    starts = bounds[:-1]
    highest = np.maximum.reduceat(high, starts) if len(starts) else high
    return [
        SpanRead(int(file[first]), int(low[first]), int(end), pairs[first:stop])
        for first, stop, end in zip(
            starts.tolist(), bounds[1:].tolist(), highest.tolist(), strict=True
        )
    ]


def _slices(geo: Geometry, pair: int, cost: ReadCost) -> list[DirectRead]:
    low, high = int(geo.chunk_low[pair]), int(geo.chunk_high[pair])
    block = max(int(geo.block_bytes[pair]), 1)
    step = max(max(SLICE_BYTES, cost.request_bytes) // block, 1) * block
    # Why: a last slice shorter than a third of the others is joined with the one before it.
    cuts = [cut for cut in range(low // step * step + step, high, step) if high - cut > step // 3]
    return [DirectRead(pair, a, b) for a, b in pairwise([low, *cuts, high])]


def _cut_to_scratch(geo: Geometry, pair: int) -> Iterator[StridedRead]:
    """Yields slabs of a pair, cut along its outermost dimensions until each fits into scratch.

    They are disjoint, in the order of their bytes, and have at least one element each.

    Complexity:
        O(number of slabs x D); at most about twice as many slabs as necessary.
    """
    itemsize, block = int(geo.itemsize[pair]), int(geo.block_bytes[pair])
    limit = max(SCRATCH_BYTES - 2 * block, block, itemsize)
    step = strides(geo.chunk_size[pair][None])[0] * itemsize

    def cut(offset: Int64Array, size: Int64Array, dim: int, low: int) -> Iterator[StridedRead]:
        extent = int((size - 1) @ step) + itemsize
        if extent <= limit:
            yield StridedRead(pair, offset, size, low)
            return
        while size[dim] == 1:
            dim += 1
        stride, length = int(step[dim]), int(size[dim])
        inner = extent - (length - 1) * stride
        # Why: `count` rows reach over (count - 1) strides and the extent of one row.
        count = (limit - inner) // stride + 1 if inner <= limit else 1
        for start in range(0, length, count):
            part_offset, part_size = offset.copy(), size.copy()
            part_offset[dim] += start
            part_size[dim] = min(count, length - start)
            yield from cut(part_offset, part_size, dim, low + start * stride)

    offset = geo.plan.offset[pair]
    yield from cut(offset, geo.plan.size[pair], 0, int((offset - geo.chunk_offset[pair]) @ step))


class PairNumbers:
    """Columns of the pairs as lists. *Why*: indexing numpy arrays costs 10 times as much.

    Attributes:
        whole: The pair consists of all bytes of its chunk and all bytes of its target.
        simple: The pair is whole, no other pair has its chunk or target, it is verified as one
            block or not at all, and its location is known.
        likeness: Group number of an unparsed pair; pairs of a group have items of equal length with
            equal dtype and size.
        unparsed: As in `Geometry`.
        straight: The bytes are contiguous in chunk and target.
        first_check: Checksum of the first block that is read.
        block_bytes: Length of a block; 0 if nothing is verified.
        file: Index of the file.
        place: Offset of the chunk's raw bytes in the file; undefined if unparsed.
        payload_bytes: Length of the chunk's raw bytes.
        read_low: First byte to read, chunk-local.
        read_start: First byte to read, in the file.
        read_bytes: Number of bytes to read.
        chunk_start: First byte needed, in the file.
        chunk_low: First byte needed, chunk-local.
        target_low: First byte of the target that is filled.
        num_bytes: Length of the common part.
        item_low: Start of the item in the file.
        item_bytes: Length of the item.
    """

    def __init__(
        self, geo: Geometry, table: ChunkTable, lengths: Int64Array, parts: Int64Array
    ) -> None:
        chunk, row = geo.plan.chunk, geo.plan.wanted
        block = np.maximum(geo.block_bytes, 1)
        check = table.check_start[chunk] + geo.read_low // block
        last = max(len(table.checks) - 1, 0)
        checks = table.checks if len(table.checks) else np.zeros(1, np.uint64)
        straight = geo.chunk_contiguous & geo.target_contiguous
        whole = straight & (geo.num_bytes == lengths[row]) & (geo.num_bytes == geo.payload_bytes)
        alone = (parts[row] == 1) & (np.bincount(chunk, minlength=1)[chunk] == 1)
        at_once = (geo.block_bytes == 0) | (geo.payload_bytes <= geo.block_bytes)
        self.first_check: list[int] = checks[np.minimum(check, last)].tolist()
        self.block_bytes: list[int] = geo.block_bytes.tolist()
        self.file: list[int] = geo.file.tolist()
        self.place: list[int] = geo.place.tolist()
        self.payload_bytes: list[int] = geo.payload_bytes.tolist()
        self.read_low: list[int] = geo.read_low.tolist()
        self.read_start: list[int] = (geo.place + geo.read_low).tolist()
        self.read_bytes: list[int] = (geo.read_high - geo.read_low).tolist()
        self.chunk_start: list[int] = (geo.place + geo.chunk_low).tolist()
        self.chunk_low: list[int] = geo.chunk_low.tolist()
        self.target_low: list[int] = geo.target_low.tolist()
        self.num_bytes: list[int] = geo.num_bytes.tolist()
        self.unparsed: list[bool] = geo.unparsed.tolist()
        self.straight: list[bool] = straight.tolist()
        self.whole: list[bool] = whole.tolist()
        self.simple: list[bool] = (whole & alone & at_once & ~geo.unparsed).tolist()
        self.item_low: list[int] = geo.item_low.tolist()
        self.item_bytes: list[int] = (geo.item_high - geo.item_low).tolist()
        self.likeness: list[int] = _group_alike(geo, table).tolist() if geo.unparsed.any() else []


def _group_alike(geo: Geometry, table: ChunkTable) -> Int64Array:
    tensor = table.tensor[geo.plan.chunk]
    columns = [geo.item_high - geo.item_low, table.dtype[tensor], table.ndim[tensor]]
    return group_rows([*columns, *geo.chunk_size.T])[1]
