"""The records that decide a checkpoint: manifest, abort record, delete record.

A record is one JSON object in a numbered slot. A manifest commits a checkpoint, an abort record
states that an attempt must never commit, and a delete record commits that no checkpoint exists any
more. The bytes of a record are canonical and begin with a digest of the rest, so that any change is
detected. Each field is read by a function that raises an error naming the fault. The storage writes
a slot at most once; the commit protocol decides which process may write it.

A manifest holds the names of the checkpoint's files as columns, in which names that count up take
one line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from ray_dcp.core.checksums import digest_bytes
from ray_dcp.core.json_text import to_json
from ray_dcp.errors import CheckpointError, DamagedCheckpointError, InternalError
from ray_dcp.format import damaged as format_damaged
from ray_dcp.format.names import check_attempt, check_file_key, check_file_keys, is_unicode

T = TypeVar("T")
Reader = Callable[[Any, str], T]

_HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}")


def integer(value: Any, name: str) -> int:
    """Returns an integer from 0 that fits into 64 bits."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise damaged(f"a number of 0 or more as {name}", short(value))
    return value


def text(value: Any, name: str) -> str:
    """Returns a string."""
    if not isinstance(value, str):
        raise damaged(f"a text as {name}", short(value))
    if not is_unicode(value):
        raise damaged(f"a text in Unicode as {name}", ascii(value)[:200])
    return value


def flag(value: Any, name: str) -> bool:
    """Returns a boolean."""
    if not isinstance(value, bool):
        raise damaged(f"true or false as {name}", short(value))
    return value


def seconds(value: Any, name: str) -> float:
    """Returns a finite number of seconds."""
    if type(value) is not float or not math.isfinite(value):
        raise damaged(f"seconds as {name}", short(value))
    return value


def hex_digits(value: Any, name: str) -> str:
    """Returns the hex digits of 1 to 64 bytes."""
    if _HEX.fullmatch(text(value, name)) is None:
        raise damaged(f"hex digits as {name}", short(value))
    return str(value)


def attempt(value: Any, name: str) -> str:
    """Returns the id of an attempt."""
    return check_attempt(text(value, name))


def items(value: Any, name: str, read: Reader[T]) -> tuple[T, ...]:
    """Returns a list, reading each item with `read`."""
    if not isinstance(value, (list, tuple)):
        raise damaged(f"a list as {name}", short(value))
    return tuple(read(item, name) for item in value)


def integers(value: Any, name: str) -> tuple[int, ...]:
    """Returns a list of integers from 0 that fit into 64 bits."""
    usual = isinstance(value, list) and set(map(type, value)) == {int}
    # Why: checks one by one take ten times as long, and a manifest may have 10,000 numbers.
    if usual and min(value) >= 0 and max(value) < 1 << 63:
        return tuple(value)
    return items(value, name, integer)


def short(value: Any) -> str:
    """Returns a value in a form short enough for a message."""
    return repr(value)[:200]


damaged = partial(format_damaged, where=" in the record")
"""Returns the error for a record that is not as it was written."""


def canonical(fields: Mapping[str, Any]) -> bytes:
    """Returns the canonical JSON of fields."""
    return to_json(fields, sort_keys=True, separators=(",", ":")).encode()


def sealed(name: str, body: bytes) -> bytes:
    r"""Returns a JSON object of a digest and, under `name`, the JSON that the digest covers.

    Examples:
        >>> sealed("info", b"{}")
        b'{"digest":"dc7048f8f8747f561349cde127705c16","info":{}}\n'
    """
    digest = digest_bytes(body).hex().encode()
    return b'{"digest":"%s","%s":%s}\n' % (digest, name.encode(), body)


