"""`StagedPieces`: the staged bytes of a file, as a writer asks for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

from ray_dcp.commit_protocol.messages import FileReceipt, PartsWritten, Target
from ray_dcp.core.wire_error import to_wire
from ray_dcp.errors import CheckpointError
from ray_dcp.io.writer import NotHeldError, write_pieces
from ray_dcp.stage.orders import (
    StageKey,
)
from ray_dcp.stage.window_bytes import WindowBytes
from ray_dcp.stage.windows import StagingLayout
from ray_dcp.stage.write_job import Job
from ray_dcp.store.storage import Storage


class StagedPieces:
    """Implements `PieceSource` on staged windows.

    Args:
        layout: Layout of the rank's share.
        file: Position of the file in the plan.
        bytes_of: Returns the bytes of a window, and may wait for them.
        passed: Called with each window whose bytes of this file are written, and with the number of
            bytes written since the last call.
    """

    def __init__(
        self,
        layout: StagingLayout,
        file: int,
        bytes_of: Callable[[int], WindowBytes],
        passed: Callable[[int | None, int], None] = lambda *_: None,
    ) -> None:
        self.before_wait: Callable[[], None] = lambda: None
        self.is_held = False
        own = slice(*layout.file_first[file : file + 2].tolist())
        self._bytes_of = bytes_of
        self._passed = passed
        self._window = layout.window[own].tolist()
        self._offset = layout.offset[own].tolist()
        self._length = layout.num_bytes[own].tolist()
        self._file_end = layout.file_end[own].tolist()
        self._segments: dict[int, list[int]] = {}
        for segment, piece in enumerate(layout.piece[own].tolist()):
            self._segments.setdefault(piece, []).append(segment)
        self._current = (-1, WindowBytes(()))
        self._last_view = memoryview(b"")
        self._done = 0

    def small(self, first: int, stop: int) -> Iterator[memoryview]:
        """See `PieceSource.small`."""
        segments = self._segments
        for piece in range(first, stop):
            found = segments.get(piece)
            yield next(self._views(found[0]), _EMPTY) if found else _EMPTY

    def parts(self, piece: int) -> Iterator[memoryview]:
        """See `PieceSource.parts`."""
        return chain.from_iterable(map(self._views, self._segments.get(piece, ())))

    def num_bytes(self, piece: int) -> int:
        """See `PieceSource.num_bytes`."""
        return sum(self._length[segment] for segment in self._segments.get(piece, ()))

    def written(self, end: int) -> None:
        """See `PieceSource.written`."""
        if self.is_held:
            return
        num_bytes = 0
        while self._done < len(self._window) and self._file_end[self._done] <= end:
            num_bytes += self._length[self._done]
            window = self._window[self._done]
            self._done += 1
            is_last = self._done == len(self._window) or self._window[self._done] != window
            if is_last:
                self._passed(window, num_bytes)
                num_bytes = 0
        if num_bytes:
            self._passed(None, num_bytes)

    def let_go(self) -> None:
        """Releases the bytes that were returned last."""
        # Suppressed: an error came between, whose traceback has it.
        with suppress(BufferError):
            self._last_view.release()
        self._last_view = memoryview(b"")
        self._current = (-1, WindowBytes(()))

    def _views(self, segment: int) -> Iterator[memoryview]:
        window = self._window[segment]
        if window != self._current[0]:
            self._current = (window, self._bytes_of(window))
        for view in self._current[1].views(self._offset[segment], self._length[segment]):
            self._last_view = view
            yield view


class JobPieces(StagedPieces):
    """The pieces of a job's file; waits for windows that are not here yet."""

    def __init__(self, job: Job, file: int, passed: Callable[[int | None, int], None]) -> None:
        super().__init__(job.layout, file, self._wait_for, passed)
        self._job = job

    def _wait_for(self, window: int) -> WindowBytes:
        job = self._job
        with job.changed:
            if job.error is None and window in job.windows:
                return job.windows[window]
        # Why: what is packed lies in windows that others may wait for, and this one for them. So
        # does what was written last, to which the writer refers still.
        self.before_wait()
        self.let_go()
        with job.changed:
            if self.is_held:
                self._hold(window)
            job.changed.wait_for(lambda: job.error is not None or window in job.windows)
            if job.error is not None:
                # Why no name for it: it would hold this frame, and so the bytes, in a circle.
                raise copy.copy(job.error)
            return job.windows[window]

    def _hold(self, window: int) -> None:
        """Waits for room for a window while all windows before it stay; the lock is held.

        *Why* a bound: the room may be taken by windows that wait for each other, each with a writer
        that holds what it has.

        Raises:
            NotHeldError: There is none.
        """
        job = self._job
        has_room = job.changed.wait_for(
            lambda: job.error is not None or job.num_granted > window,
            job.hold_s,
        )
        if not has_room:
            job.hold_s = 0.0
            raise NotHeldError


def write_staged(
    job: Job,
    file: int,
    passed: Callable[[int | None, int], None],
    opener: Callable[[Target], Storage],
) -> PartsWritten:
    """Writes one file of a job and returns what became of it. Never raises.

    Args:
        job: The job whose file is written.
        file: Position of the file in `plan.files`.
        passed: See `StagedPieces`.
        opener: Opens the storage.
    """
    order, plan = job.order, job.order.plan.files[file]
    pieces = JobPieces(job, file, passed)
    try:
        receipt = write_pieces(
            opener(order.target),
            plan,
            order.key.attempt,
            pieces,
            options=order.options,
            published=order.published,
        )
    except Exception as exc:  # noqa: BLE001 - told to whoever collects the receipts
        return unwritten(job, file, exc)
    finally:
        pieces.let_go()
    return _report(order.key, (receipt,))


def unwritten(job: Job, file: int, error: BaseException) -> PartsWritten:
    """Returns the report of a file that could not be written.

    Args:
        job: The job whose file was not written.
        file: Position of the file in `plan.files`.
        error: The error because of which it was not written.
    """
    plan = job.order.plan.files[file]
    # The report stays; the wire form has no frames, which would hold views of the bytes.
    return _report(job.order.key, error=to_wire(error, "writing staged bytes", key=plan.key))


def _report(
    key: StageKey, files: tuple[FileReceipt, ...] = (), error: CheckpointError | None = None
) -> PartsWritten:
    return PartsWritten(key.save, key.rank, key.attempt, key.epoch, files, error)


_EMPTY = memoryview(b"")
