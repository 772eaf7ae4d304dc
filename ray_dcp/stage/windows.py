"""Windows of staged bytes: where a rank's bytes lie in them, and how they are filled.

The layout is pure, and the same on both sides: rank and stager derive it from the plan, nothing is
sent. Windows are filled on several threads. *Why*: one gets half of the memory bandwidth of a small
machine, and a tenth of a large one's. *Why* the threads stay for the next copy: to start them takes
as long as to copy a window.

Bytes that are not in host memory are copied by a `Filler` of their source: on a side stream, into
memory that is registered with the device's driver.

The index of the memory tier (`TierEntry`) says what a node has in memory of a checkpoint. A file's
bytes are found by their place in the file, so that a load reads them as it would read the file, and
verifies them by the same checksums. Frames and padding are not in it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from ray_dcp.core.checksums import MAX_BLOCK_BYTES, block_bytes_for_many
from ray_dcp.core.processes import wait_all
from ray_dcp.core.values import FilePlan, Int32Array, Int64Array, RankPlan
from ray_dcp.errors import InternalError
from ray_dcp.io.writer import DEFERRED_ALIGNMENT, Source
from ray_dcp.stage.orders import StagedWindow, StageKey

_PAGE = 4096
_LARGE_BYTES = 64 << 10
"""From this length on, a piece has the same place in a page as in its file: for direct I/O."""
_LEAST_PART_BYTES = MAX_BLOCK_BYTES
"""A piece is cut only where at least so much of it still goes into the window."""


@dataclass(frozen=True, eq=False)
class StagingLayout:
    """All staged bytes of one rank, segment by segment, in file order.

    A segment is a run of bytes of one piece in one window. Pieces are those of the `FilePlan`,
    then its deferred items. A piece has no segment when it is empty, and several when it is cut
    at the end of a window; each but the last is a whole number of its checksum blocks.

    Attributes:
        file: int32[s], position in `RankPlan.files`.
        piece: int32[s], number of the piece in its file.
        row: int32[s], row of the rank's `Columns`.
        is_deferred: bool[s].
        start: int64[s], first byte of the segment in the piece.
        source_start: int64[s], first byte of the segment in the item's bytes.
        num_bytes: int64[s], at least 1.
        window: int32[s], ascending.
        offset: int64[s], first byte of the segment in its window.
        file_end: int64[s], where its last byte ends in the file.
        window_first: int64[w + 1], where each window's segments start.
        file_first: int64[f + 1], where each file's segments start.
        used_bytes: int64[w], from each window's start to the end of its last segment.
    """

    file: Int32Array
    piece: Int32Array
    row: Int32Array
    is_deferred: np.ndarray
    start: Int64Array
    source_start: Int64Array
    num_bytes: Int64Array
    window: Int32Array
    offset: Int64Array
    file_end: Int64Array
    window_first: Int64Array
    file_first: Int64Array
    used_bytes: Int64Array

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return len(self.used_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all segments."""
        return int(self.num_bytes.sum())

    def files_of(self, window: int) -> frozenset[int]:
        """Returns the files that have bytes in a window."""
        low, high = self.window_first[window : window + 2].tolist()
        return frozenset(self.file[low:high].tolist())


