"""Writes part files, with their checksums, according to a plan.

A part file consists of pieces at planned offsets, deferred items and the checksums:

    |gap|header|payload|footer| ... |gap|deferred item| ... |checksums of all blocks|
        `------ piece -------'

Small payloads are packed with their frames (header and footer) into a joined buffer. Large ones are
hashed and written slice by slice, while a slice is in the processor's cache. The bytes come from
items in memory, or from pieces that were staged (`PieceSource`). Memory that other threads may
write to is copied first. `reader` reads part files.

A writer that lost the answer to its commit finds its key taken. The existing file is accepted if it
has the same length and block checksums.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ray_dcp.commit_protocol.messages import DeferredPlace, FileReceipt
from ray_dcp.core.checksums import (
    MAX_BLOCK_BYTES,
    block_bytes_for,
    block_check,
    block_checks,
    digest,
    digest_bytes,
    end_checks,
)
from ray_dcp.core.processes import Stop, run_tasks
from ray_dcp.core.values import FilePlan, RankPlan
from ray_dcp.errors import CheckpointError, CheckpointExistsError, InternalError, SaveCancelledError
from ray_dcp.format.torch_items import frames_of
from ray_dcp.options import SaveOptions
from ray_dcp.store.storage import KeyExistsError, PartWriter, PublishedFile, Storage, reuse_file


def contradiction(expected: str, found: str, key: str) -> InternalError:
    """Returns the error for a plan that contradicts the items to be written."""
    return InternalError(
        f"the plan of this file expected {expected}, found {found}; please report this", key=key
    )


def _framed(plan: FilePlan, key: str) -> tuple[list[int], list[bytes], list[bytes]]:
    """Returns the frames of all pieces, as lists: indexing a numpy array costs ten times as much.

    Args:
        plan: Plan of the file.
        key: Key of the file, for messages.

    Returns:
        `(gaps, headers, footers)`: the number of zero bytes before each header, and at last those
        before the deferred items; the bytes before and after the raw bytes of each piece.

    Raises:
        InternalError: The frames do not fit the planned offsets.
    """
    distinct, frame = frames_of(plan.dtypes, plan.dtype, plan.ndim, plan.size)
    headers = [distinct[one].header for one in frame.tolist()]
    footers = [distinct[one].footer for one in frame.tolist()]
    header_bytes = np.fromiter(map(len, headers), np.int64)
    item_bytes = header_bytes + plan.payload_bytes + np.fromiter(map(len, footers), np.int64)
    ends = np.concatenate([[0], plan.item_offset + plan.item_bytes])
    gaps = np.concatenate([plan.item_offset, [plan.num_bytes]]) - ends
    wrong = (header_bytes != plan.payload_offset - plan.item_offset) | (gaps[:-1] < 0)
    wrong |= item_bytes != plan.item_bytes
    if wrong.any() or gaps[-1] < 0:
        raise contradiction(f"room for all pieces of {item_bytes.sum()} bytes", "others", key)
    return gaps.tolist(), headers, footers


_READ_TIMES = 3


def _is_published(storage: Storage, receipt: FileReceipt, end: bytes) -> bool:
    """Returns whether the file under a receipt's key is the one that was to be published.

    Its length and block checksums are compared. A read whose bytes differ is repeated, as they may
    have been altered in transit.

    Args:
        storage: Storage of the file.
        receipt: Receipt of the file.
        end: Last bytes of the file: all checksums.

    Raises:
        StorageError: The file can't be read.
    """
    num_bytes = max(len(end), min(1, receipt.num_bytes))
    start = receipt.num_bytes - num_bytes
    for _ in range(_READ_TIMES):
        # Why one byte more: it shows where the file ends. A listing may be older than the file.
        found = storage.read(receipt.key, start, num_bytes + 1)
        if len(found) == num_bytes and found.endswith(end):
            return True
    return False


BytesLike = bytes | bytearray | memoryview

_COPIED_BYTES = 4 * MAX_BLOCK_BYTES
"""Length of a copied part: whole checksum blocks, and short enough for the processor's cache."""


Source = Callable[[int], memoryview]
"""Row of the rank's `Columns` -> all bytes of the item in C order (uint8, one dimension)."""
Deferred = Callable[[int], BytesLike]
"""Row of the rank's `Columns` -> output of `torch.save` for the item."""


