"""`ArrowStorage`: a storage on a filesystem of pyarrow.fs, such as Ray's `storage_filesystem`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyarrow import fs as arrow

from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import split_url
from ray_dcp.store.storage import Storage
from ray_dcp.store.storage_adapter import FilesystemPort, StorageAdapter

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
        super().__init__(ArrowPort(filesystem), _url(filesystem, path), path.rstrip("/"))

    def __reduce__(self) -> tuple[object, ...]:
        return (ArrowStorage, (self.filesystem, self._root))

    @classmethod
    def within(cls, filesystem: Any, url: str) -> Storage:
        """Returns the storage of a path or URL in a given filesystem."""
        filesystem, path = _unwrapped(filesystem, url)
        handler = getattr(filesystem, "handler", None)
        if isinstance(handler, arrow.FSSpecHandler):
            from ray_dcp.store.fsspec_storage import FsspecStorage

            return FsspecStorage.within(handler.fs, path)
        if isinstance(filesystem, arrow.LocalFileSystem):
            return LocalStorage(path)
        return cls(filesystem, path)


def _unwrapped(filesystem: Any, url: str) -> tuple[Any, str]:
    path = split_url(url)[1]
    while isinstance(filesystem, arrow.SubTreeFileSystem):
        base = filesystem.base_path.rstrip("/")
        if path != base and not path.startswith(f"{base}/"):
            path = f"{base}/{path.strip('/')}".rstrip("/")
        filesystem = filesystem.base_fs
    return filesystem, path


def _url(filesystem: Any, path: str) -> str:
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
