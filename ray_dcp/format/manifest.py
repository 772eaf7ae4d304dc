"""The records that decide a checkpoint: the manifest, which commits it, abort and delete.

One JSON object a record, in a numbered slot. Its bytes are canonical and begin with a digest of
the rest, so that any change of them is seen. Writing a slot at most once, and who may, is the
storage's and the protocol's part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ray_dcp.errors import CheckpointError, DamagedCheckpointError, InternalError
from ray_dcp.format.checksums import digest_bytes
from ray_dcp.format.file_entries import (
    FileEntry,
    FilesColumns,
    entry,
    files_from,
    files_to,
)
from ray_dcp.format.record_fields import (
    attempt,
    damaged,
    flag,
    hex_digits,
    integer,
    integers,
    items,
    seconds,
    short,
    text,
)

__all__ = [
    "FORMAT_VERSION",
    "AbortRecord",
    "DeleteRecord",
    "FileEntry",
    "FilesColumns",
    "Manifest",
    "PlaceRun",
    "Record",
    "Verdict",
    "deciding",
    "decode_record",
    "encode_record",
    "newest",
    "record_key",
    "slot_of",
]

FORMAT_VERSION = 1
"""The one that is written and read: of records, and of all that a manifest names."""
MAX_RECORD_BYTES = 256 << 20
MAX_SLOT = 10**15

_HEAD = b'{"digest":"'
_MIDDLE = b'","record":'
_TAIL = b"}\n"
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SLOT_KEY = re.compile(r"manifest-([0-9]{8,16})\.json")


@dataclass(frozen=True)
class Verdict:
    """What became of an earlier attempt, for the time when its own record is removed."""

    attempt: str
    committed: bool
    """False: it never was the checkpoint and never will be."""


class PlaceRun(NamedTuple):
    """Where deferred items are, each in another file: as many as `num_items` at the same place."""

    item_offset: int
    item_bytes: int
    block_bytes: int
    """Of its block checksums."""
    num_items: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a committed checkpoint consists of; that it stands in its slot is the commit."""

    attempt: str
    epoch: int
    """Epoch of the coordinator that wrote it."""
    world_size: int
    container: str
    """`SaveOptions.container`."""
    created_s: float
    """Seconds since 1970 by the writer's clock; for people, nothing is decided by it."""
    files: Sequence[FileEntry]
    """The data files, in the order of the chunk table; kept as `FilesColumns`."""
    table: FileEntry
    """The chunk table, as all saves of the plan share it."""
    metadata: FileEntry | None
    """The `.metadata` that is published for stock DCP; None for containers without."""
    replaced_metadata: str | None
    """Hex digest of the foreign `.metadata` that stood there at planning and may be replaced."""
    plan_digest: str
    """Hex digest of the global plan."""
    num_tensors: int
    num_chunks: int
    payload_bytes: int
    """Raw bytes of all chunks."""
    previous_slot: int
    """Highest slot taken at planning; 0 when there was none. Records up to it may be removed."""
    decided: tuple[Verdict, ...] = ()
    """What became of the attempts that were there at planning, as far as is remembered."""
    deferred: tuple[PlaceRun, ...] = ()
    """Places of items whose length the plan does not know (`ray_dcp.format.table_places`)."""
    table_end: FileEntry | None = None
    """The last bytes of `table`, where its rows are in groups (`ray_dcp.format.table_groups`)."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not isinstance(self.files, FilesColumns):
            object.__setattr__(self, "files", FilesColumns.of(self.files))


@dataclass(frozen=True, kw_only=True)
class AbortRecord:
    """Says that an attempt failed and must never commit."""

    attempt: str
    reason: str
    rank: int | None
    """The rank that declared it failed; None for the coordinator or a collector."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class DeleteRecord:
    """Says that nothing stands any more: a commit of nothing."""

    attempt: str
    """Its own id."""
    reason: str
    created_s: float
    """As `Manifest.created_s`."""
    replaced_metadata: str | None
    """As `Manifest.replaced_metadata`."""
    previous_slot: int
    """As `Manifest.previous_slot`."""
    decided: tuple[Verdict, ...] = ()
    """As `Manifest.decided`."""
    format_version: int = FORMAT_VERSION


