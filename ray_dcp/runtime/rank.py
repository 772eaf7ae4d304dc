"""What one rank does in a save or a load: generators of requests that take replies.

They know neither torch nor Ray: who captures a state dict or plans its targets is handed in, and
who carries the requests (`drive`, `inline.run_ranks`) is not their business.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ray_dcp.errors import (
    CheckpointError,
    CommitUnknownError,
    InternalError,
    ParticipantError,
)
from ray_dcp.options import LoadOptions, SaveOptions
from ray_dcp.plan.columns import encode
from ray_dcp.plan.reading import ReadPlan, Wanted, plan_reads
from ray_dcp.plan.values import Columns
from ray_dcp.protocol.messages import (
    FileReceipt,
    LoadDone,
    LoadGo,
    LoadJoin,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    OpKey,
    Refused,
    Reply,
    Request,
    SaveGo,
    SaveJoin,
    SaveOutcome,
    SaveReceipt,
    Target,
)
from ray_dcp.protocol.vote import Fenced, Won
from ray_dcp.runtime.outcome import settle
from ray_dcp.runtime.publishing import republish
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.opening import Checkpoint, checkpoint_from
from ray_dcp.transfer.reader import TargetSink, read_chunks, read_item
from ray_dcp.transfer.writer import write_part

__all__ = ["Captured", "LoadResult", "LoadWork", "drive", "load_rank", "save_rank"]

T = TypeVar("T")
Opener = Callable[[Target], Storage]


class Captured(Protocol):
    """What a rank holds; `ray_dcp.seam.capture.Capture` is one."""

    @property
    def columns(self) -> Columns:
        """One row an item."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know."""
        ...

    def source(self, row: int, /) -> memoryview:
        """Returns the C-order bytes of a fixed item."""
        ...

    def deferred(self, row: int, /) -> bytes:
        """Returns the serialised bytes of a deferred item."""
        ...


class LoadWork(Protocol):
    """What a rank wants of a checkpoint; `ray_dcp.seam.targets.Targets` is one."""

    @property
    def wanted(self) -> Wanted:
        """The boxes of raw tensor bytes."""
        ...

    @property
    def sink(self) -> TargetSink:
        """Where they go."""
        ...

    @property
    def objects(self) -> Sequence[tuple[int, Callable[[bytes], None]]]:
        """Chunks to read whole, and what takes their bytes."""
        ...

    def place_item(self, chunk: int, data: bytes, /) -> None:
        """Takes a whole `torch.save` item of a tensor chunk that has no raw bytes."""
        ...

    def check_coverage(self, plan: ReadPlan, /) -> None:
        """Raises `CoverageError` when something wanted is stored nowhere."""
        ...

    def finish(self) -> None:
        """Puts everything into place, after all bytes have come."""
        ...


LoadPlanning = Generator[Request, Reply, LoadWork]
"""A plan that asks the other ranks before it ends with the work."""


@dataclass(frozen=True)
class LoadResult:
    """What came of a load on one rank."""

    outcome: LoadOutcome
    checkpoint: Checkpoint
    bytes_needed: int
    """Of this rank."""
    bytes_read: int
    """By this rank."""


