"""`RankProgress`: how far a save or load of one rank is, with its order to stop.

The thread that saves or loads, and its storage, fill it in; the heartbeat sender, events and
reports read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ray_dcp.commit_protocol.liveness import Doing
from ray_dcp.commit_protocol.messages import FileReceipt, OpKey
from ray_dcp.core.phases import PhaseClock
from ray_dcp.core.processes import Stop
from ray_dcp.errors import CheckpointError, DeadlineError, SaveCancelledError
from ray_dcp.store.storage import (
    Entry,
    PartWriter,
    PublishedFile,
    Reused,
    Storage,
    StorageWrapper,
    reuse_file,
)


class RankProgress(PhaseClock):
    """The current step of one rank, and its history. Thread-safe.

    Args:
        clock: Returns monotonic seconds.

    Attributes:
        key: Key of the save or load, once it has begun.
        over: Whether the save or load has its outcome on this rank.
        is_good: Whether that outcome is a success: a later Ctrl-C does not undo it.
        stop: Set when continuing is useless: the operation failed elsewhere, or was cancelled.
        abandoned: Why its coordinator will never answer; None while it may.
        attempt: Attempt of a save, once it is planned.
        plan: `SaveReport.plan` of a save, once it is planned.
        memory_bytes: Bytes of a load that came from the memory of the nodes.
        reused_bytes: Bytes of a save's files of this rank that were not written, by how.

    Examples:
        >>> from ray_dcp.core.phases import WRITE
        >>> progress = RankProgress(lambda: 0.0)
        >>> _ = progress.enter(WRITE, total_bytes=100)
        >>> progress.moved(40)
        >>> progress.doing.done_bytes, progress.doing.phase
        (40, 'writing')
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self.key: OpKey | None = None
        self.over = self.is_good = False
        self.stop = Stop()
        self.abandoned: CheckpointError | None = None
        self.attempt: str | None = None
        self.plan: str | None = None
        self.differing: tuple[str, ...] = ()
        self.memory_bytes = 0
        self.reused_bytes: dict[str, int] = {}
        self._first_seq: int | None = None
        self._last_seq = -1
        self._at: dict[object, str] = {}
        self.awaited = ""
        """What this rank waits for; empty while it does not."""

    def names(self, key: OpKey) -> None:
        """Records that this call will take part in an operation."""
        with self._lock:
            self._first_seq = key.seq if self._first_seq is None else self._first_seq
            self._last_seq = max(self._last_seq, key.seq)

    def begin(self, key: OpKey) -> None:
        """Records that a save or load begins, which the rank must not leave silently."""
        self.key, self.stop, self.abandoned = key, Stop(), None
        self.over = self.is_good = False
        self._last_moved = (0, 0)
        self.names(key)

    def renumber(self, seq: int) -> None:
        """Records the new number of this call, as the other ranks made calls without this one."""
        with self._lock:
            self._first_seq = self._last_seq = seq
            if self.key is not None:
                self.key = replace(self.key, seq=seq)

    def abandon(self, error: CheckpointError) -> None:
        """Records that no coordinator knows this save or load any more."""
        self.abandoned = error
        self.stop.because(error)

    def count_files(self, files: Iterable[FileReceipt]) -> None:
        """Counts part files of this rank that are durable.

        Args:
            files: Their receipts.
        """
        for file in files:
            if file.reused:
                self.reused_bytes[file.reused] = (
                    self.reused_bytes.get(file.reused, 0) + file.num_bytes
                )
            else:
                self.count(file.num_bytes)

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Marks a call of the storage. Refuses to begin or to succeed after `stop`."""
        self.check(key)
        mark = object()
        self._at[mark] = key
        try:
            yield
        finally:
            del self._at[mark]
        self.check(key)

    def waits_for(self, what: str) -> None:
        """Records what this rank waits for; an empty string, that it waits no longer."""
        self.awaited = what

    def check(self, key: str | None = None) -> None:
        """Raises `SaveCancelledError` after `stop`."""
        if self.stop.asked:
            raise SaveCancelledError(f"Given up, because of {self.stop.error!r}", key=key)

    @property
    def is_working(self) -> bool:
        """Whether this rank moves bytes, and has to be notified of a failure elsewhere."""
        # Why not "opening": that is before it joins.
        return self.step.doing in ("planning", "writing", "reading")

    @property
    def waits_for_others(self) -> bool:
        """Whether this rank may wait for another one, and has to be notified of its failure."""
        return self.is_working or self.step.doing == "staging"

    @property
    def doing(self) -> Doing:
        """The progress of this call, for a heartbeat."""
        with self._lock:
            now_s = self._clock()
            return Doing(
                first_seq=self._last_seq if self._first_seq is None else self._first_seq,
                last_seq=self._last_seq,
                phase=self.step.doing,
                phase_s=now_s - self._step_s,
                done_bytes=self._done_bytes,
                total_bytes=self._total_bytes,
                quiet_s=now_s - self._moved_s,
                key=next(iter([*self._at.values()]), None),
            )

    def look(self) -> tuple[str, str, int, int]:
        """Returns what this rank does, the file, and the bytes of the last step that moved some."""
        doing = self.doing
        file = doing.key if self.is_working else None
        moved = (doing.done_bytes, doing.total_bytes) if doing.total_bytes else self._last_moved
        return doing.phase, file or "", *moved

    def overdue(self, what: str, option: str, after_s: float, rank: int) -> CheckpointError:
        """Returns the error of this rank's own work that exceeds its deadline.

        Args:
            what: What the rank had to do.
            option: The option with the deadline.
            after_s: The deadline, in seconds.
            rank: This rank.
        """
        doing = self.doing
        where = f"it is at {doing.key}, and " if doing.key else ""
        where = f"it waits for {self.awaited}, and " if self.awaited else where
        return DeadlineError(
            f"Expected rank {rank} to {what} within {after_s:g} s, but {where}"
            f"{doing.done_bytes} of {doing.total_bytes or 'unknown'} bytes were moved, the last "
            f"{doing.quiet_s:.1f} s ago. Look whether the storage answers there; raise {option} "
            f"if it is merely slow",
            rank=rank,
            key=doing.key,
        )


class WatchedStorage(StorageWrapper):
    """A storage that records progress in `RankProgress`, and does nothing more after its `stop`.

    Args:
        inner: The storage.
        progress: Progress of the rank that uses it.
    """

    def __init__(self, inner: Storage, progress: RankProgress) -> None:
        super().__init__(inner)
        self._progress = progress

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        with self._progress.at(key):
            data = self._inner.read(key, start, num_bytes)
        self._progress.moved(len(data))
        return data

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        with self._progress.at(key):
            self._inner.read_into(key, start, target)
        self._progress.moved(len(target))

    @property
    def map_range(self) -> Callable[[str, int, int], memoryview | None] | None:
        """The storage's `map_range`, if it has one."""
        inner = getattr(self._inner, "map_range", None)
        return None if inner is None else partial(self._map_range, inner)

    def _map_range(
        self,
        inner: Callable[[str, int, int], memoryview | None],
        key: str,
        start: int,
        num_bytes: int,
    ) -> memoryview | None:
        with self._progress.at(key):
            view = inner(key, start, num_bytes)
        if view is not None:
            self._progress.moved(num_bytes)
        return view

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """See `Storage.write`."""
        with self._progress.at(key):
            self._inner.write(key, data, create=create)

    def reuse(self, key: str, source: PublishedFile, end: bytes, *, sync: bool) -> Reused | None:
        """See `ray_dcp.store.storage.reuse_file`."""
        with self._progress.at(key):
            reused = reuse_file(self._inner, key, source, end, sync=sync)
        if reused is not None:
            self._progress.moved(source.num_bytes)
        return reused

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`."""
        self._progress.check(key)
        # Why no check after it: nobody would abort the writer.
        return _WatchedWriter(self._inner.open_writer(key, sync=sync), key, self._progress)

    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        with self._progress.at(prefix or "its list of files"):
            return self._inner.list(prefix)


class _WatchedWriter:
    def __init__(self, inner: PartWriter, key: str, progress: RankProgress) -> None:
        self._inner = inner
        self._key = key
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._progress.at(self._key):
            self._inner.write(data)
        self._progress.moved(len(data))

    def commit(self) -> None:
        with self._progress.at(self._key):
            self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()
