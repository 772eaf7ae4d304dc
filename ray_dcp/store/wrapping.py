"""`StorageWrapper`: a storage that hands everything on to another one, to be changed in part."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any

from ray_dcp.store.storage import Entry, PartWriter, Storage, StorageTraits

__all__ = ["StorageWrapper"]


class StorageWrapper:
    """Implements `Storage` by another one; subclasses do some of it their own way.

    Args:
        inner: The storage that does the work.

    Example:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> class Shouting(StorageWrapper):
        ...     def read(self, key, start=0, num_bytes=None):
        ...         return super().read(key, start, num_bytes).upper()
        >>> storage = Shouting(MemoryStorage("wrapping"))
        >>> storage.write("a", b"data")
        >>> storage.read("a")
        b'DATA'
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        # Why: a storage may offer more than the protocol asks for. And the check: a copy is asked
        # for names before it has any.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def url(self) -> str:
        """See `Storage.url`."""
        return self._inner.url

    @property
    def traits(self) -> StorageTraits:
        """See `Storage.traits`."""
        return self._inner.traits

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        return self._inner.read(key, start, num_bytes)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        self._inner.read_into(key, start, target)

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """See `Storage.write`."""
        self._inner.write(key, data, create=create)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`."""
        return self._inner.open_writer(key, sync=sync)

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        """See `Storage.list`."""
        return self._inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        self._inner.delete(keys)
