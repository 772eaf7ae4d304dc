"""Staging backends: where the bytes of an asynchronous save are while training goes on.

In a job with Ray the stager of the node holds them (`stager_backend`), and writes them while the
rank waits for the outcome. A process that is alone holds them itself (`InProcessBackend`), in
memory that it does not train with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ray_dcp.core.values import FilePlan
from ray_dcp.errors import CheckpointError, LimitError
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import (
    OpKey,
    Reply,
    Request,
    SaveGo,
    SaveOutcome,
    SaveReceipt,
    Target,
)
from ray_dcp.runtime.inline import InlineSession
from ray_dcp.runtime.rank_progress import RankProgress
from ray_dcp.runtime.rank_save import (
    Captured,
    PlanMemory,
    attempt,
    await_outcome,
    check_unchanged,
    join_save,
    write_share,
)
from ray_dcp.stage.copying import fill_rows, filler_of
from ray_dcp.stage.memory import PIECE_BYTES, Lease, PrivateMemory
from ray_dcp.store.opening import open_storage

Finish = Generator[Request, Reply, SaveOutcome]


class StagingBackend(Protocol):
    """The staged bytes of one rank's save."""

    kind: str
    """`SaveReport.staging`."""
    survives: bool
    """The save goes on when this process dies."""
    num_bytes: int
    """Bytes that were copied."""
    takeovers: int
    """How often they were handed to another stager."""

    def stage(
        self,
        key: OpKey,
        go: SaveGo,
        captured: Captured,
        target: Target,
        options: SaveOptions,
        vitals: RankProgress,
    ) -> CheckpointError | None:
        """Copies what this rank writes; when it returns, the state may change.

        Returns:
            Why it failed: `finish` tells the other ranks, which fail as well.
        """
        ...

    def finish(self) -> Finish:
        """Returns what this rank still has to say and to do, until the save has ended."""
        ...

    def progress(self) -> tuple[int, int]:
        """Returns bytes written and bytes in all."""
        ...

    def release(self, *, committed: bool) -> None:
        """Gives the memory back; the save has ended.

        Args:
            committed: How: what it is to keep in memory stays then.
        """
        ...


def keeping_of(session: Any) -> StagingBackend:
    """Returns where a session's rank keeps its bytes.

    Args:
        session: Of this rank: a `Session`, or an `InlineSession` for a process that is alone.
    """
    if isinstance(session, InlineSession):
        return InProcessBackend(session.rank)
    # Why here: a process that is alone has no need of Ray.
    from ray_dcp.runtime.stager_backend import StagerBackend

    return StagerBackend(session)


_memory = PrivateMemory()


def warm_process(num_bytes: int) -> Future[None]:
    """Begins to touch this process's memory for a state, in the background; returns at once."""
    done: Future[None] = Future()

    def run() -> None:
        # Suppressed: the first save is slower then, and tells what is wrong.
        with suppress(MemoryError, OSError):
            _memory.warm(num_bytes)
        done.set_result(None)

    threading.Thread(target=run, name="warm", daemon=True).start()
    return done