class PieceSource(Protocol):
    """Returns the bytes of one file piece by piece, in file order.

    Pieces are numbered as in the `FilePlan`, deferred items after all others.
    """

    is_held: bool
    """Set by the consumer while it only looks at the bytes: `written` has no effect then, so that
    all bytes can be requested again. A source that can't hold them all raises `NotHeldError`."""
    before_wait: Callable[[], None]
    """Called before the source waits for more bytes; set by the consumer, which then writes all
    bytes it has received. *Why*: the source may need their memory for further bytes."""

    def small(self, first: int, stop: int) -> Iterable[memoryview]:
        """Returns the bytes of consecutive pieces of at most 128 KiB, each as a whole.

        They do not change before `written` has been called with an end behind them.
        """
        ...

    def parts(self, piece: int) -> Iterable[memoryview]:
        """Returns the bytes of a piece in parts; each but the last is whole checksum blocks.

        A part does not change until the next one is requested.
        """
        ...

    def num_bytes(self, piece: int) -> int:
        """Returns the length of a piece."""
        ...

    def written(self, end: int) -> None:
        """Reports that all bytes of the file before `end` have been written."""
        ...


class NotHeldError(Exception):
    """A source has no memory for all bytes of a file at once."""


class ItemPieces:
    """Implements `PieceSource` on items in memory, which other threads may modify meanwhile.

    *Invariant*: all returned bytes are copies, unless they are read-only or held. If another thread
    changed a tensor between its checksum and its write, the checkpoint would be committed but never
    load.

    Args:
        plan: Plan of the file.
        key: Key of the file, for messages.
        source: Returns the items.
        deferred: Returns the deferred items.
    """

    def __init__(self, plan: FilePlan, key: str, source: Source, deferred: Deferred) -> None:
        self.before_wait = _do_nothing
        self.is_held = False
        self._key = key
        self._source = source
        self._deferred = deferred
        self._row = [*plan.row.tolist(), *plan.deferred.tolist()]
        self._start = plan.source_start.tolist()
        self._num_bytes = plan.payload_bytes.tolist()
        self._place = plan.payload_offset.tolist()
        self._buffer: npt.NDArray[np.uint8] | None = None
        self._item_row = -1
        self._item = memoryview(b"")
        self._data: tuple[int, memoryview] | None = None

    def small(self, first: int, stop: int) -> Iterator[memoryview]:
        """See `PieceSource.small`."""
        rows = self._row[first:stop]
        for index, item in enumerate(map(self._item_of, rows), first):
            num_bytes, start = self._num_bytes[index], self._start[index]
            whole = len(item) == num_bytes and not start
            part = item if whole else self._part_of(item, self._row[index], start, num_bytes)
            yield part if part.readonly else memoryview(bytes(part))

    def parts(self, piece: int) -> Iterable[memoryview]:
        """See `PieceSource.parts`."""
        if piece >= len(self._start):
            (_, data), self._data = self._deferred_item(piece), None
            return (data,)
        row = self._row[piece]
        part = self._part_of(self._item_of(row), row, self._start[piece], self._num_bytes[piece])
        # Why no copy of what is held: only its checksums are made, and nothing is written.
        is_safe = part.readonly or self.is_held
        return (part,) if is_safe else self._copy_parts(part, self._place[piece])

    def num_bytes(self, piece: int) -> int:
        """See `PieceSource.num_bytes`."""
        if piece >= len(self._start):
            return len(self._deferred_item(piece)[1])
        num_bytes: int = self._num_bytes[piece]
        return num_bytes

    def written(self, end: int) -> None:
        """Does nothing: the items stay in memory."""

    def _copy_parts(self, data: memoryview, place: int) -> Iterator[memoryview]:
        """Yields copies of parts of the data, one after another in the same memory.

        Args:
            data: Bytes to copy.
            place: Offset of the data in the file. A copy has the same offset in a page of memory as
                in a page of the file, so that direct I/O needs no further copy.
        """
        if self._buffer is None:
            self._buffer = np.frombuffer(mmap.mmap(-1, _COPIED_BYTES + mmap.PAGESIZE), np.uint8)
        source, first = np.frombuffer(data, np.uint8), place % mmap.PAGESIZE
        for start in range(0, len(source), _COPIED_BYTES):
            part = source[start : start + _COPIED_BYTES]
            target = self._buffer[first : first + len(part)]
            # Why not a memoryview assignment: it holds Python's global lock during the copy.
            np.copyto(target, part)
            yield target.data

    def _item_of(self, row: int) -> memoryview:
        """Returns an item's bytes; caches the last item, as its pieces are mostly consecutive."""
        if row != self._item_row:
            self._item_row, self._item = row, self._checked(self._source(row), row)
        return self._item

    def _deferred_item(self, piece: int) -> tuple[int, memoryview]:
        if self._data is None or self._data[0] != piece:
            row = self._row[piece]
            self._data = (piece, self._checked(self._deferred(row), row))
        return self._data

    def _part_of(self, item: memoryview, row: int, start: int, num_bytes: int) -> memoryview:
        part = item[start : start + num_bytes]
        if len(part) != num_bytes:
            raise contradiction(
                f"bytes [{start}, {start + num_bytes}) of row {row}",
                f"an item of {len(item)} bytes",
                self._key,
            )
        return part

    def _checked(self, data: BytesLike, row: int) -> memoryview:
        view = memoryview(data)
        if view.ndim != 1 or view.itemsize != 1 or not view.c_contiguous:
            raise contradiction(
                f"flat bytes of row {row}",
                f"{view.ndim} dimensions of {view.itemsize} bytes",
                self._key,
            )
        return view


