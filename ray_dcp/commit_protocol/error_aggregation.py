"""Error aggregation: combines the errors that ranks report into one error for all of them.

Pure functions that return the error of a failed operation, with its message, and the errors for
requests that no operation can accept.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from dataclasses import fields
from itertools import groupby

from ray_dcp.commit_protocol.messages import (
    Exchange,
    Exchanged,
    Fenceable,
    LoadJoin,
    OpKey,
    Refused,
    Reply,
    Request,
    SaveJoin,
)
from ray_dcp.commit_protocol.vote import Fenced, Lost, Vote
from ray_dcp.core.wire_error import Failure, add_note, from_wire
from ray_dcp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUnknownError,
    DeadlineError,
    ParticipantError,
    RankDisagreementError,
    SaveCancelledError,
)
from ray_dcp.options import LoadOptions, SaveOptions

MOST_DESCRIBED = 16
"""Most missing ranks that an error describes; it only names the others."""

Opening = SaveJoin | LoadJoin | Exchange
"""A request with which a rank begins an operation."""

Call = tuple[str, SaveOptions | LoadOptions | None]
"""Description of a rank's call, and its options, for messages."""


def name_ranks(ranks: Iterable[int]) -> str:
    """Returns a readable list of ranks.

    Args:
        ranks: The ranks, in any order.

    Examples:
        >>> name_ranks([4, 0, 1, 2])
        'ranks 0-2, 4'
        >>> name_ranks([7])
        'rank 7'
    """
    ordered = sorted(set(ranks))
    runs = []
    for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        first, last = members[0], members[-1]
        if last - first > 1:
            runs.append(f"{first}-{last}")
        else:
            runs.extend(map(str, members))
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(runs) or '(none)'}"


def located(
    error: CheckpointError, checkpoint_id: str | None, rank: int | None = None
) -> CheckpointError:
    """Returns a copy of an error with its checkpoint and rank filled in.

    Args:
        error: The error of a task or a rank; not modified.
        checkpoint_id: Checkpoint of the operation; used if the error does not name one.
        rank: The rank; used if the error does not name one.
    """
    placed = copy.copy(error)
    placed.rank = rank if placed.rank is None else placed.rank
    placed.checkpoint_id = placed.checkpoint_id or checkpoint_id
    return placed


def combine(errors: Mapping[int, CheckpointError], checkpoint_id: str | None) -> CheckpointError:
    """Returns the error that every rank raises when some ranks failed.

    It is the error of the lowest rank that reported one itself, as a missing rank is more often the
    consequence than the cause. All errors are in its `failures` and in a note.

    Args:
        errors: Errors by rank; at least one.
        checkpoint_id: Checkpoint of the operation.
    """
    first = min(errors, key=lambda rank: (isinstance(errors[rank], ParticipantError), rank))
    combined = located(errors[first], checkpoint_id, first)
    others = {
        rank: error
        for rank, error in sorted(errors.items())
        if rank != first and error is not errors[first]
    }
    if isinstance(combined, ParticipantError) and others:
        combined.message = "; ".join(
            dict.fromkeys([combined.message, *(e.message for e in others.values())])
        )
    elif others:
        told = [f"rank {rank}: {type(e).__name__}: {e.message}" for rank, e in others.items()]
        add_note(combined, f"{name_ranks(others)} failed too: {'; '.join(told)}")
    return combined.with_failures({rank: _failure(errors[rank], rank) for rank in sorted(errors)})


def _failure(error: CheckpointError, rank: int) -> Failure:
    own = error.failures
    if rank in own and own[rank][0] is not error:
        return own[rank]
    summary = own[rank][1] if rank in own else traceback.StackSummary()
    return located(error, None, rank), summary


def deadline(
    key: OpKey,
    ranks: Iterable[int],
    what: str,
    after_s: float,
    way_out: str,
    describe_rank: Callable[[int], str] = lambda _: "",
) -> dict[int, CheckpointError]:
    """Returns the error of ranks that missed a deadline, by rank; it is the same for all of them.

    Args:
        key: The operation.
        ranks: The missing ranks; at least one.
        what: What they had to do, for example `"join the save"`.
        after_s: The deadline that expired, in seconds.
        way_out: The option to raise, for the message.
        describe_rank: Returns a description of a rank; empty if nothing is known of it.
    """
    missing = sorted(ranks)
    facts = _describe_ranks(missing, describe_rank)
    error = DeadlineError(
        f"Expected every rank to {what} within {after_s:g} s, but {name_ranks(missing)} did not "
        f"(operation {key.seq} of session {key.session!r}){facts}. Look at the log of "
        f"{name_ranks(missing)}: dead, stuck, or on another code path; {way_out} if merely slow",
        rank=missing[0] if len(missing) == 1 else None,
    )
    return dict.fromkeys(missing, error)


