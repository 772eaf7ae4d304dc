"""`WindowBudget`: which windows of which jobs have room in a node's memory.

It is pure: events in, grants out. A *job* is one rank's share of one save; its windows are granted
in order, and the jobs wait in the order in which they came. A window has its room until it is full,
with its bytes of every file written. A job that is *kept* has it longer: until it is dropped, or
until other windows wait and there is no room. The memory of a window is free some time after nobody
needs it: its grant ends (`ended`), and later its bytes count no more (`freed`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ray_dcp.errors import InternalError

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
    """Grants a number of bytes in turn. Not thread-safe.

    Args:
        limit_bytes: Most bytes that may be granted at a time.

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
        """Bytes that are granted, or whose memory is not free again yet."""
        return _bytes_of(self._granted) + _bytes_of(self._leaving)

    def limit(self, limit_bytes: int, kept_bytes: int) -> None:
        """Changes the limit; what is used beyond it stays until it ends.

        Args:
            limit_bytes: The limit for new windows, in bytes.
            kept_bytes: Windows that are only kept are dropped until at most this many bytes are
                granted.
        """
        self.limit_bytes = limit_bytes
        while _bytes_of(self._granted) > kept_bytes and self._give_up_kept():
            pass

    def granted(self) -> dict[J, int]:
        """Returns the number of bytes that each job has room for now."""
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
            job: Key of the job.
            windows: For each window, its length, which is at most the limit, and the files with
                bytes in it.
            keep: Whether its windows stay after they are written, while nobody needs the room.
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
        """Records that the bytes of a file in a window are written to storage."""
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
        """Removes a job and ends its room; neither its rank nor a writer may use it any more.

        An unknown job is ignored.

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