Record = Manifest | AbortRecord | DeleteRecord


def encode_record(record: Record) -> bytes:
    """Returns the bytes of a record: one line of JSON, equal for equal records.

    Raises:
        InternalError: The record would not be read back: a field has a wrong type or range.

    Example:
        >>> data = encode_record(AbortRecord(attempt="a1", reason="deadline", rank=3))
        >>> decode_record(data).reason
        'deadline'
    """
    kind = next(kind for kind, (cls, _) in _KINDS.items() if isinstance(record, cls))
    try:
        body = _canonical(_fields_of(kind, record))
        found = _record_of(json.loads(body))
    except (CheckpointError, ValueError, TypeError) as exc:
        raise InternalError(f"This {kind} record would not be read back: {exc}") from exc
    if found != record:
        raise InternalError(f"This {kind} record would be read back as another one")
    return _HEAD + digest_bytes(body).hex().encode() + _MIDDLE + body + _TAIL


def decode_record(data: bytes, *, key: str | None = None) -> Record:
    """Returns the record that bytes hold.

    Args:
        data: A file under a `record_key`.
        key: That key, for messages.

    Raises:
        DamagedCheckpointError: The bytes are not what `encode_record` made.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: A newer ray_dcp wrote it.
    """
    try:
        return _decoded(bytes(data))
    except (ValueError, RecursionError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise DamagedCheckpointError(
            f"Expected a record in JSON: {exc}; load an earlier step", key=key
        ) from exc
    except CheckpointError as exc:
        exc.key = exc.key or key
        raise


# Why kept: a commit reads its record back, and the next save reads it again.
@lru_cache(maxsize=4)
def _decoded(data: bytes) -> Record:
    body = _verified_body(data)
    fields = json.loads(body)
    _check_version(fields)
    record = _record_of(fields)
    if _canonical(fields) != body:
        raise damaged("canonical JSON", "other spelling")
    return record


def record_key(slot: int) -> str:
    """Returns the storage key of a slot.

    Raises:
        InternalError: There is no such slot: they count from 1.

    Example:
        >>> record_key(7)
        'manifest-00000007.json'
    """
    if not 1 <= slot <= MAX_SLOT:
        raise InternalError(f"A slot is a number from 1 to {MAX_SLOT}, not {slot}")
    return f"manifest-{slot:08d}.json"


def slot_of(key: str) -> int | None:
    """Returns the slot that a storage key belongs to, None for other keys.

    Example:
        >>> slot_of("manifest-00000007.json"), slot_of("manifest-7.json")
        (7, None)
    """
    match = _SLOT_KEY.fullmatch(key)
    slot = int(match[1]) if match else 0
    return slot if 1 <= slot <= MAX_SLOT and record_key(slot) == key else None


def newest(records: Mapping[int, Record]) -> tuple[int, Manifest] | None:
    """Returns the slot and the manifest of the checkpoint, None when nothing stands.

    Args:
        records: By slot.
    """
    found = deciding(records)
    if found is None or isinstance(found[1], DeleteRecord):
        return None
    return found[0], found[1]


def deciding(records: Mapping[int, Record]) -> tuple[int, Manifest | DeleteRecord] | None:
    """Returns the slot and the record that decide what stands: the last commit or delete.

    The first record that names an attempt decides that attempt: a manifest after its abort, or
    after its own manifest, counts for nothing. What a commit says of earlier attempts counts as
    naming them.

    Args:
        records: By slot.

    Returns:
        None when nothing was ever committed or deleted.
    """
    decided: set[str] = set()
    found: tuple[int, Manifest | DeleteRecord] | None = None
    for slot in sorted(records):
        record = records[slot]
        if record.attempt not in decided and not isinstance(record, AbortRecord):
            found = slot, record
            decided.update(verdict.attempt for verdict in record.decided)
        decided.add(record.attempt)
    return found


def _fields_of(kind: str, record: Record) -> dict[str, Any]:
    if isinstance(record, Manifest):
        # Why apart: dataclasses would copy the columns, item by item.
        files = files_to(FilesColumns.of(record.files))
        fields = {**asdict(replace(record, files=())), "files": files}
    else:
        fields = asdict(record)
    return {"kind": kind} | {name: value for name, value in fields.items() if value is not None}


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _verified_body(data: bytes) -> bytes:
    start = len(_HEAD) + 32 + len(_MIDDLE)
    if not start + len(_TAIL) < len(data) <= MAX_RECORD_BYTES:
        raise damaged(f"{start} bytes to {MAX_RECORD_BYTES >> 20} MiB", f"{len(data)} bytes")
    body = bytes(data[start : -len(_TAIL)])
    head = _HEAD + digest_bytes(body).hex().encode() + _MIDDLE
    if data[:start] != head or data[-len(_TAIL) :] != _TAIL:
        raise damaged("bytes that match the digest they begin with", "other bytes")
    return body


def _check_version(fields: Any) -> None:
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise damaged("a format version", "none")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected a record of format version {FORMAT_VERSION}, found version {version}: "
            f"another ray_dcp wrote this checkpoint; upgrade ray_dcp to load it"
        )


