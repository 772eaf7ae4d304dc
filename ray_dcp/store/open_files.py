"""A small thread-safe cache of files opened for reading, for `LocalStorage.read_into`."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["OpenFiles", "open_regular"]


@dataclass
class _OpenFile:
    fd: int
    identity: tuple[int, int]
    users: int = 0
    retired: bool = False


class OpenFiles:
    """Keeps the last few files open; owns their descriptors.

    A path that has come to name another file since (it was replaced or removed and written
    again) is opened afresh: the descriptor is used only while device and inode still match. While
    somebody reads the file, others read the same: it does not change between their reads.
    Descriptors in use by another thread are never closed under it. All are closed when the
    cache is dropped.

    Args:
        limit: Most descriptors kept while nobody uses them.
    """

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._files: dict[str, _OpenFile] = {}
        # Why not __del__: it also runs on half-built objects and at interpreter exit.
        weakref.finalize(self, _close_all, self._files)

    @contextmanager
    def reading(self, path: str) -> Iterator[int]:
        """Lends a descriptor of a regular file.

        Raises:
            OSError: It can't be opened; ENOENT also when `path` is a directory.
        """
        file = self._acquire(path)
        try:
            yield file.fd
        finally:
            self._release(file)

    def forget(self, path: str) -> None:
        """Closes the file of a path that is about to vanish, if it is kept."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is not None:
                _retire(file)

    def close(self) -> None:
        """Closes everything that is not in use; the cache stays usable."""
        with self._lock:
            for file in self._files.values():
                _retire(file)
            self._files.clear()

    def _acquire(self, path: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(path)
            # Why: a call of the system for each read makes threads that read side by side wait
            # for Python's global lock twice as often.
            if file is not None and file.users:
                file.users += 1
                return file
        now = os.stat(path)
        identity = (now.st_dev, now.st_ino)
        with self._lock:
            file = self._files.pop(path, None)
            if file is not None and file.identity != identity:
                _retire(file)
                file = None
            if file is None:
                file = _open(path)
            file.users += 1
            self._files[path] = file  # the last entry is the most recent
            self._evict()
        return file

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if file.retired and file.users == 0:
                os.close(file.fd)

    def _evict(self) -> None:
        surplus = len(self._files) - self._limit
        if surplus > 0:
            for path in list(self._files)[:surplus]:
                _retire(self._files.pop(path))


def open_regular(path: str) -> int:
    """Returns a descriptor for reading a regular file.

    Raises:
        OSError: As `os.open`; ENOENT for a directory, EINVAL for a device, pipe or socket.
    """
    # Why O_NONBLOCK: opening a named pipe that somebody left there would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        code = errno.ENOENT if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, os.strerror(code), path)
    return fd


def _open(path: str) -> _OpenFile:
    fd = open_regular(path)
    status = os.fstat(fd)
    return _OpenFile(fd, (status.st_dev, status.st_ino))


def _retire(file: _OpenFile) -> None:
    file.retired = True
    if file.users == 0:
        os.close(file.fd)


def _close_all(files: dict[str, _OpenFile]) -> None:
    for file in files.values():
        os.close(file.fd)
    files.clear()
