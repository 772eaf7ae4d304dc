"""The files of a checkpoint as a manifest names them: a few as entries, many as columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from ray_dcp.format.keys import check_file_key, check_file_keys
from ray_dcp.format.record_fields import damaged, integer, integers, items, short, text

__all__ = ["MANY_FILES", "FileEntry", "FilesColumns", "entry", "files_from", "files_to"]

MANY_FILES = 1000
"""From so many files on a manifest lists them as columns. Why not always: a list of entries is for
people to look into, and older versions read nothing else."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_DIGESTS = re.compile(r"(?:[0-9a-f]{32})*")
_DIGEST_CHARS = 32


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
    """The entries of many files, made when they are asked for.

    Example:
        >>> files = FilesColumns(("a", "b"), (1, 2), "00" * 16 + "ff" * 16)
        >>> files[1].num_bytes, files[1].digest[:4], [entry.key for entry in files]
        (2, 'ffff', ['a', 'b'])
    """

    keys: tuple[str, ...]
    num_bytes: tuple[int, ...]
    digests: str
    """32 hex digits for each file."""

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

    def usual(self) -> Sequence[FileEntry]:
        """Returns them as a manifest of so many files has them."""
        return self if len(self) >= MANY_FILES else tuple(self)


def files_to(files: Sequence[FileEntry]) -> Any:
    """Returns the files of a manifest in JSON's terms."""
    if not isinstance(files, FilesColumns):
        return [asdict(entry) for entry in files]
    return {
        "digests": files.digests,
        "keys": "\n".join(files.keys),
        "num_bytes": list(files.num_bytes),
    }


def files_from(value: Any, name: str) -> Sequence[FileEntry]:
    """Returns what `files_to` gave.

    Raises:
        DamagedCheckpointError: It is something else, or names a file twice.
        UnsafeCheckpointError: A file lies outside the checkpoint's directory.
    """
    if not isinstance(value, dict):
        found: Sequence[FileEntry] = items(value, name, entry)
        keys = [one.key for one in found]
    else:
        if set(value) != {"keys", "num_bytes", "digests"}:
            raise damaged(f"keys, num_bytes and digests as {name}", short(list(value)))
        # Why as one text: it is checked as a whole, in C.
        keys = text(value["keys"], name).split("\n")
        found = FilesColumns(
            tuple(check_file_keys(keys)),
            integers(value["num_bytes"], name),
            text(value["digests"], name),
        )
        if len(found) < MANY_FILES:
            raise damaged(f"{MANY_FILES} files or more as columns of {name}", str(len(found)))
        if len(found.num_bytes) != len(found) or len(found.digests) != _DIGEST_CHARS * len(found):
            raise damaged(f"columns of one length as {name}", "others")
        if _DIGESTS.fullmatch(found.digests) is None:
            raise damaged(f"32 hex digits as each digest of {name}", "others")
    if len(set(keys)) != len(keys):
        raise damaged(f"each key once in {name}", "one twice")
    return found


def entry(value: Any, name: str) -> FileEntry:
    """Returns one file of a record."""
    if not isinstance(value, dict) or set(value) != {"key", "num_bytes", "digest"}:
        raise damaged(f"key, num_bytes and digest as {name}", short(value))
    found = text(value["digest"], name)
    if _DIGEST.fullmatch(found) is None:
        raise damaged(f"32 hex digits as digest of {name}", short(found))
    key = check_file_key(text(value["key"], name))
    return FileEntry(key, integer(value["num_bytes"], name), found)
