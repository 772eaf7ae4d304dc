"""`FsspecStorage`: a storage on a filesystem of fsspec or pyarrow.fs.

A filesystem of pyarrow.fs is used through fsspec's wrapper.

*Two ways to write a file.* An object store has an atomic put, but no cheap rename; a true
filesystem has an atomic rename, but no atomic put. The two are distinguished by whether the class
of the filesystem overrides `mv`.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import available_protocols, get_filesystem_class
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from pyarrow import fs as arrow

from ray_dcp.core import bounds
from ray_dcp.core.processes import ProcessLock
from ray_dcp.errors import InvalidRequestError, StorageError, StorageRefusedError
from ray_dcp.store.conditional_create import creates_if_absent_in
from ray_dcp.store.environment import is_of_storages
from ray_dcp.store.local import LocalStorage
from ray_dcp.store.location import split_url, url_below
from ray_dcp.store.redaction import redacted
from ray_dcp.store.retries import Retrying
from ray_dcp.store.storage import (
    MEMORY,
    OBJECT_STORE,
    TEMP_PREFIX,
    BytesLike,
    Entry,
    KeyExistsError,
    KeyMissingError,
    OnceWriter,
    PartWriter,
    ReadTraits,
    Storage,
    StorageTraits,
    as_bytes_view,
    check_key,
    check_range,
    is_temporary,
    os_failure,
    too_short,
)

T = TypeVar("T")

_HEAD_BYTES = 8 << 20
"""Files up to this length are written by a single put, and conditionally where that is possible."""
_SCHEMES = {"gcs": "gs", "abfs": "az"}
"""Names that pyarrow.fs has for a kind of store, and the schemes of its URLs."""


_IN_MEMORY = ProcessLock()
"""Lets one thread at a time create a file in the memory of this process."""


class FsspecStorage:
    """Implements `Storage` on a filesystem of fsspec or pyarrow.fs. Thread-safe if that one is.

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

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        is_arrow = not isinstance(filesystem, AbstractFileSystem)
        self._fs = fs = _ArrowFilesystem(filesystem) if is_arrow else filesystem
        protocol = fs.protocol if isinstance(fs.protocol, str) else str(fs.protocol[0])
        self._root = str(fs._strip_protocol(path)).rstrip("/")
        if is_arrow:
            self._url = f"{_SCHEMES.get(protocol, protocol)}://{self._root.strip('/')}"
        elif protocol == "memory":
            self._url = f"memory://{self._root.strip('/')}"
        else:
            url = str(fs.unstrip_protocol(self._root))
            self._url = url if url.endswith("://") else url.rstrip("/")
        self._name = f"fsspec:{protocol}:{fs._fs_token}"
        self._options = dict(fs.storage_options or {}) if not is_arrow else {}
        self._is_shared = protocol != "memory"
        moves = type(fs).mv is not AbstractFileSystem.mv
        self._puts_at_once = fs.puts_at_once if is_arrow else not moves
        # Why not for true filesystems: they create an empty file first and then fill it.
        self._may_create = self._puts_at_once and not is_arrow
        self._retrying = Retrying(bounds.RETRY_S)

    def __reduce__(self) -> tuple[object, ...]:
        return (FsspecStorage, (self.filesystem, self._root))

    def __repr__(self) -> str:
        return f"FsspecStorage({self.url!r})"

    @classmethod
    def within(cls, filesystem: Any, url: str) -> Storage:
        """Returns the storage of a path or URL in a given filesystem."""
        if not isinstance(filesystem, AbstractFileSystem):
            filesystem, url = _path_in_arrow(filesystem, url)
            handler = getattr(filesystem, "handler", None)
            if not isinstance(handler, arrow.FSSpecHandler):
                is_local = isinstance(filesystem, arrow.LocalFileSystem)
                return LocalStorage(url) if is_local else cls(filesystem, url)
            filesystem = handler.fs
        filesystem, path = _path_in_fsspec(filesystem, url)
        is_local = isinstance(filesystem, LocalFileSystem)
        return LocalStorage(path) if is_local else cls(filesystem, path)

    @property
    def url(self) -> str:
        """Protocol and path."""
        return self._url

    @property
    def read_traits(self) -> ReadTraits:
        """Traits of an object store, or of memory if no other process sees the files."""
        return OBJECT_STORE if self._is_shared else MEMORY

    @property
    def traits(self) -> StorageTraits:
        """Traits of the filesystem; `create_if_absent` is found by a trial, once per filesystem.

        Raises:
            StorageError: The trial failed.
        """
        can_create = self._may_create and creates_if_absent_in(
            self._name, self._create, self._read, self.delete
        )
        return StorageTraits(
            create_if_absent=can_create, durable=self._is_shared, shared=self._is_shared
        )

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        check_key(key)
        check_range(key, start, num_bytes)
        if num_bytes == 0:
            self._size(key)
            return b""
        try:
            return self._read(key, start, num_bytes)
        except KeyMissingError:
            raise
        except StorageError:
            # Why checked: some filesystems raise for a range behind the end, or for folders.
            if self._size(key) <= start:
                return b""
            raise

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        view = as_bytes_view(target)
        data = self.read(key, start, len(view))
        if len(data) < len(view) or (not len(view) and start > self._size(key)):
            raise too_short(self._url_of(key), key, start, len(view), start + len(data))
        view[:] = data

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """See `Storage.write`; without conditional creation, `create` checks first."""
        path = self._path(check_key(key))
        value = bytes(as_bytes_view(data))
        if create and self.traits.create_if_absent:
            self._create(key, value)
            return
        if create:
            self._check_free(key)
        self._call("create" if create else "write", key, lambda: self._put_file(path, value))

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `sync` changes nothing."""
        return _FileWriter(self, check_key(key))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        failures: builtins.list[StorageError] = []
        for key in keys:
            path = self._path(check_key(key, unpublished=True))
            try:
                self._call("delete", key, partial(self._remove, path))
            except KeyMissingError:
                continue
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def unpublished(self) -> tuple[Entry, ...]:
        """Returns the temporary files of all writers, including those of crashed processes."""
        return tuple(entry for entry in self._list_all() if is_temporary(entry.key))

    def _list_all(self) -> builtins.list[Entry]:
        head = f"{self._root}/"

        def find() -> builtins.list[Entry]:
            self._fs.invalidate_cache()
            found = _files_below(self._fs, self._root)
            return [
                Entry(str(path)[len(head) :], int(info["size"] or 0))
                for path, info in found.items()
                if str(path).startswith(head) and info["type"] == "file"
            ]

        try:
            return sorted(self._call("list", "", find), key=lambda entry: entry.key)
        except KeyMissingError:
            return []

    def _read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        stop = None if num_bytes is None else start + num_bytes
        get = partial(self._fs.cat_file, self._path(key), start=start or None, end=stop)
        return bytes(self._call("read", key, get))

    def _put_file(self, path: str, value: bytes) -> None:
        if self._puts_at_once:
            self._fs.pipe_file(path, value)
            return
        file = _HiddenFile(self._fs, path)
        try:
            file.write(memoryview(value))
        except BaseException:
            file.discard()
            raise
        file.publish()

    def _create(self, key: str, value: bytes) -> None:
        path = self._path(key)

        def act() -> None:
            try:
                self._fs.pipe_file(path, value, mode="create")
            except Exception as error:
                # Why checked: each library has its own exception for a name that exists.
                if isinstance(error, FileExistsError) or _is_file(self._fs, path):
                    raise FileExistsError(str(error)) from error
                raise

        # Why a lock: fsspec's memory looks whether a file is there, and then adds it.
        with nullcontext() if self._is_shared else _IN_MEMORY:
            self._call("create", key, act, repeat=False)

    def _check_free(self, key: str) -> None:
        if self._call("look at", key, lambda: _is_file(self._fs, self._path(key))):
            raise KeyExistsError(f"could not create {self._url_of(key)}: it exists", key=key)

    def _size(self, key: str) -> int:
        return self._call("read", key, lambda: _size_of(self._fs, self._path(key)))

    def _remove(self, path: str) -> None:
        _size_of(self._fs, path)  # raises for a missing file and for a folder
        self._fs.rm_file(path)

    def _call(self, doing: str, key: str, act: Callable[[], T], *, repeat: bool = True) -> T:
        """Calls the filesystem and returns its answer.

        Raises:
            StorageError: The call failed. The message quotes its error without credentials.
        """
        try:
            return self._retrying.call(act, _worth_s, kind=doing) if repeat else act()
        except StorageError:
            raise
        except Exception as exc:
            raise self._failure(exc, doing, key) from exc

    def _failure(self, exc: Exception, doing: str, key: str) -> StorageError:
        where = self._url_of(key)
        if isinstance(exc, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return KeyMissingError(f"could not {doing} {where}: there is no such key", key=key)
        if isinstance(exc, FileExistsError):
            return KeyExistsError(f"could not {doing} {where}: it exists already", key=key)
        notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", ()))
        if isinstance(exc, OSError) and exc.errno:
            failure = os_failure(exc, doing, key, where)
            failure.message += f" ({redacted(str(exc), self._options)}){notes}"
            return failure
        told = redacted(f"{type(exc).__name__}: {exc}", self._options)
        refusals = PermissionError | NotImplementedError
        cls = StorageRefusedError if isinstance(exc, refusals) else StorageError
        return cls(f"could not {doing} {where}: {told}{notes}", key=key or None)

    def _url_of(self, key: str) -> str:
        return url_below(self._url, key) if key else self._url

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    # Last: below it, `list` in an annotation would mean this method.
    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        return [
            entry
            for entry in self._list_all()
            if entry.key.startswith(prefix) and not is_temporary(entry.key)
        ]


class _FileWriter(OnceWriter):
    """Buffers a short file in memory, and writes a longer one into a hidden file."""

    def __init__(self, storage: FsspecStorage, key: str) -> None:
        self._storage = storage
        self._head = bytearray()
        self._file: _HiddenFile | None = None
        super().__init__(storage._url_of(key), key)

    def _append(self, data: BytesLike) -> None:
        view = as_bytes_view(data)
        if self._file is None and len(self._head) + len(view) <= _HEAD_BYTES:
            self._head += view
            return
        if self._file is None:
            path = self._storage._path(self._key)
            self._file = self._ask("create", lambda: _HiddenFile(self._storage._fs, path))
            self._write(self._file, memoryview(self._head))
        self._write(self._file, view)

    def _publish(self) -> None:
        if self._file is None:
            self._storage.write(self._key, self._head, create=True)
        else:
            self._storage._check_free(self._key)
            self._ask("publish", self._file.publish)

    def _discard(self) -> None:
        self._head = bytearray()
        # Suppressed: a remaining temporary file is removed by garbage collection.
        with suppress(Exception):
            if self._file is not None:
                self._file.discard()

    def _write(self, file: _HiddenFile, view: memoryview) -> None:
        self._ask("write", lambda: file.write(view))

    def _ask(self, doing: str, act: Callable[[], T]) -> T:
        return self._storage._call(doing, self._key, act, repeat=False)


class _HiddenFile:
    """A file that is written sequentially and gets its name in `publish`.

    Where the library can commit an upload by itself (s3fs), it is such an upload; elsewhere a
    temporary file that is renamed. A stream of pyarrow.fs can't be aborted: one that is
    garbage-collected publishes its bytes.

    Args:
        fs: The filesystem.
        path: Path of the file when published.
    """

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        directory, slash, name = path.rpartition("/")
        # Its name ends with the final name, which contains the attempt.
        self._temp = f"{directory}{slash}{TEMP_PREFIX}{secrets.token_hex(6)}-{name}"
        self._commits = _commits_later(fs, self._temp)
        if self._commits:
            self._file: Any = fs.open(path, "wb", autocommit=False)
        else:
            fs.makedirs(directory, exist_ok=True)
            self._file = fs.open(self._temp, "wb")

    def write(self, data: memoryview) -> None:
        """Appends bytes. The buffer may be reused when the call returns."""
        self._file.write(data)

    def publish(self) -> None:
        """Gives the file its name; an existing file is replaced."""
        self._file.close()
        if self._commits:
            self._file.commit()
            return
        self._fs.mv(self._temp, self._path)
        # Why checked: HDFS does not replace a file but answers that it did not rename, and its HTTP
        # client ignores that answer.
        if _is_file(self._fs, self._temp):
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._path)
            self._fs.mv(self._temp, self._path)
            if _is_file(self._fs, self._temp):
                raise OSError(f"the filesystem did not rename {self._temp} and reported no error")

    def discard(self) -> None:
        """Removes the file."""
        if self._commits:
            self._file.discard()
            return
        try:
            self._file.close()
        finally:
            self._fs.rm_file(self._temp)


def _commits_later(fs: AbstractFileSystem, path: str) -> bool:
    """Returns whether a file opened with `autocommit=False` is invisible until `commit`.

    *Why by class*: some filesystems accept the argument and ignore it.

    Args:
        fs: The filesystem.
        path: A path for a trial.
    """
    if type(fs).mv is not AbstractFileSystem.mv:
        return False
    file = fs.open(path, "wb", autocommit=False)
    kind = type(file)
    if not issubclass(kind, AbstractBufferedFile):
        file.close()
        with suppress(FileNotFoundError):
            fs.rm_file(path)
        return False
    file.discard()
    return (
        kind.commit is not AbstractBufferedFile.commit
        and kind.discard is not AbstractBufferedFile.discard
    )


def _files_below(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Returns all files below a path, with what the filesystem tells of each.

    *Why not always `find`*: that of fsspec itself leaves out folders that it fails to list. With
    them, tags and leases of a run would be missing, and steps that they protect would be deleted.
    """
    find = getattr(fs.find, "__wrapped__", fs.find)  # Of an asynchronous filesystem.
    if getattr(find, "__func__", None) not in (AbstractFileSystem.find, AsyncFileSystem._find):
        return dict(fs.find(path, detail=True))
    found, todo = dict[str, Any](), [path]
    while todo:
        folder = todo.pop()
        try:
            entries = fs.ls(folder, detail=True)
        except OSError as error:
            # Why also by number: smbclient's errors are of no class of their own.
            is_gone = isinstance(error, FileNotFoundError | NotADirectoryError)
            if not is_gone and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            continue  # It was removed meanwhile, or nothing was ever written here.
        for entry in entries:
            name = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[name] = entry
            elif name != folder:  # Some filesystems list a folder in itself.
                todo.append(name)
    return found


