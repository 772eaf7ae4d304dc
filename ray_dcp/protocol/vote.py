"""The vote on one attempt: which records to create in which slots, and what the answers decide.

The slots of a target are numbered from 1 and filled without gaps, each by one record that is
created if absent and never changed or removed: a manifest (commits its attempt) or an abort
record (fences its attempt off). *The first record that names an attempt decides its fate, and
the highest commit is the checkpoint.* So whoever wants to decide walks upwards from the highest
slot that he has seen, and reads every record that stands in his way.

*Why* a slot is never freed: an attempt that was overtaken creates its record in the slot after
the one that it saw. Would that slot be free again, a zombie could commit an old state over a
newer one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_dcp.errors import CheckpointError, InternalError
from ray_dcp.protocol.commands import (
    CreateAbort,
    CreateRecord,
    Failed,
    ReadRecord,
    RecordCreated,
    Result,
    SlotFree,
    SlotTaken,
)
from ray_dcp.protocol.messages import Target

__all__ = ["Decision", "Fenced", "Lost", "Open", "Vote", "VoteTask", "Won"]

TRIES = 3
"""How often a record is tried after failures whose fate is unknown. Storages retry by themselves
as well; this is for those that lose answers."""


@dataclass(frozen=True)
class Won:
    """The attempt is committed."""

    slot: int
    record: bytes
    """The manifest as it stands on storage."""


@dataclass(frozen=True)
class Fenced:
    """An abort record of the attempt stands: it will never be committed."""

    slot: int


@dataclass(frozen=True)
class Lost:
    """Another attempt took the slot with its commit; this one will never be committed."""

    slot: int
    attempt: str
    """Who won."""


@dataclass(frozen=True)
class Open:
    """The storage did not say."""

    error: CheckpointError


Decision = Won | Fenced | Lost | Open
VoteTask = CreateRecord | CreateAbort | ReadRecord


class Vote:
    """Walks the slots for one attempt: to commit it, or to fence it off.

    Args:
        target: Where.
        attempt: Whose fate.
        slot: First slot that may be free.

    Attributes:
        slot: The slot that is tried now.
        at_stake: A manifest of the attempt was tried: it may stand, or still arrive.
    """

    def __init__(self, target: Target, attempt: str, slot: int) -> None:
        self.target = target
        self.attempt = attempt
        self.slot = slot
        self.at_stake = False
        self._record = b""
        self._abort: tuple[str, int | None] | None = None
        self._tries = TRIES

    def commit(self, record: bytes) -> VoteTask:
        """Returns the first task of committing.

        Args:
            record: The manifest.
        """
        self._record = record
        self.at_stake = True
        return self._create()

    def abort(self, reason: str, rank: int | None) -> VoteTask:
        """Returns the first task of fencing the attempt off, also after `commit` stayed open.

        Args:
            reason: Goes into the abort record.
            rank: Who caused it, if it was one rank.
        """
        self._abort = (reason, rank)
        self._tries = TRIES
        return self._create()

    def tell(self, result: Result) -> VoteTask | Decision:
        """Returns what to do next, or what is decided.

        Args:
            result: Of the last task.

        Raises:
            InternalError: The result is of no task of a vote.
        """
        match result:
            case RecordCreated():
                return Fenced(result.slot) if self._abort else Won(result.slot, self._record)
            case SlotTaken():
                return self._taken(result)
            case SlotFree():
                # Careful: the write that failed may still arrive. Trying again is safe, as the
                # slot has one winner, and both would be this record.
                return self._create()
            case Failed():
                return self._failed(result.error)
            case _:
                raise InternalError(
                    f"Expected the result of a vote for attempt {self.attempt}, but found "
                    f"{type(result).__name__}. Please report this"
                )

    def _create(self) -> VoteTask:
        if self._abort is None:
            return CreateRecord(self.target, self.slot, self._record)
        return CreateAbort(self.target, self.slot, self.attempt, *self._abort)

    def _taken(self, found: SlotTaken) -> VoteTask | Decision:
        if found.attempt == self.attempt:
            return Fenced(found.slot) if found.is_abort else Won(found.slot, found.record)
        if self._abort is None and not found.is_abort:
            return Lost(found.slot, found.attempt)
        self.slot = found.slot + 1
        return self._create()

    def _failed(self, error: CheckpointError) -> VoteTask | Decision:
        self._tries -= 1
        if self._tries < 0:
            return Open(error)
        return ReadRecord(self.target, self.slot)