def _do_nothing() -> None:
    """Default of `before_wait`."""


_PACK_BYTES = 2 << 20
"""Small payloads are joined up to this length before they are written."""
_SMALL_BYTES = 128 << 10
"""Payloads up to this length are joined with others."""
_SLICE_BYTES = 8 << 20
"""A large payload is hashed and written in slices of about this length, cut at block bounds."""
DEFERRED_ALIGNMENT = 64
"""What deferred items are aligned to in their file."""


class PartFile:
    """Writes one part file: tracks its end, the buffered bytes and the checksums.

    Args:
        writer: Writer of the storage.
        plan: Plan of the file.
        key: Key of the file.
        source: Returns the bytes.
        stop: Signals that the save is cancelled.
    """

    def __init__(
        self,
        writer: PartWriter,
        plan: FilePlan,
        key: str,
        source: PieceSource,
        stop: Stop,
    ) -> None:
        self._writer = writer
        self._plan = plan
        self._key = key
        self._source = source
        self._stop = stop
        self._pack: list[BytesLike] = []
        self._end = 0
        self._flushed = 0
        self._checks = array("Q")
        self._gaps: list[int] = []
        self._headers: list[bytes] = []
        self._footers: list[bytes] = []

    def write(self) -> FileReceipt:
        """Writes the whole file, and returns its receipt."""
        self._source.before_wait = self.flush
        try:
            self._write_fixed()
            places = [self._write_deferred(index) for index in range(len(self._plan.deferred))]
            return self._finish(tuple(places))
        finally:
            # Why: source and file would keep each other, and the state, until a collector comes.
            self._source.before_wait = _do_nothing

    def _write_fixed(self) -> None:
        """Writes all planned pieces: small ones joined with their neighbours, others alone."""
        plan = self._plan
        self._gaps, self._headers, self._footers = _framed(plan, self._key)
        large, pack = plan.payload_bytes > _SMALL_BYTES, plan.item_offset // _PACK_BYTES
        cuts = np.flatnonzero(large[1:] | large[:-1] | (pack[1:] != pack[:-1])) + 1
        for first, stop in pairwise([0, *cuts.tolist(), len(large)]):
            if large[first:stop].any():
                self._write_large(first)
            else:
                self._pack_small(first, stop)
            if self._end - self._flushed >= _PACK_BYTES // 2:
                self.flush()
        self._append(bytes(self._gaps[-1]))

    def _write_deferred(self, index: int) -> DeferredPlace:
        """Writes a deferred item at the next aligned offset, and returns its place."""
        piece = len(self._plan.row) + index
        num_bytes = self._source.num_bytes(piece)
        self._append(bytes(-self._end % DEFERRED_ALIGNMENT))
        row = int(self._plan.deferred[index])
        place = DeferredPlace(row, self._end, num_bytes, block_bytes_for(num_bytes))
        self._write_payload(self._source.parts(piece), num_bytes, place.block_bytes)
        return place

    def flush(self) -> None:
        """Writes the buffered bytes."""
        if self._stop.asked:
            raise SaveCancelledError(
                "writing this file was given up, because another one failed", key=self._key
            )
        if self._pack:
            # Why a special case: joining a single deferred item would copy it.
            whole = self._pack[0] if len(self._pack) == 1 else b"".join(self._pack)
            self._pack.clear()
            if len(whole):
                self._writer.write(whole)
        self._flushed = self._end
        self._source.written(self._end)

    def _finish(self, places: tuple[DeferredPlace, ...]) -> FileReceipt:
        """Writes the checksums and all buffered bytes, and returns the receipt."""
        checks = np.array(self._checks, dtype=np.uint64)
        self._append(end_checks(self._end, checks))
        self.flush()
        return FileReceipt(
            file=self._plan.file,
            key=self._key,
            num_bytes=self._end,
            digest=digest(checks),
            deferred=places,
        )

    @property
    def end(self) -> bytes:
        """The last bytes of the file: all checksums."""
        return np.array(self._checks, dtype="<u8").tobytes()

    def commit(self, storage: Storage, receipt: FileReceipt) -> None:
        """Publishes the file.

        Raises:
            CheckpointExistsError: Another file has the same key.
            StorageError: The storage failed.
        """
        try:
            self._writer.commit()
        except KeyExistsError as exc:
            if not _is_published(storage, receipt, self.end):
                raise CheckpointExistsError(
                    f"expected to publish {self._key} or to find the same bytes under it, but "
                    f"other bytes are there: two writers use one attempt id, or what was sent was "
                    f"altered on its way",
                    key=self._key,
                ) from exc

    def _pack_small(self, first: int, stop: int) -> None:
        """Packs pieces with their frames.

        *Why a single loop*: this is the path of small tensors, for which a call costs as much as
        the work in it.
        """
        which = slice(first, stop)
        add, add_check = self._pack.append, self._checks.append
        for payload, num_bytes, block_bytes, gap, header, footer in zip(
            self._source.small(first, stop),
            self._plan.payload_bytes[which].tolist(),
            self._plan.block_bytes[which].tolist(),
            self._gaps[which],
            self._headers[which],
            self._footers[which],
            strict=True,
        ):
            if 0 < num_bytes <= block_bytes:
                add_check(block_check(payload))
            else:
                self._checks.frombytes(block_checks(payload, block_bytes).tobytes())
            if gap:
                add(bytes(gap))
            add(header)
            add(payload)
            add(footer)
            self._end += gap + len(header) + num_bytes + len(footer)

    def _write_large(self, index: int) -> None:
        self._append(bytes(self._gaps[index]))
        self._append(self._headers[index])
        num_bytes, block_bytes = (
            int(column[index]) for column in (self._plan.payload_bytes, self._plan.block_bytes)
        )
        self._write_payload(self._source.parts(index), num_bytes, block_bytes)
        self._append(self._footers[index])

    def _write_payload(self, parts: Iterable[memoryview], num_bytes: int, block_bytes: int) -> None:
        if num_bytes <= _SMALL_BYTES:
            for payload in parts:
                self._checks.frombytes(block_checks(payload, block_bytes).tobytes())
                self._append(payload)
            return
        self.flush()
        end = self._end + num_bytes
        step = max(_SLICE_BYTES // block_bytes, 1) * block_bytes
        for payload in parts:
            for start in range(0, len(payload), step):
                self._write_slice(payload[start : start + step], block_bytes)
        if self._end != end:
            raise contradiction(f"a piece up to byte {end}", f"one up to {self._end}", self._key)

    def _write_slice(self, part: memoryview, block_bytes: int) -> None:
        self._checks.frombytes(block_checks(part, block_bytes).tobytes())
        self._writer.write(part)
        self._end += len(part)
        self.flush()

    def _append(self, data: BytesLike) -> None:
        self._pack.append(data)
        self._end += len(data)


Published = Mapping[bytes, tuple[PublishedFile, ...]]
"""Part files of committed checkpoints, by `file_layout`."""
NOTHING_PUBLISHED: Published = MappingProxyType({})


def file_layout(plan: FilePlan) -> bytes:
    """Returns 16 bytes that name everything in a file but the raw bytes of its tensors.

    Two files of the same layout whose block checksums are equal have equal bytes: headers and
    footers follow from dtypes and sizes, and neither attempt nor step is in the file.

    Args:
        plan: Plan of a file without deferred items.
    """
    words = repr((plan.num_bytes, plan.dtypes, plan.size.shape))
    columns = (
        plan.dtype, plan.ndim, plan.size, plan.item_offset, plan.item_bytes, plan.payload_offset,
        plan.payload_bytes, plan.block_bytes,
    )  # fmt: skip
    parts = [words.encode(), *(np.ascontiguousarray(column).tobytes() for column in columns)]
    return digest_bytes(b"".join(parts))


def _reuse_file(
    storage: Storage,
    plan: FilePlan,
    key: str,
    source: PieceSource,
    options: SaveOptions,
    stop: Stop,
    published: Published,
) -> FileReceipt | None:
    """Returns the receipt of a file that got the bytes of a published one; None if it did not."""
    found = published.get(file_layout(plan), ()) if plan.settled and published else ()
    if not found:
        return None
    source.is_held = True
    try:
        # Why all of the work of a writer: so that the checksums can't differ from its own.
        file = PartFile(_Nowhere(), plan, key, source, stop)
        receipt = file.write()
    except NotHeldError:
        return None
    finally:
        source.is_held = False
    for one in found:
        if (receipt.num_bytes, receipt.digest.hex()) == (one.num_bytes, one.digest):
            reused = reuse_file(storage, key, one, file.end, sync=options.sync_files)
            if reused is not None:
                source.written(receipt.num_bytes)
                return replace(receipt, reused=reused)
    return None


class _Nowhere:
    """A `PartWriter` that keeps nothing."""

    def write(self, data: BytesLike) -> None:
        """Does nothing."""

    def commit(self) -> None:
        """Does nothing."""

    abort = commit


_STORED_BYTES = 8 << 20
_STORED_PART_BYTES = MAX_BLOCK_BYTES
"""Whole checksum blocks; much shorter than what is read at once, so that little is read twice."""


class _OtherBytesError(Exception):
    """A stored file is not what was written."""


class _StoredPieces:
    """The pieces of a stored file (`PieceSource`), and a `PartWriter` that compares it.

    Args:
        storage: Storage of the file.
        plan: Plan of the file, without deferred items.
        source: The file.
    """

    is_held = False

    def __init__(self, storage: Storage, plan: FilePlan, source: PublishedFile) -> None:
        self.before_wait = _do_nothing
        self._storage = storage
        self._source = source
        self._start = plan.payload_offset.tolist()
        self._num_bytes = plan.payload_bytes.tolist()
        self._window, self._window_start = memoryview(b""), 0
        self._end = 0

    def small(self, first: int, stop: int) -> Iterator[memoryview]:
        """See `PieceSource.small`."""
        for start, num_bytes in zip(
            self._start[first:stop], self._num_bytes[first:stop], strict=True
        ):
            yield self._view(start, num_bytes)

    def parts(self, piece: int) -> Iterator[memoryview]:
        """See `PieceSource.parts`."""
        start, num_bytes = self._start[piece], self._num_bytes[piece]
        for low in range(0, num_bytes, _STORED_PART_BYTES):
            yield self._view(start + low, min(_STORED_PART_BYTES, num_bytes - low))

    def num_bytes(self, piece: int) -> int:
        """See `PieceSource.num_bytes`."""
        num_bytes: int = self._num_bytes[piece]
        return num_bytes

    def written(self, end: int) -> None:
        """Does nothing: there is no memory to free."""

    def write(self, data: BytesLike) -> None:
        """Compares the next bytes of the file with those that a writer writes."""
        found = self._view(self._end, len(data))
        if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(data, np.uint8)):
            raise _OtherBytesError
        self._end += len(data)

    def commit(self) -> None:
        """Does nothing."""

    abort = commit

    def _view(self, start: int, num_bytes: int) -> memoryview:
        low = start - self._window_start
        if not 0 <= low <= low + num_bytes <= len(self._window):
            length = min(max(num_bytes, _STORED_BYTES), self._source.num_bytes - start)
            self._window = memoryview(self._storage.read(self._source.key, start, length))
            self._window_start, low = start, 0
            if len(self._window) < num_bytes:
                raise _OtherBytesError
        return self._window[low : low + num_bytes]


