"""`SharedReadStorage`: some bytes are read by one rank only, and passed on to the others.

`planning.reads.share_reads` decides who reads what; a `Transport` passes it on. What comes from
another rank is checked like what storage gives. Where it does not come, it is read from storage, so
that no rank depends on another.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ray_dcp.core.processes import start_thread
from ray_dcp.core.values import Int32Array, Int64Array
from ray_dcp.errors import CheckpointError
from ray_dcp.planning.reads import RankShare
from ray_dcp.store.storage import Storage, StorageWrapper

SHARE_TIMEOUT_S = 20.0
"""How long a reader waits for the others to use what it has read, in seconds, before it leaves the
rest to everybody: one that is frozen must not keep the others from reading."""

_LOOK_S = 0.2

Reads = tuple[Int32Array, Int64Array, Int64Array]


class Transport(Protocol):
    """How units get from the rank that reads them to the others of one load.

    For several threads. Nothing raises: what can't be had is None.
    """

    def enter(self, share: RankShare, freed: Callable[[int], None]) -> None:
        """Begins; `freed(unit)` is called for each unit offered that nobody needs any more."""
        ...

    def offer(self, unit: int, ranks: int, data: memoryview) -> memoryview | None:
        """Hands a unit on; returns its bytes where they are now. `data` may change afterwards."""
        ...

    def decline(self, units: Sequence[int]) -> None:
        """Tells that units of this rank will not be offered."""
        ...

    def take(self, unit: int, reader: int) -> memoryview | None:
        """Returns a unit's bytes, once its reader has offered it."""
        ...

    def use(self, unit: int) -> None:
        """Tells that this rank needs a unit no more."""
        ...

    def leave(self) -> None:
        """Ends: what is offered stays until the others have used it, and nothing else comes."""
        ...


