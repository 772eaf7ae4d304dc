"""Staging backends: where the bytes of an asynchronous save are while training goes on.

In a job with Ray the stager of the node holds them (`StagerBackend`), and writes them while the
rank waits for the outcome, also if the rank died. A process without Ray, alone or one of several,
holds them itself (`InProcessBackend`), in memory that it does not train with. So does a rank of a
Ray for one save where the object store has no room.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ray_dcp.commit_protocol.messages import (
    FileReceipt,
    Reply,
    Request,
    SaveGo,
    SaveOutcome,
    SaveReceipt,
    SaveStaged,
)
from ray_dcp.core.processes import begin
from ray_dcp.errors import CheckpointError, LimitError
from ray_dcp.rank.captured import Captured
from ray_dcp.rank.rank_save import (
    Opener,
    RankSave,
    result_or_error,
)
from ray_dcp.session.rank_progress import RankProgress
from ray_dcp.stage.node_memory import NoRoomError
from ray_dcp.stage.orders import StageKey
from ray_dcp.stage.private_memory import PIECE_BYTES, Lease, PrivateMemory
from ray_dcp.stage.staged_pieces import StagedPieces
from ray_dcp.stage.window_bytes import WindowBytes
from ray_dcp.stage.window_filler import deferred_items, fill_window, filler_of
from ray_dcp.stage.windows import lay_out_windows
from ray_dcp.store.opening import open_storage

if TYPE_CHECKING:
    from ray_dcp.session.ray_actors import RayActors
    from ray_dcp.stage.link import Staged

Finish = Generator[Request, Reply, SaveOutcome]

logger = logging.getLogger(__name__)


def staging_backend_of(ray: RayActors | None) -> StagingBackend:
    """Returns the backend that stages a session's bytes.

    Args:
        ray: The actors of the session; None without Ray.
    """
    return InProcessBackend() if ray is None else StagerBackend(ray)


_memory = PrivateMemory()
os.register_at_fork(after_in_child=_memory.begin_anew)


def warm_process(num_bytes: int) -> Future[None]:
    """Begins to touch this process's memory for a state, in the background; returns at once."""

    def run() -> None:
        # Suppressed: the first save is slower then, and tells what is wrong.
        with suppress(MemoryError, OSError):
            _memory.warm(num_bytes)

    return begin(run, "warm")


class InProcessBackend:
    """Stages in this process: training continues, but the save ends with the process.

    Args:
        opener: Opens the storage.

    Attributes:
        kind: `SaveReport.staging`.
        num_bytes: Bytes that were copied.
    """

    kind = "process"

    def __init__(self, opener: Opener = open_storage) -> None:
        self.num_bytes = 0
        self._opener = opener
        self._lease: Lease | None = None
        self._ended = False
        self._rank_progress: RankProgress | None = None

    def stage(
        self,
        save: RankSave,
        go: SaveGo,
        captured: Captured,
        report: Callable[[], None] = lambda: None,
    ) -> tuple[CheckpointError | None, Finish]:
        """Copies what this rank writes; when it returns, the state may change.

        Args:
            save: The save of this rank.
            go: Its assignment.
            captured: The state.
            report: Called once it is copied. What it raises fails the save on all ranks, as if it
                could not be copied.

        Returns:
            Why it failed, and what this rank still has to do until the save has ended: that reports
            an error to the other ranks, which fail as well.
        """

        def copy() -> Callable[[int], StagedPieces]:
            copied = self._copy(go, captured)
            report()
            return copied

        pieces, error = result_or_error(copy, "staging", save.rank)
        self._rank_progress = save.progress
        save = replace(save, opener=self._opener)

        def finish() -> Finish:
            if pieces is None:
                receipt = SaveReceipt(save.key, save.rank, go.attempt, go.epoch, error=error)
            else:
                receipt = save.write(go, pieces=pieces)
                self._ended = receipt.error is None
                # Why now: with the outcome the next save begins, and may have this memory. A thread
                # that was given up may still read it, for a file that will not be committed.
                self.release(committed=False)
            return (yield from save.outcome(go, receipt))

        return error, finish()

    def progress(self) -> tuple[int, int]:
        """Returns bytes written and bytes in all."""
        if self._ended or self._rank_progress is None:
            return self.num_bytes, self.num_bytes
        doing = self._rank_progress.doing
        done = min(doing.done_bytes, self.num_bytes) if doing.phase == "writing" else 0
        return done, self.num_bytes

    def release(self, *, committed: bool) -> None:
        """Gives the memory back; the save has ended.

        Args:
            committed: How: what it is to keep in memory stays then.
        """
        if self._lease is not None:
            self._lease.release()

    def _copy(self, go: SaveGo, captured: Captured) -> Callable[[int], StagedPieces]:
        """Copies what this rank writes; returns the bytes of each file, by its position."""
        filler = filler_of(captured.source)
        deferred, lengths = deferred_items(go.plan, captured.deferred)
        layout = lay_out_windows(go.plan, lengths, PIECE_BYTES)
        self.num_bytes = int(layout.num_bytes[~layout.is_deferred].sum())
        used_bytes = layout.used_bytes.tolist()
        try:
            self._lease = _memory.lease(sum(used_bytes[-1:], PIECE_BYTES * len(used_bytes[1:])))
        except MemoryError as exc:
            raise LimitError(
                f"Expected {self.num_bytes} bytes of memory for a copy of the state, but {exc}. "
                f"Save synchronously, or with fewer saves pending"
            ) from exc
        memory, windows = np.frombuffer(self._lease.view, dtype=np.uint8), []
        for window, num_bytes in enumerate(used_bytes):
            self._lease.pin(filler.pin, window)
            into = memory[PIECE_BYTES * window :][:num_bytes]
            fill_window(layout, window, into, filler, deferred.__getitem__)
            windows.append(WindowBytes([into]))
        return lambda file: StagedPieces(layout, file, windows.__getitem__)


