"""The files of a checkpoint as a manifest names them: columns, names that count as one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ray_dcp.format.keys import check_file_key, check_file_keys
from ray_dcp.format.record_fields import damaged, integer, integers, short, text

__all__ = ["FileEntry", "FilesColumns", "entry", "files_from", "files_to"]

_DIGEST = re.compile(r"[0-9a-f]{32}")
_DIGESTS = re.compile(r"(?:[0-9a-f]{32})*")
_DIGEST_CHARS = 32
_NUMBER = re.compile(r"([0-9]+)")
_RANGE = re.compile(r"([^{}]*)\{([0-9]{1,18})\.\.([0-9]{1,18})\}([^{}]*)")
_NUMBER_CHARS = 15
_PATTERN_CHARS = 256
"""Longest name of which a pattern is made. Why: it may be made 10,000 names again."""


@dataclass(frozen=True)
class FileEntry:
    """One file that a checkpoint consists of."""

    key: str
    """Relative to the checkpoint."""
    num_bytes: int
    digest: str
    """Hex xxh3-128: for data files over their block checksums in file order, for the chunk table
    and `.metadata` over their bytes."""


@dataclass(frozen=True)
class FilesColumns(Sequence[FileEntry]):
    """The entries of the data files, made when they are asked for.

    Example:
        >>> files = FilesColumns(("a", "b"), (1, 2), "00" * 16 + "ff" * 16)
        >>> files[1].num_bytes, files[1].digest[:4], [entry.key for entry in files]
        (2, 'ffff', ['a', 'b'])
    """

    keys: tuple[str, ...]
    num_bytes: tuple[int, ...]
    digests: str
    """32 hex digits for each file."""

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

    @overload
    def __getitem__(self, index: int) -> FileEntry: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[FileEntry, ...]: ...

    def __getitem__(self, index: int | slice) -> FileEntry | tuple[FileEntry, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        start = _DIGEST_CHARS * range(len(self))[index]
        digest = self.digests[start : start + _DIGEST_CHARS]
        return FileEntry(self.keys[index], self.num_bytes[index], digest)


def files_to(files: FilesColumns) -> dict[str, Any]:
    """Returns the files of a manifest in JSON's terms.

    Names that count upwards are one line: `__{0..10239}_0.a1.distcp`.

    Example:
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
    """Returns what `files_to` gave.

    Raises:
        DamagedCheckpointError: It is something else, or names a file twice.
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
    return FilesColumns(tuple(check_file_keys(keys)), lengths, digests)


def entry(value: Any, name: str) -> FileEntry:
    """Returns one file of a record."""
    if not isinstance(value, dict) or set(value) != {"key", "num_bytes", "digest"}:
        raise damaged(f"key, num_bytes and digest as {name}", short(value))
    found = text(value["digest"], name)
    if _DIGEST.fullmatch(found) is None:
        raise damaged(f"32 hex digits as digest of {name}", short(found))
    key = check_file_key(text(value["key"], name))
    return FileEntry(key, integer(value["num_bytes"], name), found)


def _patterns(keys: Sequence[str]) -> Iterator[str]:
    """Yields a line for each run of names of which one number grows by one."""
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
    """Returns what is around the one number in which the second name is one more; "": none is."""
    parts = _NUMBER.split(keys[0]) if len(keys) == 2 and len(keys[0]) <= _PATTERN_CHARS else []
    for index in range(1, len(parts), 2):
        prefix, number, suffix = "".join(parts[:index]), parts[index], "".join(parts[index + 1 :])
        following = f"{prefix}{int(number) + 1:0{len(number)}d}{suffix}"
        if len(number) <= _NUMBER_CHARS and keys[1] == following:
            return prefix, number, suffix
    return "", "", ""


def _expanded(lines: str, num_files: int, name: str) -> list[str]:
    """Returns the names of so many files; nothing longer is made of a lie."""
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
