"""Memory of staged bytes and its budget.

`WindowBytes` are those of an object, `PrivateMemory` belongs to one process.

Private memory is allocated once, with huge pages, and reused. *Why*: a page that was never touched
costs five times as much to write as a warm one. A child that is forked has neither its content nor
a share in it.

`WindowBudget` decides which windows of which jobs have room in a node's memory, and which jobs
wait. It is pure: events in, grants out. A *job* is one rank's share of one save; its windows are
granted in order. A window has its room until it is full and its bytes of every file are written. A
job that is *kept* has it longer: until it is dropped, or until other windows wait and there is no
room. The memory of a window is free some time after nobody needs it: its grant ends (`ended`), and
later its bytes count no more (`freed`).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from ray_dcp.core.processes import OwnProcess
from ray_dcp.errors import InternalError
from ray_dcp.stage.node_memory import free_memory_bytes
from ray_dcp.stage.windows import Pin

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: touches pages without changing them (Linux 5.14)."""
_TOUCH_BYTES = 8 << 20


class WindowBytes:
    """The bytes of a window, as the runs of an object.

    Args:
        runs: One behind the other, each uint8[n].
        ref: What others on this node get the same bytes by.

    Attributes:
        ref: As given, until `release`.
        borrowers: Who uses the bytes by it.
    """

    def __init__(self, runs: Sequence[np.ndarray], ref: Any = None) -> None:
        self.ref = ref
        self.borrowers: set[Hashable] = set()
        self._runs = [memoryview(run) for run in runs]  # type: ignore[arg-type]
        self._ends = list(accumulate(map(len, runs)))
        self._arrays = [weakref.ref(run) for run in runs]

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
        """Lets go of the bytes."""
        self._runs.clear()
        self.ref = None

    @property
    def has_bytes(self) -> bool:
        """Whether it was not let go."""
        return bool(self._runs)

    @property
    def is_gone(self) -> bool:
        """Whether nobody uses the bytes any more."""
        return not self.borrowers and all(array() is None for array in self._arrays)


def runs_of(buffers: Sequence[Any]) -> list[np.ndarray]:
    """Returns the runs of an object that came through Ray, where they lie."""
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers]


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
    """Private memory; what a driver has of it is given back before it goes.

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

    def release(self) -> None:
        """Gives it back; nobody may write to it any more. May come twice."""
        area, self._area = self._area, None
        self.view = memoryview(b"")
        if area is not None:
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
        """Gives what is idle back to the system."""
        with self._lock:
            self._idle.clear()

    def begin_anew(self) -> None:
        """Begins anew in a child that was forked: what is idle, and the lock, are its parent's."""
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


J = TypeVar("J", bound=Hashable)


@dataclass(frozen=True)
class Room(Generic[J]):
    """The room of one window."""

    job: J
    window: int
    num_bytes: int