def _size_of(fs: AbstractFileSystem, path: str) -> int:
    """Returns the length of a file, or raises `FileNotFoundError`."""
    fs.invalidate_cache()
    found = fs.info(path)
    if found["type"] != "file":
        raise FileNotFoundError(path)
    return int(found["size"])


def _is_file(fs: AbstractFileSystem, path: str) -> bool:
    try:
        _size_of(fs, path)
    except FileNotFoundError:
        return False
    return True


def _worth_s(error: Exception) -> float:
    if isinstance(error, ConnectionRefusedError):
        return bounds.REFUSED_S
    return bounds.RETRY_S if isinstance(error, ConnectionError | TimeoutError) else 0.0


class _ArrowFilesystem(ArrowFSWrapper):  # type: ignore[misc]  # fsspec is untyped
    """A filesystem of pyarrow.fs as one of fsspec. It has no conditional creation."""

    cachable = False

    def __init__(self, filesystem: Any) -> None:
        super().__init__(filesystem)
        self.puts_at_once = filesystem.type_name in ("s3", "gcs", "abfs", "mock")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Creates a folder, but not on object stores, where it would be an object."""
        if not self.puts_at_once:
            super().makedirs(path, exist_ok)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> Any:
        """Returns bytes of a file. Only a seekable one can be read up to an end."""
        return super().cat_file(path, start, end, seekable=True)

    def find(self, path: str, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns all files below a path, by a single request; none if there is no such path."""
        chosen = arrow.FileSelector(path, allow_not_found=True, recursive=True)
        return {info.path: self._make_entry(info) for info in self.fs.get_file_info(chosen)}


