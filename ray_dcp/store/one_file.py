"""One file of a directory as a storage to read: nothing else is seen, nothing can be written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from ray_dcp.errors import StorageError
from ray_dcp.store.storage import Entry, KeyMissingError, Storage, StorageTraits

__all__ = ["OneFile"]


class OneFile:
    """Implements the reading part of `Storage`.

    Args:
        inner: Of the directory.
        key: Of the file.

    Example:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> inner = MemoryStorage("doc-one-file")
        >>> inner.write("a", b"1"), inner.write("b", b"2")
        (None, None)
        >>> [entry.key for entry in OneFile(inner, "a").list()]
        ['a']
    """

    def __init__(self, inner: Storage, key: str) -> None:
        self._inner = inner
        self._key = key

    @property
    def url(self) -> str:
        """Path or URL of the file."""
        return f"{self._inner.url.rstrip('/')}/{self._key}"

    @property
    def traits(self) -> StorageTraits:
        """Those of the directory's."""
        return self._inner.traits

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        self._check(key)
        return self._inner.read(key, start, num_bytes)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        self._check(key)
        self._inner.read_into(key, start, target)

    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        if not self._key.startswith(prefix):
            return []
        return [entry for entry in self._inner.list(self._key) if entry.key == self._key]

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """Refuses."""
        self._refuse()

    def open_writer(self, key: str, *, sync: bool = True) -> NoReturn:
        """Refuses."""
        self._refuse()

    def delete(self, keys: Iterable[str]) -> None:
        """Refuses."""
        self._refuse()

    def _check(self, key: str) -> None:
        if key != self._key:
            raise KeyMissingError(f"{self.url} is one file, and has no {key!r}", key=key)

    def _refuse(self) -> NoReturn:
        raise StorageError(f"{self.url} is one file: nothing is written or deleted here")
