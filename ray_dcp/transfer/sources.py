"""What a writer gets its bytes from: items that are whole in memory, or pieces as they were staged.

Nothing here opens a file.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ray_dcp.plan.values import FilePlan
from ray_dcp.transfer.pieces import contradiction

__all__ = ["BytesLike", "Deferred", "ItemPieces", "ManySource", "PieceSource", "Source"]

BytesLike = bytes | bytearray | memoryview

_COPIED_BYTES = 4 << 20
"""Whole checksum blocks; hashed and written while they are in the processor's cache."""


@runtime_checkable
class ManySource(Protocol):
    """A source that gives the bytes of many small items for less than one by one."""

    def __call__(self, row: int, /) -> memoryview:
        """Returns the bytes of one item."""
        ...

    def many(self, rows: Sequence[int], /) -> Sequence[memoryview]:
        """Returns the bytes of each item."""
        ...


Source = Callable[[int], memoryview] | ManySource
"""Row of the rank's `Columns` → all C-order bytes of the item (uint8, one dimension)."""
Deferred = Callable[[int], BytesLike]
"""Row of the rank's `Columns` → what `torch.save` makes of the item."""


class PieceSource(Protocol):
    """The bytes of one file as they were staged: piece by piece, in the order of the file.

    Pieces are numbered as in the `FilePlan`, deferred items after the fixed ones.
    """

    before_wait: Callable[[], None]
    """Set by whoever takes the bytes; called before this waits for more of them, which may come
    only when those that were given are written."""

    def small(self, first: int, stop: int) -> Iterable[memoryview]:
        """Returns the bytes of consecutive pieces of at most 128 KiB, whole.

        Nobody changes them before `written` has passed them.
        """
        ...

    def parts(self, piece: int) -> Iterable[memoryview]:
        """Returns the bytes of a piece, in parts; each but the last is whole checksum blocks.

        Each is used before the next one is asked for, and nobody changes it until then.
        """
        ...

    def num_bytes(self, piece: int) -> int:
        """Returns the length of a piece."""
        ...

    def written(self, end: int) -> None:
        """Takes that the storage has all bytes before this place in the file."""
        ...


class ItemPieces:
    """The `PieceSource` of items that are whole in memory, which others may go on writing to.

    *Invariant*: what it gives is a copy, unless it is read-only. A tensor that another thread
    changes between its checksum and its way to the storage would be committed, and never load.

    Args:
        plan: Of the file.
        key: Of the file, for messages.
        source: Gives the items.
        deferred: Gives the deferred items.
    """

    def __init__(self, plan: FilePlan, key: str, source: Source, deferred: Deferred) -> None:
        self.before_wait = _nothing
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
        for index, item in enumerate(self._items(rows), first):
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
        return (part,) if part.readonly else self._copied(part, self._place[piece])

    def num_bytes(self, piece: int) -> int:
        """See `PieceSource.num_bytes`."""
        if piece >= len(self._start):
            return len(self._deferred_item(piece)[1])
        num_bytes: int = self._num_bytes[piece]
        return num_bytes

    def written(self, end: int) -> None:
        """Does nothing: the items stay where they are."""

    def _copied(self, data: memoryview, place: int) -> Iterator[memoryview]:
        """Yields copies of the data, one after another in the same memory.

        Args:
            data: What to copy.
            place: Where it begins in the file. Copies lie in a page of memory as in one of the
                file, so that a file that is written past the page cache needs no other copy.
        """
        if self._buffer is None:
            self._buffer = np.frombuffer(mmap.mmap(-1, _COPIED_BYTES + mmap.PAGESIZE), np.uint8)
        source, first = np.frombuffer(data, np.uint8), place % mmap.PAGESIZE
        for start in range(0, len(source), _COPIED_BYTES):
            part = source[start : start + _COPIED_BYTES]
            target = self._buffer[first : first + len(part)]
            # Why not by memoryviews: they keep other threads from running meanwhile.
            np.copyto(target, part)
            yield target.data

    def _items(self, rows: Sequence[int]) -> Iterator[memoryview]:
        if isinstance(self._source, ManySource) and len(rows) > 1:
            return map(self._checked, self._source.many(rows), rows)
        return map(self._item_of, rows)

    def _item_of(self, row: int) -> memoryview:
        """Returns an item's bytes; pieces of one item mostly follow each other."""
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
    """Is called where nobody has to wait."""
