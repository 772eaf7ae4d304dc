"""Writes part files according to a plan, and computes their checksums.

A part file consists of pieces at planned offsets, deferred items and the checksums:

    |gap|header|payload|footer| ... |gap|deferred item| ... |checksums of all blocks|
        `------ piece -------'

Small payloads are packed with their frames (header and footer) into a joined buffer. Large ones are
hashed and written slice by slice, while a slice is in the processor's cache. The bytes come from
items in memory, or from pieces that were staged (`PieceSource`). Memory that other threads may
write to is copied first. `reader` reads part files.

`pieces_of` computes frames, gaps and runs of pieces that are joined. It is pure. It returns lists,
as accessing an element of a numpy array from Python costs ten times as much.

A writer that took over from another one, or lost the answer to its commit, may find its key taken.
`same_file_is_published` then determines whether the existing file is the intended one.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ray_dcp.commit_protocol.messages import DeferredPlace, FileReceipt
from ray_dcp.core.checksums import (
    block_bytes_for,
    block_check,
    block_checks,
    digest,
    digest_bytes,
    end_checks,
    num_blocks,
)
from ray_dcp.core.values import FilePlan, Int64Array, RankPlan, group_rows
from ray_dcp.errors import CheckpointError, CheckpointExistsError, InternalError, SaveCancelledError
from ray_dcp.format.torch_items import Frame, torch_save_frame
from ray_dcp.io.threads import Stop, run_tasks
from ray_dcp.options import SaveOptions
from ray_dcp.store.storage import (
    KeyExistsError,
    PartWriter,
    PublishedFile,
    Storage,
    reuse_file,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces that are written together; a large piece is a run of its own."""

    first: int
    stop: int
    is_large: bool


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces before the deferred items, in file order; all lists are aligned.

    Attributes:
        row: Row of the rank's `Columns`.
        start: First byte of the piece in that item's bytes.
        num_bytes: Length of the raw bytes.
        block_bytes: Length of a checksum block.
        gap: Number of zero bytes before the header.
        header: Part of the frame before the raw bytes.
        footer: Part of the frame after the raw bytes.
        runs: All pieces, divided into runs.
        last_gap: Number of zero bytes after the last piece.
    """

    row: list[int]
    start: list[int]
    num_bytes: list[int]
    block_bytes: list[int]
    gap: list[int]
    header: list[bytes]
    footer: list[bytes]
    runs: list[Run]
    last_gap: int


def pieces_of(plan: FilePlan, key: str, *, small_bytes: int, pack_bytes: int) -> Pieces:
    """Returns the pieces of a file plan.

    Args:
        plan: Plan of the file.
        key: Key of the file, for messages.
        small_bytes: Maximum length of a small piece.
        pack_bytes: Approximate length of a run of small pieces.

    Raises:
        InternalError: The frames do not fit the planned offsets.
    """
    frames, frame = _frames(plan)
    header_bytes = np.array([len(one.header) for one in frames], dtype=np.int64)[frame]
    footer_bytes = np.array([len(one.footer) for one in frames], dtype=np.int64)[frame]
    item_bytes = header_bytes + plan.payload_bytes + footer_bytes
    planned_header = plan.payload_offset - plan.item_offset
    wrong = np.flatnonzero((header_bytes != planned_header) | (item_bytes != plan.item_bytes))
    if len(wrong):
        at = int(wrong[0])
        raise contradiction(
            f"an item of {plan.item_bytes[at]} bytes for row {plan.row[at]}",
            f"{header_bytes[at]} + {plan.payload_bytes[at]} + {footer_bytes[at]}",
            key,
        )
    ends = np.concatenate([[0], plan.item_offset + plan.item_bytes])
    gaps = np.concatenate([plan.item_offset, [plan.num_bytes]]) - ends
    if int(gaps.min()) < 0:
        at = int(np.argmin(gaps))
        raise contradiction(
            f"room up to byte {ends[at] + gaps[at]}", f"bytes up to {ends[at]}", key
        )
    headers, footers = [one.header for one in frames], [one.footer for one in frames]
    chosen = frame.tolist()
    return Pieces(
        row=plan.row.tolist(),
        start=plan.source_start.tolist(),
        num_bytes=plan.payload_bytes.tolist(),
        block_bytes=plan.block_bytes.tolist(),
        gap=gaps[:-1].tolist(),
        header=[headers[one] for one in chosen],
        footer=[footers[one] for one in chosen],
        runs=_runs(plan, small_bytes, pack_bytes),
        last_gap=int(gaps[-1]),
    )


def contradiction(expected: str, found: str, key: str) -> InternalError:
    """Returns the error for a plan that contradicts the items to be written."""
    return InternalError(
        f"the plan of this file expected {expected}, found {found}; please report this", key=key
    )


def _frames(plan: FilePlan) -> tuple[list[Frame], Int64Array]:
    """Returns the distinct frames, and the index of each piece's frame."""
    first, frame = group_rows([plan.dtype, plan.ndim, *plan.size.T])
    columns = (plan.dtype[first], plan.ndim[first], plan.size[first])
    distinct = zip(*(column.tolist() for column in columns), strict=True)
    return [torch_save_frame(plan.dtypes[dtype], tuple(s[:n])) for dtype, n, s in distinct], frame


