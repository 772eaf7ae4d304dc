"""The vote on one attempt: which records to create in which slots, and what the answers decide.

The slots of a target are numbered from 1 and filled without gaps, each by one record that is
created if absent and never changed: a manifest (commits its attempt), a delete record (commits
that there is no checkpoint) or an abort record (fences its attempt). *The first record that names
an attempt decides its fate, and the highest commit or delete decides what the place holds.* So
whoever wants to decide walks upwards from the highest slot that it has seen, and reads every record
in its way.

*Why* slots below the one that decides may become free again: an attempt that was paused for long
may create its record in one of them, but a record there changes nothing. Whoever creates it learns
at once that it was overtaken (`Overtaken`), and what the deciding record remembers of the attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_dcp.commit_protocol.commands import (
    CreateAbort,
    CreateRecord,
    Failed,
    Overtaken,
    ReadRecord,
    RecordCreated,
    Result,
    SlotFree,
    SlotTaken,
)
from ray_dcp.commit_protocol.messages import Target
from ray_dcp.errors import CheckpointError, InternalError, StorageRefusedError

TRIES = 1
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
    """Another attempt took the slot with its commit; this one will never be committed.

    Or it was committed and is replaced already, when an abort of it comes too late.
    """

    slot: int
    attempt: str
    """Who won."""
    is_delete: bool = False
    """The place was deleted, and not saved to."""


@dataclass(frozen=True)
class Open:
    """The storage did not answer."""

    error: CheckpointError


Decision = Won | Fenced | Lost | Open
VoteTask = CreateRecord | CreateAbort | ReadRecord


class Vote:
    """Walks the slots for one attempt: to commit it, or to fence it off.

    Args:
        target: Where.
        attempt: Whose fate.
        slot: First slot that may be free.
        create_if_absent: A record has one winner at the target, as whoever planned the attempt saw.

    Attributes:
        slot: The slot that is tried now.
        at_stake: A manifest of the attempt was tried: it may stand, or still arrive.
        met: The last commit or delete of another attempt that was seen.
    """

    def __init__(
        self, target: Target, attempt: str, slot: int, *, create_if_absent: bool = True
    ) -> None:
        self.target = target
        self.attempt = attempt
        self.slot = slot
        self.at_stake = False
        self.decided_by: Lost | None = None
        self._create_if_absent = create_if_absent
        self._record = b""
        self._abort: tuple[str, int | None] | None = None
        self._tries = TRIES
        self._refused: StorageRefusedError | None = None

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
        self._refused = None
        return self._create()

    def advance(self, result: Result) -> VoteTask | Decision:
        """Returns what to do next, or what is decided.

        Args:
            result: Of the last task.

        Raises:
            InternalError: The result is of no task of a vote.
        """
        match result:
            case RecordCreated():
                is_abort = self._abort is not None
                return self._found(result.slot, is_abort, self._record, result.overtaken)
            case SlotTaken() if result.attempt == self.attempt:
                return self._found(result.slot, result.is_abort, result.record, result.overtaken)
            case SlotTaken():
                return self._taken(result)
            case SlotFree() if self._refused is not None:
                return Open(self._refused)
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
            return CreateRecord(self.target, self.slot, self._record, self._create_if_absent)
        return CreateAbort(
            self.target, self.slot, self.attempt, *self._abort, self._create_if_absent
        )

    def _found(
        self, slot: int, is_abort: bool, record: bytes, overtaken: Overtaken | None
    ) -> Decision:
        """Returns what a record of this attempt in a slot decides."""
        # Careful: a record below one that decides was created too late, and counts for nothing,
        # unless that one records otherwise.
        if overtaken is not None:
            self.decided_by = Lost(overtaken.slot, overtaken.attempt, overtaken.is_delete)
            if overtaken.was_committed == is_abort:
                return self.decided_by
        return Fenced(slot) if is_abort else Won(slot, record)

    def _taken(self, found: SlotTaken) -> VoteTask | Decision:
        if not found.is_abort:
            self.decided_by = Lost(found.slot, found.attempt, found.is_delete)
            if self._abort is None:
                return self.decided_by
        self.slot = found.slot + 1
        return self._create()

    def _failed(self, error: CheckpointError) -> VoteTask | Decision:
        self._tries -= 1
        if self._tries < 0 or self._refused is not None:
            return Open(error)
        if isinstance(error, StorageRefusedError):
            self._refused = error
        return ReadRecord(self.target, self.slot)