@dataclass
class _Window:
    num_bytes: int
    unread: set[int]
    is_here: bool = False
    has_room: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it has room that nobody fills or reads any more."""
        return self.has_room and self.is_here and not self.unread


@dataclass
class _Job:
    windows: list[_Window]
    is_kept: bool
    num_granted: int = 0


class WindowBudget(Generic[J]):
    """A number of bytes, granted in turn. Not thread-safe.

    Args:
        limit_bytes: How many there are.

    Examples:
        >>> budget = WindowBudget(8)
        >>> budget.begin("a", [(4, {0}), (4, {0}), (2, {0})])
        >>> [room.window for room in budget.grants()]
        [0, 1]
        >>> budget.delivered("a", 0)
        >>> budget.read("a", 0, 0)
        >>> [budget.freed(room) for room in budget.ended()]
        [None]
        >>> [room.window for room in budget.grants()]
        [2]
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._granted: list[Room[J]] = []
        self._leaving: list[Room[J]] = []
        self._ended: list[Room[J]] = []
        self._jobs: dict[J, _Job] = {}
        self._waiting: deque[J] = deque()

    @property
    def used_bytes(self) -> int:
        """How many are granted, or not free again yet."""
        return _bytes_of(self._granted) + _bytes_of(self._leaving)

    def limit(self, limit_bytes: int, kept_bytes: int) -> None:
        """Changes the limit; what is used beyond it stays until it ends.

        Args:
            limit_bytes: The limit for new windows.
            kept_bytes: What is only kept goes, until no more than this is granted.
        """
        self.limit_bytes = limit_bytes
        while _bytes_of(self._granted) > kept_bytes and self._give_up_kept():
            pass

    def granted(self) -> dict[J, int]:
        """Returns how many bytes each job has room for now."""
        found: dict[J, int] = {}
        for room in self._granted:
            found[room.job] = found.get(room.job, 0) + room.num_bytes
        return found

    def begin(
        self,
        job: J,
        windows: Sequence[tuple[int, frozenset[int] | set[int]]],
        *,
        keep: bool = False,
    ) -> None:
        """Registers a job, which waits for room from now on.

        Args:
            job: Names it.
            windows: For each window its length, at most the limit, and the files with bytes in it.
            keep: Its windows stay after they are written, while nobody needs the room.
        """
        if job in self._jobs:
            raise InternalError(f"expected a new job, found {job} again; please report this")
        made = [_Window(num_bytes, set(files)) for num_bytes, files in windows]
        self._jobs[job] = _Job(made, keep)
        if made:
            self._waiting.append(job)

    def grants(self) -> list[Room[J]]:
        """Returns the windows that have room from now on, the jobs that wait taking turns."""
        given: list[Room[J]] = []
        while self._waiting:
            name = self._waiting[0]
            job = self._jobs.get(name)
            if job is not None:
                number = job.num_granted
                window = job.windows[number]
                if not self._has_room(window.num_bytes):
                    break
                window.has_room = True
                job.num_granted += 1
                given.append(Room(name, number, window.num_bytes))
                self._granted.append(given[-1])
                if job.num_granted < len(job.windows):
                    self._waiting.append(name)
            self._waiting.popleft()
        return given

    def delivered(self, job: J, window: int) -> None:
        """Records that a window is full: its rank does not write to it any more."""
        found = self._jobs[job]
        found.windows[window].is_here = True
        self._let_go(job, found, window)

    def read(self, job: J, window: int, file: int) -> None:
        """Records that the bytes of a file in a window are written."""
        found = self._jobs[job]
        found.windows[window].unread.discard(file)
        self._let_go(job, found, window)

    def finished(self, job: J, file: int) -> None:
        """Records that a file is not read any more, also where it was not written.

        A window that its rank still fills keeps its room until it is delivered.
        """
        for window in range(len(self._jobs[job].windows)):
            self.read(job, window, file)

    def is_whole(self, job: J) -> bool:
        """Returns whether every window of a job is written and still has its room."""
        found = self._jobs.get(job)
        return found is not None and all(window.is_idle for window in found.windows)

    def ended(self) -> list[Room[J]]:
        """Returns the room that ended since the last call; its bytes count until `freed`."""
        found, self._ended = self._ended, []
        return found

    def freed(self, room: Room[J]) -> None:
        """Records that the memory of a window is free, after its room had ended."""
        self._leaving.remove(room)

    def drop(self, job: J) -> None:
        """Forgets a job and ends its room; neither its rank nor a writer may use it any more.

        A job that is not known is fine.
        """
        found = self._jobs.pop(job, None)
        if found is not None:
            for number, window in enumerate(found.windows):
                self._end_window(job, number, window)

    def _has_room(self, num_bytes: int) -> bool:
        """Returns whether there is room now; gives up what is only kept where that helps."""
        while self.used_bytes + num_bytes > self.limit_bytes:
            # Why: what leaves is free in a moment, and no more need go for this window.
            if _bytes_of(self._granted) + num_bytes <= self.limit_bytes:
                return False
            if not self._give_up_kept():
                return False
        return True

    def _give_up_kept(self) -> bool:
        """Ends the room of the oldest job that is only kept; returns False when there is none.

        Of one that is larger than the budget nothing is kept: its own windows wait for the room.
        """
        for name, job in self._jobs.items():
            if job.is_kept and any(window.is_idle for window in job.windows):
                job.is_kept = False
                for window in range(len(job.windows)):
                    self._let_go(name, job, window)
                return True
        return False

    def _let_go(self, name: J, job: _Job, window: int) -> None:
        if job.windows[window].is_idle and not job.is_kept:
            self._end_window(name, window, job.windows[window])

    def _end_window(self, name: J, number: int, window: _Window) -> None:
        if window.has_room:
            window.has_room = False
            room = Room(name, number, window.num_bytes)
            self._granted.remove(room)
            self._leaving.append(room)
            self._ended.append(room)


def _bytes_of(rooms: Sequence[Room[J]]) -> int:
    return sum(room.num_bytes for room in rooms)
