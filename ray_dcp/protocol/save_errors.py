"""The errors with which the save machine ends a save, in words. Decides nothing."""

from __future__ import annotations

import copy

from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    ParticipantError,
    PlanConflictError,
    SaveCancelledError,
)
from ray_dcp.protocol.commands import Failed
from ray_dcp.protocol.messages import Fenceable
from ray_dcp.protocol.vote import Fenced, Lost, Vote

__all__ = [
    "REPLACED_SINCE",
    "both_gone",
    "disagreeing_values",
    "fenced_off",
    "lost_race",
    "no_overwrite",
    "other_attempt",
    "overtaken",
    "replaced_since",
    "slow",
    "undecided",
    "warning",
]


REPLACED_SINCE = (
    "The checkpoint was committed, but it does not stand any more: another save of the same "
    "checkpoint id, or a delete, came right after. Only one save at a time should have an id"
)
"""The warning of a save that was overtaken after its commit."""


def no_overwrite(committed: str, url: str) -> CheckpointExistsError:
    """Returns the error of a save that must not replace what stands.

    Args:
        committed: What stands, in words.
        url: Of the target.
    """
    return CheckpointExistsError(
        f"Checkpoint already exists, and SaveOptions.overwrite is False: found {committed}. Save "
        f"under another id, delete that one, or allow overwrite",
        checkpoint_id=url,
    )


def disagreeing_values(disagreements: str, url: str) -> PlanConflictError:
    """Returns the error of `SaveOptions(replicas="check")`.

    Args:
        disagreements: Which items differ between which ranks, in words.
        url: Of the target.
    """
    return PlanConflictError(
        f"{disagreements}. Make the ranks agree, or save with SaveOptions(replicas='warn') to "
        f"take the lowest rank's value",
        checkpoint_id=url,
    )


def lost_race(vote: Vote, lost: Lost) -> CheckpointExistsError:
    """Returns the error of an attempt that was overtaken.

    Args:
        vote: On the attempt.
        lost: Its decision.
    """
    if lost.is_delete:
        return CheckpointExistsError(
            f"Expected slot {lost.slot} to be free for attempt {vote.attempt}, but the checkpoint "
            f"id was deleted in it meanwhile. Save again",
            checkpoint_id=vote.target.url,
        )
    return CheckpointExistsError(
        f"Expected slot {lost.slot} to be free for attempt {vote.attempt}, but another save of "
        f"the same checkpoint id (attempt {lost.attempt}) was committed in it first. Only one "
        f"save at a time can have an id",
        checkpoint_id=vote.target.url,
    )


def replaced_since(attempt: str, lost: Lost, url: str, rank: int) -> CheckpointExistsError:
    """Returns the error of a rank that learns of the commit when it does not stand any more.

    Args:
        attempt: Of the rank.
        lost: What came after it.
        url: Of the target.
        rank: Which.
    """
    what = "deleted" if lost.is_delete else f"saved again (attempt {lost.attempt})"
    return CheckpointExistsError(
        f"Attempt {attempt} was committed, but this rank learned it late: the checkpoint id was "
        f"{what} in slot {lost.slot} since. Only one save at a time can have an id",
        checkpoint_id=url,
        rank=rank,
    )


def overtaken(cause: CheckpointError, vote: Vote) -> CheckpointError:
    """Returns the error of a save that failed, with a note when another one came before it.

    Args:
        cause: Why it failed; not changed.
        vote: That fenced it off.
    """
    if vote.met is None:
        return cause
    told = copy.copy(cause)
    what = "the id was deleted" if vote.met.is_delete else f"attempt {vote.met.attempt} committed"
    note = (
        f"While attempt {vote.attempt} ran, {what} in slot {vote.met.slot}, which removes files of "
        f"all other attempts. Only one save at a time can have an id"
    )
    told.__notes__ = [*getattr(cause, "__notes__", ()), note]
    return told


def fenced_off(vote: Vote, fenced: Fenced) -> SaveCancelledError:
    """Returns the error of an attempt that somebody else declared failed.

    Args:
        vote: On the attempt.
        fenced: Its decision.
    """
    return SaveCancelledError(
        f"Attempt {vote.attempt} was declared failed by somebody else before its commit: slot "
        f"{fenced.slot} holds an abort record for it",
        checkpoint_id=vote.target.url,
    )


def undecided(vote: Vote, cause: str) -> CommitUnknownError:
    """Returns the error of a vote that stays open.

    Args:
        vote: On the attempt.
        cause: What went wrong, in words; may be empty.
    """
    why = f" ({cause})" if cause else ""
    return CommitUnknownError(
        f"The storage did not say whether attempt {vote.attempt} was committed in slot "
        f"{vote.slot}{why}. Ask ray_dcp.outcome({vote.target.url!r}, {vote.attempt!r}) later",
        attempt=vote.attempt,
        checkpoint_id=vote.target.url,
    )


def other_attempt(receipt: Fenceable, attempt: str, epoch: int, url: str) -> CommitUnknownError:
    """Returns the error of a receipt for another attempt than the one that runs.

    Args:
        receipt: The stray one.
        attempt: That runs; empty when none does yet.
        epoch: Of this coordinator.
        url: Of the target.
    """
    return CommitUnknownError(
        f"Expected a receipt for attempt {attempt or '(none yet)'} of epoch {epoch}, but rank "
        f"{receipt.rank} sent one for attempt {receipt.attempt} of epoch {receipt.epoch}: the "
        f"coordinator was restarted in between, or this rank was replaced. It is ignored; the "
        f"storage tells what became of that attempt",
        attempt=receipt.attempt,
        checkpoint_id=url,
        rank=receipt.rank,
    )


def slow(phase: str, option: str, after_s: float, url: str) -> DeadlineError:
    """Returns the error of a task that took too long.

    Args:
        phase: In which.
        option: Of `SaveOptions`, to raise.
        after_s: Its value, in seconds.
        url: Of the target.
    """
    return DeadlineError(
        f"Expected {phase} to end within {after_s:g} s, but the storage or the coordinator was "
        f"slower. Raise SaveOptions.{option}, or look at the storage",
        checkpoint_id=url,
    )


def warning(what: str, failed: Failed) -> str:
    """Returns the warning that something after the commit failed.

    Args:
        what: In words, so that "it" is the checkpoint.
        failed: What happened.
    """
    error = failed.error
    return f"The checkpoint is committed, but {what}: {type(error).__name__}: {error}"


def both_gone(rank: int, num_files: int, reason: str) -> ParticipantError:
    """Returns the error for bytes whose stager and rank are lost.

    Args:
        rank: Whose bytes.
        num_files: Files of the rank without a receipt.
        reason: What became of the stager, in words.
    """
    return ParticipantError(
        f"Expected a stager to write the bytes of rank {rank}, but it was lost with {num_files} "
        f"files unwritten ({reason}), and so was the rank, which could have given them again. "
        f"Save again",
        rank=rank,
    )