def lay_out_windows(
    plan: RankPlan, deferred_bytes: Sequence[Sequence[int]], window_bytes: int
) -> StagingLayout:
    """Returns where every byte of a rank's plan lies while it is staged.

    Small pieces follow each other without a gap. Large ones start where they will start in a
    page of their file, so that they can be written from where they are, past the page cache.

    Args:
        plan: What the rank writes.
        deferred_bytes: For each file the lengths of its deferred items.
        window_bytes: Length of a window: pages, at least 2 MiB.

    Raises:
        InternalError: The lengths do not fit the plan.

    Complexity:
        O(pieces) in numpy, and a few steps of Python for each window.
    """
    lines = [
        _pieces(index, file, lengths)
        for index, (file, lengths) in enumerate(zip(plan.files, deferred_bytes, strict=True))
    ]
    columns = [np.concatenate(parts) for parts in zip(*lines, strict=True)] or [_NONE] * 7
    file, piece, row, source, num_bytes, place, block = columns
    full = num_bytes > 0
    file, piece, row, source = file[full], piece[full], row[full], source[full]
    num_bytes, place, block = num_bytes[full], place[full], block[full]
    num_fixed = np.array([len(one.row) for one in plan.files] or [0], dtype=np.int64)
    at, start, length, window, offset = _cut_into_windows(
        _line(num_bytes, place), num_bytes, block, window_bytes
    )
    num_windows = int(window[-1]) + 1 if len(window) else 0
    window_first = np.searchsorted(window, np.arange(num_windows + 1))
    ends = offset + length
    return StagingLayout(
        file=file[at].astype(np.int32),
        piece=piece[at].astype(np.int32),
        row=row[at].astype(np.int32),
        is_deferred=piece[at] >= num_fixed[file[at]],
        start=start,
        source_start=source[at] + start,
        num_bytes=length,
        window=window.astype(np.int32),
        offset=offset,
        file_end=place[at] + start + length,
        window_first=window_first.astype(np.int64),
        file_first=np.searchsorted(file[at], np.arange(len(plan.files) + 1)).astype(np.int64),
        used_bytes=ends[window_first[1:] - 1] if num_windows else _NONE,
    )


_NONE = np.zeros(0, dtype=np.int64)


