"""Does the jobs of a read: storage into targets, with every block verified on the way.

Which jobs there are is decided in `jobs`; who asks for them is `reader`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.checksums import block_check
from ray_dcp.format.torch_items import TensorItem
from ray_dcp.options import Verify
from ray_dcp.plan.boxes import strides
from ray_dcp.plan.values import ChunkTable, Int64Array
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.blocks import BlockVerifier, read_stored
from ray_dcp.transfer.jobs import Direct, Geometry, Job, ReadCost, Span, Strided, slab_reads
from ray_dcp.transfer.pair_numbers import PairNumbers
from ray_dcp.transfer.stock import ELEMENT_TYPES, parse_item, view_of_item

__all__ = ["Filler", "ManySink", "TargetSink"]

_VERIFY_BYTES = 2 << 20
"""Direct reads are verified in steps of about this length, while they are in the cache."""
_SMALL_PAIR_BYTES = 32 << 10
"""Spans of pairs that are shorter than this on average are taken apart by one thread at a time."""


class TargetSink(Protocol):
    """Where the bytes of wanted boxes go. Called from several threads at once."""

    def buffer(self, row: int) -> memoryview:
        """Returns the target of a wanted row: writable, flat, its C-order bytes as stored.

        May be called many times for a row, until `done`; always the same memory.
        """
        ...

    def done(self, row: int) -> None:
        """Is told once that all bytes of a row are in its target and verified."""
        ...


@runtime_checkable
class ManySink(TargetSink, Protocol):
    """A sink that takes many small rows for less than one by one."""

    def put_many(
        self,
        rows: Sequence[int],
        source: memoryview,
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Sequence[int]:
        """Fills whole rows, as `buffer`, a copy and `done` do for each.

        Args:
            rows: Which.
            source: Verified bytes.
            starts: Where those of each row begin in it.
            counts: How many each has.

        Returns:
            The places in `rows` of those that it leaves to be filled one by one.
        """
        ...


class Filler:
    """Does jobs, and tells the sink when a row has got all its parts. For several threads.

    Args:
        storage: Where the files are.
        table: What is stored.
        geo: Where the bytes of every pair are.
        sink: Gives the targets.
        lengths: Bytes of each wanted row.
        parts: How many parts fill each wanted row.
        verify: Which blocks to check.
        cost: As given to `make_jobs`.

    Attributes:
        bytes_read: Bytes asked of the storage.
        blocks_checked: How many blocks were verified.
        opaque: Chunks that turned out to be readable by `torch.load` only.
    """

    def __init__(
        self,
        storage: Storage,
        table: ChunkTable,
        geo: Geometry,
        sink: TargetSink,
        lengths: Sequence[int],
        parts: Sequence[int],
        verify: Verify,
        cost: ReadCost,
    ) -> None:
        self.bytes_read = 0
        self.blocks_checked = 0
        self.opaque: set[int] = set()
        self._storage = storage
        self._cost = cost
        self._table = table
        self._geo = geo
        self._sink = sink
        self._many = sink if isinstance(sink, ManySink) else None
        self._lengths = lengths
        self._parts = list(parts)
        self._single = [count == 1 for count in parts]
        self._verifier = BlockVerifier(table, verify, storage.url)
        # Why: a read from a store that is far away costs a round trip, however short.
        self._step_bytes = max(_VERIFY_BYTES, cost.request_bytes)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._local = threading.local()
        self._chunk: list[int] = geo.plan.chunk.tolist()
        self._row: list[int] = geo.plan.wanted.tolist()
        self._pairs = PairNumbers(geo, table, np.array(lengths, np.int64), np.array(parts))
        self._heads: dict[int, tuple[bytes, TensorItem]] = {}

    def do(self, job: Job) -> None:
        """Does one job.

        Raises:
            DamagedCheckpointError: A block does not match, or a file is gone or too short.
            StorageError: A file can't be read.
            InvalidRequestError: A target does not fit its row.
        """
        if isinstance(job, Span):
            num_bytes, blocks = self._do_span(job)
        elif isinstance(job, Direct):
            num_bytes, blocks = self._do_direct(job)
        else:
            num_bytes, blocks = self._do_strided(job)
        with self._lock:
            self.bytes_read += num_bytes
            self.blocks_checked += blocks

    # The three kinds of jobs; each returns (bytes read, blocks checked).

    def _do_span(self, job: Span) -> tuple[int, int]:
        view = self._scratch(job.high - job.low)
        self._load(job.file, job.low, view)
        # Why: what is done for a small pair holds Python's global lock, but for moments; threads
        # that take it from each other at every pair spend more time on that than on the pairs.
        with self._turn if len(view) < _SMALL_PAIR_BYTES * len(job.pairs) else nullcontext():
            return len(view), self._copy_pairs(job, view)

    def _copy_pairs(self, job: Span, view: memoryview) -> int:
        """Copies the pairs of a span; returns how many blocks were verified."""
        numbers = self._pairs
        blocks = self._copy_simple(job.pairs, view, job.low)
        verified = (-1, -1, -1)
        for pair in job.pairs:
            if numbers.simple[pair]:
                continue
            if numbers.unparsed[pair]:
                self._copy_parsed(pair, view, job.low)
                continue
            extent = (self._chunk[pair], numbers.read_start[pair], numbers.read_bytes[pair])
            if extent != verified:
                blocks += self._check_in_span(pair, view, job.low)
                verified = extent
            if numbers.straight[pair]:
                begin = numbers.chunk_start[pair] - job.low
                into, count = numbers.target_low[pair], numbers.num_bytes[pair]
                target = self._target(self._row[pair])
                target[into : into + count] = view[begin : begin + count]
            else:
                plan = self._geo.plan
                part = view[numbers.read_start[pair] - job.low :]
                base = numbers.read_low[pair]
                self._copy_box(pair, part, base, plan.offset[pair], plan.size[pair])
            self._part_done(self._row[pair])
        return blocks

    def _check_in_span(self, pair: int, view: memoryview, span_low: int) -> int:
        """Verifies what a pair needs of a span; returns how many blocks that were."""
        numbers = self._pairs
        block_bytes = numbers.block_bytes[pair]
        if block_bytes == 0:
            return 0
        start, low = numbers.read_start[pair] - span_low, numbers.read_low[pair]
        part = view[start : start + numbers.read_bytes[pair]]
        return self._verifier.check(self._chunk[pair], low, part, low)

    def _copy_simple(self, pairs: Sequence[int], view: memoryview, span_low: int) -> int:
        """Copies the simple ones among some pairs; returns how many blocks were verified.

        Why all at once: this is the path of small tensors, and a call costs as much as what it
        would do.
        """
        numbers, row_of, lengths = self._pairs, self._row, self._lengths
        simple, first = numbers.simple, numbers.chunk_start
        chosen = [pair for pair in pairs if simple[pair]]
        rows = [row_of[pair] for pair in chosen]
        counts = [lengths[row] for row in rows]
        starts = [first[pair] - span_low for pair in chosen]
        blocks = self._check_simple(chosen, view, starts, counts)
        many, left = self._many, range(len(rows))
        for index in left if many is None else many.put_many(rows, view, starts, counts):
            start = starts[index]
            self._target(rows[index])[:] = view[start : start + counts[index]]
            self._sink.done(rows[index])
        return blocks

    def _check_simple(
        self, pairs: Sequence[int], view: memoryview, starts: Sequence[int], counts: Sequence[int]
    ) -> int:
        """Verifies pairs of one block each; returns how many blocks that were."""
        numbers, check = self._pairs, block_check
        has_check, expected = numbers.block_bytes, numbers.first_check
        found = [
            check(view[start : start + count]) if has_check[pair] else expected[pair]
            for pair, start, count in zip(pairs, starts, counts, strict=True)
        ]
        if found != [expected[pair] for pair in pairs]:
            both = zip(pairs, found, strict=True)
            bad = next(pair for pair, value in both if value != expected[pair])
            raise self._verifier.damaged(self._chunk[bad], 0)
        return sum(1 for pair in pairs if has_check[pair])

    def _do_direct(self, job: Direct) -> tuple[int, int]:
        numbers, pair = self._pairs, job.pair
        block = numbers.block_bytes[pair]
        shift = numbers.target_low[pair] - numbers.chunk_low[pair]
        target = self._target(self._row[pair])[job.low + shift : job.high + shift]
        if block == 0:
            self._load(numbers.file[pair], numbers.place[pair] + job.low, target)
            self._part_done(self._row[pair])
            return len(target), 0
        num_bytes = blocks = 0
        end = numbers.payload_bytes[pair]
        for low, high in _at_block_bounds(job.low, job.high, block, end, self._step_bytes):
            part = target[low - job.low : high - job.low]
            read, checked = self._read_verified(pair, low, high, part, block)
            num_bytes += read
            blocks += checked
        self._part_done(self._row[pair])
        return num_bytes, blocks

    def _read_verified(
        self, pair: int, low: int, high: int, part: memoryview, block: int
    ) -> tuple[int, int]:
        """Fills `part` with bytes `[low, high)` of a chunk, through scratch if not whole blocks."""
        numbers = self._pairs
        start = low // block * block
        stop = min(-(-high // block) * block, numbers.payload_bytes[pair])
        whole = (start, stop) == (low, high)
        view = part if whole else self._scratch(stop - start)
        self._load(numbers.file[pair], numbers.place[pair] + start, view)
        checked = self._verifier.check(self._chunk[pair], start, view, numbers.read_low[pair])
        if not whole:
            part[:] = view[low - start : high - start]
        return len(view), checked

    def _do_strided(self, job: Strided) -> tuple[int, int]:
        geo, pair, slab = self._geo, job.pair, job.slab
        block = int(geo.block_bytes[pair])
        ranges = slab_reads(geo, job, self._cost).tolist()
        base = ranges[0][0]
        view = self._scratch(ranges[-1][1] - base)
        num_bytes = blocks = 0
        for low, high in ranges:
            part = view[low - base : high - base]
            self._load(geo.file[pair], int(geo.place[pair]) + low, part)
            anchor = int(geo.bytes.read_low[pair])
            blocks += self._verifier.check(self._chunk[pair], low, part, anchor) if block else 0
            num_bytes += len(part)
        self._copy_box(pair, view, base, slab.offset, slab.size)
        self._part_done(self._row[pair])
        return num_bytes, blocks

    # Copying between boxes.

    def _copy_parsed(self, pair: int, view: memoryview, span_low: int) -> None:
        """Copies a pair out of a whole stock item."""
        geo, numbers, chunk = self._geo, self._pairs, self._chunk[pair]
        start = numbers.item_low[pair] - span_low
        data = view[start : start + numbers.item_bytes[pair]]
        item = self._parsed(pair, data)
        if item is None:
            with self._lock:
                self.opaque.add(chunk)
            return
        row = self._row[pair]
        if numbers.whole[pair] and item.is_contiguous:
            begin = item.payload_offset
            self._target(row)[:] = data[begin : begin + item.payload_bytes]
            self._part_done(row)
            return
        width = geo.plan.offset.shape[1]
        source = view_of_item(item, data, int(geo.itemsize[pair]), width)
        offset, size = geo.plan.offset[pair], geo.plan.size[pair]
        low = offset - geo.chunk_offset[pair]
        self._into_target(pair, offset, size)[...] = source[_slices(low, size)]
        self._part_done(row)

    def _parsed(self, pair: int, data: memoryview) -> TensorItem | None:
        """Returns where the tensor of a stock item lies.

        Items of tensors that are alike begin with the same bytes, and these alone decide.
        """
        likeness = self._pairs.likeness[pair]
        known = self._heads.get(likeness)
        if known is not None and data[: len(known[0])].tobytes() == known[0]:
            return known[1]
        item = parse_item(self._table, self._chunk[pair], data)
        if item is not None:
            self._heads[likeness] = data[: item.payload_offset].tobytes(), item
        return item

    def _copy_box(
        self, pair: int, view: memoryview, base: int, offset: Int64Array, size: Int64Array
    ) -> None:
        """Copies a box out of C-order bytes of a chunk, of which `view` holds those from `base`."""
        geo = self._geo
        itemsize = int(geo.itemsize[pair])
        steps = strides(geo.chunk_size[pair][None])[0] * itemsize
        first = int((offset - geo.chunk_offset[pair]) @ steps)
        source: npt.NDArray[np.generic] = np.ndarray(
            tuple(size.tolist()),
            ELEMENT_TYPES[itemsize],
            buffer=view,
            offset=first - base,
            strides=tuple(steps.tolist()),
        )
        self._into_target(pair, offset, size)[...] = source

    def _into_target(
        self, pair: int, offset: Int64Array, size: Int64Array
    ) -> npt.NDArray[np.generic]:
        geo = self._geo
        box: npt.NDArray[np.generic] = np.ndarray(
            tuple(geo.target_size[pair].tolist()),
            ELEMENT_TYPES[int(geo.itemsize[pair])],
            buffer=self._target(self._row[pair]),
        )
        return box[_slices(offset - geo.target_offset[pair], size)]

    # What all jobs need.

    def _target(self, row: int) -> memoryview:
        target = self._sink.buffer(row)
        if len(target) != self._lengths[row] or target.readonly or target.itemsize != 1:
            raise self._misfit(row, target)
        return target

    def _misfit(self, row: int, target: memoryview) -> InvalidRequestError:
        return InvalidRequestError(
            f"the target of row {row} must be {self._lengths[row]} writable bytes, but is "
            f"{target.nbytes} {'read-only' if target.readonly else 'writable'} bytes in items "
            f"of {target.itemsize}"
        )

    def _part_done(self, row: int) -> None:
        if not self._single[row]:
            with self._lock:
                self._parts[row] -= 1
                if self._parts[row]:
                    return
        self._sink.done(row)

    def _load(self, file: int, start: int, view: memoryview) -> None:
        read_stored(self._storage, self._table.files[file], start, view)

    def _scratch(self, num_bytes: int) -> memoryview:
        """Returns this thread's scratch memory; what it held before is lost."""
        room: npt.NDArray[np.uint8] | None = getattr(self._local, "room", None)
        if room is None or len(room) < num_bytes:
            self._local.room = room = None  # Why: the old one goes before the new one comes.
            self._local.room = room = np.empty(num_bytes, np.uint8)
        return room.data[:num_bytes]


def _at_block_bounds(
    low: int, high: int, block: int, payload_bytes: int, step_bytes: int
) -> list[tuple[int, int]]:
    """Cuts a range into an edge, steps of whole blocks, and another edge."""
    inner = min(-(-low // block) * block, high)
    end = high if high == payload_bytes else max(high // block * block, inner)
    step = max(step_bytes // block, 1) * block
    cuts = [low, *range(inner, end, step), end, high]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def _slices(low: Int64Array, size: Int64Array) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(low.tolist(), size.tolist(), strict=True))
