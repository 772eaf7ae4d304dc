"""`MemoryStorage`: a storage in the memory of this process, for tests, examples and trials.

Storages of one name share their content for the lifetime of the process; nothing is durable.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray_dcp.core.processes import ProcessLock
from ray_dcp.store.storage import (
    MEMORY,
    BytesLike,
    Entry,
    KeyExistsError,
    KeyMissingError,
    OnceWriter,
    PartWriter,
    PublishedFile,
    Reused,
    StorageTraits,
    as_bytes_view,
    check_key,
    check_range,
    too_short,
)

# Why one dict of full paths: `memory://runs` then lists the keys of `memory://runs/step-10`.
_LOCK = ProcessLock()
_CONTENT: dict[str, bytes] = {}


class MemoryStorage:
    """Implements `Storage` on one dict of the process, keyed by full path.

    Args:
        name: `/`-separated path of the root; empty for the root of all names.

    Raises:
        InvalidRequestError: The name is not a legal key.

    Examples:
        >>> MemoryStorage("doc").write("a", b"1")
        >>> MemoryStorage("doc").read("a")
        b'1'
        >>> MemoryStorage("doc").delete(["a"])
    """

    def __init__(self, name: str) -> None:
        name = name.strip("/")
        self._root = f"{check_key(name)}/" if name else ""

    @property
    def url(self) -> str:
        """`memory://` followed by the name."""
        return f"memory://{self._root.rstrip('/')}"

    read_traits = MEMORY

    @property
    def traits(self) -> StorageTraits:
        """Conditional creation works; neither durable nor shared."""
        return StorageTraits(create_if_absent=True, durable=False, shared=False)

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        check_range(key, start, num_bytes)
        data = self._value(key)
        return data[start:] if num_bytes is None else data[start : start + num_bytes]

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        view = as_bytes_view(target)
        check_range(key, start, len(view))
        data = self._value(key)
        if start + len(view) > len(data):
            raise too_short(f"{self.url}/{key}", key, start, len(view), len(data))
        view[:] = memoryview(data)[start : start + len(view)]

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """See `Storage.write`."""
        self._put(key, data if type(data) is bytes else bytes(as_bytes_view(data)), create)

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `sync` changes nothing."""
        return _MemoryWriter(self, check_key(key))

    def reuse(self, key: str, source: PublishedFile, end: bytes, *, sync: bool) -> Reused | None:
        """See `reuse_file`: both keys have the same bytes object."""
        name = f"{source.url}/{source.key}".removeprefix("memory://")
        with _LOCK:
            data = _CONTENT.get(name, b"")
        if len(data) != source.num_bytes or not data.endswith(end):
            return None
        self._put(check_key(key), data, create=True)
        return "linked"

    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        full = self._root + prefix
        with _LOCK:
            found = [(name, len(data)) for name, data in _CONTENT.items() if name.startswith(full)]
        return [Entry(name[len(self._root) :], size) for name, size in sorted(found)]

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        names = [self._root + check_key(key, unpublished=True) for key in keys]
        with _LOCK:
            for name in names:
                _CONTENT.pop(name, None)

    def _value(self, key: str) -> bytes:
        name = self._root + check_key(key)
        with _LOCK:
            data = _CONTENT.get(name)
        if data is None:
            raise KeyMissingError(f"could not read {self.url}/{key}: there is no such key", key=key)
        return data

    def _put(self, key: str, data: bytes, create: bool) -> None:
        name = self._root + check_key(key)
        with _LOCK:
            if create and name in _CONTENT:
                raise KeyExistsError(f"could not create {self.url}/{key}: it exists", key=key)
            _CONTENT[name] = data


class _MemoryWriter(OnceWriter):
    """Buffers the bytes and stores them at commit."""

    def __init__(self, storage: MemoryStorage, key: str) -> None:
        self._storage = storage
        self._data = bytearray()
        super().__init__(f"{storage.url}/{key}", key)

    def _append(self, data: BytesLike) -> None:
        self._data += as_bytes_view(data)

    def _publish(self) -> None:
        self._storage._put(self._key, bytes(self._data), create=True)
        self._data = bytearray()

    def _discard(self) -> None:
        self._data = bytearray()