_KNOWN_TO_READ = frozenset({"s3", "s3a"})
"""Protocols of s3fs. It reads no variables but those of storages (`environment.is_of_storages`)."""
_ENVIRONMENTS: dict[str, bytes] = {}
"""Digest of what a protocol may read in the environment, when its filesystem was made last."""


def _forget_filesystems_of_another_environment(scheme: str) -> None:
    """Makes fsspec create a filesystem anew if the environment is another one than before.

    *Why*: fsspec keeps filesystems by their arguments alone, but many take credentials from the
    environment when they are made. Which variables those of third parties read is not known.

    Args:
        scheme: Protocol of a URL; may be a chain, as `simplecache::ftp`.
    """
    variables = sorted(os.environ.items())
    for protocol in scheme.split("::"):
        is_known = protocol in _KNOWN_TO_READ
        read = [one for one in variables if not is_known or is_of_storages(one[0])]
        seen = hashlib.blake2b(repr(read).encode(errors="surrogateescape")).digest()
        if _ENVIRONMENTS.setdefault(protocol, seen) != seen:
            _ENVIRONMENTS[protocol] = seen
            get_filesystem_class(protocol).clear_instance_cache()


def filesystem_of(url: str, options: dict[str, object]) -> tuple[AbstractFileSystem, str]:
    """Returns the filesystem that fsspec creates for a URL or local path, and the path in it.

    Raises:
        InvalidRequestError: No package serves the protocol, or an option is unknown.
    """
    scheme = split_url(url)[0]
    try:
        _forget_filesystems_of_another_environment(scheme)
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