def _record_of(fields: Any) -> Record:
    if not isinstance(fields, dict):
        raise damaged("an object", type(fields).__name__)
    kind = fields.get("kind")
    cls, readers = _KINDS.get(kind if isinstance(kind, str) else "", (None, {}))
    if cls is None:
        raise damaged("a manifest, an abort or a delete record", short(kind))
    told = {name: value for name, value in fields.items() if name != "kind"}
    if not {*readers} - _OPTIONAL <= {*told} <= {*readers}:
        raise damaged(f"the fields of a record of kind {kind}", short(sorted(told)))
    found = {name: readers[name](value, name) for name, value in told.items()}
    return cls(**dict.fromkeys(_OPTIONAL & {*readers}) | found)


def _verdict(value: Any, name: str) -> Verdict:
    if not isinstance(value, dict) or set(value) != {"attempt", "committed"}:
        raise damaged(f"attempt and committed in {name}", short(value))
    return Verdict(attempt(value["attempt"], name), flag(value["committed"], name))


def _verdicts(value: Any, name: str) -> tuple[Verdict, ...]:
    found = items(value, name, _verdict)
    if len({verdict.attempt for verdict in found}) != len(found):
        raise damaged(f"each attempt once in {name}", "one twice")
    return found


def _place_runs(value: Any, name: str) -> tuple[PlaceRun, ...]:
    return items(value, name, _place_run)


def _place_run(value: Any, name: str) -> PlaceRun:
    numbers = integers(value, name)
    if len(numbers) != 4 or not all(numbers[2:]):
        raise damaged(f"offset, length, length of blocks and a count in {name}", short(value))
    return PlaceRun(*numbers)


_MANIFEST_FIELDS: dict[str, Any] = {
    "attempt": attempt,
    "epoch": integer,
    "world_size": integer,
    "container": text,
    "created_s": seconds,
    "files": files_from,
    "table": entry,
    "metadata": entry,
    "replaced_metadata": hex_digits,
    "plan_digest": hex_digits,
    "num_tensors": integer,
    "num_chunks": integer,
    "payload_bytes": integer,
    "previous_slot": integer,
    "decided": _verdicts,
    "deferred": _place_runs,
    "table_end": entry,
    "format_version": integer,
}
_ABORT_FIELDS: dict[str, Any] = {
    "attempt": attempt,
    "reason": text,
    "rank": integer,
    "format_version": integer,
}
_DELETE_FIELDS: dict[str, Any] = {
    "attempt": attempt,
    "reason": text,
    "created_s": seconds,
    "replaced_metadata": hex_digits,
    "previous_slot": integer,
    "decided": _verdicts,
    "format_version": integer,
}
_OPTIONAL = frozenset({"metadata", "replaced_metadata", "table_end", "rank"})
"""Fields that a record without them leaves out."""
_KINDS: dict[str, tuple[type[Record], dict[str, Any]]] = {
    "manifest": (Manifest, _MANIFEST_FIELDS),
    "abort": (AbortRecord, _ABORT_FIELDS),
    "delete": (DeleteRecord, _DELETE_FIELDS),
}