def _pieces(index: int, file: FilePlan, deferred_bytes: Sequence[int]) -> tuple[Int64Array, ...]:
    """Returns (file, piece, row, source start, length, place in the file, block) of each piece."""
    if len(deferred_bytes) != len(file.deferred):
        raise InternalError(
            f"expected lengths of {len(file.deferred)} deferred items, found "
            f"{len(deferred_bytes)}; please report this",
            key=file.key,
        )
    lengths = np.array(deferred_bytes, dtype=np.int64)
    step = -(-lengths // DEFERRED_ALIGNMENT) * DEFERRED_ALIGNMENT
    first = -(-file.num_bytes // DEFERRED_ALIGNMENT) * DEFERRED_ALIGNMENT
    count = len(file.row) + len(lengths)
    return (
        np.full(count, index, dtype=np.int64),
        np.arange(count, dtype=np.int64),
        np.concatenate([file.row, file.deferred]).astype(np.int64),
        np.concatenate([file.source_start, np.zeros_like(lengths)]),
        np.concatenate([file.payload_bytes, lengths]),
        np.concatenate([file.payload_offset, first + np.cumsum(step) - step]),
        np.concatenate([file.block_bytes, block_bytes_for_many(lengths)]),
    )


def _line(num_bytes: Int64Array, place: Int64Array) -> Int64Array:
    """Returns where each piece starts when all lie in one line, large ones as in their page.

        file    |page.....|page.....|page.....|        `*` is a large piece: it starts at the same
                    ****************                   place in a page in both
        line    |page.....|page.....|page.....|
                ab..****************c                  `..` is the gap before it

    What a large piece needs before it depends only on the large one before it: the gaps add up.
    """
    end = np.cumsum(num_bytes)
    large = np.flatnonzero(num_bytes >= _LARGE_BYTES)
    gap = np.zeros_like(num_bytes)
    if len(large):
        # Where the byte before each large piece ends, in a page, if the one before it is right.
        phase = np.concatenate([[0], place[large[:-1]] + num_bytes[large[:-1]]])
        since = np.diff(end[large] - num_bytes[large], prepend=0)
        since[1:] -= num_bytes[large[:-1]]
        gap[large] = (place[large] - phase - since) % _PAGE
    line: Int64Array = end - num_bytes + np.cumsum(gap)
    return line


def _cut_into_windows(
    line: Int64Array,
    num_bytes: Int64Array,
    block: Int64Array,
    window_bytes: int,
) -> tuple[Int64Array, ...]:
    """Cuts the line into windows; returns (piece, start, length, window, offset) of segments."""
    ends = line + num_bytes
    found: list[tuple[Int64Array, ...]] = []
    piece, inside, window = 0, 0, 0
    while piece < len(line):
        base = (int(line[piece]) + inside) // _PAGE * _PAGE
        stop = int(np.searchsorted(ends, base + window_bytes, side="right"))
        at = np.arange(piece, stop)
        start, length = np.zeros_like(at), num_bytes[piece:stop].copy()
        if stop > piece:
            start[0] = inside
            length[0] -= inside
            inside = 0
        if stop < len(line):
            room = base + window_bytes - int(line[stop]) - inside
            whole = int(np.lcm(block[stop], _PAGE))
            part = room // whole * whole
            if part >= (_LEAST_PART_BYTES if stop > piece else 1):
                at, start = np.append(at, stop), np.append(start, inside)
                length = np.append(length, part)
                inside += part
        if not len(at):
            raise InternalError(
                f"expected a checksum block of {block[stop]} bytes to fit into a window of "
                f"{window_bytes}, but it does not; please report this"
            )
        found.append((at, start, length, np.full(len(at), window), line[at] + start - base))
        piece, window = stop, window + 1
    if not found:
        return (_NONE,) * 5
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


# --- Filling windows ------------------------------------------------------------------------------


_SLICE_BYTES = 4 << 20
"""Longer memory is cut for the threads."""
_MOST_THREADS = 4

Pair = tuple[np.ndarray, np.ndarray]


def _new_helpers() -> ThreadPoolExecutor:
    """Returns threads that copy; none is started before it is used."""
    return ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix="ray_dcp copies")


_helpers = _new_helpers()


def _begin_anew() -> None:
    """Begins anew in a child that was forked: the threads are not here."""
    global _helpers
    _helpers = _new_helpers()


os.register_at_fork(after_in_child=_begin_anew)


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copies memory; returns when everything is in its place.

    The caller's thread takes part, and does all where no other gets a processor.

    Args:
        pairs: Where to and where from, each uint8[n] of one length.

    Raises:
        ValueError: Two lengths differ; nothing, some or all of the others is copied.

    Examples:
        >>> into = np.zeros(3, np.uint8)
        >>> copy_all([(into, np.arange(3, dtype=np.uint8))])
        >>> into
        array([0, 1, 2], dtype=uint8)
    """
    left = deque(
        (target[low : low + _SLICE_BYTES], found[low : low + _SLICE_BYTES])
        for target, found in pairs
        for low in range(0, max(len(target), len(found)), _SLICE_BYTES)
    )

    def work() -> None:
        try:
            while True:
                # Why numpy: unlike an assignment to a memoryview it lets other threads run.
                np.copyto(*left.popleft())
        except IndexError:
            return
        except BaseException:
            # Why: the caller may have been interrupted, and use the memory for something else.
            left.clear()
            raise

    helpers: list[Future[None]] = []
    # Suppressed: the interpreter ends, and starts no threads any more.
    with suppress(RuntimeError):
        for _ in range(min(copying_threads(), len(left)) - 1):
            helpers.append(_helpers.submit(work))
    try:
        work()
    finally:
        working = [one for one in helpers if not one.cancel()]
        wait_all(working)
    for one in working:
        one.result()


def copying_threads() -> int:
    """Returns how many threads copy at a time: as many as have a processor, up to four."""
    asked = getattr(os, "sched_getaffinity", None)
    return min(_MOST_THREADS, len(asked(0)) if asked is not None else os.cpu_count() or 1)


_SMALL_BYTES = 64 << 10
_MOST_JOINED = 4096
"""Small items that are asked for at once."""
_MOST_BEGUN_BYTES = 64 << 20
_VIEW_BYTES = MAX_BLOCK_BYTES
"""Large items are cut to buffers of this length, a multiple of every checksum block. Ray copies
longer ones on threads that it starts for each: that takes twice as long, and as much CPU."""


Pin = Callable[[np.ndarray], Callable[[], None] | None]
"""Registers memory with a device's driver; returns what undoes it, None where it could not."""


class Filler(Protocol):
    """Copies the bytes of items. Called by one thread, in the order of the layout."""

    @property
    def pin(self) -> Pin | None:
        """What makes copies into memory faster that is used again and again; None: no need."""
        ...

    def fill(self, row: int, start: int, target: np.ndarray) -> None:
        """Begins to copy an item's bytes from `start` on into `target` (uint8[n])."""
        ...

    def fill_many(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], target: np.ndarray
    ) -> None:
        """Begins to copy parts of small items, one behind the other: mostly whole items."""
        ...

    def finish(self) -> None:
        """Returns when everything that was begun is in its place."""
        ...


