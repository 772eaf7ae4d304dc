"""The fate of attempts: the vote that decides one, and the files that a decided one leaves.

`Vote` says which record to create in which slot, and what the answers decide.

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

*Garbage.* ray_dcp owns a file if its name matches one of its patterns, with an attempt in it. Other
files are never deleted, whatever a record says. *Why*: the writer of a record could otherwise
choose files to delete.

*Why* no clock is needed: files that were listed before a commit or delete was recorded belong to
attempts that were planned earlier. To become the checkpoint, such an attempt would have to pass
that record's slot, where it loses. Files of attempts that began later were not listed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
from ray_dcp.format.manifest import (
    AbortRecord,
    DeleteRecord,
    Manifest,
    Record,
    Verdict,
    deciding,
    slot_of,
)
from ray_dcp.format.names import SHARED_FOLDER
from ray_dcp.format.save_trace import trace_key
from ray_dcp.format.step_info import info_slot

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


# Garbage

MOST_DECIDED = 64
"""Most verdicts on earlier attempts in a record, of 50 bytes each; a save adds one or two."""

_METADATA = ".metadata"
_ATTEMPT = r"(?P<attempt>[0-9a-f]{16})"
"""Pattern of attempt ids; see `place.attempt_id.new_attempt`."""
LEASE = re.compile(r"writing-(?P<number>[0-9]{8,16})\.json")
"""Lease of a command that writes to a place; see `place.target_lease`."""
_TEMP = re.compile(r"\.tmp-[0-9a-f]{12}-(?P<name>[^/]+)")

Kind = Literal["data", "table", "record", "metadata", "temp", "trace", "lease"]
_NAMES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("data", re.compile(rf"__[0-9]+_[0-9]+\.{_ATTEMPT}\.distcp")),
    ("table", re.compile(rf"chunks\.{_ATTEMPT}\.table")),
    ("trace", re.compile(rf"trace\.{_ATTEMPT}\.json")),
)
_ORDER: dict[Kind, int] = {
    "data": 0, "temp": 0, "trace": 0, "table": 1, "record": 2, "metadata": 3, "lease": 3
}  # fmt: skip


class Owned(NamedTuple):
    """A file that ray_dcp wrote."""

    kind: Kind
    """Kind of file. `temp`: an unpublished file of a writer that is running or crashed. `trace`:
    written after the commit of its attempt, so its attempt is never unfinished. `lease`: that of a
    command that writes here."""
    attempt: str | None = None
    """None if the name has no attempt: records, leases, `.metadata` and temporary files of
    these."""


@dataclass(frozen=True)
class KeptFile:
    """A file that is not deleted, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class GarbagePlan:
    """The files to delete and to keep at a place."""

    delete: tuple[str, ...]
    """Keys in the order in which to delete them: data, then tables, then records, ascending."""
    kept: tuple[KeptFile, ...]
    """Files that remain besides the current checkpoint and the records that decide it."""
    unfinished: tuple[str, ...]
    """Attempts that may still be committed, sorted."""


def owner_of(key: str) -> Owned | None:
    """Returns the kind and attempt of a file by its name; None if ray_dcp did not write it.

    Args:
        key: Key relative to the checkpoint.

    Examples:
        >>> owner_of("__0_1.0123456789abcdef.distcp")
        Owned(kind='data', attempt='0123456789abcdef')
        >>> owner_of(".tmp-0123456789ab-chunks.0123456789abcdef.table").kind
        'temp'
        >>> print(owner_of("__0_1.distcp"), owner_of("notes.0123456789abcdef.txt"))
        None None
    """
    temp = _TEMP.fullmatch(key)
    if temp is not None:
        owned = owner_of(temp["name"])
        if info_slot(temp["name"]) is not None:
            return Owned("temp")
        return None if owned is None or owned.kind == "temp" else Owned("temp", owned.attempt)
    if key == _METADATA:
        return Owned("metadata")
    if slot_of(key) is not None:
        return Owned("record")
    if LEASE.fullmatch(key) is not None:
        return Owned("lease")
    found = ((kind, pattern.fullmatch(key)) for kind, pattern in _NAMES)
    return next((Owned(kind, match["attempt"]) for kind, match in found if match), None)


def attempts_of(keys: Iterable[str]) -> frozenset[str]:
    """Returns the attempts that left files, other than traces.

    Args:
        keys: All keys at the place, with unpublished files.
    """
    found = (owner_of(key) for key in keys)
    left = (owned for owned in found if owned is not None and owned.kind != "trace")
    return frozenset(owned.attempt for owned in left if owned.attempt)


