"""One rank's share of one save while a node holds and writes it; its bytes for a writer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError, LimitError, ParticipantError
from ray_dcp.io.writer import part_key, write_pieces
from ray_dcp.protocol.messages import Target
from ray_dcp.stage.allocator import SlotAllocator
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.stage.memory_tier import TierFile, kept_file
from ray_dcp.stage.values import (
    Grant,
    Slot,
    StageKey,
    StageOrder,
    StageProgress,
    StageReport,
    StagerOptions,
    Unknown,
)
from ray_dcp.stage.windows import StagingLayout
from ray_dcp.store.storage import Storage


@dataclass(eq=False)
class Channel:
    """A kind of staging memory: shared by the node, or objects of the store, which only count."""

    slot_bytes: int
    allocator: SlotAllocator[StageKey]
    arena: StagingMemory | None = None


def channel_of(limit_bytes: int, options: StagerOptions) -> Channel:
    """Returns one of so many bytes, without memory of its own."""
    slot_bytes = options.window_bytes_within(limit_bytes)
    return Channel(slot_bytes, SlotAllocator(max(limit_bytes // slot_bytes, 1)))


def arena_channel(limit_bytes: int, options: StagerOptions) -> Channel:
    """Returns one with shared memory of so many bytes.

    Raises:
        LimitError: There is no such memory on this machine.
    """
    channel = channel_of(limit_bytes, options)
    channel.arena = StagingMemory.create(channel.allocator.num_slots, channel.slot_bytes)
    return channel


@dataclass(eq=False)
class Job:
    """What a `WriteQueue` knows of one `StageKey`. Guarded by its lock."""

    order: StageOrder
    plan: RankPlan
    layout: StagingLayout
    reporter: Any
    """Who gets the reports; the queue only passes it on."""
    channel: Channel | None
    """What its slots count in; None for one that was adopted."""
    arena: StagingMemory | None
    """Where its slots are; None when its windows come as objects."""
    changed: threading.Condition
    slots: list[Slot] = field(default_factory=list)
    windows: dict[int, memoryview] = field(default_factory=dict)
    """Bytes of the windows that are here."""
    reports: dict[int, StageReport] = field(default_factory=dict)
    """By position in `plan.files`."""
    written_bytes: int = 0
    error: CheckpointError | None = None
    """Why it ends early."""
    tells_error: bool = True
    """Whether that is reported, for every file that is not written."""
    is_sealed: bool = False
    rank_is_done: bool = False
    """The rank writes into its slots no more."""
    is_working: bool = False
    is_over: bool = False
    is_kept: bool = False
    """Written, and its bytes stay for loads."""
    is_committed: bool = False
    """Its rank was told so."""
    is_released: bool = False
    """Its rank knows the outcome: it is forgotten as soon as it is over, if it is not kept."""
    is_dropped: bool = False
    """It failed, or was cancelled: nobody will load it."""
    wants_more: list[tuple[int, Future[Grant | Unknown]]] = field(default_factory=list)
    wants_seal: list[Future[bool | Unknown]] = field(default_factory=list)

    @property
    def files(self) -> tuple[int, ...]:
        """Positions in `plan.files` of those to write."""
        if self.order.files is not None:
            return self.order.files
        return tuple(range(len(self.plan.files)))

    @property
    def is_written(self) -> bool:
        """Whether there is a receipt for each of its files."""
        told = self.reports
        return len(told) == len(self.files) and all(one.receipt for one in told.values())

    @property
    def run(self) -> str:
        """The folder of the checkpoints that it belongs to."""
        return self.order.target.url.rstrip("/").rpartition("/")[0]

    def kept_files(self) -> tuple[TierFile, ...]:
        """Returns where the bytes of each file lie, by the keys of the attempt."""
        return tuple(
            kept_file(
                part_key(self.plan.files[file], self.order.key.attempt),
                self.layout,
                file,
                self.slots,
            )
            for file in self.files
        )

    def failure(self) -> CheckpointError | None:
        """Returns a copy of why it ends early, to be raised in another thread."""
        return None if self.error is None else copy.copy(self.error)

    def progress(self) -> StageProgress:
        """Returns how far it is."""
        return StageProgress(
            self.order.key,
            self.layout.total_bytes,
            self.written_bytes,
            self.is_sealed,
            tuple(self.reports.values()),
            self.order.helps,
        )


class StagedPieces:
    """Implements `PieceSource` on the windows of a job; waits for those that are not here yet.

    Args:
        job: Whose.
        file: Position in `plan.files`.
        turn: Held by the writing thread; given up while it waits.
        passed: Told of each window whose bytes for this file are written, and of how many bytes
            are written since the last time.
    """

    def __init__(
        self,
        job: Job,
        file: int,
        turn: threading.Semaphore,
        passed: Callable[[int | None, int], None],
    ) -> None:
        self.before_wait: Callable[[], None] = lambda: None
        layout = job.layout
        low, high = layout.file_first[file : file + 2].tolist()
        own = slice(low, high)
        self._job = job
        self._turn = turn
        self._passed = passed
        self._window = layout.window[own].tolist()
        self._offset = layout.offset[own].tolist()
        self._length = layout.num_bytes[own].tolist()
        self._file_end = layout.file_end[own].tolist()
        self._segments: dict[int, list[int]] = {}
        for segment, piece in enumerate(layout.piece[own].tolist()):
            self._segments.setdefault(piece, []).append(segment)
        self._current = (-1, memoryview(b""))
        self._done = 0

    def small(self, first: int, stop: int) -> Iterator[memoryview]:
        """See `PieceSource.small`."""
        segments = self._segments
        for piece in range(first, stop):
            found = segments.get(piece)
            yield self._view(found[0]) if found else _EMPTY

    def parts(self, piece: int) -> Iterator[memoryview]:
        """See `PieceSource.parts`."""
        return map(self._view, self._segments.get(piece, ()))

    def num_bytes(self, piece: int) -> int:
        """See `PieceSource.num_bytes`."""
        return sum(self._length[segment] for segment in self._segments.get(piece, ()))

    def written(self, end: int) -> None:
        """See `PieceSource.written`.

        Raises:
            ParticipantError: Memory that was adopted has been used for something else meanwhile.
        """
        num_bytes = 0
        while self._done < len(self._window) and self._file_end[self._done] <= end:
            num_bytes += self._length[self._done]
            window = self._window[self._done]
            self._done += 1
            is_last = self._done == len(self._window) or self._window[self._done] != window
            if is_last:
                self._check_kept(window)
                self._passed(window, num_bytes)
                num_bytes = 0
        if num_bytes:
            self._passed(None, num_bytes)

    def _view(self, segment: int) -> memoryview:
        window = self._window[segment]
        if window != self._current[0]:
            self._current = (window, self._wait_for(window))
        offset = self._offset[segment]
        return self._current[1][offset : offset + self._length[segment]]

    def _wait_for(self, window: int) -> memoryview:
        job = self._job
        with job.changed:
            if job.error is None and window in job.windows:
                return job.windows[window]
        # Why: what is packed lies in windows that others may wait for, and this one for them.
        self.before_wait()
        self._turn.release()
        try:
            with job.changed:
                while job.error is None and window not in job.windows:
                    job.changed.wait()
                error = job.failure()
                if error is not None:
                    raise error
                view = job.windows[window]
        finally:
            self._turn.acquire()
        return view

    def _check_kept(self, window: int) -> None:
        job = self._job
        is_adopted = job.channel is None
        if is_adopted and job.arena is not None and not job.arena.holds(job.slots[window]):
            raise lost_memory(job.order.key.rank)


def write_staged(
    job: Job,
    file: int,
    turn: threading.Semaphore,
    passed: Callable[[int | None, int], None],
    opener: Callable[[Target], Storage],
) -> StageReport:
    """Writes one file of a job and returns what became of it. Never raises.

    Args:
        job: Whose.
        file: Position in `plan.files`.
        turn: See `StagedPieces`; held by the caller.
        passed: See `StagedPieces`.
        opener: What opens the storage.
    """
    order, plan = job.order, job.plan.files[file]
    try:
        pieces = StagedPieces(job, file, turn, passed)
        storage = opener(order.target)
        receipt = write_pieces(storage, plan, order.key.attempt, pieces, options=order.options)
    except Exception as exc:  # noqa: BLE001 - told to whoever collects the receipts
        return unwritten(job, file, exc)
    return StageReport(order.key, plan.file, receipt)


def unwritten(job: Job, file: int, error: BaseException) -> StageReport:
    """Returns the report of a file that could not be written.

    Args:
        job: Whose.
        file: Position in `plan.files`.
        error: Why.
    """
    plan = job.plan.files[file]
    if not isinstance(error, CheckpointError):
        error = CheckpointError(
            f"writing staged bytes failed: {type(error).__name__}: {error}", key=plan.key
        )
    return StageReport(job.order.key, plan.file, None, error)


def no_thread(rank: int, error: RuntimeError) -> LimitError:
    """Returns the error for a share that the stager has no thread to write with."""
    return LimitError(
        f"expected the node's stager to start a thread that writes the bytes of rank {rank}, but "
        f"{error}: the node has as many processes and threads as it may. Raise the limit (ulimit "
        f"-u, or pids of the container), or end what needs them, and save again",
        rank=rank,
    )


def lost_memory(rank: int) -> ParticipantError:
    """Returns the error for staged bytes that are not there any more."""
    return ParticipantError(
        f"expected the bytes that rank {rank} had staged, but their memory was used for something "
        f"else meanwhile; save again",
        rank=rank,
    )


def died(rank: int) -> ParticipantError:
    """Returns the error for a rank that ended in the middle of handing over."""
    return ParticipantError(
        f"rank {rank} died before the stager had all its bytes; restart it and save again",
        rank=rank,
    )


def answer(future: Future[Any], error: CheckpointError | None, result: Any) -> None:
    """Ends a future that somebody may wait for."""
    # Suppressed: whoever waited has given up.
    with suppress(Exception):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


_EMPTY = memoryview(b"")