@runtime_checkable
class DeviceSource(Protocol):
    """A source some of whose bytes may be on a device."""

    def filler(self, host: Filler, /) -> Filler | None:
        """Returns what copies them from there; None when all are in host memory.

        Args:
            host: Copies those in host memory.
        """
        ...


def filler_of(source: Source) -> Filler:
    """Returns what copies from a source, wherever its bytes are."""
    host: Filler = HostFiller(source)
    asked: object = source
    return (asked.filler(host) if isinstance(asked, DeviceSource) else None) or host


class HostFiller:
    """Copies from memory of this process, large items on several threads: see `copying`.

    Args:
        source: As for `ray_dcp.io.writer.write_part`; called by one thread.
    """

    pin: Pin | None = None

    def __init__(self, source: Source) -> None:
        self._source = source
        self._row = -1
        self._item = memoryview(b"")
        self._begun: list[tuple[np.ndarray, np.ndarray]] = []
        self._begun_bytes = 0

    def fill(self, row: int, start: int, target: np.ndarray) -> None:
        """See `Filler.fill`."""
        self._begun.append((target, self.view(row, start, len(target))))
        self._begun_bytes += len(target)
        # Why: tensors that are not contiguous are there a second time until they are copied.
        if self._begun_bytes >= _MOST_BEGUN_BYTES:
            self.finish()

    def view(self, row: int, start: int, num_bytes: int) -> np.ndarray:
        """Returns an item's bytes from `start` on (uint8[num_bytes]), where they are."""
        if row != self._row:
            # Why kept: a tensor that is not contiguous is copied each time it is asked for.
            self._row, self._item = row, self._source(row)
        part = self._item[start : start + num_bytes]
        if len(part) != num_bytes:
            raise InternalError(
                f"expected bytes [{start}, {start + num_bytes}) of row {row}, found an item of "
                f"{len(self._item)} bytes; please report this"
            )
        return np.frombuffer(part, dtype=np.uint8)

    def fill_many(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], target: np.ndarray
    ) -> None:
        """See `Filler.fill_many`."""
        items = [self._source(row) for row in rows]
        joined = b"".join(items)
        # Whole items, if the lengths agree: none is shorter than the part that is wanted of it.
        if len(joined) != len(target) or any(starts):
            cuts = zip(items, starts, lengths, strict=True)
            joined = b"".join(item[start : start + length] for item, start, length in cuts)
        if len(joined) != len(target):
            raise InternalError(
                f"expected {len(target)} bytes in {len(rows)} items, found {len(joined)}; please "
                f"report this"
            )
        np.copyto(target, np.frombuffer(joined, dtype=np.uint8))

    def finish(self) -> None:
        """See `Filler.finish`."""
        begun, self._begun, self._begun_bytes = self._begun, [], 0
        copy_all(begun)


def fill_window(
    layout: StagingLayout,
    window: int,
    target: np.ndarray,
    filler: Filler,
    deferred: Callable[[int], bytes],
) -> None:
    """Fills one window; returns when all its bytes are there. Nothing is under way after an error.

    Args:
        layout: Where they go.
        window: Which one.
        target: uint8[window bytes].
        filler: Copies the fixed items.
        deferred: Gives a deferred item's bytes.
    """
    low, high = layout.window_first[window : window + 2].tolist()
    own = slice(low, high)
    row, offset = layout.row[own].tolist(), layout.offset[own].tolist()
    length, start = layout.num_bytes[own].tolist(), layout.source_start[own].tolist()
    first = 0
    with _finished(filler):
        for stop in _run_ends(layout, own):
            begin, end = offset[first], offset[stop - 1] + length[stop - 1]
            if stop - first > 1:
                run = slice(first, stop)
                filler.fill_many(row[run], start[run], length[run], target[begin:end])
            elif layout.is_deferred[low + first]:
                data = deferred(row[first])
                part = memoryview(data)[start[first] : start[first] + length[first]]
                np.copyto(target[begin:end], np.frombuffer(part, dtype=np.uint8))
            else:
                filler.fill(row[first], start[first], target[begin:end])
            first = stop


