"""What ray_dcp needs of a storage: the `Storage` and `PartWriter` protocols, and their errors.

A storage is bound to one checkpoint directory. Keys are relative, `/`-separated, without `..`.
Every method may be called from several threads, and everything may happen twice. A storage
describes itself by `StorageTraits` and `ReadTraits`, which are asked instead of its class.

Every storage shares the checks of keys and ranges, what an errno means (`os_failure`), and the life
of a writer, from open to committed or aborted (`OnceWriter`). A
`StorageWrapper` passes everything on to another storage, to be changed in part. `OneFile` is one
file of a directory as a storage to read: nothing else is visible, nothing can be written. `opening`
opens the storage of a path or URL.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

from ray_dcp.errors import CheckpointError, InvalidRequestError, StorageError

BytesLike = bytes | bytearray | memoryview
"""What can be written."""


class KeyMissingError(StorageError, FileNotFoundError):
    """There is nothing under this key."""


class KeyExistsError(StorageError, FileExistsError):
    """Something is under this key already, and it was to be created."""


@dataclass(frozen=True)
class Entry:
    """One stored key."""

    key: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StorageTraits:
    """What a storage can do; asked instead of its class."""

    create_if_absent: bool
    """`write(create=True)` and `PartWriter.commit` have exactly one winner, whoever asks from
    wherever. False where they look first and then write: then a save's coordinator alone decides
    (see `ray_dcp.runtime.tasks`). Where a file of several requests is put together, `commit` of
    one may look first all the same: of two in the same moment the later stands, and the other is
    not told. Keys of data files carry their attempt, whose writers write equal bytes."""
    durable: bool
    """What was written survives a power cut."""
    shared: bool
    """Other processes see it (False for `memory://`)."""


@dataclass(frozen=True, kw_only=True)
class ReadTraits:
    """What reading from a storage is like: guesses by its kind, nothing is measured.

    Apart from `StorageTraits`, since these may have to be tried, which a reader must not.

    Examples:
        >>> ReadTraits().cached
        True
    """

    request_s: float = 20e-6
    """What a read costs before its first byte, in seconds: rather than begin another, a reader
    takes in what lies between."""
    bytes_per_s: float = 3e9
    """What one reading thread gets."""
    cached: bool = True
    """The processes of one machine read through one cache: what one of them has read costs the
    others no more than a copy."""
    shared: bool = True
    """Other processes see it."""
    durable: bool = False
    """What can be read survives a power cut. False where a writer that died may have named a file
    without making that durable."""


LOCAL_DISK = ReadTraits()
MEMORY = ReadTraits(request_s=1e-6, bytes_per_s=5e9, shared=False, durable=True)
NETWORK_DISK = ReadTraits(request_s=1e-3, bytes_per_s=250e6)
"""NFS, Lustre and the like: through the page cache of each node."""
OBJECT_STORE = ReadTraits(request_s=30e-3, bytes_per_s=100e6, cached=False, durable=True)


def read_traits_of(storage: object) -> ReadTraits:
    """Returns the `read_traits` of a storage; those of a local disk where it has none."""
    found = getattr(storage, "read_traits", None)
    return found if isinstance(found, ReadTraits) else LOCAL_DISK


def read_if_there(storage: Storage, key: str, most_bytes: int | None = None) -> bytes | None:
    """Returns the bytes of a key, or None if there is no such key.

    Args:
        storage: Where it lies.
        key: Which.
        most_bytes: What is longer is cut off there.

    Raises:
        StorageError: The storage refused.
    """
    try:
        return storage.read(key, 0, most_bytes)
    except KeyMissingError:
        return None


@runtime_checkable
class PartWriter(Protocol):
    """Writes one file front to back; nothing is visible before `commit`."""

    def write(self, data: BytesLike) -> None:
        """Appends bytes. They are consumed when the call returns.

        Raises:
            StorageError: The storage refused; the writer is only good for `abort` then.
        """
        ...

    def commit(self) -> None:
        """Makes the bytes durable and visible under the key, if that is still free.

        Raises:
            KeyExistsError: Somebody else published this key; it is durable.
            StorageError: Anything else; the bytes are not visible, or their fate is unknown.
        """
        ...

    def abort(self) -> None:
        """Drops what was written. Never raises; does nothing after `commit`."""
        ...


class OnceWriter:
    """Implements `PartWriter` for subclasses that say where the bytes go.

    One that is dropped while it is open is aborted: it leaves neither file nor thread behind.

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
        """See `PartWriter.commit`; does nothing when it was committed."""
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
        """Drops what was written; must not raise."""
        raise NotImplementedError