def unsealed(name: str, data: bytes) -> bytes:
    """Returns the JSON inside the result of `sealed`.

    Raises:
        DamagedCheckpointError: The bytes are not a result of `sealed`.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise damaged(f"at most {MAX_RECORD_BYTES >> 20} MiB", f"{len(data)} bytes")
    body = bytes(data[len(sealed(name, b"")) - 2 : -2])
    if not body or data != sealed(name, body):
        raise damaged("bytes that match the digest they begin with", "other bytes")
    return body


_DIGEST = re.compile(r"[0-9a-f]{32}")
_DIGESTS = re.compile(r"(?:[0-9a-f]{32})*")
_DIGEST_CHARS = 32
_NUMBER = re.compile(r"([0-9]+)")
_RANGE = re.compile(r"([^{}]*)\{([0-9]{1,18})\.\.([0-9]{1,18})\}([^{}]*)")
_NUMBER_CHARS = 15
_PATTERN_CHARS = 256
"""Longest name of which a pattern is made. Why: one pattern may expand to 10,000 names."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    key: str
    """Name of the file, relative to the checkpoint."""
    num_bytes: int
    digest: str
    """Hex xxh3-128: of a data file's block checksums in file order, or of the bytes of the chunk
    table or `.metadata`."""


@dataclass(frozen=True)
class FilesColumns(Sequence[FileEntry]):
    """The entries of the data files, stored as columns; each entry is made on access.

    Examples:
        >>> files = FilesColumns(("a", "b"), (1, 2), "00" * 16 + "ff" * 16)
        >>> files[1].num_bytes, files[1].digest[:4], [entry.key for entry in files]
        (2, 'ffff', ['a', 'b'])
    """

    keys: tuple[str, ...]
    num_bytes: tuple[int, ...]
    digests: str
    """The hex digests joined: 32 digits per file."""

    @classmethod
    def of(cls, entries: Iterable[FileEntry]) -> FilesColumns:
        """Returns entries as columns."""
        if isinstance(entries, FilesColumns):
            return entries
        found = list(entries)
        return cls(
            tuple(one.key for one in found),
            tuple(one.num_bytes for one in found),
            "".join(one.digest for one in found),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[FileEntry]:
        starts = range(0, len(self.digests), _DIGEST_CHARS)
        digests = [self.digests[start : start + _DIGEST_CHARS] for start in starts]
        return map(FileEntry, self.keys, self.num_bytes, digests)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


def files_to(files: FilesColumns) -> dict[str, Any]:
    """Returns the files of a manifest as JSON values.

    Names that count up are joined to one line: `__{0..10239}_0.a1.distcp`.

    Examples:
        >>> columns = FilesColumns(("__0_0.x", "__1_0.x", "__2_0.x"), (1, 2, 3), "0f" * 48)
        >>> files_to(columns)["keys"]
        '__{0..2}_0.x'
    """
    return {
        "digests": files.digests,
        "keys": "\n".join(_patterns(files.keys)),
        "num_bytes": list(files.num_bytes),
    }


def files_from(value: Any, name: str) -> FilesColumns:
    """Returns the files that `files_to` was called on.

    Raises:
        DamagedCheckpointError: The value is not a result of `files_to`, or names a file twice.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
    """
    if not isinstance(value, dict) or set(value) != {"keys", "num_bytes", "digests"}:
        raise damaged(f"keys, num_bytes and digests as {name}", short(value))
    lengths, digests = integers(value["num_bytes"], name), text(value["digests"], name)
    if len(digests) != _DIGEST_CHARS * len(lengths):
        raise damaged(f"columns of one length as {name}", "others")
    keys = _expanded(text(value["keys"], name), len(lengths), name)
    if _DIGESTS.fullmatch(digests) is None:
        raise damaged(f"32 hex digits as each digest of {name}", "others")
    if len(set(keys)) != len(keys):
        raise damaged(f"each key once in {name}", "one twice")
    check_file_keys(keys)
    return FilesColumns(tuple(keys), lengths, digests)


def entry(value: Any, name: str) -> FileEntry:
    """Returns one file entry of a record."""
    if not isinstance(value, dict) or set(value) != {"key", "num_bytes", "digest"}:
        raise damaged(f"key, num_bytes and digest as {name}", short(value))
    found = text(value["digest"], name)
    if _DIGEST.fullmatch(found) is None:
        raise damaged(f"32 hex digits as digest of {name}", short(found))
    key = check_file_key(text(value["key"], name))
    return FileEntry(key, integer(value["num_bytes"], name), found)


def _patterns(keys: Sequence[str]) -> Iterator[str]:
    """Yields a line for each run of names that differ in one number, which grows by one."""
    start = 0
    while start < len(keys):
        prefix, first, suffix = _counting(keys[start : start + 2])
        if not first:
            yield keys[start]
            start += 1
            continue
        low, width, stop = int(first), len(first), start + 2
        while stop < len(keys) and keys[stop] == (
            f"{prefix}{low + stop - start:0{width}d}{suffix}"
        ):
            stop += 1
        yield f"{prefix}{{{first}..{low + stop - start - 1:0{width}d}}}{suffix}"
        start = stop


def _counting(keys: Sequence[str]) -> tuple[str, str, str]:
    """Returns the text around the number by which the second name is one higher; "" if none is."""
    parts = _NUMBER.split(keys[0]) if len(keys) == 2 and len(keys[0]) <= _PATTERN_CHARS else []
    for index in range(1, len(parts), 2):
        prefix, number, suffix = "".join(parts[:index]), parts[index], "".join(parts[index + 1 :])
        following = f"{prefix}{int(number) + 1:0{len(number)}d}{suffix}"
        if len(number) <= _NUMBER_CHARS and keys[1] == following:
            return prefix, number, suffix
    return "", "", ""


def _expanded(lines: str, num_files: int, name: str) -> list[str]:
    """Expands lines to `num_files` names, and never to more, even from forged lines."""
    keys: list[str] = []
    for line in lines.split("\n") if num_files or lines else ():
        if "{" not in line:
            keys.append(line)
            continue
        found = _RANGE.fullmatch(line)
        low, high = (int(found[2]), int(found[3])) if found else (1, 0)
        fits = len(line) <= _PATTERN_CHARS + 40 and 0 <= high - low < num_files - len(keys)
        if found is None or not fits:
            raise damaged(f"a range of names of {num_files} files as {name}", short(line))
        width, prefix, suffix = len(found[2]), found[1], found[4]
        keys += [f"{prefix}{number:0{width}d}{suffix}" for number in range(low, high + 1)]
    if len(keys) != num_files:
        raise damaged(f"names of {num_files} files as {name}", str(len(keys)))
    return keys


FORMAT_VERSION = 1
"""Version of records, and of all files that a manifest names, which is written and read."""
CONTAINER = "torch_save"
MAX_RECORD_BYTES = 256 << 20
MAX_SLOT = 10**15

_SLOT_KEY = re.compile(r"manifest-([0-9]{8,16})\.json")


@dataclass(frozen=True)
class Verdict:
    """The outcome of an earlier attempt, kept once its own record is removed."""

    attempt: str
    committed: bool
    """False: the attempt was never committed, and never will be."""


class PlaceRun(NamedTuple):
    """The place of deferred items: `num_items` items, each in another file, at the same place."""

    item_offset: int
    item_bytes: int
    block_bytes: int
    """Length of the item's checksum blocks."""
    num_items: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a committed checkpoint; its presence in a slot is the commit."""

    attempt: str
    epoch: int
    """Epoch of the coordinator that wrote it."""
    world_size: int
    container: str = CONTAINER
    """Format of the data files; `"torch_save"`, that of DCP."""
    created_s: float
    """Seconds since 1970 by the writer's clock; informative, nothing is decided by it."""
    files: Sequence[FileEntry]
    """The data files, in the order of the chunk table; stored as `FilesColumns`."""
    table: FileEntry
    """The chunk table, which all saves of the plan share."""
    metadata: FileEntry | None
    """The `.metadata` that is published for stock DCP; None if it was not asked for."""
    replaced_metadata: str | None
    """Hex digest of the foreign `.metadata` that existed at planning and may be replaced."""
    plan_digest: str
    """Hex digest of the global plan."""
    num_tensors: int
    num_chunks: int
    payload_bytes: int
    """Raw bytes of all chunks."""
    previous_slot: int
    """Highest slot in use at planning; 0 if there was none. Records up to it may be removed."""
    decided: tuple[Verdict, ...] = ()
    """Outcomes of the attempts that existed at planning, as far as they are remembered."""
    deferred: tuple[PlaceRun, ...] = ()
    """Places of items whose length is unknown to the plan (`ray_dcp.format.table`)."""
    table_end: FileEntry | None = None
    """The last bytes of `table`, if its rows are in groups (`ray_dcp.format.table`)."""
    about: Mapping[str, Any] | None = field(default=None, hash=False)
    """How the checkpoint was made, by topic; None if nothing is recorded. Informative: readers
    ignore topics that they do not know, so that new ones need no new format version."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not isinstance(self.files, FilesColumns):
            object.__setattr__(self, "files", FilesColumns.of(self.files))


def sources_in(manifest: Manifest) -> tuple[dict[str, Any], ...]:
    """Returns the checkpoints that one was averaged of, as `ray_dcp.average` recorded them.

    Returns:
        Checkpoint, attempt (None if stock DCP wrote it) and weight of each. Empty for a checkpoint
        that is no average; what a newer ray_dcp records in another form is left out.
    """
    about = (manifest.about or {}).get("average")
    told = about.get("sources") if isinstance(about, dict) else None
    wanted: dict[str, Any] = {"checkpoint": str, "attempt": (str, type(None)), "weight": float}
    return tuple(
        {name: one[name] for name in wanted}
        for one in (told if isinstance(told, list) else ())
        if isinstance(one, dict) and all(isinstance(one.get(n), kind) for n, kind in wanted.items())
    )


TIED = "tied"
"""The topic of `Manifest.about` with groups of names whose tensors were one memory."""


def tied_in(manifest: Manifest | None) -> dict[str, str]:
    """Returns, for each name whose tensor was of one memory with others, the first of their names.

    What a newer ray_dcp records in another form is left out.

    Args:
        manifest: The manifest; None if there is none.
    """
    groups = ((manifest and manifest.about) or {}).get(TIED)
    return {
        name: group[0]
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, list) and all(isinstance(name, str) for name in group)
        for name in group
    }


def repeated(names: Iterable[str], tied: Mapping[str, str]) -> dict[str, str]:
    """Returns the names whose tensors repeat that of an earlier name, each with the earlier one.

    Args:
        names: The names that are chosen, in order.
        tied: The result of `tied_in`.

    Examples:
        >>> repeated(["b", "c", "d"], {"a": "a", "b": "a", "d": "a"})
        {'d': 'b'}
    """
    first: dict[str, str] = {}
    found = {name: first.setdefault(tied[name], name) for name in names if name in tied}
    return {name: before for name, before in found.items() if name != before}


@dataclass(frozen=True, kw_only=True)
class AbortRecord:
    """States that an attempt failed and must never commit."""

    attempt: str
    reason: str
    rank: int | None
    """The rank that declared the failure; None for the coordinator or garbage collection."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class DeleteRecord:
    """States that no checkpoint exists any more: the commit of a deletion."""

    attempt: str
    """Id of the deletion itself."""
    reason: str
    created_s: float
    """See `Manifest.created_s`."""
    replaced_metadata: str | None
    """See `Manifest.replaced_metadata`."""
    previous_slot: int
    """See `Manifest.previous_slot`."""
    decided: tuple[Verdict, ...] = ()
    """See `Manifest.decided`."""
    format_version: int = FORMAT_VERSION


Record = Manifest | AbortRecord | DeleteRecord


def encode_record(record: Record) -> bytes:
    """Returns the bytes of a record: one line of JSON, equal for equal records.

    Raises:
        InternalError: The record could not be read back: a field has a wrong type or range.

    Examples:
        >>> data = encode_record(AbortRecord(attempt="a1", reason="deadline", rank=3))
        >>> decode_record(data).reason
        'deadline'
    """
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(record, cls))
    try:
        body = canonical(_fields_of(kind, record))
        found = _record_of(json.loads(body))
    except (CheckpointError, ValueError, TypeError) as exc:
        raise InternalError(f"This {kind} record would not be read back: {exc}") from exc
    if found != record:
        raise InternalError(f"This {kind} record would be read back as another one")
    return sealed("record", body)