class _Views:
    """Implements `Filler`: leaves large parts of items out, and notes where their bytes are."""

    pin: Pin | None = None

    def __init__(self, host: HostFiller) -> None:
        self.views: list[np.ndarray] = []
        self._host = host
        self.fill_many = host.fill_many
        self.finish = host.finish

    def fill(self, row: int, start: int, target: np.ndarray) -> None:
        if len(target) < _VIEW_BYTES:
            self._host.fill(row, start, target)
        else:
            self.views.append(self._host.view(row, start, len(target)))


def window_parts(
    layout: StagingLayout,
    window: int,
    scratch: np.ndarray,
    filler: Filler,
    deferred: Callable[[int], bytes],
) -> list[np.ndarray]:
    """Returns the bytes of a window as runs, one behind the other: to be copied once, as an object.

    Large items in host memory are runs where they are; all else is copied to `scratch` first.

    Args:
        layout: Where they go.
        window: Which one.
        scratch: uint8[used bytes of the window].
        filler: Copies the fixed items.
        deferred: Gives a deferred item's bytes.
    """
    if not isinstance(filler, HostFiller):
        fill_window(layout, window, scratch, filler, deferred)
        return [scratch]
    views = _Views(filler)
    fill_window(layout, window, scratch, views, deferred)
    own = slice(*layout.window_first[window : window + 2].tolist())
    is_view = (layout.num_bytes[own] >= _VIEW_BYTES) & ~layout.is_deferred[own]
    parts, done = [], 0
    for offset, view in zip(layout.offset[own][is_view].tolist(), views.views, strict=True):
        cut = (view[low : low + _VIEW_BYTES] for low in range(0, len(view), _VIEW_BYTES))
        parts += [scratch[done:offset], *cut]
        done = offset + len(view)
    return [part for part in (*parts, scratch[done:]) if len(part)]


def deferred_items(
    plan: RankPlan, deferred: Callable[[int], bytes]
) -> tuple[dict[int, bytes], tuple[tuple[int, ...], ...]]:
    """Returns the deferred items of a plan by row, and their lengths for each file."""
    rows = [file.deferred.tolist() for file in plan.files]
    items = {row: deferred(row) for own in rows for row in own}
    return items, tuple(tuple(len(items[row]) for row in own) for own in rows)


@contextmanager
def _finished(filler: Filler) -> Iterator[None]:
    """Lets a filler finish what was begun, also where a copy fails midway."""
    try:
        yield
    except BaseException:
        drain(filler)
        raise
    filler.finish()


def drain(filler: Filler) -> None:
    """Returns when nothing is under way any more, whatever became of it: after an error.

    Why: it would come into memory that is somebody else's by then.
    """
    with suppress(Exception):
        filler.finish()


def _run_ends(layout: StagingLayout, own: slice) -> list[int]:
    """Returns where each run of segments ends that are copied together: small fixed items."""
    length, offset = layout.num_bytes[own], layout.offset[own]
    alone = (length >= _SMALL_BYTES) | layout.is_deferred[own]
    number = np.arange(len(length))
    ends = alone[1:] | alone[:-1] | (offset[1:] != offset[:-1] + length[:-1])
    ends |= number[1:] % _MOST_JOINED == 0
    return [*(np.flatnonzero(ends) + 1).tolist(), len(length)]


@dataclass(frozen=True)
class Part:
    """A run of bytes in one window, or of frames between such runs, which are nowhere."""

    window: StagedWindow | None
    offset: int
    """First byte in the window."""
    num_bytes: int