@runtime_checkable
class Storage(Protocol):
    """Keys to bytes under one root."""

    @property
    def url(self) -> str:
        """Absolute path or URL of the root, for messages and for `open_storage`."""
        ...

    @property
    def traits(self) -> StorageTraits:
        """What this storage can do; for those who are about to write, as it may have to be tried.

        Raises:
            StorageError: It could not be tried.
        """
        ...

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Returns the bytes `[start, start + num_bytes)` of a key, to its end by default.

        Fewer when the key is shorter.

        Raises:
            KeyMissingError: There is no such key.
            StorageError: Anything else.
        """
        ...

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start`.

        Raises:
            KeyMissingError: There is no such key.
            StorageError: The key is too short (`target` holds rubbish then), or anything else.
        """
        ...

    def write(self, key: str, data: BytesLike, *, create: bool = False) -> None:
        """Puts a small value under a key: atomically, and durable when it returns.

        Args:
            key: Where.
            data: What.
            create: Only if the key is free.

        Raises:
            KeyExistsError: `create` and the key is taken; durably so, whoever took it.
            StorageError: Anything else; whether it happened is unknown.
        """
        ...

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """Returns a writer for a large file.

        Args:
            key: Where.
            sync: Durable when committed, past the page cache if the storage can.
        """
        ...

    def list(self, prefix: str = "") -> list[Entry]:
        """Returns the keys that start with `prefix`, sorted, at any depth.

        An empty list when the root does not exist. Files that a writer has not yet published
        are not listed.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Removes keys; those that are gone already are fine.

        Raises:
            StorageError: One could not be removed; the others were tried.
        """
        ...


TEMP_PREFIX = ".tmp-"
"""File names that begin so are unpublished: not listed, and not legal in keys."""

_WAY_OUT = {
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "free quota there, or save elsewhere",
    errno.EROFS: "save to a place that is mounted writable",
    errno.EACCES: "give this user access, or choose another place",
    errno.EPERM: "give this user access, or choose another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENAMETOOLONG: "choose a shorter checkpoint path",
    errno.ENOTDIR: "choose a path whose parents are all directories",
    errno.EIO: "the device reports a failure: check it, and don't trust what it holds",
    errno.ESTALE: "the network filesystem lost this file: check its server, then retry",
    errno.EFBIG: "lower `part_bytes`: the filesystem can't hold a file of this size",
}


def is_full(error: CheckpointError | str) -> bool:
    """Returns whether an error, or its text, reports a full disk or quota.

    Examples:
        >>> is_full(os_failure(OSError(errno.ENOSPC, ""), "write", "a", "/run/a"))
        True
    """
    text = error if isinstance(error, str) else error.message
    # Why by the text: of what failed on another rank nothing else comes here.
    return "[ENOSPC]" in text or "[EDQUOT]" in text


def check_key(key: str, *, unpublished: bool = False) -> str:
    """Returns a key after checking that it stays below the root of a storage.

    Args:
        key: Relative, `/`-separated.
        unpublished: Accept names of unpublished temporary files (for removing them).

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
    """Tells whether a key is that of an unpublished file."""
    return key.rpartition("/")[2].startswith(TEMP_PREFIX)


def check_range(key: str, start: int, num_bytes: int | None) -> None:
    """Checks the range of a read.

    Raises:
        InvalidRequestError: It begins before the file, or has a negative length.
    """
    if start < 0 or (num_bytes is not None and num_bytes < 0):
        raise InvalidRequestError(
            f"a read must start at 0 or later and be 0 bytes or longer, but "
            f"start={start}, num_bytes={num_bytes}",
            key=key,
        )


def as_bytes_view(data: BytesLike) -> memoryview:
    """Returns a flat view of unsigned bytes of a contiguous buffer, without a copy.

    Raises:
        InvalidRequestError: `data` is no buffer, or is not C-contiguous.
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
    """Returns the `StorageError` that says what an `OSError` of a local path means.

    Args:
        exc: What the operating system said.
        doing: Verb for the message: "write", "read".
        key: The key concerned.
        path: The file or directory concerned.

    Returns:
        `KeyMissingError`, `KeyExistsError`, or a `StorageError` with the name of the errno, its
        text, the path and a way out.
    """
    if exc.errno == errno.ENOENT:
        return KeyMissingError(f"could not {doing} {path}: there is no such file", key=key)
    if exc.errno == errno.EEXIST:
        return KeyExistsError(f"could not {doing} {path}: it exists already", key=key)
    name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
    text = os.strerror(exc.errno) if exc.errno else str(exc)
    way_out = _WAY_OUT.get(exc.errno or 0)
    return StorageError(
        f"could not {doing} {path}: [{name}] {text}" + (f"; {way_out}" if way_out else ""), key=key
    )


class StorageWrapper:
    """Implements `Storage` by another one; subclasses do some of it their own way.

    Args:
        inner: The storage that does the work.

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
    """Implements the reading part of `Storage`.

    Args:
        inner: Of the directory.
        key: Of the file.
        suffix: Added to its key.

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
        # Why not all that begins so: there may be much beside the file, at any depth.
        found = super().list(self._name) if self._key.startswith(prefix) else []
        return [Entry(self._key, one.num_bytes) for one in found if one.key == self._name]

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise StorageError(f"{self.url} is one file: nothing is written or deleted here")

    write = open_writer = delete = _refuse

    def _check(self, key: str) -> None:
        if key != self._key:
            raise KeyMissingError(f"{self.url} is one file, and has no {key!r}", key=key)