def decode_record(data: bytes, *, key: str | None = None) -> Record:
    """Returns the record that `encode_record` encoded.

    Args:
        data: Content of the file under a `record_key`.
        key: That key, for messages.

    Raises:
        DamagedCheckpointError: The bytes are not a result of `encode_record`.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
        CheckpointError: A newer ray_dcp wrote the record.
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


# Why cached: a commit reads its record back, and the next save reads it again.
@lru_cache(maxsize=4)
def _decoded(data: bytes) -> Record:
    body = unsealed("record", data)
    fields = json.loads(body)
    _check_version(fields)
    record = _record_of(fields)
    if canonical(fields) != body:
        raise damaged("canonical JSON", "other spelling")
    return record


def record_key(slot: int) -> str:
    """Returns the storage key of a slot.

    Raises:
        InternalError: The slot is invalid: slots count from 1.

    Examples:
        >>> record_key(7)
        'manifest-00000007.json'
    """
    if not 1 <= slot <= MAX_SLOT:
        raise InternalError(f"A slot is a number from 1 to {MAX_SLOT}, not {slot}")
    return f"manifest-{slot:08d}.json"


def slot_of(key: str) -> int | None:
    """Returns the slot of a record's storage key; None for other keys.

    Examples:
        >>> slot_of("manifest-00000007.json"), slot_of("manifest-7.json")
        (7, None)
    """
    match = _SLOT_KEY.fullmatch(key)
    slot = int(match[1]) if match else 0
    return slot if 1 <= slot <= MAX_SLOT and record_key(slot) == key else None


def deciding(records: Mapping[int, Record]) -> tuple[int, Manifest | DeleteRecord] | None:
    """Returns the slot and record that decide the committed state: the last commit or delete.

    The first record that names an attempt decides that attempt: a manifest is ignored after an
    abort record or another manifest of the same attempt. The outcomes of earlier attempts in a
    commit (`decided`) count as records that name them:

        slot 1   abort a       a can't commit any more
        slot 2   manifest b    b is committed
        slot 3   manifest a    ignored
        result   (2, manifest b)

    Args:
        records: Records by slot.

    Returns:
        None if nothing was ever committed or deleted.
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
        # Why separate: dataclasses would copy the columns, item by item.
        files = files_to(FilesColumns.of(record.files))
        told = {**asdict(replace(record, files=())), "files": files}
    else:
        told = asdict(record)
    return {"kind": kind} | {name: value for name, value in told.items() if value is not None}


