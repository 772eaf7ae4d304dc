"""What became of an attempt: `outcome` reads it, `settle` decides it for good.

*Why* a rank may settle: the coordinator may be gone. The vote on storage has one winner, so it does
not matter who votes, and every rank gets the same answer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from ray_dcp.commit_protocol.messages import (
    Target,
)
from ray_dcp.commit_protocol.vote import Decision, Fenced, Lost, Open, Vote, Won
from ray_dcp.errors import (
    CheckpointError,
    InvalidRequestError,
    StorageError,
)
from ray_dcp.format.manifest import (
    record_key,
)
from ray_dcp.io.records import read_slots
from ray_dcp.place.records import confirm_record, decision_of
from ray_dcp.place.voting import Opener, decide
from ray_dcp.store.location import AnyPlace
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyMissingError, Storage

Outcome = Literal["committed", "aborted", "open"]


def outcome(path: AnyPlace, attempt: str) -> Outcome:
    """Returns what became of a save whose outcome was unknown.

    Args:
        path: The `checkpoint_id` of the save.
        attempt: Id of the attempt, as in `CommitUnknownError.attempt` or `Metadata.attempt`.

    Returns:
        `"committed"` (also if it was replaced or deleted since) or `"aborted"` once a record names
        the attempt; `"open"` before that. An attempt whose ranks and coordinator are all gone stays
        open: nothing commits it once a later save of the same id is committed. An attempt that very
        many others followed is forgotten, and counts as open as well. On a storage without
        conditional create, every attempt stays open whose coordinator died before it decided.

    Raises:
        InvalidRequestError: `path` is invalid, or `attempt` is empty.
        StorageError: The storage does not answer.
        DamagedCheckpointError: A record can't be read.

    Examples:
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
    """Returns how an attempt ended, and ends it if it has not.

    Never raises.

    Args:
        target: Location of the checkpoint.
        attempt: Id of the attempt.
        reason: Reason, for the abort record.
        rank: The rank that settles, or None.
        opener: Opens the storage.
        create_if_absent: Whether the storage creates a record only if it is absent, as the
            attempt's coordinator found.

    Returns:
        `Won` or `Fenced`; `Lost` if it was committed, and replaced or deleted since; `Open` if the
        storage does not answer. On a storage without conditional create, it only reads, and returns
        `Open` if no record names the attempt.
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
    return decide(vote, vote.abort(reason, rank), opener)


def _left_to_coordinator(storage: Storage) -> Open:
    """Returns the decision on a storage on which an abort record could replace the commit."""
    return Open(
        StorageError(
            f"{storage.url} can't create a file only if there is none: only the coordinator of "
            f"the save may decide there, and no record of it names this attempt yet"
        )
    )