def _runs(plan: FilePlan, small_bytes: int, pack_bytes: int) -> list[Run]:
    if not len(plan.row):
        return []
    large = plan.payload_bytes > small_bytes
    bucket = plan.item_offset // pack_bytes
    cut = large[1:] | large[:-1] | (bucket[1:] != bucket[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(cut) + 1])
    stops = [*firsts[1:].tolist(), len(large)]
    return [
        Run(first, stop, is_large)
        for first, stop, is_large in zip(
            firsts.tolist(), stops, large[firsts].tolist(), strict=True
        )
    ]


_READ_BYTES = 8 << 20
_READ_TIMES = 3
Checks = npt.NDArray[np.uint64]


class Region(NamedTuple):
    """A range of raw bytes in a file, with block checksums."""

    offset: int
    num_bytes: int
    block_bytes: int


def same_file_is_published(
    storage: Storage, receipt: FileReceipt, regions: Sequence[Region], checks: Checks
) -> bool:
    """Returns whether the file under a receipt's key has its length, checksums and bytes.

    Bytes that differ are read again, as they may have been altered in transit. The length does not
    come from a listing, which may be older than the file.

    Args:
        storage: Storage of the file.
        receipt: Receipt of the file that was to be published.
        regions: Ranges of the checksums, in order.
        checks: The block checksums.

    Raises:
        StorageError: The file can't be read.
    """
    tail = end_checks(0, checks)
    # Why at least one byte and one byte more: an empty range does not show where the file ends.
    low = max(0, receipt.num_bytes - max(len(tail), 1))

    def ends_so(end: bytes) -> bool:
        return len(end) == receipt.num_bytes - low and end.endswith(tail)

    if not _comes(storage, receipt.key, low, receipt.num_bytes - low + 1, ends_so):
        return False
    done = 0
    for region in regions:
        # Why: a read must be whole blocks, at least one (no block is longer than 1 MiB).
        step = max(_READ_BYTES // region.block_bytes, 1) * region.block_bytes
        for start in range(0, region.num_bytes, step):
            length = min(step, region.num_bytes - start)
            count = num_blocks(length, region.block_bytes)
            expected = checks[done : done + count]

            def is_so(data: bytes, block: int = region.block_bytes, so: Checks = expected) -> bool:
                return np.array_equal(block_checks(data, block), so)

            if not _comes(storage, receipt.key, region.offset + start, length, is_so):
                return False
            done += count
    return True


def _comes(
    storage: Storage, key: str, start: int, num_bytes: int, is_so: Callable[[bytes], bool]
) -> bool:
    """Returns whether at least one of several reads returns the expected bytes."""
    return any(is_so(storage.read(key, start, num_bytes)) for _ in range(_READ_TIMES))


BytesLike = bytes | bytearray | memoryview

_COPIED_BYTES = 4 << 20
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
        self.before_wait = _nothing
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
        return (part,) if is_safe else self._copied(part, self._place[piece])

    def num_bytes(self, piece: int) -> int:
        """See `PieceSource.num_bytes`."""
        if piece >= len(self._start):
            return len(self._deferred_item(piece)[1])
        num_bytes: int = self._num_bytes[piece]
        return num_bytes

    def written(self, end: int) -> None:
        """Does nothing: the items stay in memory."""

    def _copied(self, data: memoryview, place: int) -> Iterator[memoryview]:
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


def _nothing() -> None:
    """Default of `before_wait`."""


_PACK_BYTES = 2 << 20
"""Small payloads are joined up to this length before they are written."""
_SMALL_BYTES = 128 << 10
"""Payloads up to this length are joined with others."""
_SLICE_BYTES = 8 << 20
"""A large payload is hashed and written in slices of about this length, cut at block bounds."""
_DEFERRED_ALIGNMENT = 64


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
        source.before_wait = self.flush
        self._stop = stop
        self._pack: list[BytesLike] = []
        self._end = 0
        self._flushed = 0
        self._checks = array("Q")
        self._deferred_regions: list[Region] = []

    def write(self) -> FileReceipt:
        """Writes the whole file, and returns its receipt."""
        self._write_fixed()
        places = [self._write_deferred(index) for index in range(len(self._plan.deferred))]
        return self._finish(tuple(places))

    def _write_fixed(self) -> None:
        """Writes all planned pieces."""
        pieces = pieces_of(self._plan, self._key, small_bytes=_SMALL_BYTES, pack_bytes=_PACK_BYTES)
        for run in pieces.runs:
            if run.is_large:
                self._write_large(pieces, run.first)
            else:
                self._pack_small(pieces, run)
            if self._end - self._flushed >= _PACK_BYTES // 2:
                self.flush()
        self._append(bytes(pieces.last_gap))

    def _write_deferred(self, index: int) -> DeferredPlace:
        """Writes a deferred item at the next aligned offset, and returns its place."""
        piece = len(self._plan.row) + index
        num_bytes = self._source.num_bytes(piece)
        self._append(bytes(-self._end % _DEFERRED_ALIGNMENT))
        row = int(self._plan.deferred[index])
        place = DeferredPlace(row, self._end, num_bytes, block_bytes_for(num_bytes))
        self._deferred_regions.append(Region(self._end, num_bytes, place.block_bytes))
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
            regions = [*self._fixed_regions(), *self._deferred_regions]
            checks = np.array(self._checks, dtype=np.uint64)
            if not same_file_is_published(storage, receipt, regions, checks):
                raise CheckpointExistsError(
                    f"expected to publish {self._key} or to find the same bytes under it, but "
                    f"other bytes are there: two writers use one attempt id, or what was sent was "
                    f"altered on its way",
                    key=self._key,
                ) from exc

    def _pack_small(self, pieces: Pieces, run: Run) -> None:
        """Packs pieces with their frames.

        *Why a single loop*: this is the path of small tensors, for which a call costs as much as
        the work in it.
        """
        which = slice(run.first, run.stop)
        add, add_check = self._pack.append, self._checks.append
        for payload, num_bytes, block_bytes, gap, header, footer in zip(
            self._source.small(run.first, run.stop),
            pieces.num_bytes[which],
            pieces.block_bytes[which],
            pieces.gap[which],
            pieces.header[which],
            pieces.footer[which],
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

    def _write_large(self, pieces: Pieces, index: int) -> None:
        self._append(bytes(pieces.gap[index]))
        self._append(pieces.header[index])
        parts = self._source.parts(index)
        self._write_payload(parts, pieces.num_bytes[index], pieces.block_bytes[index])
        self._append(pieces.footer[index])

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

    def _fixed_regions(self) -> list[Region]:
        plan = self._plan
        columns = (plan.payload_offset, plan.payload_bytes, plan.block_bytes)
        return [Region(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


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


def _reused(
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
        reused = _reused(storage, file_plan, key, source, options, stop, published)
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