def left_by_others(keys: Iterable[str], *, last_slot: int) -> tuple[str, ...]:
    """Returns the files that are garbage once an attempt that begins now has been committed.

    Args:
        keys: All keys at the place when the attempt begins, with unpublished files.
        last_slot: Highest slot in use at that time.

    Returns:
        The keys in the order in which to delete them, without `.metadata`, which the commit
        replaces, and leases, which end with their holders.
    """
    found = [(owner_of(key), key) for key in keys]
    left = [
        (owned, key)
        for owned, key in found
        if owned is not None
        and owned.kind not in ("metadata", "lease")
        and (slot_of(key) or 0) <= last_slot
    ]
    return _in_order(left)


def verdicts(records: Mapping[int, Record], present: Iterable[str]) -> tuple[Verdict, ...]:
    """Returns the verdicts on earlier attempts that the next deciding record has to include.

    Args:
        records: The current records by slot; see `ray_dcp.io.records.read_slots`.
        present: Attempts that left files. Those that no record names count as not committed.

    Returns:
        The newest `MOST_DECIDED` verdicts, oldest first.
    """
    found = deciding(records)
    known = {v.attempt: v.committed for v in found[1].decided} if found is not None else {}
    for _, record in sorted(records.items()):
        known.setdefault(record.attempt, not isinstance(record, AbortRecord))
    for attempt in sorted(present):
        known.setdefault(attempt, False)
    return tuple(Verdict(*item) for item in known.items())[-MOST_DECIDED:]


def was_committed(record: Manifest | DeleteRecord, attempt: str) -> bool:
    """Returns whether the deciding record lists an earlier attempt as committed.

    Args:
        record: The deciding record.
        attempt: The earlier attempt.
    """
    return Verdict(attempt, True) in record.decided


def sweep(
    keys: Iterable[str],
    *,
    standing: Manifest | None,
    last_slot: int,
    dead: Collection[str],
    all_dead: bool = False,
    anonymous: bool = False,
    named: Mapping[str, str] | None = None,
) -> GarbagePlan:
    """Returns the files that can be deleted without committing anything.

    Args:
        keys: All keys at the place, with unpublished files.
        standing: Manifest of the current checkpoint; None if there is none.
        last_slot: `previous_slot` of the deciding record: records up to it can be deleted.
        dead: Attempts that will never be the checkpoint (again), and leases of dead processes.
        all_dead: Treat all attempts except that of `standing` as dead, even those that no record
            names.
        anonymous: Also delete leases, and temporary files of records, leases and `.metadata`. If a
            process is writing one, that write fails and is retried.
        named: Attempts whose files are kept in any case, with the reason.
    """
    own = None if standing is None else standing.attempt
    needed = set() if standing is None else {entry.key for entry in standing.files}
    needed |= set() if standing is None else {standing.table.key}
    needed |= set() if own is None else {trace_key(own)}
    known: set[str | None] = {*dead, *(() if own is None else (own,))}
    delete: list[tuple[Owned, str]] = []
    kept: list[KeptFile] = []
    unfinished: set[str] = set()
    for key in sorted(keys):
        owned = owner_of(key)
        if key in needed or (owned is not None and owned.kind == "metadata"):
            continue
        if owned is None:
            kept.append(KeptFile(key, _why_not_ours(key)))
        elif owned.kind == "record":
            if (slot_of(key) or 0) <= last_slot:
                delete.append((owned, key))
        elif owned.kind == "trace":
            # Why: only committed attempts have a trace; if not the current one, it was replaced.
            delete.append((owned, key))
        elif owned.attempt is not None and owned.attempt in (named or {}):
            kept.append(KeptFile(key, (named or {})[owned.attempt]))
        elif all_dead or {owned.attempt, key} & known or (owned.attempt is None and anonymous):
            delete.append((owned, key))
        elif owned.attempt is None:
            kept.append(KeptFile(key, "somebody may be writing it"))
        else:
            unfinished.add(owned.attempt)
            kept.append(KeptFile(key, f"attempt {owned.attempt} may still be committed"))
    return GarbagePlan(_in_order(delete), tuple(kept), tuple(sorted(unfinished)))


def _why_not_ours(key: str) -> str:
    """Returns why a file is none of this checkpoint's."""
    folder, _, name = key.rpartition("/")
    if owner_of(name) is not None:
        return "it is of a checkpoint in that folder"
    is_managers = info_slot(name) is not None or folder.startswith(SHARED_FOLDER)
    return "it is of the run's manager" if is_managers else "ray_dcp did not write it"


def _in_order(found: Iterable[tuple[Owned, str]]) -> tuple[str, ...]:
    ordered = sorted(found, key=lambda item: (_ORDER[item[0].kind], slot_of(item[1]) or 0, item[1]))
    return tuple(key for _, key in ordered)
