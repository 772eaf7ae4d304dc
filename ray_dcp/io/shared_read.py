"""`SharedReadStorage`: one rank reads bytes that several ranks need, and sends them to the others.

`planning.reads.share_reads` assigns units of bytes to reading ranks; a `UnitExchange` transfers
them. Bytes from another rank are verified like bytes from storage. If they do not arrive, they are
read from storage, so that no rank depends on another.

`SmallFiles` caches small files of a storage whose requests have a high latency: a load reads
checksums, tensors and objects of a file by several short reads, each of which takes as long as
reading a few megabytes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from ray_dcp.core.processes import start_thread
from ray_dcp.core.values import Int32Array, Int64Array
from ray_dcp.errors import CheckpointError
from ray_dcp.format.manifest import FileEntry
from ray_dcp.planning.reads import RankShare
from ray_dcp.store.storage import Storage, StorageWrapper, read_traits_of

_LOOK_S = 0.2

Reads = tuple[Int32Array, Int64Array, Int64Array]


class UnitExchange(Protocol):
    """Transfers units from the rank that reads them to the other ranks of one load. Thread-safe.

    Bytes that are not available are None.
    """

    def offer(self, unit: int, takers: int, data: memoryview) -> memoryview | None:
        """Offers a copy of a unit's bytes to other ranks and returns it; `data` may be reused.

        Args:
            unit: The unit.
            takers: Number of other ranks that need it.
            data: Its bytes.
        """
        ...

    def has_room(self) -> bool:
        """Waits until this rank may offer another unit; returns whether that was in time.

        An offered unit takes room until this rank has used it and the others have it.
        """
        ...

    def use(self, unit: int) -> None:
        """Records that this rank needs a unit no longer that it has offered."""
        ...

    def decline(self, units: Sequence[int]) -> None:
        """Announces that units of this rank will not be offered."""
        ...

    def take(self, unit: int, reader: int) -> memoryview | None:
        """Waits until the reader of a unit has offered it, and returns its bytes."""
        ...

    def skip(self, units: Sequence[int]) -> None:
        """Announces that this rank does not need units of others."""
        ...

    def leave(self) -> None:
        """Ends `has_room` and `take`; offered units stay until the others have them."""
        ...


class SharedReadStorage(StorageWrapper):
    """Implements `Storage` for the reads of one load on one rank.

    *Invariant*: units are read and used in ascending order of their numbers, which is the order of
    files and offsets. The first unit that some rank still needs can therefore always be read: ranks
    never wait for each other in a cycle, however little room there is.

    Args:
        inner: Storage of the files.
        files: Files of the chunk table.
        share: Units that this rank reads for others and receives from them.
        rank: This rank.
        reads: `Prepared.reads()`, all ranges that will be read.
        exchange: Transfers the units.
        num_threads: Number of threads that read for others.
        check: Raises if the load has failed.
        moved: Called with the number of bytes received from other ranks.

    Attributes:
        bytes_from_storage: Bytes that this rank read from the storage.
        bytes_from_peers: Bytes that this rank received from other ranks.
        bytes_instead: Bytes read from the storage because another rank did not send them.
    """

    # Why none: other ranks read most of the bytes.
    read_ahead = None

    def __init__(
        self,
        inner: Storage,
        files: Sequence[str],
        share: RankShare,
        rank: int,
        reads: Reads,
        exchange: UnitExchange,
        *,
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
        self._check = check
        self._moved = moved
        self._key = [files[index] for index in share.file.tolist()]
        self._number: list[int] = share.unit.tolist()
        self._low: list[int] = share.low.tolist()
        self._high: list[int] = share.high.tolist()
        self._is_mine: list[bool] = (share.reader == rank).tolist()
        self._reader: list[int] = share.reader.tolist()
        edges = np.searchsorted(share.file, np.arange(len(files) + 1)).tolist()
        self._units_of = {
            key: (edges[index], edges[index + 1])
            for index, key in enumerate(files)
            if edges[index] < edges[index + 1]
        }
        self._left: list[int] = bytes_asked(share, reads).tolist()
        self._changed = threading.Condition()
        self._view: dict[int, memoryview | None] = {}
        self._fetched: set[int] = set()
        self._todo = [index for index, mine in enumerate(self._is_mine) if mine]
        self._over = False
        self._turn = threading.Lock()
        self._num_threads = min(num_threads, len(self._todo))
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begins to read for others; call `finish` also where it fails.

        Raises:
            LimitError: No thread can be started.
        """
        unused = [index for index, left in enumerate(self._left) if not left]
        self._skip(unused)
        for index in unused:
            if self._is_mine[index]:
                self._exchange.use(self._number[index])
        for _ in range(self._num_threads):
            self._threads.append(start_thread(self._read_for_all, "ray_dcp reads for all"))

    def finish(self, *, failed: bool = False) -> None:
        """Waits until all units of this rank have been offered or declined.

        Args:
            failed: Read nothing more; the other ranks read the rest themselves.
        """
        if failed:
            self._exchange.leave()
            self._give_up()
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
            self._give_up()
            self._skip(range(len(self._number)))

    @property
    def behind(self) -> Storage:
        """The storage itself, from which any bytes can be read again."""
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
            self._count_used(index, high - at)
            at, index = high, index + 1

    # Using units

    def _unit(self, index: int) -> memoryview | None:
        """Waits for a unit and returns its bytes; None if they must be read from storage."""
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
            # Why not always kept: a unit without bytes left will not be read again.
            self._view[index] = view if self._left[index] else None
            self._changed.notify_all()

    def _count_used(self, index: int, num_bytes: int) -> None:
        """Counts used bytes of a unit, and releases the unit after the last ones."""
        with self._changed:
            self._left[index] -= num_bytes
            if self._left[index] > 0:
                return
            self._view[index] = None
        if self._is_mine[index]:
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
            number, data, view = self._number[index], scratch.data[:length], None
            try:
                self._from_storage(self._key[index], self._low[index], data)
                view = self._exchange.offer(number, int(self._share.ranks[index]) - 1, data)
            except CheckpointError:
                # Why ignored: a rank that needs these bytes reads them and gets the error itself.
                pass
            finally:
                if view is None:
                    self._exchange.decline([number])
                self._put(index, view)

    def _next(self) -> int | None:
        """Waits until there is room for the next unit, and returns the unit; None if none is left.

        *Why under one lock*: a later unit must not take the room that an earlier one needs.
        """
        with self._turn:
            if self._todo and not self._exchange.has_room():
                self._give_up()
            with self._changed:
                return self._todo.pop(0) if self._todo else None

    def _give_up(self) -> None:
        """Leaves the units that this rank has not begun to the others."""
        with self._changed:
            given_up, self._todo = self._todo, []
            for index in given_up:
                self._view[index] = None
            self._changed.notify_all()
        if given_up:
            self._exchange.decline([self._number[index] for index in given_up])

    def _skip(self, indices: Iterable[int]) -> None:
        """Announces which units of others this rank has not fetched, and will not."""
        with self._changed:
            own = [i for i in indices if not self._is_mine[i] and i not in self._fetched]
            self._fetched.update(own)
        self._exchange.skip([self._number[index] for index in own])


