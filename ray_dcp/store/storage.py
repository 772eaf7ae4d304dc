"""What ray_dcp needs of a storage: the `Storage` and `PartWriter` protocols and their errors.

A storage is bound to one checkpoint directory. Keys are relative, `/`-separated, without `..`.
Every method may be called from several threads, and everything may happen twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ray_dcp.errors import StorageError

__all__ = [
    "LOCAL_DISK",
    "MEMORY",
    "NETWORK_DISK",
    "OBJECT_STORE",
    "Entry",
    "KeyExistsError",
    "KeyMissingError",
    "PartWriter",
    "ReadTraits",
    "Storage",
    "StorageTraits",
    "read_traits_of",
]


class KeyMissingError(StorageError, FileNotFoundError):
    """There is nothing under this key."""


class KeyExistsError(StorageError, FileExistsError):
    """Something is under this key already, and it was to be created."""


@dataclass(frozen=True)
class Entry:
    """One stored key."""

    key: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StorageTraits:
    """What a storage can do; asked instead of its class."""

    create_if_absent: bool
    """`write(create=True)` and `PartWriter.commit` have exactly one winner, whoever asks from
    wherever. False where they look first and then write: then a save's coordinator alone decides
    (see `ray_dcp.runtime.outcome`)."""
    durable: bool
    """What was written survives a power cut."""
    shared: bool
    """Other processes see it (False for `memory://`)."""
    exclusive_parts: bool = True
    """`PartWriter.commit` has exactly one winner, however long the file. False where only files of
    one request have: of two that commit a longer one in the same moment the later stands, and the
    other is not told. Keys of data files carry their attempt, whose writers write equal bytes."""


@dataclass(frozen=True, kw_only=True)
class ReadTraits:
    """What reading from a storage is like: guesses by its kind, nothing is measured.

    Apart from `StorageTraits`, since these may have to be tried, which a reader must not.

    Example:
        >>> ReadTraits().cached
        True
    """

    request_s: float = 20e-6
    """What a read costs before its first byte, in seconds: rather than begin another, a reader
    takes in what lies between."""
    bytes_per_s: float = 3e9
    """What one reading thread gets."""
    cached: bool = True
    """The processes of one machine read through one cache: what one of them has read costs the
    others no more than a copy."""
    shared: bool = True
    """Other processes see it."""
    durable: bool = False
    """What can be read survives a power cut. False where a writer that died may have named a file
    without making that durable."""


LOCAL_DISK = ReadTraits()
MEMORY = ReadTraits(request_s=1e-6, bytes_per_s=5e9, shared=False, durable=True)
NETWORK_DISK = ReadTraits(request_s=1e-3, bytes_per_s=250e6)
"""NFS, Lustre and the like: through the page cache of each node."""
OBJECT_STORE = ReadTraits(request_s=30e-3, bytes_per_s=100e6, cached=False, durable=True)


def read_traits_of(storage: object) -> ReadTraits:
    """Returns the `read_traits` of a storage; those of a local disk where it has none."""
    found = getattr(storage, "read_traits", None)
    return found if isinstance(found, ReadTraits) else LOCAL_DISK


@runtime_checkable
class PartWriter(Protocol):
    """Writes one file front to back; nothing is visible before `commit`."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends bytes. They are consumed when the call returns.

        Raises:
            StorageError: The storage refused; the writer is only good for `abort` then.
        """
        ...

    def commit(self) -> None:
        """Makes the bytes durable and visible under the key, if that is still free.

        Raises:
            KeyExistsError: Somebody else published this key; it is durable.
            StorageError: Anything else; the bytes are not visible, or their fate is unknown.
        """
        ...

    def abort(self) -> None:
        """Drops what was written. Never raises; does nothing after `commit`."""
        ...


@runtime_checkable
class Storage(Protocol):
    """Keys to bytes under one root."""

    @property
    def url(self) -> str:
        """Absolute path or URL of the root, for messages and for `open_storage`."""
        ...

    @property
    def traits(self) -> StorageTraits:
        """What this storage can do; for those who are about to write, as it may have to be tried.

        Raises:
            StorageError: It could not be tried.
        """
        ...

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Returns the bytes `[start, start + num_bytes)` of a key, to its end by default.

        Fewer when the key is shorter.

        Raises:
            KeyMissingError: There is no such key.
            StorageError: Anything else.
        """
        ...

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start`.

        Raises:
            KeyMissingError: There is no such key.
            StorageError: The key is too short (`target` holds rubbish then), or anything else.
        """
        ...

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """Puts a small value under a key: atomically, and durable when it returns.

        Args:
            key: Where.
            data: What.
            create: Only if the key is free.

        Raises:
            KeyExistsError: `create` and the key is taken; durably so, whoever took it.
            StorageError: Anything else; whether it happened is unknown.
        """
        ...

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """Returns a writer for a large file.

        Args:
            key: Where.
            sync: Durable when committed, past the page cache if the storage can.
        """
        ...

    def list(self, prefix: str = "") -> list[Entry]:
        """Returns the keys that start with `prefix`, sorted, at any depth.

        An empty list when the root does not exist. Files that a writer has not yet published
        are not listed.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Removes keys; those that are gone already are fine.

        Raises:
            StorageError: One could not be removed; the others were tried.
        """
        ...
