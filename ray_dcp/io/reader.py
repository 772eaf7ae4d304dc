"""Reads planned bytes from storage into targets; every block is verified.

Large contiguous regions are read directly into the target's memory, small adjacent regions are
read together, and all others go through a bounded scratch buffer per thread. `read_jobs` plans
these jobs, `TargetFiller` executes them on several threads, and `BlockVerifier` compares each block
with the chunk table and names damaged bytes.

An item that stock DCP wrote contains the location of its raw bytes in its header only
(`format.torch_items`). Its head is therefore read first and compared with the chunk table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import block_check, first_bad_block, num_blocks
from ray_dcp.core.processes import run_tasks
from ray_dcp.core.values import ChunkTable, Int32Array, Int64Array, Kind, strides, volume
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    StorageError,
)
from ray_dcp.format import damaged
from ray_dcp.format.table import volumes
from ray_dcp.format.torch_items import (
    MAX_OBJECT_BYTES,
    NeedMoreBytes,
    NotPlainTensor,
    TensorItem,
    parse_torch_save,
    unpacked_item,
)
from ray_dcp.io.read_jobs import (
    DirectRead,
    Geometry,
    Job,
    PairNumbers,
    ReadCost,
    SpanRead,
    StridedRead,
    geometry,
    job_reads,
    make_jobs,
    read_ahead,
    slab_reads,
)
from ray_dcp.options import LoadOptions, Verify
from ray_dcp.planning.reads import ReadPlan, Wanted
from ray_dcp.store.storage import (
    LOCAL_DISK,
    KeyMissingError,
    Storage,
    read_traits_of,
    threads_for,
)

_SAMPLED = 16
"""`verify="sample"` checks every 16th block that is read of a chunk, starting with the first."""


class BlockVerifier:
    """Verifies bytes of chunks against their block checksums.

    Args:
        table: Chunk table with the checksums.
        verify: Which blocks to check.
        checkpoint_id: Path or URL, for messages.
    """

    def __init__(self, table: ChunkTable, verify: Verify, checkpoint_id: str) -> None:
        self._table = table
        self._verify = verify
        self._checkpoint_id = checkpoint_id

    def check(
        self,
        chunk: int,
        low: int,
        view: memoryview,
        anchor: int = 0,
        again: Callable[[], object] | None = None,
    ) -> int:
        """Verifies bytes that begin at a block bound and end at a block bound or the chunk's end.

        Args:
            chunk: Row of the chunk table.
            low: First byte, chunk-local.
            view: The bytes.
            anchor: First byte of the whole read, chunk-local; sampling counts from it.
            again: Fills `view` once more, in case that the bytes were altered in transit.

        Returns:
            The number of blocks that were checked.

        Raises:
            DamagedCheckpointError: A block does not match.
        """
        try:
            return self._checked(chunk, low, view, anchor)
        except DamagedCheckpointError:
            if again is None:
                raise
        again()
        return self._checked(chunk, low, view, anchor)

    def _checked(self, chunk: int, low: int, view: memoryview, anchor: int) -> int:
        table = self._table
        block_bytes = int(table.block_bytes[chunk])
        if block_bytes == 0 or self._verify == "never" or len(view) == 0:
            return 0
        first = low // block_bytes
        start = int(table.check_start[chunk]) + first
        count = num_blocks(len(view), block_bytes)
        if self._verify == "sample":
            skip = (anchor // block_bytes - first) % _SAMPLED
            sampled = range(skip, count, _SAMPLED)
            for block in sampled:
                part = view[block * block_bytes : (block + 1) * block_bytes]
                check = table.checks[start + block : start + block + 1]
                if first_bad_block(part, block_bytes, check) is not None:
                    raise self.damaged(chunk, first + block)
            return len(sampled)
        bad = first_bad_block(view, block_bytes, table.checks[start : start + count])
        if bad is not None:
            raise self.damaged(chunk, first + bad)
        return count

    def damaged(self, chunk: int, block: int) -> DamagedCheckpointError:
        """Returns the error that names the damaged bytes, their tensor and their file."""
        table = self._table
        block_bytes = int(table.block_bytes[chunk])
        length = int(table.payload_bytes[chunk])
        start = int(table.payload_offset[chunk])
        low, high = block * block_bytes, min((block + 1) * block_bytes, length)
        name, file = table.names[table.tensor[chunk]], table.files[table.file[chunk]]
        return DamagedCheckpointError(
            f"{name!r} is damaged: bytes [{start + low}, {start + high}) of {file} (bytes "
            f"[{low}, {high}) of the chunk's {length}) do not match their checksum; load an "
            f"earlier step",
            checkpoint_id=self._checkpoint_id,
            key=file,
        )


@contextmanager
def naming_tensor(table: ChunkTable, chunk: int) -> Iterator[None]:
    """Adds tensor, file and byte range of an item to an error that does not name them."""
    try:
        yield
    except CheckpointError as error:
        name, file = table.names[table.tensor[chunk]], table.files[table.file[chunk]]
        if file not in (error.key or "") and file not in error.message:
            start = int(table.item_offset[chunk])
            stop = start + int(table.item_bytes[chunk])
            error.message = f"{name!r} in bytes [{start}, {stop}) of {file}: {error.message}"
        raise


def behind(storage: Storage) -> Storage:
    """Returns the innermost storage, whose bytes do not come from other ranks."""
    while (inner := getattr(storage, "behind", None)) is not None:
        storage = inner
    return storage


def read_stored(storage: Storage, key: str, start: int, view: memoryview) -> None:
    """Fills `view` from a file that the checkpoint refers to.

    Raises:
        DamagedCheckpointError: The file is missing or too short.
        StorageError: The file can't be read.
    """
    try:
        storage.read_into(key, start, view)
    except KeyMissingError as exc:
        raise damaged(f"{key}, to which the checkpoint refers", "no such file", key=key) from exc
    except StorageError as exc:
        found = next((e.num_bytes for e in storage.list(key) if e.key == key), None)
        if found is None or found >= start + len(view):
            raise
        expected = f"bytes [{start}, {start + len(view)}) in {key}"
        raise damaged(expected, f"a file of {found} bytes: it was cut off", key=key) from exc


_HEAD_BYTES = 4096

ELEMENT_TYPES = {size: np.dtype(f"V{size}") for size in range(1, 33)} | {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
"""Element size -> numpy type used to copy elements of that size, whatever their dtype."""


def item_bytes_at_most(table: ChunkTable, chunk: int) -> int:
    """Returns the maximum length of a chunk's item after its transforms are undone.

    The limit is generous for tensors, as a subclass may contain more than its elements.
    """
    if table.kind[table.tensor[chunk]] == Kind.OBJECT:
        return MAX_OBJECT_BYTES
    return 32 * max(int(volumes(table.size[chunk : chunk + 1])[0]), 0) + (16 << 20)


def locate_item(storage: Storage, table: ChunkTable, chunk: int) -> TensorItem | None:
    """Returns the location of the tensor in a large item, from the item's head alone.

    Returns:
        None if the item is not a plain tensor, so that only `torch.load` can read it.

    Raises:
        DamagedCheckpointError: As for `parse_item`, or the file is missing or too short.
        StorageError: The file can't be read.
    """
    length = int(table.item_bytes[chunk])
    head_bytes = min(_HEAD_BYTES, length)
    while True:
        head = bytearray(head_bytes)
        key = table.files[table.file[chunk]]
        read_stored(storage, key, int(table.item_offset[chunk]), memoryview(head))
        try:
            return parse_item(table, chunk, memoryview(head))
        except NeedMoreBytes as exc:
            head_bytes = exc.num_bytes


def parse_item(table: ChunkTable, chunk: int, head: memoryview) -> TensorItem | None:
    """Returns the location of the tensor in an item, after comparing it with the chunk table.

    Returns:
        None if the item is not a plain tensor, so that only `torch.load` can read it.

    Raises:
        NeedMoreBytes: `head` is too short.
        UnsafeCheckpointError: The pickle in the item would execute code.
        DamagedCheckpointError: The item was not written by `torch.save`, or contains another
            tensor than the chunk table states.
    """
    name, file = table.names[table.tensor[chunk]], table.files[table.file[chunk]]
    try:
        item = parse_torch_save(head, int(table.item_bytes[chunk]))
    except NotPlainTensor:
        return None
    except DamagedCheckpointError as exc:
        exc.message = f"{name!r} in {file}: {exc.message}"
        raise
    tensor = table.tensor[chunk]
    size = tuple(table.size[chunk, : table.ndim[tensor]].tolist())
    dtype = table.dtypes[table.dtype[tensor]]
    if item.size != size or item.dtype != dtype:
        expected = (
            f"{name!r} as {dtype} of size {size} in {file} at byte {table.item_offset[chunk]}"
        )
        raise damaged(expected, f"{item.dtype} of size {item.size}", key=file)
    return item


_SMALL_PAIR_BYTES = 32 << 10
"""Only one thread at a time copies the pairs of a span whose average length is below this."""


class TargetSink(Protocol):
    """Receives the bytes of wanted boxes. Must be thread-safe."""

    def buffer(self, row: int) -> memoryview:
        """Returns the target of a wanted row: writable, flat, in C order.

        May be called many times for a row before `done`, and returns the same memory each time.
        """
        ...

    def done(self, row: int) -> None:
        """Called once per row, when all its bytes are in the target and verified."""
        ...


@runtime_checkable
class ManySink(TargetSink, Protocol):
    """A sink that accepts many small rows in one call, at a lower cost per row."""

    def put_many(
        self,
        rows: Sequence[int],
        source: memoryview,
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Sequence[int]:
        """Fills whole rows, with the same effect as `buffer`, a copy and `done` for each row.

        Args:
            rows: Wanted rows.
            source: Verified bytes.
            starts: Offset of each row's bytes in `source`.
            counts: Number of bytes of each row.

        Returns:
            Indices into `rows` of the rows that were not filled; the caller fills them one by one.
        """
        ...

    def drain(self) -> None:
        """Waits until all work that `done` and `put_many` have started has ended."""
        ...


class TargetFiller:
    """Executes jobs, and calls the sink's `done` when all parts of a row are filled. Thread-safe.

    Args:
        storage: Storage of the files.
        prepared: Result of `prepare_reads`.
        sink: Returns the targets.
        lengths: int64[w], number of bytes of each wanted row.
        verify: Which blocks to check.

    Attributes:
        bytes_read: Number of bytes read from the storage.
        blocks_checked: Number of blocks that were verified.
        opaque: Chunks that only `torch.load` can read, as found while reading.
    """

    def __init__(
        self,
        storage: Storage,
        prepared: Prepared,
        sink: TargetSink,
        lengths: Int64Array,
        verify: Verify,
    ) -> None:
        table, geo = prepared.table, prepared.geo
        self.bytes_read = 0
        self.blocks_checked = 0
        self.opaque: set[int] = set()
        self._storage = storage
        self._cost = prepared.cost
        self._table = table
        self._geo = geo
        self._sink = sink
        self._many = sink if isinstance(sink, ManySink) else None
        self._lengths: list[int] = lengths.tolist()
        self._parts: list[int] = prepared.parts.tolist()
        self._single = [count == 1 for count in self._parts]
        self._verifier = BlockVerifier(table, verify, storage.url)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._local = threading.local()
        self._chunk: list[int] = geo.plan.chunk.tolist()
        self._row: list[int] = geo.plan.wanted.tolist()
        self._pairs = PairNumbers(geo, table, lengths, prepared.parts)
        self._heads: dict[int, tuple[bytes, TensorItem]] = {}

    def do(self, job: Job) -> None:
        """Executes one job.

        Raises:
            DamagedCheckpointError: A block does not match, or a file is missing or too short.
            StorageError: A file can't be read.
        """
        if isinstance(job, SpanRead):
            num_bytes, blocks = self._do_span(job)
        elif isinstance(job, DirectRead):
            num_bytes, blocks = self._do_direct(job)
        else:
            num_bytes, blocks = self._do_strided(job)
        with self._lock:
            self.bytes_read += num_bytes
            self.blocks_checked += blocks

    # One method for each kind of job; each returns (bytes read, blocks checked).

    def _do_span(self, job: SpanRead) -> tuple[int, int]:
        view = self._scratch(job.high - job.low)
        self._load(job.file, job.low, view)
        # Why one thread at a time: copying small pairs holds Python's global lock nearly all the
        # time. Threads that hand it over at every pair spend more time on that than on the copies.
        with self._turn if len(view) < _SMALL_PAIR_BYTES * len(job.pairs) else nullcontext():
            return len(view), self._copy_pairs(job, view)

    def _copy_pairs(self, job: SpanRead, view: memoryview) -> int:
        """Copies the pairs of a span; returns the number of verified blocks."""
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
                target = self._sink.buffer(self._row[pair])
                target[into : into + count] = view[begin : begin + count]
            else:
                plan = self._geo.plan
                part = view[numbers.read_start[pair] - job.low :]
                base = numbers.read_low[pair]
                self._copy_box(pair, part, base, plan.offset[pair], plan.size[pair])
            self._part_done(self._row[pair])
        return blocks

    def _check_in_span(self, pair: int, view: memoryview, span_low: int) -> int:
        """Verifies the bytes of a pair in a span; returns the number of verified blocks."""
        numbers = self._pairs
        start, low = numbers.read_start[pair] - span_low, numbers.read_low[pair]
        part = view[start : start + numbers.read_bytes[pair]]
        return self._verifier.check(
            self._chunk[pair],
            low,
            part,
            low,
            self._make_retry(pair, numbers.read_start[pair], part),
        )

    def _copy_simple(self, pairs: Sequence[int], view: memoryview, span_low: int) -> int:
        """Copies the simple pairs among some pairs; returns the number of verified blocks.

        *Why in one call*: this is the path of small tensors, for which a call costs as much as the
        work in it.
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
            self._sink.buffer(rows[index])[:] = view[start : start + counts[index]]
            self._sink.done(rows[index])
        return blocks

    def _check_simple(
        self, pairs: Sequence[int], view: memoryview, starts: Sequence[int], counts: Sequence[int]
    ) -> int:
        """Verifies pairs of one block each; returns the number of verified blocks."""
        numbers, check = self._pairs, block_check
        has_check, expected = numbers.block_bytes, numbers.first_check
        found = [
            check(view[start : start + count]) if has_check[pair] else expected[pair]
            for pair, start, count in zip(pairs, starts, counts, strict=True)
        ]
        if found != [expected[pair] for pair in pairs]:
            for pair, value, start, count in zip(pairs, found, starts, counts, strict=True):
                part = view[start : start + count]
                if value != expected[pair]:
                    self._make_retry(pair, numbers.chunk_start[pair], part)()
                    if check(part) != expected[pair]:
                        raise self._verifier.damaged(self._chunk[pair], 0)
        return sum(1 for pair in pairs if has_check[pair])

    def _fill(self, pair: int, low: int, view: memoryview) -> int:
        """Reads and verifies whole blocks of a chunk, from byte `low` on; returns their number."""
        file, start = self._pairs.file[pair], self._pairs.place[pair] + low
        self._load(file, start, view)
        again = self._make_retry(pair, start, view)
        return self._verifier.check(self._chunk[pair], low, view, self._pairs.read_low[pair], again)

    def _do_direct(self, job: DirectRead) -> tuple[int, int]:
        numbers, pair = self._pairs, job.pair
        # Without checksums, any bound is a block bound.
        block, end = max(numbers.block_bytes[pair], 1), numbers.payload_bytes[pair]
        shift = numbers.target_low[pair] - numbers.chunk_low[pair]
        target = self._sink.buffer(self._row[pair])[job.low + shift : job.high + shift]
        num_bytes = blocks = 0
        for low, high in _at_block_bounds(job.low, job.high, block, end):
            part = target[low - job.low : high - job.low]
            start, stop = low // block * block, min(-(-high // block) * block, end)
            num_bytes += stop - start
            if (start, stop) == (low, high):
                blocks += self._fill(pair, low, part)
            else:
                view = self._scratch(stop - start)
                blocks += self._fill(pair, start, view)
                part[:] = view[low - start : high - start]
        self._part_done(self._row[pair])
        return num_bytes, blocks

    def _do_strided(self, job: StridedRead) -> tuple[int, int]:
        ranges = slab_reads(self._geo, job, self._cost).tolist()
        base = ranges[0][0]
        view, blocks = self._mapped(job.pair, ranges), 0
        if view is None:
            view = self._scratch(ranges[-1][1] - base)
            for low, high in ranges:
                blocks += self._fill(job.pair, low, view[low - base : high - base])
        self._copy_box(job.pair, view, base, job.offset, job.size)
        self._part_done(self._row[job.pair])
        return sum(high - low for low, high in ranges), blocks

    def _mapped(self, pair: int, ranges: Sequence[tuple[int, int]]) -> memoryview | None:
        """Returns the bytes of a slab without a copy; None if they must be read.

        *Why only without checksums*: bytes of a mapping may change after they were verified.
        """
        numbers = self._pairs
        # Why asked again: bytes may come from other ranks since the jobs were made.
        map_range = getattr(self._storage, "map_range", None) if self._cost.maps else None
        if map_range is None or numbers.block_bytes[pair] or len(ranges) > 1:
            return None
        low, high = ranges[0]
        key = self._table.files[numbers.file[pair]]
        return cast("memoryview | None", map_range(key, numbers.place[pair] + low, high - low))

    # Copying between boxes.

    def _copy_parsed(self, pair: int, view: memoryview, span_low: int) -> None:
        """Copies a pair from a whole item of stock DCP."""
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
            self._sink.buffer(row)[:] = data[begin : begin + item.payload_bytes]
            self._part_done(row)
            return
        width = geo.plan.offset.shape[1]
        itemsize, spare = int(geo.itemsize[pair]), width - len(item.size)
        # Dimensions of length 1 are appended; `parse_item` checked that the view is in the item.
        source: npt.NDArray[np.generic] = np.ndarray(
            (*item.size, *[1] * spare),
            ELEMENT_TYPES[itemsize],
            buffer=data[item.payload_offset : item.payload_offset + item.payload_bytes],
            offset=item.storage_offset * itemsize,
            strides=(*[stride * itemsize for stride in item.stride], *[itemsize] * spare),
        )
        offset, size = geo.plan.offset[pair], geo.plan.size[pair]
        low = offset - geo.chunk_offset[pair]
        self._into_target(pair, offset, size)[...] = source[_slices(low, size)]
        self._part_done(row)

    def _parsed(self, pair: int, data: memoryview) -> TensorItem | None:
        """Returns the location of the tensor in an item of stock DCP.

        Items with equal heads have equal locations, so each distinct head is parsed once.
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
        """Copies a box of a chunk; `view` holds the chunk's bytes, in C order, from `base` on."""
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
            buffer=self._sink.buffer(self._row[pair]),
        )
        return box[_slices(offset - geo.target_offset[pair], size)]

    def _part_done(self, row: int) -> None:
        if not self._single[row]:
            with self._lock:
                self._parts[row] -= 1
                if self._parts[row]:
                    return
        self._sink.done(row)

    def _make_retry(self, pair: int, start: int, view: memoryview) -> Callable[[], None]:
        """Returns a function that fills a view once more, from storage."""
        key = self._table.files[int(self._geo.file[pair])]
        return partial(read_stored, behind(self._storage), key, start, view)

    def _load(self, file: int, start: int, view: memoryview) -> None:
        read_stored(self._storage, self._table.files[file], start, view)

    def _scratch(self, num_bytes: int) -> memoryview:
        """Returns the scratch memory of this thread; its previous content is lost."""
        room: npt.NDArray[np.uint8] | None = getattr(self._local, "room", None)
        if room is None or len(room) < num_bytes:
            self._local.room = room = None  # Why: frees the old buffer before the new allocation.
            self._local.room = room = np.empty(num_bytes, np.uint8)
        return room.data[:num_bytes]