def save_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    target: Target,
    options: SaveOptions,
    capture: Callable[[], Captured],
    opener: Opener = open_storage,
) -> Generator[Request, Reply, SaveOutcome]:
    """Returns the part of one rank in a save.

    Args:
        key: The operation.
        rank: This rank.
        world_size: Number of ranks.
        target: Where to save.
        options: How.
        capture: Makes the local plan; called once, at the start.
        opener: What opens the storage.

    Returns:
        A generator that ends with the outcome; its warnings are those of this rank as well.

    Raises:
        CheckpointError: The save failed, on this rank or on another: the same error on all.
        CommitUnknownError: Neither coordinator nor storage say whether it was committed.
    """
    captured, error = _attempt(capture, "capturing the state dict", rank)
    columns = b""
    if captured is not None:
        encoded, error = _attempt(lambda: encode(captured.columns), "encoding the plan", rank)
        columns = encoded or b""
    go = yield SaveJoin(key, rank, world_size, target, options, columns, error)
    if not isinstance(go, SaveGo) or captured is None:
        raise _refusal(go, rank)

    def write() -> tuple[FileReceipt, ...]:
        return write_part(
            opener(target), go.plan, go.attempt,
            source=captured.source, deferred=captured.deferred, options=options,
        )  # fmt: skip

    files, error = _attempt(write, "writing", rank)
    try:
        outcome = yield SaveReceipt(key, rank, go.attempt, go.epoch, files or (), error)
    except CheckpointError as unanswered:
        outcome = _settled(unanswered, go.attempt, rank, target, opener)
    # Why InternalError: a coordinator that contradicted itself may have committed, or still may.
    if isinstance(outcome, Refused) and isinstance(
        outcome.error, CommitUnknownError | InternalError
    ):
        outcome = _settled(_refusal(outcome, rank), go.attempt, rank, target, opener)
    if not isinstance(outcome, SaveOutcome):
        raise _refusal(outcome, rank)
    warnings = dict.fromkeys([*captured.warnings, *go.warnings, *outcome.warnings])
    return replace(outcome, warnings=tuple(warnings))


def load_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    target: Target,
    options: LoadOptions,
    plan: Callable[[Checkpoint], LoadWork | LoadPlanning],
    opener: Opener = open_storage,
) -> Generator[Request, Reply, LoadResult]:
    """Returns the part of one rank in a load.

    Args:
        key: The operation.
        rank: This rank.
        world_size: Number of ranks.
        target: What to load.
        options: How.
        plan: From the checkpoint to what this rank wants of it, or a generator that ends with
            that, for planners that talk to the other ranks; changes nothing yet.
        opener: What opens the storage.

    Returns:
        A generator that ends when every rank has loaded.

    Raises:
        CheckpointError: The load failed, on this rank or on another: the same error on all. No
            target was touched unless the failure came while reading.
    """
    storage, error = _attempt(lambda: opener(target), "opening the storage", rank)
    go = yield LoadJoin(key, rank, world_size, target, options, error)
    if not isinstance(go, LoadGo) or storage is None:
        raise _refusal(go, rank)

    checkpoint, error = _attempt(
        lambda: checkpoint_from(storage, go.kind, go.slot, go.record), "opening", rank
    )
    work: LoadWork | None = None
    read_plan: ReadPlan | None = None
    if checkpoint is not None:
        work, read_plan, error = yield from _planned(plan, checkpoint, rank)
    proceed = yield LoadReady(key, rank, error)
    if not isinstance(proceed, LoadProceed):
        raise _refusal(proceed, rank)
    if checkpoint is None or work is None or read_plan is None:
        raise error or _refusal(proceed, rank)
    counts, error = _attempt(
        lambda: _read(storage, checkpoint, work, read_plan, options), "reading", rank
    )
    needed, read = counts or (0, 0)
    outcome = yield LoadDone(key, rank, needed, read, error)
    if not isinstance(outcome, LoadOutcome):
        raise _refusal(outcome, rank)
    return LoadResult(outcome, checkpoint, needed, read)


def drive(generator: Generator[Request, Reply, T], call: Callable[[Request], Reply]) -> T:
    """Returns what a rank generator ends with, after carrying its requests.

    Args:
        generator: Of this module.
        call: Returns the reply to a request. A `CheckpointError` that it raises (nobody
            answered) goes to the generator, which finds out what it can.

    Raises:
        CheckpointError: What the generator raises.
    """
    try:
        request = next(generator)
        while True:
            try:
                reply = call(request)
            except CheckpointError as error:
                request = generator.throw(error)
            else:
                request = generator.send(reply)
    except StopIteration as end:
        value: T = end.value
        return value


def _planned(
    plan: Callable[[Checkpoint], LoadWork | LoadPlanning], checkpoint: Checkpoint, rank: int
) -> Generator[Request, Reply, tuple[LoadWork | None, ReadPlan | None, CheckpointError | None]]:
    try:
        planned = plan(checkpoint)
        work = (yield from planned) if isinstance(planned, Generator) else planned
        read_plan = plan_reads(checkpoint.table, work.wanted)
        work.check_coverage(read_plan)
    except Exception as error:  # noqa: BLE001 - told to every rank, which raises it
        return None, None, _reported(error, "planning the reads", rank)
    return work, read_plan, None


