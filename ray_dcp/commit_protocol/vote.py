"""`Vote`: which record to create in which slot for one attempt, and what the answers decide.

The slots of a target are numbered from 1 and filled without gaps. Each holds one record, created if
absent and never changed: a manifest (commits its attempt), a delete record (commits that there is
no checkpoint) or an abort record (fences its attempt). *The first record that names an attempt
decides its fate; the highest commit or delete decides what the place holds.* A vote therefore walks
upwards from the highest slot that it has seen, and reads every record in its way:

    slot      1          2         3          4         5
    record    manifest   abort     manifest   abort     (free)
    attempt   A          B         C          D
                                   ^ decides            ^ a vote of attempt E tries this slot

Slots below the one that decides may become free again, when their records are deleted. An attempt
that was paused for a long time may create its record in one of them. *Why* that is safe: the record
has no effect, and its creator learns at once that it was overtaken (`Overtaken`), and what the
deciding record has about its attempt.
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
"""Retries of a record after a failure that leaves unknown whether it was written. Storages retry
by themselves; this is for those that lose answers."""


@dataclass(frozen=True)
class Won:
    """The attempt is committed."""

    slot: int
    record: bytes
    """The manifest as stored."""


@dataclass(frozen=True)
class Fenced:
    """The attempt has an abort record, and will never be committed."""

    slot: int


@dataclass(frozen=True)
class Lost:
    """Another attempt committed in the slot; this one will never be committed.

    Or, in a vote to abort: this attempt was committed and has already been replaced.
    """

    slot: int
    attempt: str
    """The attempt that won the slot."""
    is_delete: bool = False
    """Whether the winner is a delete, not a save."""


@dataclass(frozen=True)
class Open:
    """The storage did not answer."""

    error: CheckpointError


Decision = Won | Fenced | Lost | Open
VoteTask = CreateRecord | CreateAbort | ReadRecord


class Vote:
    """Walks the slots for one attempt, to commit it or to fence it off.

    Args:
        target: Location of the checkpoint.
        attempt: The attempt.
        slot: First slot that may be free.
        create_if_absent: Whether the storage creates a record only if it is absent, as found when
            the attempt was planned.

    Attributes:
        slot: The slot that is tried now.
        at_stake: Whether a manifest of the attempt was tried, so that it may exist or still appear.
        decided_by: The last commit or delete of another attempt that was seen; None if none was.

    Examples:
        The place has manifests in slots 1 and 3. E was planned then, and aims at slot 4. The abort
        record of D is there: E goes on to slot 5. Its answer is lost, so it looks; the record in
        slot 5 is its own.

        >>> target, attempt = Target("s3://bucket/run/step-5"), "e" * 16
        >>> vote = Vote(target, attempt, slot=4)
        >>> vote.commit(b"manifest of E").slot
        4
        >>> vote.advance(SlotTaken(4, "d" * 16, is_abort=True, record=b"")).slot
        5
        >>> vote.advance(Failed(CheckpointError("no answer"))).slot, vote.at_stake
        (5, True)
        >>> vote.advance(SlotTaken(5, attempt, is_abort=False, record=b"manifest of E"))
        Won(slot=5, record=b'manifest of E')

        Had F committed in slot 5 meanwhile, E would have lost, and left its files to F's collector:

        >>> vote = Vote(target, attempt, slot=5)
        >>> _ = vote.commit(b"manifest of E")
        >>> vote.advance(SlotTaken(5, "f" * 16, is_abort=False, record=b""))
        Lost(slot=5, attempt='ffffffffffffffff', is_delete=False)
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
        """Starts the commit of the attempt and returns its first task.

        Args:
            record: The manifest.
        """
        self._record = record
        self.at_stake = True
        return self._create()

    def abort(self, reason: str, rank: int | None) -> VoteTask:
        """Starts fencing the attempt off and returns the first task; also after an open `commit`.

        Args:
            reason: Reason, for the abort record.
            rank: The rank that failed, if it was a single one.
        """
        self._abort = (reason, rank)
        self._tries = TRIES
        self._refused = None
        return self._create()

    def advance(self, result: Result) -> VoteTask | Decision:
        """Returns the next task, or the decision.

        Args:
            result: Result of the last task.

        Raises:
            InternalError: The result is not one of a vote's tasks.
        """
        match result:
            case RecordCreated():
                is_abort = self._abort is not None
                return self._judge(result.slot, is_abort, self._record, result.overtaken)
            case SlotTaken() if result.attempt == self.attempt:
                return self._judge(result.slot, result.is_abort, result.record, result.overtaken)
            case SlotTaken():
                return self._after_taken_slot(result)
            case SlotFree() if self._refused is not None:
                return Open(self._refused)
            case SlotFree():
                # Careful: the failed write may still arrive. A retry is safe, as the slot has one
                # winner, and both writes have the same record.
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

    def _judge(
        self, slot: int, is_abort: bool, record: bytes, overtaken: Overtaken | None
    ) -> Decision:
        """Returns the decision that follows from a record of this attempt in a slot."""
        # Careful: a record below the one that decides was created too late and has no effect. The
        # deciding record knows whether the attempt was committed before.
        if overtaken is not None:
            self.decided_by = Lost(overtaken.slot, overtaken.attempt, overtaken.is_delete)
            if overtaken.was_committed == is_abort:
                return self.decided_by
        return Fenced(slot) if is_abort else Won(slot, record)

    def _after_taken_slot(self, found: SlotTaken) -> VoteTask | Decision:
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