def name_known(ranks: Iterable[int], describe_rank: Callable[[int], str]) -> str:
    """Returns a readable list of ranks, with a description of each.

    Args:
        ranks: The ranks, in any order.
        describe_rank: As for `deadline`.
    """
    ordered = sorted(ranks)
    return name_ranks(ordered) + _describe_ranks(ordered, describe_rank)


def _describe_ranks(ordered: list[int], describe_rank: Callable[[int], str]) -> str:
    known = [text for text in map(describe_rank, ordered[:MOST_DESCRIBED]) if text]
    more = f"; and {len(ordered) - MOST_DESCRIBED} more" if len(ordered) > MOST_DESCRIBED else ""
    return f": {'; '.join(known)}{more}" if known else ""


def identity(request: Opening) -> tuple[object, ...]:
    """Returns the fields of a call that must be equal on all ranks.

    Args:
        request: The request with which a rank begins an operation.
    """
    match request:
        case SaveJoin() | LoadJoin():
            return (type(request), request.world_size, request.target.url, request.options)
        case Exchange():
            return (type(request), request.world_size, request.tag)


def disagreement(key: OpKey, openings: Mapping[int, Opening]) -> RankDisagreementError:
    """Returns the error of ranks that made different calls as the same operation.

    Args:
        key: The operation.
        openings: The request with which each rank began it.
    """
    by_call: dict[str, list[int]] = {}
    for rank, request in sorted(openings.items()):
        call = f"{describe(request)}, world size {request.world_size}"
        by_call.setdefault(call, []).append(rank)
    calls = "; ".join(f"{name_ranks(ranks)}: {call}" for call, ranks in by_call.items())
    return RankDisagreementError(
        f"Expected all ranks to make the same call as operation {key.seq} of session "
        f"{key.session!r}, but they made different ones: {calls}. Make every rank call save and "
        f"load in the same order with the same path and options{_if_paths_differ(openings)}"
    )


def _if_paths_differ(openings: Mapping[int, Opening]) -> str:
    """Returns the way out for ranks that save to local folders of their own, as for Ray Train."""
    found = [one.target.url for one in openings.values() if isinstance(one, SaveJoin)]
    if len(found) < len(openings) or len(set(found)) == 1:
        return ""
    if not all(url.startswith(("/", "file:")) for url in found):
        return ""
    return (
        "; that path is one that all nodes share. In Ray Train's workers, "
        "ray_dcp.train.checkpointer saves to the storage of the run"
    )


def describe(request: Opening) -> str:
    """Returns a description of a rank's call.

    Args:
        request: The request with which the rank begins an operation.
    """
    return describe_call(call_of(request))


def call_of(request: Opening) -> Call:
    """Returns the part of a request that `describe` needs, without the rank's items."""
    if isinstance(request, Exchange):
        return (f"exchange {request.tag!r}", None)
    what = "save to" if isinstance(request, SaveJoin) else "load from"
    return (f"{what} {request.target.url}", request.options)


def describe_call(call: Call) -> str:
    """Returns a description of a call, with the options that differ from the defaults."""
    what, options = call
    return what if options is None else f"{what}{_describe_options(options)}"


def _describe_options(options: SaveOptions | LoadOptions) -> str:
    chosen = [
        f"{field.name}={getattr(options, field.name)!r}"
        for field in fields(options)
        if getattr(options, field.name) != field.default
    ]
    return f" with {', '.join(chosen)}" if chosen else ""


def went_ahead(key: OpKey, rank: int) -> ParticipantError:
    """Returns the error of an operation that a rank began with an earlier coordinator.

    Args:
        key: The operation.
        rank: The rank, which continues it.
    """
    return ParticipantError(
        f"The coordinator was restarted during operation {key.seq} of session {key.session!r}: "
        f"rank {rank} had begun it before, and will not join again. Call again",
        rank=rank,
    )


def unknown(request: Request, why: str) -> CheckpointError:
    """Returns the error of a request for an unknown operation.

    Args:
        request: The request.
        why: Why the operation is unknown, for the message.
    """
    message = (
        f"Operation {request.key.seq} of session {request.key.session!r}, to which rank "
        f"{request.rank} sent {type(request).__name__}, is not known here: {why}"
    )
    if isinstance(request, Fenceable):
        return CommitUnknownError(
            f"{message}. The storage tells whether attempt {request.attempt} was committed: ask "
            f"ray_dcp.outcome(path, {request.attempt!r})",
            attempt=request.attempt,
            rank=request.rank,
        )
    return ParticipantError(f"{message}. Call again", rank=request.rank)