def _read(
    storage: Storage,
    checkpoint: Checkpoint,
    work: LoadWork,
    read_plan: ReadPlan,
    options: LoadOptions,
) -> tuple[int, int]:
    table = checkpoint.table
    stats = read_chunks(storage, table, read_plan, work.wanted, work.sink, options=options)
    needed, read = stats.bytes_needed, stats.bytes_read
    for chunk in stats.opaque:
        data = read_item(storage, table, chunk, verify=options.verify)
        read += len(data)
        work.place_item(chunk, data)
    for chunk, take in work.objects:
        data = read_item(storage, table, chunk, verify=options.verify)
        needed += len(data)
        read += len(data)
        take(data)
    work.finish()
    return needed, read


def _settled(
    unanswered: CheckpointError, attempt: str, rank: int, target: Target, opener: Opener
) -> SaveOutcome:
    """Returns the outcome that the storage knows, when the coordinator does not tell it."""
    reason = f"rank {rank} has no answer: {type(unanswered).__name__}"
    decision = settle(target, attempt, reason=reason, rank=rank, opener=opener)
    match decision:
        case Won():
            warning = f"The coordinator did not confirm the commit, but it stands: {unanswered}"
            # Why rank 0: one is enough, and each would decode the whole chunk table.
            if rank == 0:
                with suppress(CheckpointError):
                    republish(opener(target), target.url)
            return SaveOutcome(attempt, decision.slot, decision.record, (warning,))
        case Fenced() if not isinstance(unanswered, CommitUnknownError):
            raise unanswered
        case Fenced():
            raise ParticipantError(
                f"The save failed: attempt {attempt} was declared failed in slot "
                f"{decision.slot} after no coordinator knew its outcome. Save again. "
                f"({unanswered.message})",
                checkpoint_id=target.url,
                rank=rank,
            )
    if isinstance(unanswered, CommitUnknownError):
        raise unanswered
    raise CommitUnknownError(
        f"Nobody said whether attempt {attempt} was committed: {unanswered.message}. Ask "
        f"ray_dcp.outcome({target.url!r}, {attempt!r}) later",
        attempt=attempt,
        checkpoint_id=target.url,
        rank=rank,
    )


def _refusal(reply: Reply, rank: int) -> CheckpointError:
    if isinstance(reply, Refused):
        return copy.copy(reply.error)
    return InternalError(
        f"Expected the next step or a refusal, but rank {rank} was told "
        f"{type(reply).__name__}. Please report this",
        rank=rank,
    )


def _attempt(
    work: Callable[[], T], doing: str, rank: int
) -> tuple[T, None] | tuple[None, CheckpointError]:
    """Returns what a step gives, or its error: a rank must tell the others, not just die."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - told to every rank, which raises it
        return None, _reported(error, doing, rank)


def _reported(error: Exception, doing: str, rank: int) -> CheckpointError:
    if isinstance(error, CheckpointError):
        told = copy.copy(error)
        if told.rank is None:
            told.rank = rank
    else:
        told = CheckpointError(f"{doing} failed: {type(error).__name__}: {error}", rank=rank)
        told.__cause__ = error
    known = {} if told._failures is None else told.failures
    if rank not in known:
        stack = _plain(traceback.extract_tb(error.__traceback__))
        known = {**known, rank: (_portable(error), stack)}
    # Why a note: the traceback is lost when the error is pickled to another process.
    lines = "".join(traceback.format_exception(error)[-4:])
    told.__notes__ = [*getattr(told, "__notes__", ()), f"On rank {rank}, {doing}:\n{lines}"]
    return told.with_failures(known)


def _plain(stack: traceback.StackSummary) -> traceback.StackSummary:
    # Why: a frame keeps its code object since Python 3.13, which can't be pickled.
    return traceback.StackSummary.from_list(
        [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in stack]
    )


def _portable(error: Exception) -> BaseException:
    """Returns the error if it survives a pickle, or one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - user classes can raise anything here
        return CheckpointError(f"{type(error).__name__}: {error}")
    return error