def _check_version(fields: Any) -> None:
    version = fields.get("format_version") if isinstance(fields, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise damaged("a format version", "none")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Expected a record of format version {FORMAT_VERSION}, found version {version}: "
            f"another ray_dcp wrote this checkpoint; upgrade ray_dcp to load it"
        )


def _record_of(told: Any) -> Record:
    if not isinstance(told, dict):
        raise damaged("an object", type(told).__name__)
    kind = told.get("kind")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise damaged("a manifest, an abort or a delete record", short(kind))
    told = {name: value for name, value in told.items() if name != "kind"}
    if not _FIELDS[cls] - _OPTIONAL <= {*told} <= _FIELDS[cls]:
        raise damaged(f"the fields of a record of kind {kind}", short(sorted(told)))
    found = {name: _READERS[name](value, name) for name, value in told.items()}
    return cls(**dict.fromkeys(_OPTIONAL & _FIELDS[cls]) | found)


def _decode_verdict(value: Any, name: str) -> Verdict:
    if not isinstance(value, dict) or set(value) != {"attempt", "committed"}:
        raise damaged(f"attempt and committed in {name}", short(value))
    return Verdict(attempt(value["attempt"], name), flag(value["committed"], name))


def _decode_verdicts(value: Any, name: str) -> tuple[Verdict, ...]:
    found = items(value, name, _decode_verdict)
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


def _container(value: Any, name: str) -> str:
    if text(value, name) != CONTAINER:
        raise CheckpointError(
            f"Expected data files in the format {CONTAINER!r}, found {short(value)}: another "
            f"ray_dcp wrote this checkpoint; upgrade ray_dcp to load it"
        )
    return CONTAINER


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise damaged(f"a mapping as {name}", short(value))
    return value


_READERS: dict[str, Reader[Any]] = {
    "attempt": attempt,
    "epoch": integer,
    "world_size": integer,
    "container": _container,
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
    "decided": _decode_verdicts,
    "deferred": _place_runs,
    "table_end": entry,
    "about": _mapping,
    "format_version": integer,
    "reason": text,
    "rank": integer,
}
_OPTIONAL = frozenset({"metadata", "replaced_metadata", "table_end", "about", "rank"})
"""Fields that are left out of a record in which they are None."""
_KINDS: dict[str, type[Record]] = {
    "manifest": Manifest,
    "abort": AbortRecord,
    "delete": DeleteRecord,
}
_FIELDS = {cls: frozenset(field.name for field in fields(cls)) for cls in _KINDS.values()}
