"""`StorageAdapter`: implements `Storage` on the filesystems of other libraries.

A `FilesystemPort` hides the differences between the libraries; there is one for fsspec and one for
pyarrow.fs. `redacted` removes credentials from messages, as libraries may quote their options in
errors.

`creates_if_absent_in` determines by a trial whether conditional creation in a store has exactly one
winner. The trial runs once per store and process, with small objects that are removed again. It is
needed because some servers accept the condition and ignore it (the S3 gateways of rclone and
JuiceFS), and nothing else distinguishes them.
"""

from __future__ import annotations

import builtins
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from ray_dcp.core.processes import ProcessLock, start_thread
from ray_dcp.errors import StorageError
from ray_dcp.store.location import url_below
from ray_dcp.store.retry import Retrying
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
    StorageTraits,
    as_bytes_view,
    check_key,
    check_range,
    is_temporary,
    os_failure,
    too_short,
)

_SHORTEST = 4


def redacted(text: str, options: Mapping[str, object]) -> str:
    """Returns a text without the values of options that look like credentials.

    Args:
        text: Text of an error.
        options: Options as the user gave them; may be nested.

    Examples:
        >>> redacted("bad key hush-hush for eu-1", {"secret": "hush-hush", "region": "eu-1"})
        'bad key … for eu-1'
    """
    for value in sorted(_credentials(options), key=len, reverse=True):
        text = text.replace(value, "…")
    return text