def is_intact(
    storage: Storage, plan: FilePlan, source: PublishedFile, stop: Stop | None = None
) -> bool:
    """Returns whether a published file has the bytes that were written, to the last one.

    Payloads are compared with the checksums that the manifest covers, all else with what a writer
    of the plan writes.

    Args:
        storage: Storage of the checkpoint that has the file.
        plan: Plan of the file, without deferred items.
        source: The file.
        stop: Ends it early.

    Raises:
        StorageError: The file is gone, or can't be read.
        SaveCancelledError: `stop` was signalled.

    Complexity:
        Reads the file once, with 8 MiB of memory.
    """
    forget = getattr(storage, "forget_pages", None)
    if forget is not None:
        forget(source.key)
    stored = _StoredPieces(storage, plan, source)
    try:
        receipt = PartFile(stored, plan, source.key, stored, stop or Stop()).write()
    except _OtherBytesError:
        return False
    finally:
        if forget is not None:
            forget(source.key)
    found = (receipt.num_bytes, receipt.digest.hex())
    return found == (source.num_bytes, source.digest) and not storage.read(
        source.key, source.num_bytes, 1
    )


def part_key(plan: FilePlan, attempt: str) -> str:
    """Returns the key of a part file.

    Args:
        plan: Plan of the file.
        attempt: Id of the attempt that writes the file.
    """
    return plan.key.replace("{attempt}", attempt)