class InProcessBackend:
    """Keeps the bytes in this process: training goes on, but the save dies with the process.

    Args:
        rank: Of this process.
        opener: What opens the storage.
    """

    kind = "process"
    survives = False
    takeovers = 0

    def __init__(self, rank: int, opener: Callable[[Target], Any] = open_storage) -> None:
        self._rank = rank
        self.num_bytes = 0
        self._opener = opener
        self._lease: Lease | None = None
        self._ended = False
        self._vitals: RankProgress | None = None
        self._total = 0
        self._finish: Callable[[], Finish] | None = None

    def stage(
        self,
        key: OpKey,
        go: SaveGo,
        captured: Captured,
        target: Target,
        options: SaveOptions,
        vitals: RankProgress,
    ) -> CheckpointError | None:
        """See `StagingBackend.stage`."""
        rank = self._rank
        began_s = time.perf_counter()
        copy, error = attempt(partial(self._copy, go, captured), "staging", rank)
        staged_s = time.perf_counter() - began_s

        def finish() -> Finish:
            if copy is None:
                receipt = SaveReceipt(
                    key, rank, go.attempt, go.epoch, error=error, staged_s=staged_s
                )
            else:
                source, deferred = copy
                receipt = write_share(
                    key,
                    go,
                    target,
                    options,
                    rank=rank,
                    source=source,
                    deferred=deferred,
                    opener=self._opener,
                    vitals=vitals,
                    staged_s=staged_s,
                )
            self._ended = receipt.error is None
            return (
                yield from await_outcome(
                    receipt,
                    target,
                    self._opener,
                    timeout_s=options.commit_timeout_s,
                    vitals=vitals,
                    create_if_absent=go.create_if_absent,
                )
            )

        self._finish = finish
        self._vitals = vitals
        return error

    def finish(self) -> Finish:
        """See `StagingBackend.finish`."""
        if self._finish is None:
            raise CheckpointError("finish comes after stage. Please report this")
        return self._finish()

    def progress(self) -> tuple[int, int]:
        """See `StagingBackend.progress`."""
        if self._ended or self._vitals is None:
            return self._total, self._total
        doing = self._vitals.doing
        return (min(doing.done_bytes, self._total) if doing.phase == "writing" else 0), self._total

    def release(self, *, committed: bool) -> None:
        """See `StagingBackend.release`."""
        if self._lease is not None:
            self._lease.release()

    def _copy(
        self, go: SaveGo, captured: Captured
    ) -> tuple[Callable[[int], memoryview], Callable[[int], bytes]]:
        """Copies every item of the plan, whole: a process that is alone writes all of each."""
        files = go.plan.files
        rows = sorted({row for file in files for row in file.row.tolist()})
        filler = filler_of(captured.source)
        lengths = _planned_lengths(files) if rows else []
        ends = np.cumsum(lengths, dtype=np.int64)
        self.num_bytes = self._total = int(ends[-1]) if rows else 0
        try:
            self._lease = _memory.lease(self.num_bytes)
        except MemoryError as exc:
            raise LimitError(
                f"Expected {self.num_bytes} bytes of memory for a copy of the state, but {exc}. "
                f"Save synchronously, or with fewer saves pending"
            ) from exc
        memory = np.frombuffer(self._lease.view, dtype=np.uint8)
        starts = (ends - lengths).tolist()
        places = dict(zip(rows, zip(starts, ends.tolist(), strict=True), strict=True))

        use = partial(self._lease.pin, filler.pin)
        fill_rows(filler, rows, lengths, memory, piece_bytes=PIECE_BYTES, use=use)
        check_unchanged(captured)
        deferred = {row: captured.deferred(row) for file in files for row in file.deferred.tolist()}
        whole = self._lease.view

        def staged(row: int) -> memoryview:
            start, end = places[row]
            return whole[start:end]

        return staged, deferred.__getitem__


def _planned_lengths(files: Sequence[FilePlan]) -> list[int]:
    """Returns the length of each row of a plan that has all of each, by rising row."""
    row = np.concatenate([file.row for file in files])
    _, place = np.unique(row, return_inverse=True)
    lengths = np.zeros(place.max(initial=-1) + 1, dtype=np.int64)
    np.add.at(lengths, place, np.concatenate([file.payload_bytes for file in files]))
    return list(lengths.tolist())


def save_staged_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    target: Target,
    options: SaveOptions,
    capture: Callable[[], Captured],
    keeping: StagingBackend,
    vitals: RankProgress,
    memory: PlanMemory | None = None,
    node: str = "",
) -> Generator[Request, Reply, SaveOutcome]:
    """Returns the part of one rank in a save whose bytes somebody else writes.

    Args:
        key: As for `save_rank`, and so the following.
        rank: This rank.
        world_size: Number of ranks.
        target: Where to save.
        options: How.
        capture: Makes the local plan; called once, at the start.
        keeping: Holds the bytes, and writes them.
        vitals: Where it notes how far it is.
        memory: Plans of earlier saves of this rank's session.
        node: Names the node of this rank.

    Raises:
        CheckpointError: As `save_rank` does.
    """
    go, captured = yield from join_save(
        key,
        rank=rank,
        world_size=world_size,
        target=target,
        options=options,
        capture=capture,
        staged=keeping.survives,
        vitals=vitals,
        memory=memory,
        node=node,
    )
    committed = False
    try:
        vitals.enter("staging")
        # What goes wrong here is told to all by `finish`.
        keeping.stage(vitals.key or key, go, captured, target, options, vitals)
        outcome = yield from keeping.finish()
        committed = vitals.over = True
    finally:
        keeping.release(committed=committed)
    warnings = dict.fromkeys([*captured.warnings, *go.warnings, *outcome.warnings])
    return replace(outcome, warnings=tuple(warnings))
