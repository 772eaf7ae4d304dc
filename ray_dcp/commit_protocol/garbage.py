"""The files that decided attempts leave: who owns a file, what a save or a deletion removes.

ray_dcp owns a file if its name matches one of its patterns, with an attempt in it. Other
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