def _path_in_fsspec(filesystem: AbstractFileSystem, url: str) -> tuple[AbstractFileSystem, str]:
    path = str(filesystem._strip_protocol(url))
    while True:
        if isinstance(filesystem, AsyncFileSystem) and hasattr(filesystem, "sync_fs"):
            # This is an AsyncFileSystemWrapper, a class that fsspec has only since 2024.12. Why
            # unwrap it: its `find` is that of the wrapped one, its `mv` looks like a filesystem's.
            filesystem = filesystem.sync_fs
        elif isinstance(filesystem, DirFileSystem):
            head = f"{filesystem.path}/"
            # Why: a `Target` made from such a filesystem contains the whole path already.
            is_whole = path.startswith(head) or path == filesystem.path
            path = path if is_whole else filesystem._join(path)
            filesystem = filesystem.fs
        else:
            return filesystem, path


def _path_in_arrow(filesystem: Any, url: str) -> tuple[Any, str]:
    path = split_url(url)[1]
    while isinstance(filesystem, arrow.SubTreeFileSystem):
        base = filesystem.base_path.rstrip("/")
        if path != base and not path.startswith(f"{base}/"):
            path = f"{base}/{path.strip('/')}".rstrip("/")
        filesystem = filesystem.base_fs
    return filesystem, path