@dataclass(frozen=True, eq=False)
class TierFile:
    """Where the bytes of one part file lie in windows.

    Attributes:
        key: Of the file in its checkpoint; it names the attempt.
        start: int64[s], first byte in the file of each run, ascending.
        num_bytes: int64[s].
        offset: int64[s], first byte in the window.
        windows: int32[s], of each run, in the share.
        share: Whose windows they are.
    """

    key: str
    start: Int64Array
    num_bytes: Int64Array
    offset: Int64Array
    windows: Int32Array
    share: StageKey

    def find(self, start: int, num_bytes: int) -> list[Part] | None:
        """Returns where a range of the file lies; None when its first or last byte is not there.

        Readers take small items together, with the frames between them, of which they use nothing.

        Args:
            start: First byte in the file.
            num_bytes: How many.

        Examples:
            >>> from ray_dcp.commit_protocol.messages import OpKey
            >>> runs = np.array([[100, 170], [64, 36], [0, 64]])
            >>> file = TierFile("x", *runs, np.array([3, 3]), StageKey(OpKey("s", 0), 0, "a"))
            >>> [(part.window is None, part.offset, part.num_bytes) for part in file.find(120, 60)]
            [(False, 20, 44), (True, 0, 6), (False, 64, 10)]
            >>> file.find(0, 200) is None
            True
        """
        starts, lengths, offsets, windows = self._lists
        run = bisect_right(starts, start) - 1
        found: list[Part] = []
        while num_bytes > 0:
            if run < 0 or run >= len(starts):
                return None
            skip = start - starts[run]
            if skip < 0 and found:
                found.append(Part(None, 0, -skip))
                start, num_bytes, skip = start - skip, num_bytes + skip, 0
            left = lengths[run] - skip
            if skip < 0 or left <= 0 or num_bytes <= 0:
                return None
            length = min(left, num_bytes)
            window = StagedWindow(self.share, windows[run])
            found.append(Part(window, offsets[run] + skip, length))
            start, num_bytes, run = start + length, num_bytes - length, run + 1
        return found

    @cached_property
    def all_windows(self) -> tuple[StagedWindow, ...]:
        """All windows that have bytes of it."""
        return tuple(StagedWindow(self.share, one) for one in np.unique(self.windows).tolist())

    @cached_property
    def _lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
        # Why: it is asked for each read, and numbers in numpy take ten times as long.
        columns = (self.start, self.num_bytes, self.offset, self.windows)
        starts, lengths, offsets, windows = (column.tolist() for column in columns)
        return starts, lengths, offsets, windows


@dataclass(frozen=True, eq=False)
class TierEntry:
    """What one node keeps of one attempt."""

    files: tuple[TierFile, ...]


def kept_file(key: str, layout: StagingLayout, index: int, share: StageKey) -> TierFile:
    """Returns where a file lies.

    Args:
        key: Of the file.
        layout: Of the rank's share.
        index: Position of the file in the plan.
        share: Names the share.
    """
    own = slice(*layout.file_first[index : index + 2].tolist())
    num_bytes = layout.num_bytes[own]
    start = layout.file_end[own] - num_bytes
    order = np.argsort(start, kind="stable")
    return TierFile(
        key=key,
        start=start[order],
        num_bytes=num_bytes[order],
        offset=layout.offset[own][order],
        windows=layout.window[own][order],
        share=share,
    )


def cut(parts: Sequence[Part], low: int, high: int) -> list[Part]:
    """Returns the parts that give the bytes `[low, high)` of what parts give.

    Examples:
        >>> [(part.offset, part.num_bytes) for part in cut([Part(None, 5, 10)] * 3, 8, 21)]
        [(13, 2), (5, 10), (5, 1)]
    """
    found: list[Part] = []
    start = 0
    for part in parts:
        first, last = max(low, start), min(high, start + part.num_bytes)
        if first < last:
            found.append(replace(part, offset=part.offset + first - start, num_bytes=last - first))
        start += part.num_bytes
    return found


def too_many(attempts: Sequence[tuple[str, str, int, bool]]) -> set[str]:
    """Returns the attempts that are not to be kept any longer.

    Those before the newest that is known to be committed go, but for the last few of these. What
    came after it may be committed any time, or never.

    Args:
        attempts: `(run, attempt, how many of the run are to be kept, known to be committed)`,
            oldest first. One that several ranks hold parts of may come several times.

    Examples:
        >>> seen = [("r", "a", 1, True), ("r", "b", 1, True), ("r", "b", 1, False)]
        >>> sorted(too_many([*seen, ("r", "c", 1, False), ("other", "d", 1, True)]))
        ['a']
    """
    runs: dict[str, dict[str, bool]] = {}
    most: dict[str, int] = {}
    for run, attempt, keep, is_committed in attempts:
        known = runs.setdefault(run, {})
        known[attempt] = known.get(attempt, False) or is_committed
        most[run] = keep  # the newest wish counts
    surplus: set[str] = set()
    for run, known in runs.items():
        committed = [attempt for attempt, is_committed in known.items() if is_committed]
        if committed:
            names = list(known)
            surplus |= set(names[: names.index(committed[-1])]) - set(committed[-most[run] :])
    return surplus
