"""What one rank does in a save: generators of requests that take replies.

They know neither torch nor Ray; `rank` has the load, and what carries the requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ray_dcp.errors import CheckpointError, CommitUnknownError, InternalError, ParticipantError
from ray_dcp.options import SaveOptions
from ray_dcp.protocol.messages import (
    FileReceipt,
    OpKey,
    PartsHeld,
    Refused,
    Reply,
    Request,
    SaveGo,
    SaveOutcome,
    SaveReceipt,
    SaveStaged,
    TakeOver,
    Target,
)
from ray_dcp.protocol.save_errors import replaced_since
from ray_dcp.protocol.verdict import located
from ray_dcp.protocol.vote import Fenced, Lost, Won
from ray_dcp.runtime.outcome import settle
from ray_dcp.runtime.plan_memory import PlanMemory
from ray_dcp.runtime.publishing import republish
from ray_dcp.runtime.rank_captured import Captured
from ray_dcp.runtime.rank_join import join_save
from ray_dcp.runtime.telling import attempt, refusal
from ray_dcp.runtime.vitals import Vitals, WatchedStorage
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage
from ray_dcp.transfer.sources import Deferred, Source
from ray_dcp.transfer.threads import Stop, run_within
from ray_dcp.transfer.writer import write_part

__all__ = ["Captured", "await_outcome", "save_rank", "write_share"]

logger = logging.getLogger(__name__)

Opener = Callable[[Target], Storage]


def save_rank(
    key: OpKey,
    *,
    rank: int,
    world_size: int,
    target: Target,
    options: SaveOptions,
    capture: Callable[[], Captured],
    opener: Opener = open_storage,
    vitals: Vitals | None = None,
    memory: PlanMemory | None = None,
    node: str = "",
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
        vitals: Where it notes how far it is, and is told to stop.
        memory: Plans of earlier saves of this rank's session.
        node: Names the node of this rank, where that is known.

    Returns:
        A generator that ends with the outcome; its warnings are those of this rank as well.

    Raises:
        CheckpointError: The save failed, on this rank or on another: the same error on all.
        CommitUnknownError: Neither coordinator nor storage say whether it was committed.
    """
    vitals = vitals or Vitals()
    go, captured = yield from join_save(
        key, rank=rank, world_size=world_size, target=target, options=options, capture=capture,
        vitals=vitals, memory=memory, node=node,
    )  # fmt: skip
    receipt = write_share(
        key, go, target, options, rank=rank, source=captured.source, deferred=captured.deferred,
        opener=opener, vitals=vitals,
    )  # fmt: skip
    outcome = yield from await_outcome(
        receipt, target, opener, timeout_s=options.commit_timeout_s, vitals=vitals,
        create_if_absent=go.create_if_absent,
    )  # fmt: skip
    vitals.over = True
    warnings = dict.fromkeys([*captured.warnings, *go.warnings, *outcome.warnings])
    return replace(outcome, warnings=tuple(warnings))


def write_share(
    key: OpKey,
    go: SaveGo,
    target: Target,
    options: SaveOptions,
    *,
    rank: int,
    source: Source,
    deferred: Deferred,
    opener: Opener,
    vitals: Vitals,
    staged_s: float = 0.0,
) -> SaveReceipt:
    """Writes what the plan gives to this rank; returns the receipt, which tells a failure too.

    Args:
        key: The operation.
        go: What this rank writes.
        target: Where to.
        options: How, and within which time.
        rank: This rank.
        source: Gives an item's bytes.
        deferred: Gives a deferred item's bytes.
        opener: What opens the storage.
        vitals: Where it notes how far it is, and is told to stop.
        staged_s: See `SaveReceipt`.
    """

    def write() -> tuple[FileReceipt, ...]:
        return write_part(
            WatchedStorage(opener(target), vitals), go.plan, go.attempt,
            source=source, deferred=deferred, options=options,
        )  # fmt: skip

    timeout_s = options.write_timeout_s
    overdue = partial(
        vitals.overdue, "write its part", "SaveOptions.write_timeout_s", timeout_s, rank
    )
    vitals.enter("writing", sum(file.num_bytes for file in go.plan.files))
    in_time = partial(run_within, write, timeout_s, vitals.stop, overdue)
    files, error = attempt(in_time, "writing", rank)
    return SaveReceipt(key, rank, go.attempt, go.epoch, files or (), error, staged_s)


