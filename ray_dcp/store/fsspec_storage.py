"""`FsspecStorage`: a storage on a filesystem of fsspec, for protocols without a native client."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import available_protocols
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ray_dcp.errors import InvalidRequestError
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import split_url
from ray_dcp.store.storage import Storage
from ray_dcp.store.storage_adapter import (
    FilesystemPort,
    HiddenStream,
    StorageAdapter,
    redacted,
    temporary_beside,
)


class FsspecStorage(StorageAdapter):
    """Implements `Storage` on a filesystem of fsspec.

    Args:
        filesystem: The filesystem, used as it is; its listing cache is bypassed.
        path: Path of the root in it.

    Examples:
        >>> import fsspec
        >>> storage = FsspecStorage(fsspec.filesystem("memory"), "/doc-fsspec")
        >>> storage.write("a", b"1")
        >>> storage.read("a"), storage.url
        (b'1', 'memory://doc-fsspec')
        >>> storage.delete(["a"])
    """

    def __init__(self, filesystem: AbstractFileSystem, path: str) -> None:
        port = FsspecPort(filesystem)
        root = str(filesystem._strip_protocol(path)).rstrip("/")
        super().__init__(port, _url(filesystem, root), root)
        self.filesystem = filesystem

    def __reduce__(self) -> tuple[object, ...]:
        return (FsspecStorage, (self.filesystem, self._root))

    @classmethod
    def within(cls, filesystem: AbstractFileSystem, url: str) -> Storage:
        """Returns the storage of a path or URL in a given filesystem."""
        filesystem, path = _unwrapped(filesystem, url)
        if isinstance(filesystem, LocalFileSystem):
            return LocalStorage(path)
        return cls(filesystem, path)


def filesystem_of(url: str, options: dict[str, object]) -> tuple[AbstractFileSystem, str]:
    """Returns the filesystem that fsspec creates for a URL or local path, and the path in it.

    Raises:
        InvalidRequestError: No package serves the protocol, or an option is unknown.
    """
    scheme = split_url(url)[0]
    try:
        filesystem, path = url_to_fs(url, **options)
        return filesystem, str(path)
    except ImportError as exc:
        raise InvalidRequestError(
            f"nothing here can reach {scheme}://: {exc}; install that package",
            key="checkpoint_id",
        ) from exc
    except Exception as exc:  # noqa: BLE001 - each filesystem has errors of its own
        told = redacted(f"{type(exc).__name__}: {exc}", options)
        known = (
            ""
            if scheme in available_protocols()
            else (
                "; expected a path, s3://, gs://, az://, memory://, or a protocol that fsspec "
                "knows: install the package that registers it"
            )
        )
        raise InvalidRequestError(
            f"Cannot detect which StorageReader or StorageWriter to use: nothing here can reach "
            f"{url!r} ({told}){known}",
            key="checkpoint_id",
        ) from None


def _unwrapped(filesystem: AbstractFileSystem, url: str) -> tuple[AbstractFileSystem, str]:
    path = str(filesystem._strip_protocol(url))
    while isinstance(filesystem, DirFileSystem):
        head = f"{filesystem.path}/"
        # Why: a `Target` made from such a filesystem contains the whole path already.
        path = path if path.startswith(head) or path == filesystem.path else filesystem._join(path)
        filesystem = filesystem.fs
    return filesystem, path


class FsspecPort(FilesystemPort):
    """Implements `FilesystemPort` for fsspec.

    *Why two ways to write a file*: an object store has an atomic put, but no cheap rename; a true
    filesystem has an atomic rename, but no atomic put. The two are distinguished by whether the
    class overrides `mv`.
    """

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._fs = filesystem
        protocol = _protocol(filesystem)
        self.options = dict(filesystem.storage_options or {})
        self.name = f"fsspec:{protocol}:{filesystem._fs_token}"
        self.shared = protocol != "memory"
        self.puts_at_once = type(filesystem).mv is AbstractFileSystem.mv
        # Why not for true filesystems: they create an empty file first and then fill it.
        self.can_create = self.puts_at_once

    def read(self, path: str, start: int, num_bytes: int | None) -> bytes:
        """See `FilesystemPort`."""
        stop = None if num_bytes is None else start + num_bytes
        return bytes(self._fs.cat_file(path, start=start or None, end=stop))

    def size(self, path: str) -> int:
        """See `FilesystemPort`."""
        self._fs.invalidate_cache()
        found = self._fs.info(path)
        if found["type"] != "file":
            raise FileNotFoundError(path)
        return int(found["size"])

    def put(self, path: str, data: bytes) -> None:
        """See `FilesystemPort`."""
        self._fs.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> None:
        """See `FilesystemPort`."""
        self._fs.pipe_file(path, data, mode="create")

    def open(self, path: str) -> Any:
        """See `FilesystemPort`."""
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return self._fs.open(path, "wb")

    def move(self, path: str, to: str) -> None:
        """See `FilesystemPort`."""
        self._fs.mv(path, to)

    def open_hidden(self, path: str) -> HiddenStream:
        """See `FilesystemPort`."""
        if self.puts_at_once and self._is_uncommitted(temporary_beside(path)):
            return _UncommittedFile(self._fs.open(path, "wb", autocommit=False))
        return super().open_hidden(path)

    def _is_uncommitted(self, path: str) -> bool:
        """Returns whether a file opened with `autocommit=False` is invisible until `commit`.

        *Why by class*: some filesystems accept the argument and ignore it.
        """
        file = self._fs.open(path, "wb", autocommit=False)
        kind = type(file)
        if not issubclass(kind, AbstractBufferedFile):
            file.close()
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)
            return False
        file.discard()
        return (
            kind.commit is not AbstractBufferedFile.commit
            and kind.discard is not AbstractBufferedFile.discard
        )

    def find(self, path: str) -> Iterable[tuple[str, int]]:
        """See `FilesystemPort`."""
        self._fs.invalidate_cache()
        for name, info in self._fs.find(path, detail=True).items():
            if info["type"] == "file":
                yield str(name), int(info["size"] or 0)

    def remove(self, path: str) -> None:
        """See `FilesystemPort`."""
        self.size(path)  # raises for a missing file and for a folder
        self._fs.rm_file(path)


class _UncommittedFile:
    """A buffered upload that becomes visible by its own `commit`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> None:
        self._file.write(data)

    def publish(self) -> None:
        self._file.close()
        self._file.commit()

    def discard(self) -> None:
        self._file.discard()


def _url(filesystem: AbstractFileSystem, path: str) -> str:
    if _protocol(filesystem) == "memory":
        return f"memory://{path.strip('/')}"
    return str(filesystem.unstrip_protocol(path))


def _protocol(filesystem: AbstractFileSystem) -> str:
    protocol = filesystem.protocol
    return protocol if isinstance(protocol, str) else str(protocol[0])
