"""The `Storage` protocol, with its `PartWriter`, that every backend implements.

A storage is bound to one checkpoint directory. Keys are relative, `/`-separated, without `..`.
Every method may be called from several threads, and every call may be repeated. Callers look at a
storage's `StorageTraits` and `ReadTraits`, never at its class.

All backends share the checks of keys and ranges, the translation of errno values (`os_failure`)
and the life cycle of a writer, from open to committed or aborted (`OnceWriter`). `StorageWrapper`
forwards every call to another storage; subclasses override some of them. `OneFile` presents one
file of a directory as a read-only storage. The module `opening` opens the storage of a path or URL.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

from ray_dcp.core.processes import at_once
from ray_dcp.errors import (
    CheckpointError,
    InvalidRequestError,
    StorageError,
    StorageRefusedError,
)

BytesLike = bytes | bytearray | memoryview
"""Types that can be written."""


class KeyMissingError(StorageError, FileNotFoundError):
    """The key does not exist."""


class KeyExistsError(StorageError, FileExistsError):
    """The key was to be created, but it exists already."""


@dataclass(frozen=True)
class Entry:
    """One stored key."""

    key: str
    num_bytes: int
    shares: object = field(default=None, compare=False)
    """Equal for keys that have the same bytes on the disk; None if no other key may have them."""


@dataclass(frozen=True, kw_only=True)
class StorageTraits:
    """What a storage can do. Callers look at this instead of the class of the storage."""

    create_if_absent: bool
    """`write(create=True)` and `PartWriter.commit` have exactly one winner among all callers on all
    machines. False if the storage checks first and then writes; the coordinator of a save then
    decides alone (see `ray_dcp.coordinator.tasks`). Even if True, `commit` of a file that is
    assembled from several requests may check first: of two commits at the same moment, the later
    one replaces the earlier one, whose caller gets no error. This is harmless for data files, as
    their keys contain the attempt and all writers of one attempt write equal bytes."""
    durable: bool
    """Written data survives a power failure."""
    shared: bool
    """Other processes see the data (False for `memory://`)."""


@dataclass(frozen=True, kw_only=True)
class ReadTraits:
    """Estimated cost of reads. The values depend on the kind of storage; nothing is measured.

    They are separate from `StorageTraits`, which may be determined by a trial write; a reader must
    not write.

    Examples:
        >>> ReadTraits().cached
        True
    """

    request_s: float = 20e-6
    """Latency of a read until its first byte, in seconds. A reader reads through a gap if that is
    cheaper than another request."""
    bytes_per_s: float = 3e9
    """Throughput of one reading thread."""
    cached: bool = True
    """The processes of a machine share a page cache: bytes that one of them has read cost the
    others only a copy."""
    shared: bool = True
    """Other processes see the data."""
    durable: bool = False
    """Everything that is visible survives a power failure. False if a writer that died may have
    published a name that is not yet durable."""


LOCAL_DISK = ReadTraits()
MEMORY = ReadTraits(request_s=1e-6, bytes_per_s=5e9, shared=False, durable=True)
NETWORK_DISK = ReadTraits(request_s=1e-3, bytes_per_s=250e6)
"""NFS, Lustre and similar filesystems, which use the page cache of each node."""
OBJECT_STORE = ReadTraits(request_s=30e-3, bytes_per_s=100e6, cached=False, durable=True)


def read_traits_of(storage: object) -> ReadTraits:
    """Returns the `read_traits` of a storage, or those of a local disk if it has none."""
    found = getattr(storage, "read_traits", None)
    return found if isinstance(found, ReadTraits) else LOCAL_DISK


_THREAD_S = 1e-3
"""An additional thread pays if it saves this much waiting, in seconds."""
_MOST_THREADS = 16


def threads_for(storage: object, num_requests: int) -> int:
    """Returns the number of threads that pays for small independent requests.

    Args:
        storage: Storage that receives the requests.
        num_requests: Number of requests.

    Examples:
        >>> threads_for(None, 1), threads_for(None, 40), threads_for(None, 400)
        (1, 1, 8)
    """
    if num_requests < 2:
        return 1  # without asking a local storage for its traits, which reads the mounts
    paid = int(num_requests * read_traits_of(storage).request_s / _THREAD_S)
    return max(1, min(paid, num_requests, _MOST_THREADS))


def ask_at_once(storage: object, *calls: Callable[[], Any]) -> tuple[Any, ...]:
    """Makes several small requests, concurrently where a thread pays; returns their results.

    Raises:
        BaseException: The first error of a call.
    """
    if read_traits_of(storage).request_s < _THREAD_S:
        return tuple(call() for call in calls)
    return at_once(*calls)


def read_if_there(storage: Storage, key: str, most_bytes: int | None = None) -> bytes | None:
    """Returns the bytes of a key, or None if there is no such key.

    Args:
        storage: Storage to read from.
        key: Key to read.
        most_bytes: Maximum number of bytes to return; the rest is not read.

    Raises:
        StorageError: The read failed.
    """
    try:
        return storage.read(key, 0, most_bytes)
    except KeyMissingError:
        return None


@runtime_checkable
class PartWriter(Protocol):
    """Writes one file sequentially; the file is not visible before `commit`."""

    def write(self, data: BytesLike) -> None:
        """Appends bytes. The buffer may be reused when the call returns.

        Raises:
            StorageError: The write failed; only `abort` may be called afterwards.
        """
        ...

    def commit(self) -> None:
        """Makes the file durable and visible under its key, if the key is still free.

        Raises:
            KeyExistsError: Another writer has published this key, durably.
            StorageError: Any other failure; the file is not visible, or its state is unknown.
        """
        ...

    def abort(self) -> None:
        """Discards the written bytes. Never raises; does nothing after `commit`."""
        ...


class OnceWriter:
    """Base class of writers; subclasses implement `_append`, `_publish` and `_discard`.

    A writer that is garbage-collected while it is open is aborted, and leaves neither a file nor a
    thread behind.

    Args:
        where: Path or URL of the key, for messages.
        key: The key.
    """

    _state = "unmade"

    def __init__(self, where: str, key: str) -> None:
        self._where = where
        self._key = key
        self._state = "open"

    def write(self, data: BytesLike) -> None:
        """See `PartWriter.write`."""
        self._check_open()
        self._append(data)

    def commit(self) -> None:
        """See `PartWriter.commit`; does nothing if the writer is committed already."""
        if self._state == "committed":
            return
        self._check_open()
        try:
            self._publish()
        except BaseException:
            self.abort()
            raise
        self._state = "committed"

    def abort(self) -> None:
        """See `PartWriter.abort`."""
        if self._state == "open":
            self._state = "aborted"
            self._discard()

    def __del__(self) -> None:
        self.abort()

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(
                f"the writer of {self._where} was {self._state}; open another", key=self._key
            )

    def _append(self, data: BytesLike) -> None:
        raise NotImplementedError

    def _publish(self) -> None:
        raise NotImplementedError

    def _discard(self) -> None:
        """Discards the written bytes; must not raise."""
        raise NotImplementedError


@runtime_checkable
class Storage(Protocol):
    """Maps keys to bytes below one root."""

    @property
    def url(self) -> str:
        """Absolute path or URL of the root, for messages and for `open_storage`."""
        ...

    @property
    def traits(self) -> StorageTraits:
        """What this storage can do. Only for callers that are about to write: it may write a trial.

        Raises:
            StorageError: The trial failed.
        """
        ...

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Returns the bytes `[start, start + num_bytes)` of a key, by default up to its end.

        The result is shorter if the value ends before.

        Raises:
            KeyMissingError: There is no such key.
            StorageError: Any other failure.
        """
        ...

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes of a key from `start` on.

        Raises:
            KeyMissingError: There is no such key.
            StorageError: The value is too short, or the read failed. The content of `target` is
                undefined then.
        """
        ...

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """Writes a small value atomically; it is durable when the call returns.

        Args:
            key: Key to write.
            data: Value to write.
            create: Write only if the key does not exist.

        Raises:
            KeyExistsError: `create` is set and the key exists; its value is durable.
            StorageError: Any other failure; the value may or may not have been written.
        """
        ...

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """Returns a writer for a large file.

        Args:
            key: Key to write.
            sync: Make the file durable at commit, bypassing the page cache if the storage can.
        """
        ...

    def list(self, prefix: str = "") -> list[Entry]:
        """Returns the keys that start with `prefix`, at any depth, sorted.

        The list is empty if the root does not exist. Files that are not yet published are not
        listed.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Removes keys. Keys that do not exist are ignored.

        Raises:
            StorageError: A key could not be removed. All others were attempted.
        """
        ...


@dataclass(frozen=True)
class PublishedFile:
    """A part file of a committed checkpoint, which never changes."""

    url: str
    """URL of the checkpoint."""
    key: str
    num_bytes: int
    digest: str
    """Hex digest of its block checksums."""


Reused = Literal["linked", "copied"]
"""How a key got the bytes of another file: a second name of it, or a copy made by the storage."""


def reuse_file(
    storage: Storage, key: str, source: PublishedFile, end: bytes, *, sync: bool
) -> Reused | None:
    """Gives a key the bytes of a published file, if the storage can do that without moving them.

    A storage can if it has the optional method `reuse` with these arguments. It looks at the length
    and the last bytes of the source after nobody can take them away any more: a name may have been
    given to another file.

    Args:
        storage: Storage of the key.
        key: The new key.
        source: The published file.
        end: Last bytes that the source must have.
        sync: Make the new name durable.

    Returns:
        How; None if the storage can't do it, or the source is gone or another file.
    """
    reuse = getattr(storage, "reuse", None)
    try:
        return None if reuse is None or not end else reuse(key, source, end, sync=sync)
    except StorageError:
        return None


def place_of(storage: Storage) -> str:
    """Returns a name of a storage's place: one for all spellings, another one on another server.

    A storage may have an optional attribute `place`, if its URL does not name the server.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> place_of(MemoryStorage("run"))
        'memory://run'
    """
    return str(getattr(storage, "place", storage.url))


TEMP_PREFIX = ".tmp-"
"""Prefix of the names of unpublished files, which are not listed and not legal in keys."""

_WAY_OUT = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "free quota there, or save elsewhere",
    errno.EROFS: "save to a place that is mounted writable",
    errno.EACCES: "give this user access, or choose another place",
    errno.EPERM: "give this user access, or choose another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENAMETOOLONG: "choose a shorter checkpoint path",
    errno.ENOTDIR: "choose a path that is no file, and lies below none; what torch.save wrote is "
    "converted by `ray-dcp import` or `ray_dcp.torch_save_to_dcp`",
    errno.EIO: "the device reports a failure: check it, and don't trust what it holds",
    errno.ESTALE: "the network filesystem lost this file: check its server, then retry",
    errno.EFBIG: "lower `part_bytes`: the filesystem can't hold a file of this size",
}
_NOT_PERMITTED = (errno.EROFS, errno.EACCES, errno.EPERM)


def is_full(error: CheckpointError | str) -> bool:
    """Returns whether an error, or its text, reports a full disk or quota.

    Examples:
        >>> is_full(os_failure(OSError(errno.ENOSPC, ""), "write", "a", "/run/a"))
        True
    """
    text = error if isinstance(error, str) else error.message
    # Why by the text: it is all that an error report of another rank contains.
    return "[ENOSPC]" in text or "[EDQUOT]" in text


def check_key(key: str, *, unpublished: bool = False) -> str:
    """Returns a key after checking that it stays below the root of a storage.

    Args:
        key: Relative, `/`-separated.
        unpublished: Accept names of unpublished temporary files, so that they can be removed.

    Raises:
        InvalidRequestError: The key is empty or absolute, has an empty, `.` or `..` component, a
            backslash or a control character, or is reserved for unpublished files.

    Examples:
        >>> check_key("sub/__0_0.distcp")
        'sub/__0_0.distcp'
        >>> check_key("../x")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ray_dcp.errors.InvalidRequestError: a key must be relative ... has the component '..' ...
    """
    problem = _key_problem(key, unpublished)
    if problem is not None:
        raise InvalidRequestError(
            f"a key must be relative and stay in its checkpoint, but {key!r} {problem}",
            key=key if isinstance(key, str) else repr(key),
        )
    return key


def _key_problem(key: object, unpublished: bool) -> str | None:
    if not isinstance(key, str):
        return f"is a {type(key).__name__}, not a string"
    if key == "":
        return "is empty"
    if "\\" in key or not key.isprintable():
        return "has a backslash, a control character or a lone surrogate"
    for part in key.split("/"):
        if part in ("", ".", ".."):
            return f"has the component {part!r}"
        if part.startswith(TEMP_PREFIX) and not unpublished:
            return (
                f"has a component that begins with {TEMP_PREFIX!r}, the mark of unpublished files"
            )
    return None


def is_temporary(key: str) -> bool:
    """Returns whether a key belongs to an unpublished file."""
    return key.rpartition("/")[2].startswith(TEMP_PREFIX)


def check_range(key: str, start: int, num_bytes: int | None) -> None:
    """Checks the range of a read.

    Raises:
        InvalidRequestError: The range begins before the file, or its length is negative.
    """
    if start < 0 or (num_bytes is not None and num_bytes < 0):
        raise InvalidRequestError(
            f"a read must start at 0 or later and be 0 bytes or longer, but "
            f"start={start}, num_bytes={num_bytes}",
            key=key,
        )


def too_short(where: str, key: str, start: int, num_bytes: int, end: int) -> StorageError:
    """Returns the error of a read beyond the end of a value.

    Args:
        where: Path or URL of the key.
        key: The key.
        start: First byte that was wanted.
        num_bytes: Number of bytes that were wanted.
        end: Length of the value, as far as it is known.
    """
    return StorageError(
        f"{where} is too short: wanted bytes [{start}, {start + num_bytes}), but it ends at {end}",
        key=key,
    )


def as_bytes_view(data: BytesLike) -> memoryview:
    """Returns a flat view of the bytes of a contiguous buffer, without a copy.

    Raises:
        InvalidRequestError: `data` is not a buffer, or is not C-contiguous.
    """
    try:
        view = memoryview(data)
    except TypeError as exc:
        raise InvalidRequestError(
            f"data to write must be a bytes-like object, but is a {type(data).__name__}"
        ) from exc
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        raise InvalidRequestError(
            "data to write must be C-contiguous, but has strides; copy it first"
        )
    return view.cast("B")


def os_failure(exc: OSError, doing: str, key: str, path: str) -> StorageError:
    """Returns the `StorageError` that describes an `OSError` of a local path.

    Args:
        exc: Error of the operating system.
        doing: Verb for the message: "write", "read".
        key: The key concerned.
        path: The file or directory concerned.

    Returns:
        `KeyMissingError`, `KeyExistsError`, or a `StorageError` with the name of the errno, its
        text, the path and a remedy; a `StorageRefusedError` if permission is lacking.
    """
    if exc.errno == errno.ENOENT:
        return KeyMissingError(f"could not {doing} {path}: there is no such file", key=key)
    if exc.errno == errno.EEXIST:
        return KeyExistsError(f"could not {doing} {path}: it exists already", key=key)
    name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
    text = os.strerror(exc.errno) if exc.errno else str(exc)
    way_out = _WAY_OUT.get(exc.errno or 0)
    cls = StorageRefusedError if exc.errno in _NOT_PERMITTED else StorageError
    return cls(
        f"could not {doing} {path}: [{name}] {text}" + (f"; {way_out}" if way_out else ""), key=key
    )


class StorageWrapper:
    """Forwards every call to another storage; subclasses override some of them.

    Args:
        inner: The wrapped storage.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> class Shouting(StorageWrapper):
        ...     def read(self, key, start=0, num_bytes=None):
        ...         return super().read(key, start, num_bytes).upper()
        >>> storage = Shouting(MemoryStorage("wrapping"))
        >>> storage.write("a", b"data")
        >>> storage.read("a")
        b'DATA'
    """

    # Why not forwarded: it would go past a subclass that overrides `read_into`.
    map_range: Any = None

    def __init__(self, inner: Storage) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        # Why: a storage may have optional methods beyond the protocol. The check prevents endless
        # recursion: `copy` looks up names before `__init__` has run.
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

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
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


class OneFile(StorageWrapper):
    """Presents one file of a directory as a storage that can only be read.

    Args:
        inner: Storage of the directory.
        key: Key of the file in `inner`.
        suffix: Appended to `key` to form the only key of this storage.

    Examples:
        >>> from ray_dcp.store.memory import MemoryStorage
        >>> inner = MemoryStorage("doc-one-file")
        >>> inner.write("a", b"1"), inner.write("b", b"2")
        (None, None)
        >>> [entry.key for entry in OneFile(inner, "a").list()]
        ['a']
    """

    def __init__(self, inner: Storage, key: str, suffix: str = "") -> None:
        super().__init__(inner)
        self._name = key
        self._key = f"{key}{suffix}"

    @property
    def url(self) -> str:
        """Path or URL of the file."""
        return f"{self._inner.url.rstrip('/')}/{self._name}"

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        self._check(key)
        return super().read(self._name, start, num_bytes)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        self._check(key)
        super().read_into(self._name, start, target)

    def list(self, prefix: str = "") -> builtins.list[Entry]:
        """See `Storage.list`."""
        # Why not `list(prefix)`: it may find many other keys beside the file, at any depth.
        found = super().list(self._name) if self._key.startswith(prefix) else []
        return [Entry(self._key, one.num_bytes) for one in found if one.key == self._name]

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise StorageError(f"{self.url} is one file: nothing is written or deleted here")

    write = open_writer = delete = _refuse

    def _check(self, key: str) -> None:
        if key != self._key:
            raise KeyMissingError(f"{self.url} is one file, and has no {key!r}", key=key)
