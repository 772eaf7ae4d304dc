"""`SmallFiles`: caches small files of a storage whose requests have a high latency.

A load reads checksums, tensors and objects of a file by several short reads. On an object store,
each of them takes as long as reading a few megabytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ray_dcp.format.manifest import FileEntry
from ray_dcp.store.storage import Storage, StorageWrapper, read_traits_of

KEPT_BYTES = 64 << 20
"""Maximum number of cached bytes of all small files together."""


class SmallFiles(StorageWrapper):
    """Reads each small file as a whole, once. Only files passed to `expect` are cached.

    Args:
        inner: Storage of the files.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> inner = MemoryStorage("doc-small-files")
        >>> inner.write("a", b"abc")
        >>> storage = SmallFiles(inner)
        >>> storage.expect([FileEntry("a", 3, "")])
        >>> storage.read("a", 1), storage.read("a", 0, 1)
        (b'bc', b'a')
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._turns: dict[str, threading.Lock] = {}
        self._files: dict[str, bytes] = {}

    def expect(self, files: Iterable[FileEntry]) -> None:
        """Registers files that will be read; small ones are cached from their first read on.

        Args:
            files: Keys and lengths of the files.
        """
        traits, left = read_traits_of(self._inner), KEPT_BYTES
        most_bytes = int(traits.request_s * traits.bytes_per_s)
        for file in () if traits.cached else files:
            if file.num_bytes <= min(most_bytes, left):
                left -= file.num_bytes
                self._turns[file.key] = threading.Lock()

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        turn = self._turns.get(key)
        if turn is None:
            return super().read(key, start, num_bytes)
        with turn:
            if key not in self._files:
                self._files[key] = super().read(key)
        data = self._files[key]
        return data[start:] if num_bytes is None else data[start : start + num_bytes]

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        data = self.read(key, start, len(target)) if key in self._turns else b""
        if len(data) == len(target) > 0:
            target[:] = data
        else:
            super().read_into(key, start, target)
