"""`LocalStorage`: keys to files of one directory, on a local disk or a shared filesystem.

Order of a write: temporary file in the same directory, its bytes, fsync, link or rename, fsync
of the directory. Large files are written by `local_writer`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ray_dcp.errors import StorageError
from ray_dcp.store.durable import publish, sync_directory, write_all
from ray_dcp.store.local_writer import LocalWriter, open_temp
from ray_dcp.store.mounts import is_network_disk
from ray_dcp.store.open_files import OpenFiles, open_regular
from ray_dcp.store.paths import TEMP_PREFIX, as_bytes_view, check_key, check_range, os_failure
from ray_dcp.store.probing import creates_if_absent
from ray_dcp.store.storage import (
    LOCAL_DISK,
    NETWORK_DISK,
    Entry,
    PartWriter,
    ReadTraits,
    StorageTraits,
)

__all__ = ["LocalStorage"]

_MAX_READ_BYTES = 1 << 30


class LocalStorage:
    """Implements `Storage` on a directory. Safe to use from several threads; can be pickled.

    Nothing is touched before the first read or write; directories are made on the first write.
    Symbolic links to files are followed, so that a folder of links (a Hugging Face cache) reads
    as it looks.

    Args:
        root: The directory. Relative paths are taken from the current directory now.
        durable: Make what is written survive a power cut. False only for throw-away places.
    """

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._durable = durable
        self._files = OpenFiles()

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self._root, self._durable))

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    @property
    def url(self) -> str:
        """Absolute path of the directory."""
        return self._root

    @property
    def read_traits(self) -> ReadTraits:
        """Of a disk in this machine, or of one behind the network."""
        return NETWORK_DISK if is_network_disk(self._root) else LOCAL_DISK

    @property
    def traits(self) -> StorageTraits:
        """Shared, and durable if so chosen; whether it creates if absent is tried when asked.

        See `ray_dcp.store.probing`: the first who asks in a process writes hidden files beside or
        in the directory for a moment. Readers have no reason to ask.

        Raises:
            StorageError: It could not be tried, as for a directory that is read-only.
        """
        try:
            creates = creates_if_absent(self._root)
        except OSError as exc:
            raise os_failure(exc, "create a file in", "", self._root) from exc
        return StorageTraits(create_if_absent=creates, durable=self._durable, shared=True)

    def close(self) -> None:
        """Closes the descriptors kept for reading; the storage stays usable."""
        self._files.close()

    def read(self, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        path = self._path(key)
        check_range(key, start, num_bytes)
        try:
            fd = open_regular(path)
            try:
                return _read(fd, start, num_bytes)
            finally:
                os.close(fd)
        except OSError as exc:
            raise _read_failure(exc, key, path) from exc

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See `Storage.read_into`."""
        path = self._path(key)
        view = as_bytes_view(target)
        check_range(key, start, len(view))
        try:
            with self._files.reading(path) as fd:
                done = _fill(fd, start, view)
        except OSError as exc:
            raise _read_failure(exc, key, path) from exc
        if done < len(view):
            raise StorageError(
                f"{path} is too short: wanted bytes [{start}, {start + len(view)}), but it ends "
                f"at {start + done} or before",
                key=key,
            )

    def write(
        self, key: str, data: bytes | bytearray | memoryview, *, create: bool = False
    ) -> None:
        """See `Storage.write`."""
        path = self._path(key)
        view = as_bytes_view(data)
        fd, temp = open_temp(path, key, sync=self._durable)
        try:
            try:
                write_all(fd, view)
                if self._durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            publish(temp, path, create=create, sync=self._durable)
        except OSError as exc:
            with suppress(OSError):
                os.unlink(temp)
            raise os_failure(exc, "create" if create else "write", key, path) from exc

    def open_writer(self, key: str, *, sync: bool = True) -> PartWriter:
        """See `Storage.open_writer`."""
        return LocalWriter(self._path(key), key, sync=sync and self._durable, direct=sync)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Storage.delete`. Directories that become empty are removed as well."""
        failures: list[StorageError] = []
        changed = False
        for key in keys:
            path = os.path.join(self._root, check_key(key, unpublished=True))
            self._files.forget(path)
            try:
                if "/" in key:
                    _check_inside(path, self._root, key)
                changed = _unlink(path, self._root) or changed
            except StorageError as exc:
                failures.append(exc)
            except OSError as exc:
                failures.append(os_failure(exc, "delete", key, path))
        if changed and self._durable:
            # Why: what is deleted next may be what this one referred to.
            try:
                sync_directory(self._root)
            except OSError as exc:
                failures.append(os_failure(exc, "delete from", "", self._root))
        if failures:
            error = failures[0]
            if len(failures) > 1:
                error.message += f" (and {len(failures) - 1} more keys could not be deleted)"
            raise error

    def unpublished(self) -> tuple[Entry, ...]:
        """Returns the temporary files of writers, live ones and those of crashed processes.

        Their names end with the name that they were to get, and so tell the attempt. `delete`
        takes their keys.
        """
        return tuple(_entries(self._root, "", published=False))

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    # Last: below it, `list` in an annotation would mean this method.
    def list(self, prefix: str = "") -> list[Entry]:
        """See `Storage.list`."""
        return _entries(self._root, prefix, published=True)


def _rebuild(root: str, durable: bool) -> LocalStorage:
    return LocalStorage(root, durable=durable)


def _entries(root: str, prefix: str, *, published: bool) -> list[Entry]:
    try:
        found = list(_walk(root, "", prefix, published))
    except OSError as exc:
        raise os_failure(exc, "list", prefix, exc.filename or root) from exc
    return sorted(found, key=lambda entry: entry.key)


def _walk(directory: str, base: str, prefix: str, published: bool) -> Iterator[Entry]:
    try:
        scan = os.scandir(directory)
    except FileNotFoundError:
        return
    with scan:
        for item in scan:
            key = base + item.name
            if item.is_dir(follow_symlinks=False):
                below = f"{key}/"
                if below.startswith(prefix) or prefix.startswith(below):
                    yield from _walk(item.path, below, prefix, published)
            elif key.startswith(prefix) and published != item.name.startswith(TEMP_PREFIX):
                # Suppressed: it was removed since the scan, or is a dangling link.
                with suppress(FileNotFoundError):
                    if item.is_file():
                        yield Entry(key, item.stat().st_size)


def _check_inside(path: str, root: str, key: str) -> None:
    """Raises `StorageError` for a file that lies elsewhere, by a link to its directory."""
    directory, inside = os.path.realpath(os.path.dirname(path)), os.path.realpath(root)
    if os.path.commonpath([directory, inside]) != inside:
        raise StorageError(
            f"could not delete {path}: by a link it lies in {directory}, outside of {root}; "
            f"remove the link",
            key=key,
        )


def _unlink(path: str, root: str) -> bool:
    """Removes a file, and directories that are empty then; tells whether it was there."""
    was_there = True
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        was_there = False  # but its directory may be: that of a file that was never published
    except OSError as exc:
        if os.path.isdir(path) and not os.path.islink(path):
            return False  # a directory is no key
        raise exc
    # Suppressed: it is not empty, or somebody else was faster.
    with suppress(OSError):
        directory = os.path.dirname(path)
        while len(directory) > len(root):
            os.rmdir(directory)
            directory = os.path.dirname(directory)
    return was_there


def _read(fd: int, start: int, num_bytes: int | None) -> bytes:
    left = max(0, os.fstat(fd).st_size - start)
    if num_bytes is not None:
        left = min(left, num_bytes)
    pieces = []
    while left:
        piece = os.pread(fd, min(left, _MAX_READ_BYTES), start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _fill(fd: int, start: int, view: memoryview) -> int:
    """Fills `view` from `start`; returns how many bytes there were."""
    done = os.preadv(fd, [view], start) if len(view) else 0
    while 0 < done < len(view):
        more = os.preadv(fd, [view[done:]], start + done)
        if more == 0:
            break
        done += more
    return done


def _read_failure(exc: OSError, key: str, path: str) -> StorageError:
    if exc.errno == errno.ENOTDIR:
        exc = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if exc.errno == errno.EINVAL:
        return StorageError(f"could not read {path}: it is not a regular file", key=key)
    return os_failure(exc, "read", key, path)
