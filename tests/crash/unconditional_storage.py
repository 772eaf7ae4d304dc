"""`UnconditionalStorage`: a storage that looks first and then writes, as some mounts do.

For tests of what a storage without hard links and without conditional writes still promises, and
of what it can't.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ray_dcp.store.storage import (
    KeyExistsError,
    KeyMissingError,
    PartWriter,
    Storage,
    StorageTraits,
    StorageWrapper,
)


class UnconditionalStorage(StorageWrapper):
    """Implements `Storage` by another one, without its `create_if_absent`.

    Who creates a key looks whether it is free and puts the value then; of two who do so at once,
    both win and the later one's value stands.

    Args:
        inner: The storage that does the work.
        between: Called with the key before each put of a value, after whoever creates it has
            looked: what a test lets somebody else do meanwhile.

    Example:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> place = MemoryStorage("unconditional")
        >>> storage = UnconditionalStorage(place, between=lambda key: place.write(key, b"theirs"))
        >>> storage.traits.create_if_absent
        False
        >>> storage.write("slot", b"ours", create=True)
        >>> place.read("slot")
        b'ours'
    """

    def __init__(self, inner: Storage, *, between: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(inner)
        self._between = between

    @property
    def traits(self) -> StorageTraits:
        """Those of the inner storage, but it does not create if absent."""
        return replace(self._inner.traits, create_if_absent=False)

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """See `Storage.write`; `create` only looks first."""
        if create:
            self._look(key)
        self._between(key)
        self._inner.write(key, data)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `commit` only looks first."""
        return _Writer(self, key, self._inner.open_writer(key, sync=sync))

    def _look(self, key: str) -> None:
        try:
            self._inner.read(key, 0, 0)
        except KeyMissingError:
            return
        raise KeyExistsError(f"could not create {self.url}/{key}: it exists", key=key)


class _Writer:
    """The writer that `UnconditionalStorage` gives out."""

    def __init__(self, storage: UnconditionalStorage, key: str, inner: PartWriter) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner
        self._committed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `PartWriter.write`."""
        self._inner.write(data)

    def commit(self) -> None:
        """See `PartWriter.commit`; replaces what came since it looked."""
        if self._committed:
            return
        self._storage._look(self._key)
        self._storage._between(self._key)
        self._storage._inner.delete([self._key])
        self._inner.commit()
        self._committed = True

    def abort(self) -> None:
        """See `PartWriter.abort`; it never fails."""
        self._inner.abort()