def _credentials(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _credentials(value)
        elif isinstance(value, str) and len(value) >= _SHORTEST and _is_credential(str(name)):
            yield value


def _is_credential(name: str) -> bool:
    # Why a list of harmless names: names of secrets differ between providers.
    harmless = ("endpoint", "region", "bucket", "account_name", "url", "host", "timeout")
    return not any(word in name.lower() for word in harmless)


T = TypeVar("T")

_HEAD_BYTES = 8 << 20
"""Files up to this length are written by a single put, and conditionally where that is possible."""
_RETRY_S = 60.0
_REFUSED_S = 10.0


class HiddenStream(Protocol):
    """A file that is written sequentially and gets its name in `publish`."""

    def write(self, data: memoryview) -> None:
        """Appends bytes. The buffer may be reused when the call returns."""

    def publish(self) -> None:
        """Gives the file its name; an existing file is replaced."""

    def discard(self) -> None:
        """Removes the file."""


class FilesystemPort:
    """Operations of a filesystem, on its own paths. Methods may raise any exception.

    Attributes:
        name: Identifies the store (not the path), so that each store is probed only once.
        can_create: A conditional `create` exists and can be tried.
        puts_at_once: `put` is atomic, as on an object store, where a rename would copy.
        shared: Other processes see the files, which survive a power failure.
        options: Options as the user gave them; their values are removed from messages.
    """

    name: str
    can_create = False
    puts_at_once = False
    shared = True
    options: Mapping[str, object] = {}

    def read(self, path: str, start: int, num_bytes: int | None) -> bytes:
        """Returns bytes of a file (fewer if it is shorter), or raises `FileNotFoundError`."""
        raise NotImplementedError

    def size(self, path: str) -> int:
        """Returns the length of a file, or raises `FileNotFoundError`."""
        raise NotImplementedError

    def put(self, path: str, data: bytes) -> None:
        """Writes a file atomically. Called only if `puts_at_once`."""
        raise NotImplementedError

    def create(self, path: str, data: bytes) -> None:
        """Writes a file, or raises any exception if it exists. Called only if `can_create`."""
        raise NotImplementedError

    def open(self, path: str) -> Any:
        """Opens a file for writing and creates its folder; the file has `write` and `close`."""
        raise NotImplementedError

    def move(self, path: str, to: str) -> None:
        """Renames a file."""
        raise NotImplementedError

    def find(self, path: str) -> Iterable[tuple[str, int]]:
        """Yields path and length of every file below a path; nothing if the path does not exist."""
        raise NotImplementedError

    def remove(self, path: str) -> None:
        """Removes a file, or raises `FileNotFoundError`."""
        raise NotImplementedError

    def open_hidden(self, path: str) -> HiddenStream:
        """Opens a file for writing that is invisible until it is published."""
        return _RenamedFile(self, path)

    def is_there(self, path: str) -> bool:
        """Returns whether a file exists."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True


class _RenamedFile:
    """A temporary file that is published by a rename."""

    def __init__(self, port: FilesystemPort, path: str) -> None:
        self._port = port
        self._path = path
        self._temp = temporary_beside(path)
        self._file = port.open(self._temp)

    def write(self, data: memoryview) -> None:
        self._file.write(data)

    def publish(self) -> None:
        self._file.close()
        self._port.move(self._temp, self._path)
        # Why checked: HDFS does not replace a file but answers that it did not rename, and its HTTP
        # client ignores that answer.
        if self._port.is_there(self._temp):
            with suppress(FileNotFoundError):
                self._port.remove(self._path)
            self._port.move(self._temp, self._path)
            if self._port.is_there(self._temp):
                raise OSError(f"the filesystem did not rename {self._temp} and told no error")

    def discard(self) -> None:
        try:
            self._file.close()
        finally:
            self._port.remove(self._temp)


class StorageAdapter:
    """Implements `Storage` on a `FilesystemPort`. Thread-safe if the filesystem is.

    Args:
        port: The filesystem.
        url: URL of the root.
        root: Path of the root in the filesystem.
        retrying: Retries idempotent calls after connection errors.
    """

    def __init__(
        self, port: FilesystemPort, url: str, root: str, *, retrying: Retrying | None = None
    ) -> None:
        self._port = port
        self._url = url if url.endswith("://") else url.rstrip("/")
        self._root = root.rstrip("/")
        self._retrying = retrying or Retrying(_RETRY_S)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @property
    def url(self) -> str:
        """Protocol and path."""
        return self._url

    @property
    def read_traits(self) -> ReadTraits:
        """Traits of an object store, or of memory if no other process sees the files."""
        return OBJECT_STORE if self._port.shared else MEMORY

    @property
    def traits(self) -> StorageTraits:
        """Traits of the filesystem; `create_if_absent` is found by a trial, once per filesystem.

        Raises:
            StorageError: The trial failed.
        """
        can_create = self._port.can_create and creates_if_absent_in(
            self._port.name, self._create, self._read, self.delete
        )
        return StorageTraits(
            create_if_absent=can_create, durable=self._port.shared, shared=self._port.shared
        )

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        path = self._path(key)
        check_range(key, start, num_bytes)
        if num_bytes == 0:
            self._asked("read", key, lambda: self._port.size(path))
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
            raise too_short(self._where(key), key, start, len(view), start + len(data))
        view[:] = data

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """See `Storage.write`; without conditional creation, `create` checks first."""
        path = self._path(key)
        value = bytes(as_bytes_view(data))
        if create and self.traits.create_if_absent:
            self._create(key, value)
            return
        if create:
            self._check_free(key, path)
        self._asked("create" if create else "write", key, lambda: self._put(path, value))

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`; `sync` changes nothing."""
        return _AdapterWriter(self, key, self._path(key))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`."""
        failures: builtins.list[StorageError] = []
        for key in keys:
            path = self._below(check_key(key, unpublished=True))
            try:
                self._asked("delete", key, partial(self._port.remove, path))
            except KeyMissingError:
                continue
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def unpublished(self) -> tuple[Entry, ...]:
        """Returns the temporary files of all writers, including those of crashed processes."""
        return tuple(entry for entry in self._everything() if is_temporary(entry.key))

    def _everything(self) -> builtins.list[Entry]:
        head = f"{self._root}/"

        def find() -> builtins.list[Entry]:
            found = self._port.find(self._root)
            return [Entry(path[len(head) :], size) for path, size in found if path.startswith(head)]

        try:
            return sorted(self._asked("list", "", find), key=lambda entry: entry.key)
        except KeyMissingError:
            return []

    def _read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        path = self._below(key)
        return self._asked("read", key, lambda: self._port.read(path, start, num_bytes))

    def _put(self, path: str, value: bytes) -> None:
        if self._port.puts_at_once:
            self._port.put(path, value)
            return
        stream = self._port.open_hidden(path)
        try:
            stream.write(memoryview(value))
        except BaseException:
            stream.discard()
            raise
        stream.publish()

    def _create(self, key: str, value: bytes) -> None:
        path = self._below(key)

        def act() -> None:
            try:
                self._port.create(path, value)
            except Exception as error:
                # Why checked: each library has its own exception for a name that exists.
                if isinstance(error, FileExistsError) or self._port.is_there(path):
                    raise FileExistsError(str(error)) from error
                raise

        self._asked("create", key, act, repeat=False)

    def _check_free(self, key: str, path: str) -> None:
        if self._asked("look at", key, lambda: self._port.is_there(path)):
            raise KeyExistsError(f"could not create {self._where(key)}: it exists", key=key)

    def _size(self, key: str) -> int:
        return self._asked("read", key, lambda: self._port.size(self._path(key)))

    def _asked(self, doing: str, key: str, act: Callable[[], T], *, repeat: bool = True) -> T:
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
        where = self._where(key)
        if isinstance(exc, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return KeyMissingError(f"could not {doing} {where}: there is no such key", key=key)
        if isinstance(exc, FileExistsError):
            return KeyExistsError(f"could not {doing} {where}: it exists already", key=key)
        notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", ()))
        if isinstance(exc, OSError) and exc.errno:
            failure = os_failure(exc, doing, key, where)
            failure.message += f" ({redacted(str(exc), self._port.options)}){notes}"
            return failure
        told = redacted(f"{type(exc).__name__}: {exc}", self._port.options)
        return StorageError(f"could not {doing} {where}: {told}{notes}", key=key or None)

    def _where(self, key: str) -> str:
        return url_below(self._url, key) if key else self._url

    def _path(self, key: str) -> str:
        return self._below(check_key(key))

    def _below(self, key: str) -> str:
        return f"{self._root}/{key}"

    # Last: below it, `list` in an annotation would mean this method.
    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        return [
            entry
            for entry in self._everything()
            if entry.key.startswith(prefix) and not is_temporary(entry.key)
        ]


class _AdapterWriter(OnceWriter):
    """Buffers a short file in memory, and writes a longer one into a hidden stream."""

    def __init__(self, storage: StorageAdapter, key: str, path: str) -> None:
        self._storage = storage
        self._path = path
        self._head = bytearray()
        self._stream: HiddenStream | None = None
        super().__init__(storage._where(key), key)

    def _append(self, data: BytesLike) -> None:
        view = as_bytes_view(data)
        if self._stream is None and len(self._head) + len(view) <= _HEAD_BYTES:
            self._head += view
            return
        if self._stream is None:
            self._stream = self._ask("create", lambda: self._storage._port.open_hidden(self._path))
            self._write(self._stream, memoryview(self._head))
        self._write(self._stream, view)

    def _publish(self) -> None:
        if self._stream is None:
            self._storage.write(self._key, self._head, create=True)
        else:
            self._storage._check_free(self._key, self._path)
            self._ask("publish", self._stream.publish)

    def _discard(self) -> None:
        self._head = bytearray()
        # Suppressed: a remaining temporary file is removed by garbage collection.
        with suppress(Exception):
            if self._stream is not None:
                self._stream.discard()

    def _write(self, stream: HiddenStream, view: memoryview) -> None:
        self._ask("write", lambda: stream.write(view))

    def _ask(self, doing: str, act: Callable[[], T]) -> T:
        return self._storage._asked(doing, self._key, act, repeat=False)


def temporary_beside(path: str) -> str:
    """Returns the path of a temporary file beside `path`; its name ends with the final name."""
    directory, slash, name = path.rpartition("/")
    return f"{directory}{slash}{TEMP_PREFIX}{secrets.token_hex(6)}-{name}"


def _worth_s(error: Exception) -> float:
    if isinstance(error, ConnectionRefusedError):
        return _REFUSED_S
    return _RETRY_S if isinstance(error, ConnectionError | TimeoutError) else 0.0


Create = Callable[[str, bytes], object]
Read = Callable[[str], bytes]
Delete = Callable[[list[str]], object]

# Why few: SeaweedFS delays a larger number of concurrent creations by seconds.
_RACERS = 4
_LOCK = ProcessLock()
_KNOWN: dict[str, bool] = {}
# Why cleared in a forked child: it lacks the thread that holds the lock.
_UNDER_WAY: dict[str, threading.Lock] = {}
os.register_at_fork(after_in_child=_UNDER_WAY.clear)


def creates_if_absent_in(store: str, create: Create, read: Read, delete: Delete) -> bool:
    """Returns whether creating a key in a store has exactly one winner.

    The result is cached by `store`; a failure is not.

    Args:
        store: Identifies the store, for example by the URL of its bucket.
        create: Creates a hidden key conditionally, or raises `KeyExistsError`.
        read: Reads a hidden key, or raises `KeyMissingError`.
        delete: Removes hidden keys.

    Raises:
        StorageError: The trial failed: the store did not answer, or this process may not write.
    """
    with _LOCK:
        turn = _UNDER_WAY.setdefault(store, threading.Lock())
    with turn:
        if store not in _KNOWN:
            _KNOWN[store] = _tried(create, read, delete)
        return _KNOWN[store]


def _tried(create: Create, read: Read, delete: Delete) -> bool:
    token = secrets.token_hex(6)
    first, race = f"{TEMP_PREFIX}{token}-probe", f"{TEMP_PREFIX}{token}-race"

    def put(key: str, value: bytes) -> bool:
        with suppress(KeyExistsError):
            create(key, value)
            return True
        return False

    def get(key: str) -> bytes | None:
        with suppress(KeyMissingError):
            return read(key)
        return None

    try:
        # Why read back: the answer to a successful creation may be lost, and a server that ignores
        # the condition may still answer that it refused.
        if not put(first, b"first") and get(first) != b"first":
            return False
        if put(first, b"second") or get(first) != b"first":
            return False
        values = [str(number).encode() for number in range(_RACERS)]
        won, failures = [False] * _RACERS, list[Exception]()

        def take_part(number: int) -> None:
            try:
                won[number] = put(race, values[number])
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits
                failures.append(error)

        racers = [
            start_thread(partial(take_part, number), "ray_dcp probe") for number in range(_RACERS)
        ]
        for racer in racers:
            racer.join()
        for failure in failures:
            raise failure
        stands = get(race)
        # Why no winner is fine: the winner's answer was lost, and its retry found its own key.
        return sum(won) <= 1 and stands in values and (not any(won) or won[int(stands)])
    finally:
        for key in (first, race):
            with suppress(StorageError):
                delete([key])
