"""A read plan as jobs for threads: spans of small pairs, direct slices, strided slabs.

Pure: numbers in, numbers out. `reader` does the jobs. `PairNumbers` has the columns of the pairs as
lists, for the loops that look at every small pair: which pairs can take the shortest way is decided
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ray_dcp.core.grouping import group_rows
from ray_dcp.core.values import BoolArray, ChunkTable, Int32Array, Int64Array, volume, widen
from ray_dcp.options import Verify
from ray_dcp.planning.reads import (
    ReadPlan,
    Slab,
    Wanted,
    affordable_gap,
    block_ranges,
    byte_runs,
    coalesce,
    needed_blocks,
    slabs,
)

SPAN_BYTES = 2 << 20
"""Small pairs are read together up to this length, and taken apart while it is in the cache."""
FREE_GAP_BYTES = 2 << 10
"""A gap up to this length (a frame between two tensors) is always read through."""
MOST_GAP_BYTES = 8 << 20
"""A longer gap than this is never read through, however far the storage."""
GAP_SHARE = 0.05
"""Most bytes to read in vain in other gaps, as a share of the bytes that are needed."""
DIRECT_BYTES = 256 << 10
"""Contiguous pairs from this length on are read straight into the target."""
SLICE_BYTES = 8 << 20
"""A direct read is cut into slices of about this length, for several threads. Why not shorter: with
each slice a thread waits for Python's global lock, which another one holds while it hashes blocks
of up to 64 KiB: with 8 MiB a load from memory takes a quarter less time than with 2 MiB, one from
the page cache an eighth. Why not longer: it gains nothing more, and leaves fewer slices to share.
What a disk gives does not depend on it, as `READ_AHEAD_BYTES` are begun before they are asked
for."""
READ_AHEAD_BYTES = 64 << 20
"""How far ahead of its threads a reader has the storage read."""
AHEAD_BYTES = 8 << 20
"""Longest piece of that which is begun at once."""
SCRATCH_BYTES = 64 << 20
"""Most temporary memory of a job, for regions that are not contiguous; one that needs a longer
block takes that."""


@dataclass(frozen=True, slots=True)
class Span:
    """One read that serves several small pairs."""

    file: int
    low: int
    """First byte in the file."""
    high: int
    pairs: list[int]


@dataclass(frozen=True, slots=True)
class Direct:
    """Bytes that are contiguous in chunk and target."""

    pair: int
    low: int
    """First byte, chunk-local."""
    high: int


@dataclass(frozen=True, slots=True)
class Strided:
    """A slab that is read into scratch memory and copied element by element."""

    pair: int
    slab: Slab


Job = Span | Direct | Strided


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the bytes of every pair of a read plan are.

    Attributes:
        plan: The read plan.
        chunk_offset: int64[p, D], box of the pair's chunk.
        chunk_size: int64[p, D].
        target_offset: int64[p, D], box of the pair's target.
        target_size: int64[p, D].
        itemsize: int64[p], bytes of an element.
        file: int32[p].
        place: int64[p], where the chunk's raw bytes start in the file; meaningless if unparsed.
        block_bytes: int64[p].
        payload_bytes: int64[p], length of the chunk's raw bytes.
        num_bytes: int64[p], bytes of the common part of chunk and target.
        chunk_low: int64[p], first byte needed of the chunk, from its first raw byte.
        chunk_high: int64[p], behind the last byte needed.
        chunk_contiguous: bool[p], every byte of `[chunk_low, chunk_high)` is needed.
        target_low: int64[p], first byte filled of the target.
        target_contiguous: bool[p], all bytes from there to the last one filled are filled.
        read_low: int64[p], `chunk_low` moved down to a checksum block bound.
        read_high: int64[p], `chunk_high` moved up to a block bound or the chunk's end.
        unparsed: bool[p], the whole item must be read to know where its elements are.
        item_low: int64[p], where the item starts in the file.
        item_high: int64[p].
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
    """Returns where the bytes of every pair are.

    Args:
        table: What is stored.
        wanted: What is asked for.
        plan: `plan_reads(table, wanted)`, or some of its rows.
        place: int64[c], first raw byte of each chunk in its file; -1 where the whole item must be
            read.
        verify: With `"never"` reads are not widened to whole blocks.
    """
    width = plan.offset.shape[1]
    chunk, row = plan.chunk, plan.wanted
    chunk_box = widen(table.offset[chunk], table.size[chunk], width)
    target_box = widen(wanted.offset[row], wanted.size[row], width)
    # Why 0: reads are not widened to blocks then.
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


@dataclass(frozen=True)
class ReadCost:
    """What reading costs, of which follows what is read through and what is left out.

    Examples:
        >>> ReadCost(request_s=20e-6, bytes_per_s=3e9).gap_bytes, ReadCost(0.03, 1e8).gap_bytes
        (60000, 3000000)
    """

    request_s: float
    """What a request costs before its first byte, in seconds."""
    bytes_per_s: float
    """What one request gets."""
    request_bytes: int = 0
    """How long a request should be at least, where there is so much to read in one piece."""

    @property
    def gap_bytes(self) -> int:
        """Longest gap whose bytes take no longer than another request."""
        gap = round(self.request_s * self.bytes_per_s)
        return min(max(gap, FREE_GAP_BYTES), MOST_GAP_BYTES)


def make_jobs(geo: Geometry, num_rows: int, cost: ReadCost) -> tuple[list[Job], Int64Array]:
    """Returns the jobs, by file and place, and how many of them fill each wanted row.

    Args:
        geo: Where the bytes are.
        num_rows: Number of wanted rows.
        cost: Of a request, which says what gaps are read through.

    Returns:
        `(jobs, parts int64[num_rows])`; a pair in a span counts one part.
    """
    straight = geo.chunk_contiguous & geo.target_contiguous & ~geo.unparsed
    direct = straight & (geo.num_bytes >= DIRECT_BYTES)
    limit = min(SPAN_BYTES, SCRATCH_BYTES)
    span = geo.unparsed | (~direct & (geo.read_high - geo.read_low <= limit))
    placed: list[tuple[int, int, Job]] = []
    span_bytes = min(max(SPAN_BYTES, cost.request_bytes), SCRATCH_BYTES)
    for job in _spans(geo, np.flatnonzero(span), span_bytes, cost):
        placed.append((job.file, job.low, job))
    parts = np.bincount(geo.plan.wanted[span], minlength=num_rows)
    cut: list[Direct | Strided] = []
    for pair in np.flatnonzero(~span).tolist():
        cut += _slices(geo, pair, cost) if direct[pair] else _slabs(geo, pair)
    for piece in cut:
        low = piece.low if isinstance(piece, Direct) else piece.slab.low
        placed.append((int(geo.file[piece.pair]), int(geo.place[piece.pair]) + low, piece))
        parts[geo.plan.wanted[piece.pair]] += 1
    placed.sort(key=lambda entry: entry[:2])
    return [job for _, _, job in placed], parts


def job_reads(
    geo: Geometry, jobs: Sequence[Job], cost: ReadCost
) -> tuple[Int32Array, Int64Array, Int64Array]:
    """Returns what the jobs ask of the storage, in their order; see `Prepared.reads`.

    A read that is made in steps counts as one.

    Args:
        geo: Where the bytes are.
        jobs: What `make_jobs` returned.
        cost: As given there.
    """
    file: list[int] = []
    low: list[int] = []
    high: list[int] = []
    for job in jobs:
        if isinstance(job, Span):
            found, number = [(job.low, job.high)], job.file
        else:
            place, number = int(geo.place[job.pair]), int(geo.file[job.pair])
            ranges = (
                [_whole_blocks(geo, job)]
                if isinstance(job, Direct)
                else (slab_reads(geo, job, cost).tolist())
            )
            found = [(place + a, place + b) for a, b in ranges]
        for a, b in found:
            file.append(number)
            low.append(a)
            high.append(b)
    return np.array(file, np.int32), np.array(low, np.int64), np.array(high, np.int64)


def read_ahead(
    geo: Geometry, jobs: Sequence[Job], cost: ReadCost, begin: Callable[[int, int, int], object]
) -> Iterator[Job]:
    """Yields the jobs, and has what they will read begun before that.

    What is read with gaps is left to the storage.

    Args:
        geo: Where the bytes are.
        jobs: What `make_jobs` returned.
        cost: As given there.
        begin: Called with file, first byte and length of what is read soon, in that order.
    """
    plain = [job for job in jobs if not isinstance(job, Strided)]
    file, low, high = job_reads(geo, plain, cost)
    bounds = coalesce(file, low, high, max_gap_bytes=FREE_GAP_BYTES, max_bytes=AHEAD_BYTES)
    first = bounds[:-1]
    before = np.cumsum(high - low) - (high - low)
    ends = np.maximum.reduceat(high, first) if len(first) else high
    starts = (before[first], file[first], low[first], ends)
    ahead = zip(*(column.tolist() for column in starts), strict=True)
    places, upcoming = iter(before.tolist()), next(ahead, None)
    for job in jobs:
        place = 0 if isinstance(job, Strided) else next(places)
        while upcoming is not None and upcoming[0] < place + READ_AHEAD_BYTES:
            _, number, start, end = upcoming
            begin(number, start, end - start)
            upcoming = next(ahead, None)
        yield job


def slab_reads(geo: Geometry, job: Strided, cost: ReadCost) -> Int64Array:
    """Returns the ranges to read for a slab: int64[r, 2], chunk-local; see `block_ranges`."""
    pair = job.pair
    return block_ranges(
        geo.chunk_offset[pair],
        geo.chunk_size[pair],
        job.slab.offset,
        job.slab.size,
        int(geo.itemsize[pair]),
        block_bytes=int(geo.block_bytes[pair]),
        payload_bytes=int(geo.payload_bytes[pair]),
        max_gap_bytes=cost.gap_bytes,
    )


def _whole_blocks(geo: Geometry, job: Direct) -> tuple[int, int]:
    block = max(int(geo.block_bytes[job.pair]), 1)
    stop = min(-(-job.high // block) * block, int(geo.payload_bytes[job.pair]))
    return job.low // block * block, stop


def _spans(geo: Geometry, chosen: Int64Array, max_bytes: int, cost: ReadCost) -> list[Span]:
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
        Span(int(file[first]), int(low[first]), int(end), pairs[first:stop])
        for first, stop, end in zip(
            starts.tolist(), bounds[1:].tolist(), highest.tolist(), strict=True
        )
    ]


def _slices(geo: Geometry, pair: int, cost: ReadCost) -> list[Direct | Strided]:
    low, high = int(geo.chunk_low[pair]), int(geo.chunk_high[pair])
    block = max(int(geo.block_bytes[pair]), 1)
    step = max(max(SLICE_BYTES, cost.request_bytes) // block, 1) * block
    # Why two thirds: a last slice of a few bytes would be a request of its own.
    cuts = [cut for cut in range(low // step * step + step, high, step) if high - cut > step // 3]
    return [Direct(pair, a, b) for a, b in pairwise([low, *cuts, high])]


def _slabs(geo: Geometry, pair: int) -> list[Direct | Strided]:
    itemsize, block = int(geo.itemsize[pair]), int(geo.block_bytes[pair])
    found = slabs(
        geo.chunk_offset[pair],
        geo.chunk_size[pair],
        geo.plan.offset[pair],
        geo.plan.size[pair],
        itemsize,
        max(SCRATCH_BYTES - 2 * block, block, itemsize),
    )
    return [Strided(pair, slab) for slab in found]


class PairNumbers:
    """Columns of the pairs as lists: indexing numpy arrays costs 10 times more.

    Attributes:
        whole: All bytes of a chunk go to all bytes of a target.
        simple: And no other chunk or target needs them, they are verified at once as one block or
            not at all, and where they are is known.
        likeness: Equal for items of one length with equal tensors in them; for unparsed pairs.
        unparsed: As in `Geometry`.
        straight: The bytes are contiguous in chunk and target.
        first_check: The checksum of the first block that is read.
        block_bytes: Length of a block; 0 when nothing is to be verified.
        file: Index of the file.
        place: Where the chunk's raw bytes start in the file; meaningless if unparsed.
        payload_bytes: Length of the chunk's raw bytes.
        read_low: First byte to read, chunk-local.
        read_start: The same, in the file.
        read_bytes: How many to read.
        chunk_start: First byte needed, in the file.
        chunk_low: The same, chunk-local.
        target_low: First byte filled of the target.
        num_bytes: Bytes of the common part.
        item_low: Where the item starts in the file.
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
        self.likeness: list[int] = _likeness(geo, table).tolist() if geo.unparsed.any() else []


def _likeness(geo: Geometry, table: ChunkTable) -> Int64Array:
    tensor = table.tensor[geo.plan.chunk]
    columns = [geo.item_high - geo.item_low, table.dtype[tensor], table.ndim[tensor]]
    return group_rows([*columns, *geo.chunk_size.T])[1]
