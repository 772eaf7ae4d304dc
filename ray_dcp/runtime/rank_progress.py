"""`RankProgress`: how far one rank is in one call of its user, and whether it is to stop.

The thread that saves or loads and the storage that it uses fill it; the heartbeat sender reads it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ray_dcp.errors import CheckpointError, DeadlineError, SaveCancelledError
from ray_dcp.io.threads import Stop
from ray_dcp.protocol.liveness import Doing
from ray_dcp.protocol.messages import OpKey
from ray_dcp.store.storage import Entry, PartWriter, Storage, StorageWrapper


class RankProgress:
    """What one rank does now. Safe to use from several threads.

    Args:
        clock: Seconds that never go back.

    Attributes:
        key: The save or load of this call, once it has begun.
        over: That save or load has its outcome on this rank.
        stop: Asked to stop when going on is of no use: it failed elsewhere, or was cancelled.
        abandoned: Why its coordinator will never answer; None while it may.
        on_enter: Told every phase that begins.

    Example:
        >>> progress = RankProgress(lambda: 0.0)
        >>> progress.enter("writing", total_bytes=100)
        >>> progress.moved(40)
        >>> progress.doing.done_bytes, progress.doing.phase
        (40, 'writing')
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.key: OpKey | None = None
        self.over = False
        self.stop = Stop()
        self.abandoned: CheckpointError | None = None
        self.on_enter: Callable[[str], None] = lambda _: None
        self._clock = clock
        self._lock = threading.Lock()
        self._first_seq: int | None = None
        self._last_seq = -1
        self._phase = "beginning"
        self._entered_s = self._moved_s = clock()
        self._done_bytes = self._total_bytes = 0
        self._at: dict[object, str] = {}

    def names(self, key: OpKey) -> None:
        """Notes that this call will take part in an operation."""
        with self._lock:
            self._first_seq = key.seq if self._first_seq is None else self._first_seq
            self._last_seq = max(self._last_seq, key.seq)

    def begin(self, key: OpKey) -> None:
        """Notes that a save or load begins: the one that a rank must not leave silently."""
        self.key, self.over, self.stop, self.abandoned = key, False, Stop(), None
        self.names(key)

    def renumber(self, seq: int) -> None:
        """Notes that this call has another number: the other ranks made calls without this one."""
        with self._lock:
            self._first_seq = self._last_seq = seq
            if self.key is not None:
                self.key = replace(self.key, seq=seq)

    def abandon(self, error: CheckpointError) -> None:
        """Notes that there is no coordinator any more that knows this save or load."""
        self.abandoned = error
        self.stop.because(error)

    def enter(self, phase: str, total_bytes: int = 0) -> None:
        """Notes that a phase begins; see `liveness.Doing`."""
        with self._lock:
            self._phase = phase
            self._entered_s = self._moved_s = self._clock()
            self._done_bytes, self._total_bytes = 0, total_bytes
        self.on_enter(phase)

    def moved(self, num_bytes: int) -> None:
        """Notes that bytes went to the storage or came from it."""
        with self._lock:
            self._done_bytes += num_bytes
            self._moved_s = self._clock()

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Marks a call of the storage. Refuses to begin or to end well after `stop`."""
        self.check(key)
        mark = object()
        self._at[mark] = key
        try:
            yield
        finally:
            del self._at[mark]
        self.check(key)

    def check(self, key: str | None = None) -> None:
        """Raises `SaveCancelledError` after `stop`."""
        if self.stop.asked:
            raise SaveCancelledError(f"Given up, because of {self.stop.error!r}", key=key)

    @property
    def phase(self) -> str:
        """In which phase it is; see `liveness.Doing`."""
        return self._phase

    @property
    def is_working(self) -> bool:
        """Whether this rank does its share, and hears of a failure only by being told."""
        # Why not "opening": that is before it joins.
        return self._phase in ("planning", "writing", "reading")

    @property
    def waits_for_others(self) -> bool:
        """Whether it may wait for another rank, of whose failure it hears only by being told."""
        return self.is_working or self._phase == "staging"

    @property
    def doing(self) -> Doing:
        """What it does now."""
        with self._lock:
            now_s = self._clock()
            return Doing(
                first_seq=self._last_seq if self._first_seq is None else self._first_seq,
                last_seq=self._last_seq,
                phase=self._phase,
                phase_s=now_s - self._entered_s,
                done_bytes=self._done_bytes,
                total_bytes=self._total_bytes,
                quiet_s=now_s - self._moved_s,
                key=next(iter([*self._at.values()]), None),
            )

    def overdue(self, what: str, option: str, after_s: float, rank: int) -> CheckpointError:
        """Returns the error of this rank's own work that takes too long.

        Args:
            what: It should have done.
            option: With which deadline.
            after_s: How long it was, in seconds.
            rank: This rank.
        """
        doing = self.doing
        where = f"it is at {doing.key}, and " if doing.key else ""
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
        vitals: Of who uses it.
    """

    def __init__(self, inner: Storage, vitals: RankProgress) -> None:
        super().__init__(inner)
        self._vitals = vitals

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        with self._vitals.at(key):
            data = self._inner.read(key, start, num_bytes)
        self._vitals.moved(len(data))
        return data

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        with self._vitals.at(key):
            self._inner.read_into(key, start, target)
        self._vitals.moved(len(target))

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """See `Storage.write`."""
        with self._vitals.at(key):
            self._inner.write(key, data, create=create)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`."""
        self._vitals.check(key)
        # Why no check after it: nobody would abort the writer.
        return _WatchedWriter(self._inner.open_writer(key, sync=sync), key, self._vitals)

    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        with self._vitals.at(prefix or "its list of files"):
            return self._inner.list(prefix)


class _WatchedWriter:
    def __init__(self, inner: PartWriter, key: str, vitals: RankProgress) -> None:
        self._inner = inner
        self._key = key
        self._vitals = vitals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._vitals.at(self._key):
            self._inner.write(data)
        self._vitals.moved(len(data))

    def commit(self) -> None:
        with self._vitals.at(self._key):
            self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()