def bytes_asked(share: RankShare, reads: Reads) -> Int64Array:
    """Returns the number of bytes of each unit that will be read, as int64[u].

    A byte that several reads contain counts for each of them:

        unit        |---------------|
        read 1   [-----)
        read 2                  [-------)
        read 3          [-----)
        counted     |==||=====| |===|

    Args:
        share: The units.
        reads: `Prepared.reads()`.
    """
    asked = np.zeros(len(share), np.int64)
    file, low, high = reads
    for number in np.unique(share.file).tolist():
        own = slice(*np.searchsorted(share.file, [number, number + 1]).tolist())
        rows = file == number
        start, stop = low[rows][:, None], high[rows][:, None]
        common = np.minimum(stop, share.high[own]) - np.maximum(start, share.low[own])
        asked[own] = np.maximum(common, 0).sum(axis=0)
    return asked


KEPT_BYTES = 64 << 20
"""Maximum number of cached bytes of all small files together."""


class SmallFiles(StorageWrapper):
    """Reads each small file as a whole, once. Only files passed to `expect` are cached.

    Args:
        inner: Storage of the files.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> inner = MemoryStorage("doc-small-files")
        >>> inner.write("a", b"abc")
        >>> storage = SmallFiles(inner)
        >>> storage.expect([FileEntry("a", 3, "")])
        >>> storage.read("a", 1), storage.read("a", 0, 1)
        (b'bc', b'a')
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._turns: dict[str, threading.Lock] = {}
        self._files: dict[str, bytes] = {}
        # What is cached here is of storages that map nothing.
        self.map_range = getattr(inner, "map_range", None)

    def expect(self, files: Iterable[FileEntry]) -> None:
        """Registers files that will be read; small ones are cached from their first read on.

        Args:
            files: Keys and lengths of the files.
        """
        traits, left = read_traits_of(self._inner), KEPT_BYTES
        most_bytes = int(traits.request_s * traits.bytes_per_s)
        for file in () if traits.cached else files:
            if file.num_bytes <= min(most_bytes, left):
                left -= file.num_bytes
                self._turns[file.key] = threading.Lock()

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        turn = self._turns.get(key)
        if turn is None:
            return super().read(key, start, num_bytes)
        with turn:
            if key not in self._files:
                self._files[key] = super().read(key)
        data = self._files[key]
        return data[start:] if num_bytes is None else data[start : start + num_bytes]

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        data = self.read(key, start, len(target)) if key in self._turns else b""
        if len(data) == len(target) > 0:
            target[:] = data
        else:
            super().read_into(key, start, target)
