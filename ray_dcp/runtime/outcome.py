"""What became of an attempt, as its storage tells: read only, or settled for good.

*Why* a rank may settle: the coordinator may be gone. The vote on storage has one winner, so it
does not matter who casts it, and every rank that asks is told the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from ray_dcp.errors import CheckpointError, InvalidRequestError, StorageError
from ray_dcp.format.manifest import record_key
from ray_dcp.protocol.commands import Result
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won
from ray_dcp.runtime.perform import perform
from ray_dcp.runtime.records import confirm_record, decision_of
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyMissingError, Storage
from ray_dcp.transfer.slots import read_slots

__all__ = ["Outcome", "outcome", "settle"]

Opener = Callable[[Target], Storage]
Outcome = Literal["committed", "aborted", "open"]


def outcome(path: AnyPlace, attempt: str) -> Outcome:
    """Returns what became of a save whose outcome was open.

    Args:
        path: Where it saved to: its `checkpoint_id`.
        attempt: Its id, as `CommitUnknownError.attempt` or `Metadata.attempt` tells it.

    Returns:
        `"committed"` (also when it was replaced or deleted since) or `"aborted"` once a record
        names the attempt; `"open"` before that. An attempt whose ranks and coordinator are all
        gone stays open: nothing commits it any more once a later save of the same id is committed,
        and an attempt that very many others came after is forgotten, which is open as well. On a
        storage that can't create a file only if there is none, every attempt stays open whose
        coordinator died before it decided.

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
    match decision_of(read_slots(open_storage(path), whole=True), attempt):
        case Won() | Lost():
            return "committed"
        case Fenced():
            return "aborted"
        case None:
            return "open"


def settle(
    target: Target,
    attempt: str,
    *,
    reason: str,
    rank: int | None,
    opener: Opener = open_storage,
    create_if_absent: bool = True,
) -> Decision:
    """Returns how an attempt ended, after ending it when it had not.

    Args:
        target: Where it saved to.
        attempt: Its id.
        reason: Goes into the abort record.
        rank: Who asks.
        opener: What opens the storage.
        create_if_absent: A record has one winner there, as the attempt's coordinator saw.

    Returns:
        `Won` or `Fenced`; `Lost` when it was committed and is replaced or deleted by now; `Open`
        when the storage does not say, and on one that can't create a record only if absent: there
        it only looks. Never raises.
    """
    try:
        storage = opener(target)
        seen = read_slots(storage, whole=True)
        decided = decision_of(seen, attempt)
        if decided is not None:
            with suppress(KeyMissingError):  # replaced and removed meanwhile
                confirm_record(storage, decided.slot, storage.read(record_key(decided.slot)))
        if decided is None and not (create_if_absent and storage.traits.create_if_absent):
            return _left_to_coordinator(storage)
    except CheckpointError as error:
        return Open(error)
    if decided is not None:
        return decided
    vote = Vote(target, attempt, seen.last_slot + 1)
    step: VoteTask | Decision = vote.abort(reason, rank)
    while not isinstance(step, Won | Fenced | Lost | Open):
        result: Result = perform(step, opener)
        step = vote.tell(result)
    return step


def _left_to_coordinator(storage: Storage) -> Open:
    """Why: where a record can't be created only if absent, an abort could replace the commit."""
    return Open(
        StorageError(
            f"{storage.url} can't create a file only if there is none: only the coordinator of "
            f"the save may decide there, and no record of it names this attempt yet"
        )
    )
