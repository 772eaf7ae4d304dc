"""Staging memory: `StagingMemory` is shared by a node, `PrivateMemory` belongs to one process.

Shared memory is a nameless file that a stager creates and ranks map as well. It has no name
anywhere, so nothing can be left behind: it lives as long as some process has it open, and the
kernel takes it back with the last one, however that ends. Other processes of the same user open it
as `/proc/<pid>/fd/<fd>`, and check that it is the file that was meant.

Private memory is allocated once, with huge pages, and reused. *Why*: a page that was never touched
costs five times as much to write as a warm one. A child that is forked has neither its content nor
a share in it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np

from ray_dcp.core.processes import OwnProcess
from ray_dcp.core.values import UInt64Array
from ray_dcp.errors import InvalidRequestError, LimitError, ParticipantError
from ray_dcp.stage.copying import Pin
from ray_dcp.stage.memory_tier import Part
from ray_dcp.stage.values import MemoryAddress, Slot

_PAGE = 4096
_POPULATE_READ, _POPULATE_WRITE, _REMOVE = 22, 23, 9
"""MADV_POPULATE_READ and _WRITE: touch pages without changing them (Linux 5.14). MADV_REMOVE: free
them for all who have them mapped."""
_TOUCH_BYTES = 8 << 20


_HERE: weakref.WeakValueDictionary[tuple[int, int], StagingMemory] = weakref.WeakValueDictionary()
"""Those that are open in this process, by `MemoryAddress.identity`."""


class StagingMemory:
    """Slots of one length in shared memory, after a page or more of their generations.

    Use `create` or `open`. The memory stays mapped while anybody has a view of it.
    """

    def __init__(self, fd: int, address: MemoryAddress) -> None:
        self.address = address
        self._pin: Pin | None = None
        self._pinned: dict[int, Callable[[], None] | None] = {}
        # Why not __del__: it also runs on half-built objects and at interpreter exit.
        self._close_fd = weakref.finalize(self, _let_go, fd, self._pinned, OwnProcess())
        self._close_fd.atexit = False  # the driver may be gone by then
        self._first = _first_slot(address.num_slots)
        try:
            self._map = mmap.mmap(fd, self._first + address.num_slots * address.slot_bytes)
        except (OSError, ValueError) as exc:
            self._close_fd()
            raise LimitError(
                f"could not map {address.num_slots} x {address.slot_bytes} bytes of shared memory: "
                f"{exc}. Set StagerOptions(limit_bytes=...) lower, or allow more (ulimit -v)",
                key="limit_bytes",
            ) from exc
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._generations: UInt64Array = self._bytes[: address.num_slots * 8].view(np.uint64)
        self._pinning = threading.Lock()
        _HERE.setdefault(address.identity, self)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            # Suppressed: what the kernel does not know costs speed at most.
            with suppress(AttributeError, OSError):
                self._map.madvise(getattr(mmap, advice))

    @staticmethod
    def mapped_here(address: MemoryAddress) -> StagingMemory | None:
        """Returns one that this process has open already, whose pages may be present; or None."""
        return _HERE.get(address.identity)

    @classmethod
    def create(cls, num_slots: int, slot_bytes: int) -> StagingMemory:
        """Returns a new one. Its pages take memory only when they are first touched.

        Args:
            num_slots: How many slots.
            slot_bytes: Their length, whole pages.

        Raises:
            LimitError: There is no such memory on this machine.
        """
        if slot_bytes % _PAGE or slot_bytes < _PAGE or num_slots < 1:
            raise InvalidRequestError(
                f"expected at least one slot of whole pages, found {num_slots} of {slot_bytes}"
            )
        try:
            fd = os.memfd_create("ray_dcp", os.MFD_CLOEXEC)
            os.ftruncate(fd, _first_slot(num_slots) + num_slots * slot_bytes)
        except (AttributeError, OSError) as exc:
            raise LimitError(f"this machine has no anonymous shared memory: {exc}") from exc
        return cls(fd, _address_of(fd, num_slots, slot_bytes))

    @classmethod
    def open(cls, address: MemoryAddress) -> StagingMemory:
        """Returns the one that another process has open.

        Raises:
            LimitError: It can't be reached from this process: the other one is gone, or in
                another container, or of another user.
        """
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as exc:
            raise LimitError(f"the stager's shared memory can't be opened: {exc}") from exc
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != address.identity:
            os.close(fd)
            raise LimitError(
                f"expected the stager's shared memory under {path}, but another file is there"
            )
        return cls(fd, _address_of(fd, address.num_slots, address.slot_bytes))

    def slot(self, index: int) -> memoryview:
        """Returns the bytes of a slot, writable."""
        return self._slice(index).data

    def slot_array(self, index: int) -> np.ndarray:
        """Returns the bytes of a slot as uint8[slot_bytes], writable, for use of the whole."""
        self._use(index)
        return self._slice(index)

    def pin_with(self, pin: Pin) -> None:
        """Has each slot whose whole is used here from now on registered with a device's driver."""
        self._pin = pin

    def mark(self, slot: Slot) -> None:
        """Writes a slot's generation, for everybody who has the memory open."""
        self._generations[slot.index] = slot.generation

    def holds(self, slot: Slot) -> bool:
        """Returns whether a slot is still what was granted once."""
        return int(self._generations[slot.index]) == slot.generation

    def read_into(self, parts: Sequence[Part], target: memoryview) -> bool:
        """Fills `target` from slots; returns whether they still are what was granted.

        Args:
            parts: One after the other they give `target`; what is nowhere is left as it is.
            target: Where to; rubbish when False is returned.
        """
        return _read_parts(parts, target, self._read)

    def _read(self, slot: Slot, offset: int, target: memoryview) -> bool:
        if not self._close_fd.alive or not self.holds(slot):
            return False
        # Why from the map, also where its pages are not present yet: a copy by the kernel takes 15
        # to 30 % longer than to have them mapped, 16 at a time.
        found = self._slice(slot.index)[offset : offset + len(target)]
        # Why numpy: it lets other threads run meanwhile.
        np.copyto(np.frombuffer(target, dtype=np.uint8), found)
        return self.holds(slot)

    def touch(self, index: int) -> None:
        """Makes a slot's pages present in this process, without changing them.

        Other threads run meanwhile. Does nothing on kernels that can't (before 5.14).

        Complexity:
            0.5 to 4 s/GB for memory never used before, 0.15 s/GB for what others have.
        """
        # Why to read: shared pages are writable then as well, and come 16 at a time, at less than
        # half of the cost, where another process has them.
        _populate(self._slice(index), _POPULATE_READ)
        self._use(index)

    def discard(self, index: int) -> None:
        """Gives a slot's memory back to the machine, whoever has it mapped; its bytes are 0 then.

        Nobody may use the slot, nor have its pages registered with a device.
        """
        found = self._slice(index)
        _madvise(int(found.__array_interface__["data"][0]), len(found), _REMOVE)

    def close(self) -> None:
        """Closes this process's descriptor; the memory goes with the last view of it."""
        if self._close_fd.alive:
            if _HERE.get(self.address.identity) is self:
                del _HERE[self.address.identity]
            with self._pinning:
                self._pin = None
                self._close_fd()
            self._bytes, self._generations = np.zeros(0, np.uint8), np.zeros(0, np.uint64)
            # Suppressed: somebody still reads from it.
            with suppress(BufferError):
                self._map.close()

    def _use(self, index: int) -> None:
        if self._pin is None or index in self._pinned:
            return
        # Why a lock: the threads that touch memory and that use it may come to a slot together.
        with self._pinning:
            if self._pin is not None and index not in self._pinned:
                self._pinned[index] = self._pin(self._slice(index))

    def _slice(self, index: int) -> np.ndarray:
        start = self._first + index * self.address.slot_bytes
        return self._bytes[start : start + self.address.slot_bytes]