def await_outcome(
    receipt: SaveReceipt | SaveStaged,
    target: Target,
    opener: Opener = open_storage,
    *,
    hand_over: Callable[[TakeOver], PartsHeld | None] | None = None,
    timeout_s: float | None = None,
    vitals: Vitals | None = None,
    create_if_absent: bool = True,
) -> Generator[Request, Reply, SaveOutcome]:
    """Returns how a rank's save ended, from the coordinator or else from the storage.

    Args:
        receipt: What this rank tells last.
        target: Where it was saved.
        opener: What opens the storage.
        hand_over: Gives staged bytes to another stager; returns what was told of that.
        timeout_s: How long the storage may take to tell the outcome when the coordinator is
            gone, in seconds; `SaveOptions.commit_timeout_s` by default.
        vitals: Tells that the coordinator is gone, and where this rank notes how far it is.
        create_if_absent: See `SaveGo.create_if_absent`.

    Raises:
        CheckpointError: The save failed.
        CommitUnknownError: Neither coordinator nor storage say whether it was committed.
    """
    rank, attempt_id = receipt.rank, receipt.attempt
    vitals = vitals or Vitals()
    vitals.enter("waiting")
    held = receipt.held if isinstance(receipt, SaveStaged) else None
    ask = partial(
        _settled, attempt_id=attempt_id, rank=rank, target=target, opener=opener,
        timeout_s=SaveOptions().commit_timeout_s if timeout_s is None else timeout_s,
        create_if_absent=create_if_absent,
    )  # fmt: skip
    if vitals.abandoned is not None:
        return ask(vitals.abandoned)
    try:
        outcome = yield receipt
        while isinstance(outcome, TakeOver) and hand_over is not None:
            told, error = attempt(partial(hand_over, outcome), "handing over staged bytes", rank)
            held = told or held
            if error is not None and not outcome.lost:
                # The slow stager still writes: nothing is lost, and the save needs no help.
                logger.warning("No other stager took over from a slow one: %s", error)
                error = None
            outcome = yield SaveStaged(
                receipt.key, rank, attempt_id, receipt.epoch, outcome.incarnation, error, held
            )
    except CheckpointError as unanswered:
        outcome = ask(unanswered)
    # Why InternalError: a coordinator that contradicted itself may have committed, or still may.
    if isinstance(outcome, Refused) and isinstance(
        outcome.error, CommitUnknownError | InternalError
    ):
        outcome = ask(refusal(outcome, rank))
    if not isinstance(outcome, SaveOutcome):
        raise refusal(outcome, rank)
    return outcome


def _settled(
    unanswered: CheckpointError,
    *,
    attempt_id: str,
    rank: int,
    target: Target,
    opener: Opener,
    timeout_s: float,
    create_if_absent: bool,
) -> SaveOutcome:
    """Returns the outcome that the storage knows, when the coordinator does not tell it."""
    unanswered = located(unanswered, target.url)

    def overdue() -> CommitUnknownError:
        return CommitUnknownError(
            f"Nobody said whether attempt {attempt_id} was committed: the storage did not answer "
            f"within SaveOptions.commit_timeout_s={timeout_s:g} s, and no coordinator did "
            f"({unanswered.message}). Ask ray_dcp.outcome({target.url!r}, {attempt_id!r}) when the "
            f"storage answers again",
            attempt=attempt_id,
            checkpoint_id=target.url,
            rank=rank,
        )

    look = partial(_look, unanswered, attempt_id, rank, target, opener, create_if_absent)
    return run_within(look, timeout_s, Stop(), overdue, unwind_s=0.0)


def _look(
    unanswered: CheckpointError,
    attempt_id: str,
    rank: int,
    target: Target,
    opener: Opener,
    create_if_absent: bool,
) -> SaveOutcome:
    reason = f"rank {rank} has no answer: {type(unanswered).__name__}"
    decision = settle(
        target, attempt_id, reason=reason, rank=rank, opener=opener,
        create_if_absent=create_if_absent,
    )  # fmt: skip
    match decision:
        case Won():
            warning = f"The coordinator did not confirm the commit, but it stands: {unanswered}"
            # Why rank 0: one is enough, and each would decode the whole chunk table.
            if rank == 0:
                with suppress(CheckpointError):
                    republish(opener(target), target.url)
            return SaveOutcome(attempt_id, decision.slot, decision.record, (warning,))
        case Lost():
            raise replaced_since(attempt_id, decision, target.url, rank)
        case Fenced() if not isinstance(unanswered, CommitUnknownError):
            raise unanswered
        case Fenced():
            raise ParticipantError(
                f"The save failed: attempt {attempt_id} was declared failed in slot "
                f"{decision.slot} after no coordinator knew its outcome. Save again. "
                f"({unanswered.message})",
                checkpoint_id=target.url,
                rank=rank,
            )
    if isinstance(unanswered, CommitUnknownError):
        raise unanswered
    raise CommitUnknownError(
        f"Nobody said whether attempt {attempt_id} was committed: {unanswered.message}. Ask "
        f"ray_dcp.outcome({target.url!r}, {attempt_id!r}) later",
        attempt=attempt_id,
        checkpoint_id=target.url,
        rank=rank,
    )