def write_part(
    storage: Storage,
    rank_plan: RankPlan,
    attempt: str,
    *,
    source: Source | None = None,
    deferred: Deferred | None = None,
    pieces: Callable[[int], PieceSource] | None = None,
    options: SaveOptions,
    published: Published = NOTHING_PUBLISHED,
) -> tuple[FileReceipt, ...]:
    """Writes all files of a rank's plan, and returns their receipts in the order of the plan.

    Args:
        storage: Storage to write to.
        rank_plan: Plan of the rank.
        attempt: Id of the attempt, part of the keys.
        source: Returns an item's bytes; called from several threads, possibly repeatedly per row.
        deferred: Returns a deferred item's bytes; called once per row, from several threads.
        pieces: Returns the bytes of a file by its position in the plan, instead of those two.
        options: Only `num_threads` and `sync_files` are used.
        published: See `write_pieces`.

    Raises:
        CheckpointError: The first error of a file. The other files are aborted and not visible,
            except those that were complete already, under keys of this attempt.
        Exception: An error of `source` or `deferred`.
    """
    if pieces is None:
        if source is None or deferred is None:
            raise InternalError("expected the bytes of items or files; please report this")
        pieces = partial(_item_pieces, rank_plan, attempt, source, deferred)
    receipts: dict[int, FileReceipt] = {}
    stop = Stop()

    def write(index: int) -> None:
        plan, bytes_of_file = rank_plan.files[index], pieces(index)
        receipts[index] = write_pieces(
            storage, plan, attempt, bytes_of_file, options=options, stop=stop, published=published
        )

    num_files = len(rank_plan.files)
    run_tasks(range(num_files), write, min(options.num_threads, num_files), stop)
    return tuple(receipts[index] for index in range(num_files))