def _at_block_bounds(low: int, high: int, block: int, payload_bytes: int) -> list[tuple[int, int]]:
    """Cuts a range at block bounds into an edge, whole blocks, and an edge.

    For example, with blocks of 8 bytes:

        blocks  |.......|.......|.......|.......|
        range       [low                 high)
        parts       |===|===============|====|
    """
    inner = min(-(-low // block) * block, high)
    end = high if high == payload_bytes else max(high // block * block, inner)
    return [(a, b) for a, b in pairwise([low, inner, end, high]) if a < b]


def _slices(low: Int64Array, size: Int64Array) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(low.tolist(), size.tolist(), strict=True))


Transforms = Sequence[tuple[str, ...] | None] | None
"""Type of `ForeignMetadata.transforms`."""

WHOLE_ITEM_BYTES = 1 << 20
"""Items of stock DCP up to this length are read as a whole; of longer items, the head is read
first."""

_FAR_REQUEST_BYTES = 8 << 20
"""Minimum length of requests to a storage without page cache, where each costs a round trip."""


@dataclass(frozen=True)
class ReadStats:
    """Statistics of a read."""

    bytes_read: int
    """Number of bytes read from the storage."""
    bytes_needed: int
    """Number of bytes of all wanted boxes."""
    blocks_checked: int
    opaque: tuple[int, ...] = ()
    """Chunks that only `torch.load` can read. Their targets were not filled, and `done` was not
    called for the rows that need them. Read these chunks with `read_item`."""


def read_chunks(
    storage: Storage,
    table: ChunkTable,
    read_plan: ReadPlan,
    wanted: Wanted,
    sink: TargetSink,
    *,
    options: LoadOptions,
) -> ReadStats:
    """Fills the targets of all wanted rows.

    Rows of volume 0 are done at once. Rows that the plan lists as uncovered are filled as far as
    possible, but `done` is never called for them. After an error, the content of the targets is
    undefined.

    Args:
        storage: Storage of the files.
        table: Chunk table of the checkpoint.
        read_plan: `plan_reads(table, wanted)`.
        wanted: Wanted boxes.
        sink: Returns the targets; called from `options.num_threads` threads.
        options: Only `num_threads` and `verify` are used.

    Returns:
        The statistics, and the chunks that could not be read.

    Raises:
        DamagedCheckpointError: A block does not match its checksum, or a file is missing or too
            short. The message names the tensor, the file and the bytes.
        UnsafeCheckpointError: The pickle in an item of stock DCP would execute code.
        StorageError: A file can't be read.

    Complexity:
        O(bytes); a small tensor costs about 3 us. Memory per thread: that of its largest job, at
        most the maximum of 8 MiB, `read_jobs.SCRATCH_BYTES` and one block.
    """
    prepared = prepare_reads(storage, table, read_plan, wanted, options=options)
    return read_prepared(storage, prepared, sink, options=options)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepared read: the exact ranges and jobs. No target has been written yet."""

    table: ChunkTable
    read_plan: ReadPlan
    wanted: Wanted
    geo: Geometry
    jobs: Sequence[Job]
    parts: Int64Array
    """Number of parts that fill each wanted row."""
    opaque: frozenset[int]
    """As in `ReadStats`; reading may find more."""
    cost: ReadCost

    def reads(self) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Returns `(file, low, high)` of every range that is read from the storage."""
        return job_reads(self.geo, self.jobs, self.cost)


def prepare_reads(
    storage: Storage,
    table: ChunkTable,
    read_plan: ReadPlan,
    wanted: Wanted,
    *,
    options: LoadOptions,
) -> Prepared:
    """Plans the reads of `read_prepared`. Reads only the heads of items of stock DCP.

    Args:
        storage: Storage of the files.
        table: Chunk table of the checkpoint.
        read_plan: `plan_reads(table, wanted)`.
        wanted: Wanted boxes.
        options: Only `num_threads` and `verify` are used.

    Raises:
        CheckpointError: As `read_chunks`, for errors in the table or in the head of an item.
    """
    place, opaque = _locate(storage, table, read_plan.chunk, options.num_threads)
    usable = ~np.isin(read_plan.chunk, np.array(sorted(opaque), np.int32))
    columns: dict[str, Any] = {
        name: getattr(read_plan, name)[usable] for name in ("chunk", "wanted", "offset", "size")
    }
    geo = geometry(table, wanted, replace(read_plan, **columns), place, options.verify)
    cost = read_cost(storage, table.files)
    jobs, parts = make_jobs(geo, len(wanted), cost)
    # Why one part more: `done` must never be called for these rows.
    parts[read_plan.wanted[~usable]] += 1
    parts[np.array([row for row, _ in read_plan.uncovered], np.int64)] += 1
    return Prepared(table, read_plan, wanted, geo, jobs, parts, frozenset(opaque), cost)


def read_cost(storage: Storage, files: Sequence[str]) -> ReadCost:
    """Returns the cost of reads from a storage, by its `read_traits` and `request_bytes`.

    Args:
        storage: Storage of the files.
        files: Keys of the files that may be read.
    """
    traits = read_traits_of(storage)
    usual = 0 if traits.cached else _FAR_REQUEST_BYTES
    request_bytes = getattr(storage, "request_bytes", usual)
    # Why so few: a file that is truncated while its pages are mapped ends the process. Other
    # machines may do that on a network filesystem, and stock DCP saves over its own files.
    maps = (
        traits == LOCAL_DISK
        and getattr(storage, "map_range", None) is not None
        and all(key.endswith(".safetensors") for key in files)
    )
    return ReadCost(traits.request_s, traits.bytes_per_s, request_bytes, maps)


def read_prepared(
    storage: Storage, prepared: Prepared, sink: TargetSink, *, options: LoadOptions
) -> ReadStats:
    """Fills the targets, as `read_chunks` does.

    Jobs are started in the order of files and offsets.

    Args:
        storage: Storage of the files.
        prepared: Result of `prepare_reads`.
        sink: Returns the targets; called from `options.num_threads` threads.
        options: As for `prepare_reads`.

    Raises:
        CheckpointError: As `read_chunks`.
    """
    wanted, parts = prepared.wanted, prepared.parts
    lengths = volume(wanted.size) * wanted.itemsize
    filler = TargetFiller(storage, prepared, sink, lengths, options.verify)
    for row in np.flatnonzero((parts == 0) & (lengths == 0)).tolist():
        sink.done(row)
    jobs: Iterable[Job] = prepared.jobs
    if (begin := getattr(storage, "read_ahead", None)) is not None:
        files = prepared.table.files
        jobs = read_ahead(
            prepared.geo, prepared.jobs, prepared.cost, lambda file, *at: begin(files[file], *at)
        )
    try:
        run_tasks(jobs, filler.do, min(options.num_threads, len(prepared.jobs)))
    except BaseException:
        # Why: a copy still in progress could overwrite what the caller next puts into a target.
        if isinstance(sink, ManySink):
            sink.drain()
        raise
    return ReadStats(
        bytes_read=filler.bytes_read,
        bytes_needed=prepared.read_plan.bytes_needed,
        blocks_checked=filler.blocks_checked,
        opaque=tuple(sorted(prepared.opaque | filler.opaque)),
    )


def read_item(
    storage: Storage,
    table: ChunkTable,
    chunk: int,
    *,
    verify: Verify = "always",
    transforms: Transforms = None,
) -> bytes:
    """Returns a whole item (the output of `torch.save`) after verifying its payload.

    Args:
        storage: Storage of the files.
        table: Chunk table of the checkpoint.
        chunk: Row of the table: an object, an opaque chunk, or any other chunk.
        verify: Which blocks to check.
        transforms: `ForeignMetadata.transforms`; those of the chunk are undone.

    Raises:
        DamagedCheckpointError: A block does not match its checksum, the file is missing or too
            short, or a transform can't be undone.
        StorageError: The file can't be read.
    """
    _check_reaches(storage, table, chunk)
    data = bytearray(int(table.item_bytes[chunk]))
    view = memoryview(data)
    read_stored(storage, table.files[table.file[chunk]], int(table.item_offset[chunk]), view)
    if table.block_bytes[chunk] > 0:
        low = int(table.payload_offset[chunk] - table.item_offset[chunk])
        payload = view[low : low + int(table.payload_bytes[chunk])]
        start = int(table.payload_offset[chunk])
        key = table.files[table.file[chunk]]
        again = partial(read_stored, behind(storage), key, start, payload)
        BlockVerifier(table, verify, storage.url).check(chunk, 0, payload, again=again)
    found = None if transforms is None else transforms[chunk]
    if not found:
        return bytes(data)
    with naming_tensor(table, chunk):
        return bytes(unpacked_item(view, found, max_bytes=item_bytes_at_most(table, chunk)))


def read_items(
    storage: Storage,
    table: ChunkTable,
    chunks: Sequence[int],
    *,
    verify: Verify,
    transforms: Transforms,
) -> list[bytes]:
    """Returns the item of each chunk, as `read_item` does; reads in parallel where that pays.

    Raises:
        CheckpointError: As `read_item`.
    """
    found = [b""] * len(chunks)

    def read(index: int) -> None:
        found[index] = read_item(
            storage, table, chunks[index], verify=verify, transforms=transforms
        )

    run_tasks(range(len(chunks)), read, threads_for(storage, len(chunks)))
    return found


def _locate(
    storage: Storage, table: ChunkTable, chunks: Int32Array, num_threads: int
) -> tuple[Int64Array, set[int]]:
    """Returns the offset of each chunk's raw bytes (-1: read the whole item), and opaque chunks."""
    place = table.payload_offset.copy()
    used = np.unique(chunks)
    opaque: set[int] = set(used[table.kind[table.tensor[used]] != Kind.TENSOR].tolist())
    large = used[(place[used] < 0) & (table.item_bytes[used] > WHOLE_ITEM_BYTES)]
    todo = [chunk for chunk in large.tolist() if chunk not in opaque]

    if (begin := getattr(storage, "read_ahead", None)) is not None:
        for chunk in todo:
            begin(table.files[table.file[chunk]], int(table.item_offset[chunk]), _HEAD_BYTES)

    def locate(chunk: int) -> None:
        item = locate_item(storage, table, chunk)
        if item is None:
            opaque.add(chunk)
        elif item.is_contiguous:
            place[chunk] = table.item_offset[chunk] + item.payload_offset
        else:
            _check_reaches(storage, table, chunk)

    run_tasks(todo, locate, min(num_threads, len(todo)))
    return place, opaque


def _check_reaches(storage: Storage, table: ChunkTable, chunk: int) -> None:
    """Checks that the last byte of a long item exists, before memory is allocated for the item.

    *Why*: its length may be wrong, as a `.metadata` has no checksum.
    """
    length = int(table.item_bytes[chunk])
    if length > WHOLE_ITEM_BYTES:
        last = int(table.item_offset[chunk]) + length - 1
        read_stored(storage, table.files[table.file[chunk]], last, memoryview(bytearray(1)))
