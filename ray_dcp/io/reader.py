"""Reads planned bytes from storage into targets, and verifies every block on the way.

Large contiguous regions go straight into the target's memory; small ones that lie together are read
together; the rest goes through a bounded scratch buffer per thread. `read_jobs` decides which bytes
those are; `Filler` does the jobs on several threads; `BlockVerifier` compares each block with the
chunk table and says which bytes are damaged.

Only the header of an item that stock DCP wrote says where its raw bytes lie (`format.torch_items`).
So its head is read first, and what it says is compared with the chunk table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ray_dcp.core.checksums import block_check, first_bad_block, num_blocks
from ray_dcp.core.values import BoolArray, ChunkTable, Int32Array, Int64Array, Kind, strides, volume
from ray_dcp.errors import (
    CheckpointError,
    DamagedCheckpointError,
    StorageError,
)
from ray_dcp.format.stream_transforms import MAX_OBJECT_BYTES, unpacked_item
from ray_dcp.format.table_check import volumes
from ray_dcp.format.torch_items import NeedMoreBytes, NotPlainTensor, TensorItem, parse_torch_save
from ray_dcp.io.read_jobs import (
    Direct,
    Geometry,
    Job,
    PairNumbers,
    ReadCost,
    Span,
    Strided,
    geometry,
    job_reads,
    make_jobs,
    read_ahead,
    slab_reads,
)
from ray_dcp.io.threads import run_tasks, threads_for
from ray_dcp.options import LoadOptions, Verify
from ray_dcp.planning.reads import ReadPlan, Wanted
from ray_dcp.store.storage import KeyMissingError, Storage, read_traits_of

_SAMPLED = 16
"""`verify="sample"` checks every 16th of the blocks read of a chunk, beginning with the first."""


class BlockVerifier:
    """Checks bytes of chunks against their block checksums.

    Args:
        table: Where the checksums are.
        verify: Which blocks to check.
        checkpoint_id: For messages.
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
        """Checks bytes that begin on a block bound, and end on one or at the chunk's end.

        Args:
            chunk: Row of the chunk table.
            low: First byte, chunk-local.
            view: The bytes.
            anchor: First byte of the read that this is a part of, for sampling.
            again: Fills `view` once more: what was altered on its way comes whole then.

        Returns:
            How many blocks were checked.

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
        """Returns the error that says which bytes of which tensor and file are wrong."""
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
    """Adds to an error about an item whose it is and where it lies, if it does not say so."""
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
    """Returns the storage that others took the bytes from which this one gives, or itself."""
    while (inner := getattr(storage, "behind", None)) is not None:
        storage = inner
    return storage


def read_stored(storage: Storage, key: str, start: int, view: memoryview) -> None:
    """Fills `view` from a file that the checkpoint refers to.

    Raises:
        DamagedCheckpointError: The file is gone or too short.
        StorageError: It can't be read.
    """
    try:
        storage.read_into(key, start, view)
    except KeyMissingError as exc:
        raise DamagedCheckpointError(
            f"the checkpoint refers to {key}, but there is no such file; load an earlier step",
            checkpoint_id=storage.url,
            key=key,
        ) from exc
    except StorageError as exc:
        found = next((e.num_bytes for e in storage.list(key) if e.key == key), None)
        if found is None or found >= start + len(view):
            raise
        raise DamagedCheckpointError(
            f"expected bytes [{start}, {start + len(view)}) in {key}, but it was cut off after "
            f"{found} bytes; load an earlier step",
            checkpoint_id=storage.url,
            key=key,
        ) from exc


_HEAD_BYTES = 4096

ELEMENT_TYPES = {size: np.dtype(f"V{size}") for size in range(1, 33)} | {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
"""A numpy type that copies elements of a size, whatever they mean."""


def item_bytes_at_most(table: ChunkTable, chunk: int) -> int:
    """Returns how long the item of a chunk can be once its transforms are undone.

    Generous for tensors: a subclass may hold more than the elements that it shows.
    """
    if table.kind[table.tensor[chunk]] == Kind.OBJECT:
        return MAX_OBJECT_BYTES
    return 32 * max(int(volumes(table.size[chunk : chunk + 1])[0]), 0) + (16 << 20)


def locate_item(storage: Storage, table: ChunkTable, chunk: int) -> TensorItem | None:
    """Returns where the tensor of a large item lies, from the item's head alone.

    Returns:
        None when the item is no plain tensor: only `torch.load` can read it.

    Raises:
        DamagedCheckpointError: As for `parse_item`, or the file is gone or too short.
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
    """Returns where the tensor of an item lies, after comparing it with the chunk table.

    Returns:
        None when the item is no plain tensor: only `torch.load` can read it.

    Raises:
        NeedMoreBytes: `head` is too short.
        UnsafeCheckpointError: The item asks for code to run.
        DamagedCheckpointError: It is no item of `torch.save`, or holds another tensor.
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
        raise DamagedCheckpointError(
            f"expected {name!r} as {dtype} of size {size} in {file} at byte "
            f"{table.item_offset[chunk]}, found {item.dtype} of size {item.size}; load an earlier "
            f"step",
            key=file,
        )
    return item


def view_of_item(
    item: TensorItem, data: memoryview, itemsize: int, width: int
) -> npt.NDArray[np.generic]:
    """Returns the elements of an item's tensor as an array with `width` dimensions.

    Args:
        item: Where the tensor lies.
        data: The whole item.
        itemsize: Bytes of an element.
        width: At least the tensor's number of dimensions; more are added as 1, at the end.

    Raises:
        DamagedCheckpointError: The view reaches out of the item.
    """
    spare = width - len(item.size)
    payload = data[item.payload_offset : item.payload_offset + item.payload_bytes]
    try:
        return np.ndarray(
            (*item.size, *[1] * spare),
            ELEMENT_TYPES[itemsize],
            buffer=payload,
            offset=item.storage_offset * itemsize,
            strides=(*[stride * itemsize for stride in item.stride], *[itemsize] * spare),
        )
    except (ValueError, TypeError) as exc:
        raise DamagedCheckpointError(
            f"expected a tensor within its {item.payload_bytes} bytes, found one of size "
            f"{item.size}, stride {item.stride} from element {item.storage_offset}; load an "
            f"earlier step"
        ) from exc


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

    def drain(self) -> None:
        """Returns when nothing is under way any more that `done` or `put_many` began."""
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
        """Verifies what a pair needs of a span; returns how many blocks that were."""
        numbers = self._pairs
        block_bytes = numbers.block_bytes[pair]
        if block_bytes == 0:
            return 0
        start, low = numbers.read_start[pair] - span_low, numbers.read_low[pair]
        part = view[start : start + numbers.read_bytes[pair]]
        return self._verifier.check(
            self._chunk[pair], low, part, low, self._again(pair, numbers.read_start[pair], part)
        )

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
            self._sink.buffer(rows[index])[:] = view[start : start + counts[index]]
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
            for pair, value, start, count in zip(pairs, found, starts, counts, strict=True):
                part = view[start : start + count]
                if value != expected[pair]:
                    self._again(pair, numbers.chunk_start[pair], part)()
                    if check(part) != expected[pair]:
                        raise self._verifier.damaged(self._chunk[pair], 0)
        return sum(1 for pair in pairs if has_check[pair])

    def _do_direct(self, job: Direct) -> tuple[int, int]:
        numbers, pair = self._pairs, job.pair
        block = numbers.block_bytes[pair]
        shift = numbers.target_low[pair] - numbers.chunk_low[pair]
        target = self._sink.buffer(self._row[pair])[job.low + shift : job.high + shift]
        if block == 0:
            self._load(numbers.file[pair], numbers.place[pair] + job.low, target)
            self._part_done(self._row[pair])
            return len(target), 0
        num_bytes = blocks = 0
        end = numbers.payload_bytes[pair]
        for low, high in _at_block_bounds(job.low, job.high, block, end):
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
        again = self._again(pair, numbers.place[pair] + start, view)
        checked = self._verifier.check(
            self._chunk[pair], start, view, numbers.read_low[pair], again
        )
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
            anchor = int(geo.read_low[pair])
            again = self._again(pair, int(geo.place[pair]) + low, part)
            chunk = self._chunk[pair]
            blocks += self._verifier.check(chunk, low, part, anchor, again) if block else 0
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
            self._sink.buffer(row)[:] = data[begin : begin + item.payload_bytes]
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

    def _again(self, pair: int, start: int, view: memoryview) -> Callable[[], None]:
        """Returns what fills a view with bytes of a file once more."""
        key = self._table.files[int(self._geo.file[pair])]
        return partial(read_stored, behind(self._storage), key, start, view)

    def _load(self, file: int, start: int, view: memoryview) -> None:
        read_stored(self._storage, self._table.files[file], start, view)

    def _scratch(self, num_bytes: int) -> memoryview:
        """Returns this thread's scratch memory; what it held before is lost."""
        room: npt.NDArray[np.uint8] | None = getattr(self._local, "room", None)
        if room is None or len(room) < num_bytes:
            self._local.room = room = None  # Why: the old one goes before the new one comes.
            self._local.room = room = np.empty(num_bytes, np.uint8)
        return room.data[:num_bytes]


