"""What became of an attempt, as its storage tells: read only, or settled for good.

*Why* a rank may settle: the coordinator may be gone. The vote on storage has one winner, so it
does not matter who casts it, and every rank that asks is told the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.format.manifest import Manifest, decode_record, record_key
from ray_dcp.protocol.commands import Result
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won
from ray_dcp.runtime.perform import perform
from ray_dcp.runtime.records import confirm_record, slots
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyMissingError, Storage

__all__ = ["Outcome", "outcome", "settle"]

Opener = Callable[[Target], Storage]
Outcome = Literal["committed", "aborted", "open"]


def outcome(path: str | os.PathLike[str] | Target, attempt: str) -> Outcome:
    """Returns what became of a save whose outcome was open.

    Args:
        path: Where it saved to: its `checkpoint_id`.
        attempt: Its id, as `CommitUnknownError.attempt` or `Metadata.attempt` tells it.

    Returns:
        `"committed"` or `"aborted"` once a record names the attempt; `"open"` before that. An
        attempt whose ranks and coordinator are all gone stays open: nothing commits it any more
        once a later save of the same id is committed.

    Raises:
        InvalidRequestError: `path` is not one, or `attempt` is empty.
        StorageError: The storage does not say.
        DamagedCheckpointError: A record can't be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     outcome(root, "no-such-attempt")
        'open'
    """
    if not isinstance(attempt, str) or not attempt:
        raise InvalidRequestError(
            f"Expected the id of an attempt, found {attempt!r}. CommitUnknownError.attempt has it",
            key="attempt",
        )
    decided, _ = _look(open_storage(path), attempt)
    match decided:
        case Won():
            return "committed"
        case Fenced():
            return "aborted"
        case None:
            return "open"


def settle(
    target: Target, attempt: str, *, reason: str, rank: int | None, opener: Opener = open_storage
) -> Decision:
    """Returns how an attempt ended, after ending it when it had not.

    Args:
        target: Where it saved to.
        attempt: Its id.
        reason: Goes into the abort record.
        rank: Who asks.
        opener: What opens the storage.

    Returns:
        `Won` or `Fenced`; `Open` when the storage does not say. Never raises.
    """
    try:
        storage = opener(target)
        decided, last_slot = _look(storage, attempt)
        if decided is not None:
            confirm_record(storage, decided.slot, storage.read(record_key(decided.slot)))
    except CheckpointError as error:
        return Open(error)
    if decided is not None:
        return decided
    vote = Vote(target, attempt, last_slot + 1)
    step: VoteTask | Decision = vote.abort(reason, rank)
    while not isinstance(step, Won | Fenced | Lost | Open):
        result: Result = perform(step, opener)
        step = vote.tell(result)
    return step


def _look(storage: Storage, attempt: str) -> tuple[Won | Fenced | None, int]:
    ordered = slots(storage)
    # Careful: upwards, as the first record that names the attempt decides.
    for slot in ordered:
        found = _record(storage, slot, attempt)
        if found is not None:
            return found, slot
    return None, ordered[-1] if ordered else 0


def _record(storage: Storage, slot: int, attempt: str) -> Won | Fenced | None:
    try:
        data = storage.read(record_key(slot))
    except KeyMissingError:
        return None
    record = decode_record(data)
    if record.attempt != attempt:
        return None
    return Won(slot, data) if isinstance(record, Manifest) else Fenced(slot)