def reply_error(reply: Reply, rank: int) -> CheckpointError:
    """Returns the error that a reply stands for.

    Args:
        reply: Not the next step.
        rank: Who got it.
    """
    return from_wire(reply.error if isinstance(reply, Refused) else reply, "the coordinator", rank)


def exchanged(request: Exchange) -> Generator[Exchange, Reply, Mapping[int, bytes]]:
    """Returns what the other ranks had for this one, by sender.

    Args:
        request: What this rank has for them.

    Raises:
        CheckpointError: The exchange failed; the same on every rank.
    """
    reply = yield request
    if not isinstance(reply, Exchanged):
        raise reply_error(reply, request.rank)
    return reply.inbox


# The save


def lost_race(vote: Vote, lost: Lost) -> CheckpointExistsError:
    """Returns the error of an attempt that lost its slot to another one.

    Args:
        vote: Vote on the attempt.
        lost: Decision of the vote.
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


def overtaken(cause: CheckpointError, vote: Vote) -> CheckpointError:
    """Returns the error of a failed save, with a note if another save or delete overtook it.

    Args:
        cause: Why the save failed; not modified.
        vote: The vote that fenced the attempt off.
    """
    if vote.decided_by is None:
        return cause
    error = copy.copy(cause)
    what = (
        "the id was deleted"
        if vote.decided_by.is_delete
        else f"attempt {vote.decided_by.attempt} committed"
    )
    add_note(
        error,
        f"While attempt {vote.attempt} ran, {what} in slot {vote.decided_by.slot}, which removes "
        f"files of all other attempts. Only one save at a time can have an id",
    )
    return error


def fenced_off(vote: Vote, fenced: Fenced) -> SaveCancelledError:
    """Returns the error of an attempt that another process fenced off.

    Args:
        vote: Vote on the attempt.
        fenced: Decision of the vote.
    """
    return SaveCancelledError(
        f"Attempt {vote.attempt} was declared failed by somebody else before its commit: slot "
        f"{fenced.slot} holds an abort record for it",
        checkpoint_id=vote.target.url,
    )


def undecided(vote: Vote, cause: str) -> CommitUnknownError:
    """Returns the error of a vote that stays open.

    Args:
        vote: Vote on the attempt.
        cause: Description of the failure; may be empty.
    """
    why = f" ({cause})" if cause else ""
    return CommitUnknownError(
        f"The storage did not say whether attempt {vote.attempt} was committed in slot "
        f"{vote.slot}{why}. Ask ray_dcp.outcome({vote.target.url!r}, {vote.attempt!r}) later",
        attempt=vote.attempt,
        checkpoint_id=vote.target.url,
    )


def stagers_late(
    url: str,
    held: Mapping[int, str],
    left: Mapping[int, Sized],
    after_s: float,
    way_out: str,
) -> DeadlineError:
    """Returns the error of stagers that missed the deadline for writing their bytes.

    Args:
        url: URL of the target.
        held: The stager that holds each rank's bytes; at least one.
        left: The files of each rank that are not written.
        after_s: The deadline, in seconds.
        way_out: The option to raise, for the error message.
    """
    told = "; ".join(
        f"{stager} has not written {sum(len(left[rank]) for rank in ranks)} files of "
        f"{name_ranks(ranks)}"
        for stager in dict.fromkeys(held.values())
        for ranks in [[rank for rank, one in held.items() if one == stager]]
    )
    return DeadlineError(
        f"Expected the stagers of the nodes to write what they hold within {after_s:g} s, but "
        f"{told}. Look whether the storage answers from there; {way_out} if it is merely slow",
        checkpoint_id=url,
        rank=min(held) if len(held) == 1 else None,
    )


def lost_stager(stager: str, ranks: Sequence[int], num_files: int, reason: str) -> ParticipantError:
    """Returns the error for bytes whose stager was lost before they were written.

    Args:
        stager: Name of the stager.
        ranks: The ranks whose bytes it held.
        num_files: Number of their files without a receipt.
        reason: How the loss was detected.
    """
    return ParticipantError(
        f"Expected the stager {stager} to write the bytes of {name_ranks(ranks)}, but it was lost "
        f"with {num_files} files unwritten: {reason}. Look at its log and its node's memory, and "
        f"save again: the next save starts another stager",
        rank=ranks[0] if len(ranks) == 1 else None,
    )