class SharedReadStorage(StorageWrapper):
    """Implements `Storage` for the reads of one load on one rank.

    *Invariant*: units are read and used in the order of their numbers, which is that of files and
    of places in them. So the first unit that somebody still needs can always be read, and he who
    needs it is after it: nobody waits in a circle, however little room there is.

    Args:
        inner: Where everything is.
        files: The chunk table's.
        share: What this rank reads for others and gets from them.
        rank: This rank.
        reads: `Prepared.reads()`: all that will be asked.
        exchange: How it comes and goes.
        budget_bytes: Most bytes offered at a time that somebody still needs; one unit at least.
        num_threads: Threads that read for others.
        check: Raises when going on is of no use.
        moved: Told the bytes that came from others.

    Attributes:
        bytes_from_storage: Bytes that this rank asked of the storage.
        bytes_from_peers: Bytes that it took from what others had read.
        bytes_instead: Of those from storage, what should have come from another rank.
    """

    # Why: others read most of it.
    read_ahead = None

    def __init__(
        self,
        inner: Storage,
        files: Sequence[str],
        share: RankShare,
        rank: int,
        reads: Reads,
        exchange: Transport,
        *,
        budget_bytes: int,
        num_threads: int,
        check: Callable[[], None] = lambda: None,
        moved: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.bytes_from_storage = 0
        self.bytes_from_peers = 0
        self.bytes_instead = 0
        super().__init__(inner)
        self._share = share
        self._exchange = exchange
        self._budget_bytes = budget_bytes
        self._check = check
        self._moved = moved
        self._key = [files[index] for index in share.file.tolist()]
        self._number: list[int] = share.unit.tolist()
        self._low: list[int] = share.low.tolist()
        self._high: list[int] = share.high.tolist()
        self._is_mine: list[bool] = (share.reader == rank).tolist()
        self._reader: list[int] = share.reader.tolist()
        bounds = np.searchsorted(share.file, np.arange(len(files) + 1)).tolist()
        self._units_of = {
            key: (bounds[index], bounds[index + 1])
            for index, key in enumerate(files)
            if bounds[index] < bounds[index + 1]
        }
        self._left: list[int] = bytes_asked(share, reads).tolist()
        self._changed = threading.Condition()
        self._view: dict[int, memoryview | None] = {}
        self._fetched: set[int] = set()
        self._out: dict[int, int] = {}
        self._freed_s = 0.0
        self._todo = [index for index, mine in enumerate(self._is_mine) if mine]
        self._over = False
        self._num_threads = min(num_threads, len(self._todo))
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begins to read for others; call `finish` also where it fails.

        Raises:
            LimitError: No thread can be started.
        """
        self._freed_s = time.monotonic()
        self._exchange.enter(self._share, self._freed)
        for index in range(len(self._number)):
            if not self._left[index]:
                self._exchange.use(self._number[index])
        for _ in range(self._num_threads):
            self._threads.append(start_thread(self._read_for_all, "ray_dcp reads for all"))

    def finish(self, *, failed: bool = False) -> None:
        """Returns when all that others may expect of this rank has been offered.

        Args:
            failed: Nothing more is read; the others read for themselves.
        """
        with self._changed:
            self._over = self._over or failed
            self._changed.notify_all()
        try:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(_LOOK_S)
                    if not failed:
                        self._check()
        finally:
            with self._changed:
                self._over = True
                self._view.clear()
                self._changed.notify_all()
            self._exchange.leave()

    @property
    def behind(self) -> Storage:
        """Where the same bytes can be read again, whoever gave them first."""
        return self._inner

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        first, stop = self._units_of.get(key, (0, 0))
        at, end = start, start + len(target)
        index = bisect_right(self._high, at, first, stop)
        while at < end:
            if index == stop or self._low[index] >= end:
                self._from_storage(key, at, target[at - start :])
                return
            low, high = self._low[index], min(self._high[index], end)
            if at < low:
                self._from_storage(key, at, target[at - start : low - start])
                at = low
            part = target[at - start : high - start]
            view = self._unit(index)
            if view is None:
                self._from_storage(key, at, part, instead=not self._is_mine[index])
            else:
                part[:] = view[at - low : high - low]
                self._count_copied(index, len(part))
            del view
            self._asked(index, high - at)
            at, index = high, index + 1

    # Using units

    def _unit(self, index: int) -> memoryview | None:
        """Returns a unit's bytes when they are there; None when they have to be read."""
        with self._changed:
            mine_to_fetch = not self._is_mine[index] and index not in self._fetched
            if mine_to_fetch:
                self._fetched.add(index)
            while not mine_to_fetch and index not in self._view and not self._over:
                self._check()
                self._changed.wait(_LOOK_S)
            if not mine_to_fetch:
                return self._view.get(index)
        view = None
        try:
            view = self._exchange.take(self._number[index], self._reader[index])
        finally:
            self._put(index, view)
        return view

    def _put(self, index: int, view: memoryview | None) -> None:
        with self._changed:
            # Why not kept: nobody will ask for it again.
            self._view[index] = view if self._left[index] else None
            self._changed.notify_all()

    def _asked(self, index: int, num_bytes: int) -> None:
        """Notes that bytes of a unit were used; with the last ones it is given back."""
        with self._changed:
            self._left[index] -= num_bytes
            if self._left[index] > 0:
                return
            self._view[index] = None
        self._exchange.use(self._number[index])

    def _from_storage(
        self, key: str, start: int, target: memoryview, *, instead: bool = False
    ) -> None:
        self._inner.read_into(key, start, target)
        with self._changed:
            self.bytes_from_storage += len(target)
            self.bytes_instead += len(target) if instead else 0

    def _count_copied(self, index: int, num_bytes: int) -> None:
        if not self._is_mine[index]:
            self._moved(num_bytes)
            with self._changed:
                self.bytes_from_peers += num_bytes

    # Reading for others

    def _read_for_all(self) -> None:
        scratch = np.empty(0, np.uint8)
        while (index := self._next()) is not None:
            length = self._high[index] - self._low[index]
            if len(scratch) < length:
                scratch = np.empty(length, np.uint8)
            data = scratch.data[:length]
            view = None
            try:
                self._from_storage(self._key[index], self._low[index], data)
                view = self._exchange.offer(
                    self._number[index], int(self._share.ranks[index]), data
                )
            except CheckpointError:
                # Why not told: who needs these bytes reads them, and finds out by himself.
                pass
            finally:
                if view is None:
                    self._exchange.decline([self._number[index]])
                    self._freed(self._number[index])
                self._put(index, view)

    def _next(self) -> int | None:
        """Returns the next unit to read, once there is room for it.

        Why both at once: a later unit must not take the room that an earlier one needs.
        """
        with self._changed:
            while self._todo and not self._over:
                index = self._todo[0]
                length = self._high[index] - self._low[index]
                if not self._out or sum(self._out.values()) + length <= self._budget_bytes:
                    del self._todo[0]
                    self._out[self._number[index]] = length
                    return index
                if time.monotonic() > self._freed_s + SHARE_TIMEOUT_S:
                    break
                self._changed.wait(_LOOK_S)
            given_up, self._todo = self._todo, []
            for index in given_up:
                self._view[index] = None
            self._changed.notify_all()
        if given_up:
            self._exchange.decline([self._number[index] for index in given_up])
        return None

    def _freed(self, number: int) -> None:
        with self._changed:
            self._out.pop(number, None)
            self._freed_s = time.monotonic()
            self._changed.notify_all()


def bytes_asked(share: RankShare, reads: Reads) -> Int64Array:
    """Returns how many bytes of each unit will be asked for, each as often as it is: int64[u].

    Args:
        share: The units.
        reads: `Prepared.reads()`.
    """
    asked = np.zeros(len(share), np.int64)
    file, low, high = reads
    for number in np.unique(share.file).tolist():
        own = slice(*np.searchsorted(share.file, [number, number + 1]).tolist())
        rows = file == number
        a, b = low[rows], high[rows]
        bounds = np.stack([share.low[own], share.high[own]])
        # Bytes asked before each place: sum over the reads of min(place, high) - min(place, low).
        before = [_asked_before(a, b, place) for place in bounds]
        asked[own] = before[1] - before[0]
    return asked


def _asked_before(low: Int64Array, high: Int64Array, place: Int64Array) -> Int64Array:
    found = np.zeros(len(place), np.int64)
    for values, sign in ((np.sort(high), 1), (np.sort(low), -1)):
        total = np.concatenate([[0], np.cumsum(values)])
        under = np.searchsorted(values, place)
        found += sign * (total[under] + (len(values) - under) * place)
    return found
