"""Copies a rank's items into staging memory, window by window, on several threads.

*Why* several threads: one gets half of the memory bandwidth of a small machine, and a tenth of a
large one's. *Why* they stay for the next copy: starting threads takes as long as copying a window.

Bytes that are not in host memory are copied by a `Filler` of their source: on a side stream, into
memory that is registered with the device's driver.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import groupby, pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from ray_dcp.errors import InternalError
from ray_dcp.io.writer import Source
from ray_dcp.stage.windows import StagingLayout

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


def copy_all(pairs: Iterable[Pair], num_threads: int | None = None) -> None:
    """Copies memory; returns when everything is in its place.

    The caller's thread takes part, and does all where no other gets a processor.

    Args:
        pairs: Where to and where from, each uint8[n] of one length.
        num_threads: That copy; by default as many as have a processor, up to four.

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
        for _ in range(min(num_threads or copying_threads(), len(left)) - 1):
            helpers.append(_helpers.submit(work))
    try:
        work()
    finally:
        working = [one for one in helpers if not one.cancel()]
        wait(working)
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
_VIEW_BYTES = 1 << 20
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


def fill_rows(
    filler: Filler,
    rows: Sequence[int],
    lengths: Sequence[int],
    target: np.ndarray,
    *,
    piece_bytes: int,
    use: Callable[[int], None],
) -> None:
    """Fills memory with whole items, one behind the other; returns when all their bytes are there.

    Args:
        filler: Copies them.
        rows: Which.
        lengths: Of each, in bytes.
        target: uint8[sum of the lengths].
        piece_bytes: No copy goes beyond a multiple of this.
        use: Told the number of each such piece before it is filled.
    """
    begin = 0
    parts = enumerate(_parts(rows, lengths, piece_bytes))
    with _finished(filler):
        for place, run in groupby(parts, lambda part: _together(*part)):
            if place[0] * piece_bytes >= begin:
                use(place[0])
            row, start, length = map(list, zip(*(part[1:] for _, part in run), strict=True))
            end = begin + sum(length)
            if len(row) > 1:
                filler.fill_many(row, start, length, target[begin:end])
            else:
                filler.fill(row[0], start[0], target[begin:end])
            begin = end


def _parts(
    rows: Sequence[int], lengths: Sequence[int], piece_bytes: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields (piece, row, first byte of the item, length) of items that are cut at the pieces."""
    end = 0
    for row, length in zip(rows, lengths, strict=True):
        begin, end = end, end + length
        cuts = [begin, *range((begin // piece_bytes + 1) * piece_bytes, end, piece_bytes), end]
        for low, high in pairwise(cuts):
            if high > low:
                yield low // piece_bytes, row, low - begin, high - low


def _together(index: int, part: tuple[int, int, int, int]) -> tuple[int, int]:
    """Returns what is equal for parts that are copied together: small ones of one piece."""
    piece, _, _, num_bytes = part
    return piece, -1 - index if num_bytes >= _SMALL_BYTES else index // _MOST_JOINED


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