def _read_parts(
    parts: Sequence[Part], target: memoryview, read: Callable[[Slot, int, memoryview], bool]
) -> bool:
    done = 0
    for part in parts:
        view = target[done : done + part.num_bytes]
        if part.slot is not None and not read(part.slot, part.offset, view):
            return False
        done += part.num_bytes
    return True


class WindowBytes:
    """The bytes of a window: one run in a slot of memory, or the runs of an object.

    Args:
        runs: One behind the other, each of bytes of one dimension.
    """

    def __init__(self, runs: Sequence[memoryview | np.ndarray]) -> None:
        self._runs = [memoryview(run) for run in runs]  # type: ignore[arg-type]
        self._ends = list(accumulate(map(len, runs)))
        self._arrays = [weakref.ref(run) for run in runs if isinstance(run, np.ndarray)]

    def views(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """Yields some of them: the part in each run, one behind the other."""
        index = bisect_right(self._ends, offset)
        while num_bytes > 0:
            start = offset - self._ends[index] + len(self._runs[index])
            found = self._runs[index][start : start + num_bytes]
            yield found
            offset, num_bytes, index = offset + len(found), num_bytes - len(found), index + 1

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills `target` with their bytes from `offset` on."""
        for part in self.views(offset, len(target)):
            # Why numpy: unlike an assignment to a memoryview it lets other threads run.
            np.copyto(np.frombuffer(target[: len(part)], np.uint8), np.frombuffer(part, np.uint8))
            target = target[len(part) :]

    def release(self) -> None:
        """Lets go of the runs."""
        self._runs.clear()

    @property
    def is_gone(self) -> bool:
        """Whether nobody has a view of the arrays any more."""
        return all(array() is None for array in self._arrays)


class ObjectSlots:
    """Windows that came as objects, by the slots of the budget that they count in."""

    def __init__(self) -> None:
        self._windows: dict[Slot, WindowBytes] = {}

    def hold(self, slot: Slot, runs: Sequence[np.ndarray]) -> WindowBytes:
        """Returns the bytes of a window, which stay until `release`."""
        self._windows[slot] = WindowBytes(runs)
        return self._windows[slot]

    def release(self, slot: Slot) -> WindowBytes:
        """Lets go of a window and returns it: it may be in use for a moment."""
        window = self._windows.pop(slot, WindowBytes(()))
        window.release()
        return window

    def read_into(self, parts: Sequence[Part], target: memoryview) -> bool:
        """See `StagingMemory.read_into`."""
        return _read_parts(parts, target, self._read)

    def _read(self, slot: Slot, offset: int, target: memoryview) -> bool:
        # Suppressed: it was let go, also in the middle of this.
        with suppress(KeyError, IndexError):
            self._windows[slot].read_into(offset, target)
            return True
        return False


def lost_memory(rank: int) -> ParticipantError:
    """Returns the error for staged bytes that are not there any more."""
    return ParticipantError(
        f"expected the bytes that rank {rank} had staged, but their memory was used for something "
        f"else meanwhile; save again",
        rank=rank,
    )


def _let_go(fd: int, pinned: dict[int, Callable[[], None] | None], owner: OwnProcess) -> None:
    """Gives the memory's pages back to the device's driver, then closes its descriptor."""
    _unpin(pinned, owner)
    os.close(fd)


def _unpin(pinned: dict[int, Callable[[], None] | None], owner: OwnProcess) -> None:
    # Why: a driver takes no calls of a child that was forked, and the pages are its parent's.
    while pinned and owner.is_this:
        _, undo = pinned.popitem()
        if undo is not None:
            undo()


def touch(array: np.ndarray) -> None:
    """Makes the pages of private uint8[n] present in this process, without changing them.

    Other threads run meanwhile. Does nothing on kernels that can't (before 5.14).
    """
    _populate(array, _POPULATE_WRITE)


def _populate(array: np.ndarray, advice: int) -> None:
    start = int(array.__array_interface__["data"][0])
    for done in range(0, len(array), _TOUCH_BYTES):
        length = min(_TOUCH_BYTES, len(array) - done)
        # Why ctypes: mmap.madvise keeps the interpreter's lock.
        _madvise(start + done, length, advice)


def free_memory_bytes() -> int:
    """Returns how much memory this process could take: of the machine, and of its container."""
    found = [_meminfo("MemAvailable")]
    with suppress(OSError, ValueError):
        group = _cgroup()
        with open(f"{group}/memory.max", encoding="ascii") as most:
            limit = int(most.read())
        with open(f"{group}/memory.current", encoding="ascii") as current:
            found.append(max(limit - int(current.read()), 0))
    return min(found)


def _cgroup() -> str:
    with open("/proc/self/cgroup", encoding="ascii") as groups:
        path = next(line[3:].strip() for line in groups if line.startswith("0::"))
    inside = f"/sys/fs/cgroup{path}"
    return inside if os.path.exists(f"{inside}/memory.max") else "/sys/fs/cgroup"


def _meminfo(name: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise LimitError(f"/proc/meminfo does not tell {name}; set StagerOptions(limit_bytes=...)")


def _first_slot(num_slots: int) -> int:
    return -(-num_slots * 8 // _PAGE) * _PAGE


def _address_of(fd: int, num_slots: int, slot_bytes: int) -> MemoryAddress:
    status = os.fstat(fd)
    return MemoryAddress(os.getpid(), fd, (status.st_dev, status.st_ino), num_slots, slot_bytes)


_libc = ctypes.CDLL(None, use_errno=True)


def _madvise(start: int, length: int, advice: int) -> bool:
    """Returns whether the kernel did it."""
    done: int = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
    return done == 0


_UNIT = 2 << 20
PIECE_BYTES = 64 << 20
"""Private memory is registered with a device's driver this much at a time, when it is first used:
all at once would take seconds before the first byte is copied."""


class _Area:
    """Private memory; what a driver has of it is given back before it goes.

    Raises:
        MemoryError: There is no more.
    """

    def __init__(self, num_bytes: int) -> None:
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
    """Memory that nobody else gets until it is given back.

    Args:
        owner: Whose.
        area: The memory.
        num_bytes: How much of it is asked for.

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
            pin: Of the driver; None where there is no need.
            piece: Its number.
        """
        if self._area is not None and pin is not None:
            self._area.pin(pin, piece)

    def release(self, *, reuse: bool = True) -> None:
        """Gives it back; views of it must not be used any more. May come twice.

        Args:
            reuse: False where a thread that was given up may still use it: the memory goes when
                nobody has a view of it.
        """
        area, self._area = self._area, None
        self.view = memoryview(b"")
        if area is not None and reuse:
            self._owner._take_back(area)


class PrivateMemory:
    """Areas of memory that are leased out, and kept when they come back.

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
        """What is kept and not leased, in bytes."""
        with self._lock:
            return sum(map(len, self._idle))

    def lease(self, num_bytes: int) -> Lease:
        """Returns memory of at least one length, whose content is whatever it was.

        Args:
            num_bytes: How much.

        Raises:
            MemoryError: There is no more.
        """
        if num_bytes == 0:
            return Lease(self, None, 0)
        return Lease(self, self._fitting(num_bytes) or _Area(num_bytes), num_bytes)

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
        """Gives what is idle back to the system."""
        with self._lock:
            self._idle.clear()

    def begin_anew(self) -> None:
        """Begins anew in a child that was forked: what is idle, and the lock, are its parent's."""
        self._lock, self._idle = threading.Lock(), []

    def _fitting(self, num_bytes: int) -> _Area | None:
        with self._lock:
            fitting = [area for area in self._idle if len(area) >= num_bytes]
            # Why the rest is dropped: a state that has grown does not shrink again.
            area = min(fitting, key=len, default=None)
            self._idle = [one for one in self._idle if one is not area and fitting]
            return area

    def _take_back(self, area: _Area) -> None:
        with self._lock:
            self._idle.append(area)
