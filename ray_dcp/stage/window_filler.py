"""Fills windows with a rank's bytes.

Bytes that are not in host memory are copied by a `Filler` of their source: on a side stream, into
memory that is registered with the device's driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, runtime_checkable

import numpy as np

from ray_dcp.core.checksums import MAX_BLOCK_BYTES
from ray_dcp.core.values import RankPlan
from ray_dcp.errors import InternalError
from ray_dcp.io.writer import Source
from ray_dcp.stage.copy_threads import copy_all
from ray_dcp.stage.windows import StagingLayout

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
            host: Copies the items in host memory.
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
        layout: Layout of the rank's share.
        window: Number of the window.
        target: Memory of the window: uint8[window bytes].
        filler: Copies the fixed items.
        deferred: Returns the bytes of a deferred item.
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
        layout: Layout of the rank's share.
        window: Number of the window.
        scratch: Memory for items that must be copied: uint8[used bytes of the window].
        filler: Copies the fixed items.
        deferred: Returns the bytes of a deferred item.
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
