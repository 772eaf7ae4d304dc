"""`FsspecStorage` and `ArrowStorage`: storages on filesystems of fsspec and pyarrow.fs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import available_protocols
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from pyarrow import fs as arrow

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
        super().__init__(port, _fsspec_url(filesystem, root), root)
        self.filesystem = filesystem

    def __reduce__(self) -> tuple[object, ...]:
        return (FsspecStorage, (self.filesystem, self._root))

    @classmethod
    def within(cls, filesystem: AbstractFileSystem, url: str) -> Storage:
        """Returns the storage of a path or URL in a given filesystem."""
        filesystem, path = _fsspec_path(filesystem, url)
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


def _fsspec_path(filesystem: AbstractFileSystem, url: str) -> tuple[AbstractFileSystem, str]:
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


def _fsspec_url(filesystem: AbstractFileSystem, path: str) -> str:
    if _protocol(filesystem) == "memory":
        return f"memory://{path.strip('/')}"
    return str(filesystem.unstrip_protocol(path))


def _protocol(filesystem: AbstractFileSystem) -> str:
    protocol = filesystem.protocol
    return protocol if isinstance(protocol, str) else str(protocol[0])


_SCHEMES = {"gcs": "gs", "abfs": "az"}


class ArrowStorage(StorageAdapter):
    """Implements `Storage` on a filesystem of pyarrow.fs, which has no conditional creation.

    Args:
        filesystem: The filesystem, used as it is.
        path: Path of the root in it.

    Examples:
        >>> import tempfile
        >>> from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
        >>> with tempfile.TemporaryDirectory() as root:
        ...     tree = SubTreeFileSystem(root, LocalFileSystem())
        ...     type(ArrowStorage.within(tree, "step-1")).__name__
        'LocalStorage'
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        super().__init__(ArrowPort(filesystem), _arrow_url(filesystem, path), path.rstrip("/"))

    def __reduce__(self) -> tuple[object, ...]:
        return (ArrowStorage, (self.filesystem, self._root))

    @classmethod
    def within(cls, filesystem: Any, url: str) -> Storage:
        """Returns the storage of a path or URL in a given filesystem."""
        filesystem, path = _arrow_path(filesystem, url)
        handler = getattr(filesystem, "handler", None)
        if isinstance(handler, arrow.FSSpecHandler):
            return FsspecStorage.within(handler.fs, path)
        if isinstance(filesystem, arrow.LocalFileSystem):
            return LocalStorage(path)
        return cls(filesystem, path)


def _arrow_path(filesystem: Any, url: str) -> tuple[Any, str]:
    path = split_url(url)[1]
    while isinstance(filesystem, arrow.SubTreeFileSystem):
        base = filesystem.base_path.rstrip("/")
        if path != base and not path.startswith(f"{base}/"):
            path = f"{base}/{path.strip('/')}".rstrip("/")
        filesystem = filesystem.base_fs
    return filesystem, path


def _arrow_url(filesystem: Any, path: str) -> str:
    kind = filesystem.type_name
    return f"{_SCHEMES.get(kind, kind)}://{path.strip('/')}"


class ArrowPort(FilesystemPort):
    """Implements `FilesystemPort` for pyarrow.fs.

    *Why long files always go through a temporary file*: a stream that is garbage-collected without
    `close` publishes its bytes, and can't be aborted. On object stores, the store copies the file
    when it is renamed.
    """

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem
        self.name = f"arrow:{filesystem.type_name}"
        self.puts_at_once = filesystem.type_name in ("s3", "gcs", "abfs", "mock")

    def read(self, path: str, start: int, num_bytes: int | None) -> bytes:
        """See `FilesystemPort`."""
        with self._fs.open_input_file(path) as file:
            left = max(file.size() - start, 0)
            return bytes(file.read_at(left if num_bytes is None else min(left, num_bytes), start))

    def size(self, path: str) -> int:
        """See `FilesystemPort`."""
        info = self._fs.get_file_info(path)
        if info.type != arrow.FileType.File:
            raise FileNotFoundError(path)
        return int(info.size)

    def put(self, path: str, data: bytes) -> None:
        """See `FilesystemPort`."""
        with self._fs.open_output_stream(path) as stream:
            stream.write(data)

    def open(self, path: str) -> Any:
        """See `FilesystemPort`."""
        directory = path.rpartition("/")[0]
        if directory and not self.puts_at_once:
            self._fs.create_dir(directory, recursive=True)
        return self._fs.open_output_stream(path)

    def move(self, path: str, to: str) -> None:
        """See `FilesystemPort`."""
        self._fs.move(path, to)

    def find(self, path: str) -> Iterable[tuple[str, int]]:
        """See `FilesystemPort`."""
        chosen = arrow.FileSelector(path, allow_not_found=True, recursive=True)
        for info in self._fs.get_file_info(chosen):
            if info.type == arrow.FileType.File:
                yield info.path, int(info.size)

    def remove(self, path: str) -> None:
        """See `FilesystemPort`."""
        self.size(path)
        self._fs.delete_file(path)