def _item_pieces(
    rank_plan: RankPlan, attempt: str, source: Source, deferred: Deferred, index: int
) -> PieceSource:
    plan = rank_plan.files[index]
    return ItemPieces(plan, part_key(plan, attempt), source, deferred)


def write_pieces(
    storage: Storage,
    file_plan: FilePlan,
    attempt: str,
    source: PieceSource,
    *,
    options: SaveOptions,
    stop: Stop | None = None,
    published: Published = NOTHING_PUBLISHED,
) -> FileReceipt:
    """Writes and publishes one part file, and returns its receipt.

    A settled file is not written if its block checksums are those of a published file of the same
    layout, and the storage can reuse that one: then all its bytes are equal. A file of equal
    content that another writer of this attempt has published is accepted.

    Args:
        storage: Storage to write to.
        file_plan: Plan of the file.
        attempt: Id of the attempt, part of the key.
        source: Returns the bytes; may wait for them.
        options: Only `sync_files` is used: the file is durable when the call returns.
        stop: Signals that the save is cancelled.
        published: Part files of committed checkpoints, by `file_layout`.

    Raises:
        StorageError: The storage failed.
        CheckpointExistsError: The key exists with other content.
        SaveCancelledError: `stop` was signalled.
        InternalError: Plan and pieces contradict each other.
        Exception: An error of `source`.

    Complexity:
        O(bytes); a small tensor costs about 2 us.
    """
    key = part_key(file_plan, attempt)
    writer: PartWriter | None = None
    stop = stop or Stop()
    try:
        reused = _reuse_file(storage, file_plan, key, source, options, stop, published)
        if reused is not None:
            return reused
        writer = storage.open_writer(key, sync=options.sync_files)
        file = PartFile(writer, file_plan, key, source, stop)
        receipt = file.write()
        file.commit(storage, receipt)
    except BaseException as exc:
        if writer is not None:
            writer.abort()
        if isinstance(exc, CheckpointError) and exc.key is None:
            exc.key = key
        raise
    return receipt
