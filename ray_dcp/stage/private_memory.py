"""`PrivateMemory`: staging memory that belongs to one process.

It is allocated once, with huge pages, and reused. *Why*: a page that was never touched costs five
times as much to write as a warm one. A child that is forked has neither its content nor a share in
it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ray_dcp.core.processes import OwnProcess
from ray_dcp.stage.node_memory import free_memory_bytes
from ray_dcp.stage.window_filler import Pin

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: touches pages without changing them (Linux 5.14)."""
_TOUCH_BYTES = 8 << 20


def touch(array: np.ndarray) -> None:
    """Makes the pages of private uint8[n] present in this process, without changing them.

    Other threads run meanwhile. Does nothing on kernels that can't (before 5.14).
    """
    start = int(array.__array_interface__["data"][0])
    for done in range(0, len(array), _TOUCH_BYTES):
        length = min(_TOUCH_BYTES, len(array) - done)
        # Why ctypes: mmap.madvise keeps the interpreter's lock.
        _libc.madvise(ctypes.c_void_p(start + done), ctypes.c_size_t(length), _POPULATE_WRITE)


_libc = ctypes.CDLL(None, use_errno=True)

_UNIT = 2 << 20
PIECE_BYTES = 64 << 20
"""Private memory is registered with a device's driver this much at a time, when it is first used:
all at once would take seconds before the first byte is copied."""


def _unpin(pinned: dict[int, Callable[[], None] | None], owner: OwnProcess) -> None:
    # Why: a driver takes no calls of a child that was forked, and the pages are its parent's.
    while pinned and owner.is_this:
        _, undo = pinned.popitem()
        if undo is not None:
            undo()


class _Area:
    """Private memory; a driver's registration of it is undone before it is unmapped.

    Raises:
        MemoryError: There is no more.
    """

    def __init__(self, num_bytes: int) -> None:
        # Why: the kernel maps what it does not have, and ends a process when it is touched.
        left_bytes = free_memory_bytes()
        if num_bytes > left_bytes:
            raise MemoryError(
                f"no {num_bytes} bytes for staging: the machine or the control group of this "
                f"process has {left_bytes} left"
            )
        try:
            # Careful: by default it would be shared with children, who would write into it as well.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.map = mmap.mmap(-1, -(-num_bytes // _UNIT) * _UNIT, flags)
        except OSError as exc:
            raise MemoryError(f"no {num_bytes} bytes for staging: {exc}") from exc
        with suppress(AttributeError, OSError):
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self._pinned: dict[int, Callable[[], None] | None] = {}
        unpin = weakref.finalize(self, _unpin, self._pinned, OwnProcess())
        unpin.atexit = False  # the driver may be gone then

    def __len__(self) -> int:
        return len(self.map)

    def pin(self, pin: Pin, piece: int) -> None:
        if piece not in self._pinned:
            whole = np.frombuffer(self.map, dtype=np.uint8)
            self._pinned[piece] = pin(whole[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES])


class Lease:
    """Memory that belongs to one borrower until it is released.

    Args:
        owner: The memory that the area belongs to.
        area: The area that is leased.
        num_bytes: Number of bytes asked for.

    Attributes:
        view: Writable, one dimension of bytes, `num_bytes` long.
    """

    def __init__(self, owner: PrivateMemory, area: _Area | None, num_bytes: int) -> None:
        self._owner = owner
        self._area = area
        self.view = memoryview(b"") if area is None else memoryview(area.map)[:num_bytes]

    def pin(self, pin: Pin | None, piece: int) -> None:
        """Registers a piece of `PIECE_BYTES` with a device's driver, until the memory goes.

        Args:
            pin: Registers memory with the driver; None if that is not needed.
            piece: Number of the piece.
        """
        if self._area is not None and pin is not None:
            self._area.pin(pin, piece)

    def release(self) -> None:
        """Releases the memory; nobody may write to it any more. May be called twice."""
        area, self._area = self._area, None
        self.view = memoryview(b"")
        if area is not None:
            self._owner._take_back(area)


class PrivateMemory:
    """Areas of memory that are leased, and reused when they are released.

    Examples:
        >>> memory = PrivateMemory()
        >>> lease = memory.lease(3)
        >>> lease.view[:] = b"abc"
        >>> lease.release()
        >>> memory.idle_bytes > 0
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Area] = []

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that is not leased."""
        with self._lock:
            return sum(map(len, self._idle))

    def lease(self, num_bytes: int) -> Lease:
        """Leases memory of at least a length; its content is undefined.

        Args:
            num_bytes: Number of bytes to lease.

        Raises:
            MemoryError: There is no more.
        """
        if num_bytes == 0:
            return Lease(self, None, 0)
        return Lease(self, self._take_fitting(num_bytes) or _Area(num_bytes), num_bytes)

    def warm(self, num_bytes: int) -> None:
        """Touches memory for the next lease of one length, unless there is some.

        Raises:
            MemoryError: There is no more.
        """
        lease = self.lease(num_bytes)
        try:
            touch(np.frombuffer(lease.view, dtype=np.uint8))
        finally:
            lease.release()

    def clear(self) -> None:
        """Returns all memory that is not leased to the system."""
        with self._lock:
            self._idle.clear()

    def begin_anew(self) -> None:
        """Starts empty in a forked child: the idle memory and the lock are its parent's."""
        self._lock, self._idle = threading.Lock(), []

    def _take_fitting(self, num_bytes: int) -> _Area | None:
        with self._lock:
            fitting = [area for area in self._idle if len(area) >= num_bytes]
            # Why the rest is dropped: a state that has grown does not shrink again.
            area = min(fitting, key=len, default=None)
            self._idle = [one for one in self._idle if one is not area and fitting]
            return area

    def _take_back(self, area: _Area) -> None:
        with self._lock:
            self._idle.append(area)
