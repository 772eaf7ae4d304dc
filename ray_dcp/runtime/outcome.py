"""What became of an attempt, as its storage tells: read only, or settled for good.

*Why* a rank may settle: the coordinator may be gone. The vote on storage has one winner, so it
does not matter who casts it, and every rank that asks is told the same.
"""

from __future__ import annotations

from collections.abc import Callable

from ray_dcp.errors import CheckpointError
from ray_dcp.format.manifest import Manifest, decode_record, record_key
from ray_dcp.protocol.commands import Result
from ray_dcp.protocol.messages import Target
from ray_dcp.protocol.vote import Decision, Fenced, Lost, Open, Vote, VoteTask, Won
from ray_dcp.runtime.perform import perform
from ray_dcp.runtime.records import slots
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import KeyMissingError, Storage

__all__ = ["outcome", "settle"]

Opener = Callable[[Target], Storage]


def outcome(target: Target, attempt: str, *, opener: Opener = open_storage) -> Won | Fenced | None:
    """Returns how an attempt ended, or None while no record names it.

    Args:
        target: Where it saved to.
        attempt: Its id.
        opener: What opens the storage.

    Raises:
        StorageError: The storage does not say.
    """
    decided, _ = _look(opener(target), attempt)
    return decided


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
        decided, last_slot = _look(opener(target), attempt)
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