class StagerBackend:
    """Stages at the stager of this rank's node, or in this process where that has no room.

    Args:
        ray: The actors of the session.

    Attributes:
        kind: `SaveReport.staging`.
        num_bytes: Bytes that were copied.
    """

    def __init__(self, ray: RayActors) -> None:
        self.kind = "object_store"
        self.num_bytes = 0
        self._ray = ray
        self._here: InProcessBackend | None = None
        self._staged: Staged | None = None
        self._last: tuple[int, int] = (0, 0)

    def stage(
        self,
        save: RankSave,
        go: SaveGo,
        captured: Captured,
        report: Callable[[], None] = lambda: None,
    ) -> tuple[CheckpointError | None, Finish]:
        """See `InProcessBackend.stage`."""
        staged: Staged | None = None
        error: CheckpointError | None = None
        no_room: list[NoRoomError] = []

        def hand_over() -> Staged | None:
            try:
                held = self._transfer(save, go, captured) if go.plan.files else None
            except NoRoomError as found:
                no_room.append(found)
                return None
            report()
            return held

        staged, error = result_or_error(hand_over, "staging", save.rank)
        # Why not `save.key`: the call may have another number by now.
        save = replace(save, key=save.progress.key or save.key)
        if no_room:
            return self._stage_here(save, go, captured, report, no_room[0])
        stager = "" if staged is None else staged.stager
        ack = SaveStaged(save.key, save.rank, go.attempt, go.epoch, error, stager)
        return error, save.outcome(go, ack, self._find_receipts)

    def _stage_here(
        self,
        save: RankSave,
        go: SaveGo,
        captured: Captured,
        report: Callable[[], None],
        why: NoRoomError,
    ) -> tuple[CheckpointError | None, Finish]:
        """Stages in this process: the other ranks see a rank that writes itself."""
        logger.warning(
            "Rank %d stages its save to %s in its own process, and that save ends with it: %s. "
            "Remove what fills that memory, or start Ray with an --object-store-memory that fits "
            "beside it",
            save.rank,
            save.target.url,
            why,
        )
        self._here = here = InProcessBackend()
        self.kind = here.kind
        error, finish = here.stage(save, go, captured, report)
        self.num_bytes = here.num_bytes
        return error, finish

    def progress(self) -> tuple[int, int]:
        """See `InProcessBackend.progress`."""
        if self._here is not None:
            return self._here.progress()
        found = None if self._staged is None else self._staged.progress()
        if found is not None:
            self._last = (found.written_bytes, found.num_bytes)
        return self._last

    def release(self, *, committed: bool) -> None:
        """See `InProcessBackend.release`."""
        if self._here is not None:
            self._here.release(committed=committed)
        if self._staged is not None:
            self._staged.release(committed=committed)

    def _find_receipts(self) -> tuple[FileReceipt, ...]:
        """Returns the receipts of this rank's files, if the stager still has them all."""
        found = None if self._staged is None else self._staged.progress()
        reports = () if found is None else found.reports
        return tuple(file for report in reports for file in report.files)

    def _transfer(self, save: RankSave, go: SaveGo, captured: Captured) -> Staged:
        key = save.progress.key or save.key
        staged = self._staged = self._ray.staging().stage(
            StageKey(key, save.rank, go.attempt, go.epoch),
            go.plan,
            captured,
            target=save.target,
            options=save.options,
            published=save.history.published(go.attempt, save.opener),
            reporter=self._ray.coordinator(),
            spent=lambda: save.progress.spent,
            waits_for=save.progress.waits_for,
            stop=save.progress.stop,
        )
        self.num_bytes = staged.num_bytes
        self._last = (0, staged.num_bytes)
        return staged


StagingBackend = InProcessBackend | StagerBackend
"""The staged bytes of one rank's save."""