def _at_block_bounds(low: int, high: int, block: int, payload_bytes: int) -> list[tuple[int, int]]:
    """Cuts a range into an edge, whole blocks, and another edge."""
    inner = min(-(-low // block) * block, high)
    end = high if high == payload_bytes else max(high // block * block, inner)
    return [(a, b) for a, b in pairwise([low, inner, end, high]) if a < b]


def _slices(low: Int64Array, size: Int64Array) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(low.tolist(), size.tolist(), strict=True))


Transforms = Sequence[tuple[str, ...] | None] | None
"""`ForeignMetadata.transforms`."""

_WHOLE_ITEM_BYTES = 1 << 20
"""Stock items up to this length are read whole at once; of longer ones first the head."""

_FAR_REQUEST_BYTES = 8 << 20
"""Length that requests have at least where each of them takes a round trip."""


@dataclass(frozen=True)
class ReadStats:
    """What a read did."""

    bytes_read: int
    """Bytes asked of the storage."""
    bytes_needed: int
    """Bytes of all wanted boxes."""
    blocks_checked: int
    opaque: tuple[int, ...] = ()
    """Chunks that only `torch.load` understands. Nothing was written for them, and `done` was not
    called for the rows that need them: read them with `read_item`."""


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

    Rows of volume 0 are done at once. Rows that the plan names as uncovered are filled as far as
    they can be, and never done. After an error the targets hold rubbish.

    Args:
        storage: Where the files are.
        table: What is stored.
        read_plan: `plan_reads(table, wanted)`.
        wanted: What is asked for.
        sink: Gives the targets; used from `options.num_threads` threads.
        options: `num_threads` and `verify` count.

    Returns:
        How much was read and checked, and which chunks could not be read here.

    Raises:
        DamagedCheckpointError: A block does not match its checksum, or a file is gone or too
            short; names the tensor, the file and the bytes.
        UnsafeCheckpointError: A stock item asks for code to run.
        StorageError: A file can't be read.

    Complexity:
        O(bytes); a small tensor costs about 3 us. Memory: per thread the greatest of 8 MiB,
        `read_jobs.SCRATCH_BYTES` and one block, and no more than what one job needs.
    """
    prepared = prepare_reads(storage, table, read_plan, wanted, options=options)
    return read_prepared(storage, prepared, sink, options=options)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is to be read, to the byte, before anything of a target is touched."""

    table: ChunkTable
    read_plan: ReadPlan
    wanted: Wanted
    geo: Geometry
    jobs: Sequence[Job]
    parts: Int64Array
    """How many jobs fill each wanted row."""
    opaque: frozenset[int]
    """As in `ReadStats`; more may turn out to be when they are read."""
    cost: ReadCost

    def reads(self) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Returns `(file, low, high)` of every range that is asked of the storage."""
        return job_reads(self.geo, self.jobs, self.cost)


def prepare_reads(
    storage: Storage,
    table: ChunkTable,
    read_plan: ReadPlan,
    wanted: Wanted,
    *,
    options: LoadOptions,
) -> Prepared:
    """Decides what `read_prepared` reads; asks the storage only for the heads of stock items.

    Args:
        storage: Where the files are.
        table: What is stored.
        read_plan: `plan_reads(table, wanted)`.
        wanted: What is asked for.
        options: `num_threads` and `verify` count.

    Raises:
        CheckpointError: As `read_chunks`, for what the table or the head of an item shows.
    """
    place, opaque = _locate(storage, table, read_plan.chunk, options.num_threads)
    usable = ~np.isin(read_plan.chunk, np.array(sorted(opaque), np.int32))
    geo = geometry(table, wanted, _rows_of(read_plan, usable), place, options.verify)
    cost = read_cost(storage)
    jobs, parts = make_jobs(geo, len(wanted), cost)
    # One part too many: these rows are never done.
    parts[read_plan.wanted[~usable]] += 1
    parts[np.array([row for row, _ in read_plan.uncovered], np.int64)] += 1
    return Prepared(table, read_plan, wanted, geo, jobs, parts, frozenset(opaque), cost)


def read_cost(storage: Storage) -> ReadCost:
    """Returns what reads of a storage cost, by its kind and what it says of itself."""
    traits = read_traits_of(storage)
    usual = 0 if traits.cached else _FAR_REQUEST_BYTES
    return ReadCost(traits.request_s, traits.bytes_per_s, getattr(storage, "request_bytes", usual))


def read_prepared(
    storage: Storage, prepared: Prepared, sink: TargetSink, *, options: LoadOptions
) -> ReadStats:
    """Fills the targets, as `read_chunks` does.

    Jobs are begun in the order of files and of places in them.

    Args:
        storage: Where the files are.
        prepared: What `prepare_reads` returned.
        sink: Gives the targets; used from `options.num_threads` threads.
        options: As given to `prepare_reads`.

    Raises:
        CheckpointError: As `read_chunks`.
    """
    wanted, parts = prepared.wanted, prepared.parts
    lengths = volume(wanted.size) * wanted.itemsize
    filler = Filler(
        storage,
        prepared.table,
        prepared.geo,
        sink,
        lengths.tolist(),
        parts.tolist(),
        options.verify,
        prepared.cost,
    )
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
        # Why: a copy that goes on could come after what its user does with the targets next.
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
    """Returns a whole item (what `torch.save` wrote) after verifying its payload.

    Args:
        storage: Where the files are.
        table: What is stored.
        chunk: Row of the table: an object, an opaque chunk, or any other.
        verify: Which blocks to check.
        transforms: `ForeignMetadata.transforms`; those of the chunk are undone.

    Raises:
        DamagedCheckpointError: A block does not match its checksum, the file is gone or short, or
            a transform can't be undone.
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
    """Returns what `read_item` does for each chunk; several are read at a time where that pays.

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
    """Returns where raw bytes start (int64[c], -1: read the whole item), and opaque chunks."""
    place = table.payload_offset.copy()
    used = np.unique(chunks)
    opaque: set[int] = set(used[table.kind[table.tensor[used]] != Kind.TENSOR].tolist())
    large = used[(place[used] < 0) & (table.item_bytes[used] > _WHOLE_ITEM_BYTES)]
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
    """Checks that a long item is there to its last byte, before memory is taken for it.

    Why: how long it is said to be may be a lie, in a `.metadata` without checksums.
    """
    length = int(table.item_bytes[chunk])
    if length > _WHOLE_ITEM_BYTES:
        last = int(table.item_offset[chunk]) + length - 1
        read_stored(storage, table.files[table.file[chunk]], last, memoryview(bytearray(1)))


def _rows_of(plan: ReadPlan, chosen: BoolArray) -> ReadPlan:
    if chosen.all():
        return plan
    return ReadPlan(
        chunk=plan.chunk[chosen],
        wanted=plan.wanted[chosen],
        offset=plan.offset[chosen],
        size=plan.size[chosen],
        uncovered=plan.uncovered,
        bytes_needed=plan.bytes_needed,
    )
