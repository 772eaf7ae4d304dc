"""`SlotAllocator`: which window of which job has which slot of staging memory, and which jobs wait.

Pure: events in, grants out. A *job* is one rank's share of one save; its windows are granted in
order. A window holds its slot until it is full and its bytes of every file are written. A job that
is *kept* holds its slots longer: until it is dropped, or until other jobs wait and no slot is free.

Slots that *linger* stand for objects, whose memory is free some time after nobody needs them: their
grants end (`ended`), and later the slots are free (`gone`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray_dcp.errors import InternalError
from ray_dcp.stage.values import Slot

J = TypeVar("J", bound=Hashable)


@dataclass(frozen=True)
class Granted(Generic[J]):
    """A window has got a slot."""

    job: J
    window: int
    slot: Slot


@dataclass
class _Window:
    unread: set[int]
    grant: Granted[Any] | None = None
    is_here: bool = False


@dataclass
class _Job:
    owner: str
    windows: list[_Window]
    num_granted: int = 0
    is_kept: bool = False


class SlotAllocator(Generic[J]):
    """Slots of one length, granted in turn. Not thread-safe.

    Args:
        num_slots: How many there are.
        linger: Whether slots are free only when `gone` says so.

    Attributes:
        warm: Slots whose memory has been touched.

    Examples:
        >>> allocator = SlotAllocator(2)
        >>> allocator.begin("a", "rank 0", [{0}, {0}, {0}])
        >>> [(grant.window, grant.slot.index) for grant in allocator.grants()]
        [(0, 0), (1, 1)]
        >>> allocator.delivered("a", 0)
        >>> allocator.read("a", 0, 0)
        >>> [(grant.window, grant.slot.index) for grant in allocator.grants()]
        [(2, 0)]
    """

    def __init__(self, num_slots: int, *, linger: bool = False) -> None:
        self.num_slots = num_slots
        self._linger = linger
        self._ended: list[Granted[J]] = []
        self._num_lingering = 0
        self._jobs: dict[J, _Job] = {}
        self._waiting: deque[J] = deque()
        self._free = set(range(num_slots))
        self._generation = [0] * num_slots
        self._last_owner: list[str | None] = [None] * num_slots
        self._users: list[set[str]] = [set() for _ in range(num_slots)]
        self.warm: set[int] = set()

    @property
    def num_used(self) -> int:
        """How many slots are granted now."""
        return self.num_slots - len(self._free)

    def begin(
        self,
        job: J,
        owner: str,
        windows: Sequence[frozenset[int] | set[int]],
        *,
        keep: bool = False,
    ) -> None:
        """Takes a new job, which waits for slots from now on.

        Args:
            job: Names it.
            owner: Who hands over; gets the slots that it had before, if they are free.
            windows: For each window the files with bytes in it.
            keep: Its slots stay its own after it is finished, while nobody needs them.
        """
        if job in self._jobs:
            raise InternalError(f"expected a new job, found {job} again; please report this")
        made = [_Window(set(files)) for files in windows]
        self._jobs[job] = _Job(owner, made, is_kept=keep)
        if made:
            self._waiting.append(job)

    def grants(self) -> list[Granted[J]]:
        """Returns the slots that can be granted now, the jobs that wait taking turns."""
        given: list[Granted[J]] = []
        while True:
            self._waiting = deque(name for name in self._waiting if name in self._jobs)
            if not self._waiting:
                break
            name = self._waiting[0]
            job = self._jobs[name]
            index = self._take(job.owner)
            if index is None:
                break
            self._waiting.popleft()
            self._generation[index] += 1
            self._last_owner[index] = job.owner
            self._users[index].add(job.owner)
            grant = Granted(name, job.num_granted, Slot(index, self._generation[index]))
            job.windows[job.num_granted].grant = grant
            given.append(grant)
            job.num_granted += 1
            if job.num_granted < len(job.windows):
                self._waiting.append(name)
        return given

    def delivered(self, job: J, window: int) -> None:
        """Notes that a window is full: its rank does not touch the slot any more."""
        found = self._jobs[job]
        found.windows[window].is_here = True
        self._let_go(found, found.windows[window])

    def read(self, job: J, window: int, file: int) -> None:
        """Notes that a file's bytes of a window are written."""
        found = self._jobs[job]
        found.windows[window].unread.discard(file)
        self._let_go(found, found.windows[window])

    def finished(self, job: J, file: int) -> None:
        """Notes that nothing more of a file is read, also where it was not written.

        A window that its rank still fills keeps its slot until it is delivered.
        """
        found = self._jobs[job]
        for window in found.windows:
            window.unread.discard(file)
            self._let_go(found, window)

    def is_whole(self, job: J) -> bool:
        """Returns whether every window of a job that is finished still has its slot."""
        found = self._jobs.get(job)
        return found is not None and _is_idle(found) and all(w.grant for w in found.windows)

    def ended(self) -> list[Granted[J]]:
        """Returns the grants that ended since the last call, where slots linger."""
        found, self._ended = self._ended, []
        return found

    def gone(self, slot: Slot) -> None:
        """Takes that the memory is free of a slot whose grant had ended."""
        self._free.add(slot.index)
        self._num_lingering -= 1

    def drop(self, job: J) -> None:
        """Forgets a job and frees its slots; neither its rank nor a writer may use them any more.

        A job that is not known is fine.
        """
        found = self._jobs.pop(job, None)
        for window in found.windows if found else ():
            self._give_back(window)

    def expect(self, owner: str, count: int) -> list[int]:
        """Returns the slots to warm up for a rank: free or its own, at most `count`."""
        own = [index for index in range(self.num_slots) if self._last_owner[index] == owner]
        more = [index for index in self._free if self._last_owner[index] is None]
        more.sort(key=lambda index: (index not in self.warm, index))
        chosen = [*own, *more][:count]
        for index in chosen:
            self._last_owner[index] = owner
            self._users[index].add(owner)
        return chosen

    def cool(self, owners: Collection[str]) -> int | None:
        """Returns a free slot that none of some owners ever used, as one that was never touched.

        Why none ever: who used it may have registered its pages with a device, which would go on
        writing to them.

        Args:
            owners: Whose slots keep their memory.
        """
        for index in self._free & self.warm:
            if self._users[index].isdisjoint(owners):
                self._users[index].clear()
                self._last_owner[index] = None
                self.warm.discard(index)
                return index
        return None

    def owned(self, owner: str) -> list[int]:
        """Returns the slots that a rank had last, which have memory."""
        used = (i for i in range(self.num_slots) if i in self.warm or i not in self._free)
        return [i for i in used if self._last_owner[i] == owner]

    def _take(self, owner: str) -> int | None:
        """Returns the best free slot; frees those of a job that is only kept where none is."""
        # Why not more: those that linger are for the jobs that wait.
        if not self._free and self._num_lingering < len(self._waiting):
            self._free_kept()
        if not self._free:
            return None
        best = min(self._free, key=lambda index: (self._cost(index, owner), index))
        self._free.discard(best)
        return best

    def _cost(self, index: int, owner: str) -> int:
        if self._last_owner[index] == owner:
            return 0 if index in self.warm else 1
        if index not in self.warm:
            return 4
        return 2 if self._last_owner[index] is None else 3

    def _free_kept(self) -> None:
        """Frees the slots of the oldest job that is only kept."""
        for job in self._jobs.values():
            if job.is_kept and _is_idle(job) and any(window.grant for window in job.windows):
                for window in job.windows:
                    self._give_back(window)
                return

    def _let_go(self, job: _Job, window: _Window) -> None:
        if window.is_here and not window.unread and not job.is_kept:
            self._give_back(window)

    def _give_back(self, window: _Window) -> None:
        grant, window.grant = window.grant, None
        if grant is None:
            return
        self.warm.add(grant.slot.index)
        if self._linger:
            self._ended.append(grant)
            self._num_lingering += 1
        else:
            self._free.add(grant.slot.index)


def _is_idle(job: _Job) -> bool:
    """Returns whether nobody fills or writes a window of a job any more."""
    return all(window.is_here and not window.unread for window in job.windows)
