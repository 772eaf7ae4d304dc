"""Garbage collection, the decision: which files at a place are ours, and which nothing needs. Pure.

A file is ours if its name is one that ray_dcp gives, with an attempt in it. All others belong to
somebody else and are never deleted, whatever they look like and whatever a record has: whoever
writes a record could otherwise name the files to delete.

*Why no clock is needed.* Whatever was listed before a commit or delete was recorded belongs to
attempts that were planned before. Each of these would have to pass that record's slot to become
the checkpoint, and loses there. Files of attempts that began later were not listed.
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
from ray_dcp.format.save_trace import trace_key

MOST_DECIDED = 64
"""How many earlier attempts a record remembers. Each takes 50 bytes; one save adds one or two."""

_METADATA = ".metadata"
_ATTEMPT = r"(?P<attempt>[0-9a-f]{16})"
"""What an attempt looks like: `runtime.tasks.new_attempt`."""
_TEMP = re.compile(r"(?P<folder>(?:[^/]+/)?)\.tmp-[0-9a-f]{12}-(?P<name>[^/]+)")

Kind = Literal["data", "table", "record", "metadata", "temp", "trace"]
_NAMES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("data", re.compile(rf"__[0-9]+_[0-9]+\.{_ATTEMPT}\.distcp")),
    ("data", re.compile(rf"{_ATTEMPT}/rank-[0-9]{{5,}}-part-[0-9]{{5,}}\.safetensors")),
    ("table", re.compile(rf"chunks\.{_ATTEMPT}\.table")),
    ("trace", re.compile(rf"trace\.{_ATTEMPT}\.json")),
)
_ORDER: dict[Kind, int] = {"data": 0, "temp": 0, "trace": 0, "table": 1, "record": 2, "metadata": 3}


class Owned(NamedTuple):
    """A file that ray_dcp wrote."""

    kind: Kind
    """`temp`: not published, by a writer that still works or by one that crashed. `trace`: written
    after the commit of its attempt, so it never belongs to one that may still be committed."""
    attempt: str | None = None
    """None where the name has none: of records, `.metadata` and what was to become one."""


@dataclass(frozen=True)
class KeptFile:
    """A file that was not deleted."""

    key: str
    reason: str


@dataclass(frozen=True)
class GarbagePlan:
    """What is to be deleted at a place, and what is not."""

    delete: tuple[str, ...]
    """In the order in which to delete: data before tables before records, ascending."""
    kept: tuple[KeptFile, ...]
    """What remains beside the checkpoint that stands and the records that decide it."""
    unfinished: tuple[str, ...]
    """Attempts that may still be committed, sorted."""


def owner_of(key: str) -> Owned | None:
    """Returns whose a file is, by its name; None when it is not ours.

    Args:
        key: Relative to the checkpoint.

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
        owned = owner_of(temp["folder"] + temp["name"])
        return None if owned is None or owned.kind == "temp" else Owned("temp", owned.attempt)
    if key == _METADATA:
        return Owned("metadata")
    if slot_of(key) is not None:
        return Owned("record")
    found = ((kind, pattern.fullmatch(key)) for kind, pattern in _NAMES)
    return next((Owned(kind, match["attempt"]) for kind, match in found if match), None)


def attempts_of(keys: Iterable[str]) -> frozenset[str]:
    """Returns the attempts that left files; their traces do not count, which nothing needs.

    Args:
        keys: What is there, with unpublished files.
    """
    found = (owner_of(key) for key in keys)
    left = (owned for owned in found if owned is not None and owned.kind != "trace")
    return frozenset(owned.attempt for owned in left if owned.attempt)


def left_by_others(keys: Iterable[str], *, last_slot: int) -> tuple[str, ...]:
    """Returns what nothing needs once an attempt that begins now has been committed.

    Args:
        keys: All that is there when it begins, with unpublished files.
        last_slot: Highest slot in use then.

    Returns:
        In the order in which to delete; `.metadata`, which the commit replaces, is not among it.
    """
    found = [(owner_of(key), key) for key in keys]
    left = [
        (owned, key)
        for owned, key in found
        if owned is not None and owned.kind != "metadata" and (slot_of(key) or 0) <= last_slot
    ]
    return _in_order(left)


def verdicts(records: Mapping[int, Record], present: Iterable[str]) -> tuple[Verdict, ...]:
    """Returns the verdicts of a record that is to decide, on the attempts before it.

    Args:
        records: That decide now, by slot; see `ray_dcp.io.records.read_slots`.
        present: Attempts that left files. If no record names them, they are overtaken.

    Returns:
        The oldest first; at most `MOST_DECIDED`, the newest of them.
    """
    found = deciding(records)
    known = {v.attempt: v.committed for v in found[1].decided} if found is not None else {}
    for _, record in sorted(records.items()):
        known.setdefault(record.attempt, not isinstance(record, AbortRecord))
    for attempt in sorted(present):
        known.setdefault(attempt, False)
    return tuple(Verdict(*item) for item in known.items())[-MOST_DECIDED:]


def was_committed(record: Manifest | DeleteRecord, attempt: str) -> bool:
    """Returns whether the record that decides has an earlier attempt as committed.

    Args:
        record: That decides.
        attempt: In question.
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
    """Returns which files can be deleted without a commit of one's own.

    Args:
        keys: What is there, with unpublished files.
        standing: The checkpoint that stands.
        last_slot: Records up to this slot can be deleted: `previous_slot` of the one that decides.
        dead: Attempts that will never be the checkpoint (again).
        all_dead: All attempts but the standing one are dead, also those that nothing names.
        anonymous: Delete what was to become a record or `.metadata` as well. If somebody is
            writing it, that write fails, and its writer tries again.
        named: Attempts whose files stay all the same, with the reason.
    """
    own = None if standing is None else standing.attempt
    needed = set() if standing is None else {entry.key for entry in standing.files}
    needed |= set() if standing is None else {standing.table.key}
    needed |= set() if own is None else {trace_key(own)}
    known = {*dead, *(() if own is None else (own,))}
    delete: list[tuple[Owned, str]] = []
    kept: list[KeptFile] = []
    unfinished: set[str] = set()
    for key in sorted(keys):
        owned = owner_of(key)
        if key in needed or (owned is not None and owned.kind == "metadata"):
            continue
        if owned is None:
            kept.append(KeptFile(key, "ray_dcp did not write it"))
        elif owned.kind == "record":
            if (slot_of(key) or 0) <= last_slot:
                delete.append((owned, key))
        elif owned.kind == "trace":
            # Why: its attempt was committed. If it does not stand it was replaced.
            delete.append((owned, key))
        elif owned.attempt is not None and owned.attempt in (named or {}):
            kept.append(KeptFile(key, (named or {})[owned.attempt]))
        elif all_dead or owned.attempt in known or (owned.attempt is None and anonymous):
            delete.append((owned, key))
        elif owned.attempt is None:
            kept.append(KeptFile(key, "somebody may be writing it"))
        else:
            unfinished.add(owned.attempt)
            kept.append(KeptFile(key, f"attempt {owned.attempt} may still be committed"))
    return GarbagePlan(_in_order(delete), tuple(kept), tuple(sorted(unfinished)))


def _in_order(found: Iterable[tuple[Owned, str]]) -> tuple[str, ...]:
    ordered = sorted(found, key=lambda item: (_ORDER[item[0].kind], slot_of(item[1]) or 0, item[1]))
    return tuple(key for _, key in ordered)
