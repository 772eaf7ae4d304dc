"""`LocalWriter`: writes one large file front to back, past the page cache where it can.

Direct I/O (O_DIRECT) needs the memory address, the file offset and the length to be multiples of
4 KiB. Bytes therefore go through a small aligned bounce buffer, except where the caller's own
memory is as well aligned as the file; the tail is padded and cut off again at the end.

Source: measured for this project on ext4 and a virtual disk, 1 GiB to a new file: direct 0.38 s
with 0.01 s CPU, buffered with fsync at best 0.70 s with 0.28 s CPU.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress

import numpy as np

from ray_dcp.errors import StorageError
from ray_dcp.store.durable import (
    create_temp,
    first_existing_parent,
    publish,
)
from ray_dcp.store.paths import as_bytes_view, os_failure

__all__ = ["LocalWriter", "open_temp"]

_PAGE = 4096
_BOUNCE_BYTES = 4 << 20
_DIRECT_MIN_BYTES = 256 << 10
"""Shorter aligned memory is copied: one large request beats several small ones."""


class LocalWriter:
    """Implements `PartWriter`; owns a temporary file and a bounce buffer until it is closed.

    Args:
        path: The file to publish.
        key: Its key, for messages.
        sync: Make it durable when committed.
        direct: Try direct I/O.

    Raises:
        StorageError: The temporary file can't be made.
    """

    def __init__(self, path: str, key: str, *, sync: bool, direct: bool) -> None:
        self._path = path
        self._key = key
        self._sync = sync
        self._state = "open"
        self._fd, self._temp, self._direct = _open_maybe_direct(path, key, direct, sync)
        self._bounce = mmap.mmap(-1, _BOUNCE_BYTES)
        self._view = memoryview(self._bounce)
        self._fill = 0
        self._flushed = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `PartWriter.write`."""
        self._check_open()
        view = as_bytes_view(data)
        try:
            if len(view) >= _DIRECT_MIN_BYTES:
                view = self._write_in_place(view)
            self._write_copied(view)
        except OSError as exc:
            raise os_failure(exc, "write", self._key, self._path) from exc

    def commit(self, *, create: bool = True) -> None:
        """See `PartWriter.commit`; does nothing when it was committed.

        Args:
            create: Only if the name is free; else it takes the place of what has it.
        """
        if self._state == "committed":
            return
        self._check_open()
        try:
            self._finish()
            publish(self._temp, self._path, create=create, sync=self._sync)
        except OSError as exc:
            self.abort()
            raise os_failure(exc, "publish", self._key, self._path) from exc
        self._state = "committed"

    def abort(self) -> None:
        """See `PartWriter.abort`."""
        if self._state != "open":
            return
        self._state = "aborted"
        self._close()
        with suppress(OSError):
            os.unlink(self._temp)

    def __del__(self) -> None:
        # Why: a writer dropped without commit must leave neither descriptor nor file behind.
        if getattr(self, "_state", None) == "open" and hasattr(self, "_view"):
            self.abort()

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(
                f"the writer of {self._path} was {self._state}; open another", key=self._key
            )

    def _write_in_place(self, view: memoryview) -> memoryview:
        """Writes what can go out from the caller's memory; returns what is left of it."""
        if self._direct:
            address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
            head = -self._fill % _PAGE
            if (address + head) % _PAGE:
                return view
            self._write_copied(view[:head])
            view = view[head:]
        whole = len(view) // _PAGE * _PAGE
        # Why together: a request of one page costs as much as one of a hundred.
        parts = [self._view[: self._fill], view[:whole]]
        self._flushed += _pwrite(self._fd, parts, self._flushed)
        self._fill = 0
        return view[whole:]

    def _write_copied(self, view: memoryview) -> None:
        while len(view):
            piece = view[: _BOUNCE_BYTES - self._fill]
            self._view[self._fill : self._fill + len(piece)] = piece
            self._fill += len(piece)
            view = view[len(piece) :]
            if self._fill == _BOUNCE_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Empties the bounce buffer; its length must be whole pages when writing direct."""
        self._flushed += _pwrite(self._fd, [self._view[: self._fill]], self._flushed)
        self._fill = 0

    def _finish(self) -> None:
        num_bytes = self._flushed + self._fill
        if self._direct and self._fill % _PAGE:
            padded = self._fill + -self._fill % _PAGE
            self._view[self._fill : padded] = bytes(padded - self._fill)
            self._fill = padded
        self._flush()
        if self._flushed != num_bytes:
            os.ftruncate(self._fd, num_bytes)
        if self._sync:
            os.fsync(self._fd)
        # Why not suppressed: without fsync, a network filesystem tells only now what it refused.
        self._close(strict=True)

    def _close(self, *, strict: bool = False) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._view.release()
            # Why: the traceback of a write that failed still holds a piece of the buffer.
            with suppress(BufferError):
                self._bounce.close()
            try:
                os.close(fd)
            except OSError:
                if strict:
                    raise


def open_temp(path: str, key: str, flags: int = 0, *, sync: bool) -> tuple[int, str]:
    """Creates a temporary file beside `path`, as `create_temp`.

    Raises:
        StorageError: It can't be made; when its directory is missing and can't be made, the
            message names the nearest parent that exists.
    """
    try:
        return create_temp(path, flags, sync=sync)
    except OSError as exc:
        if exc.errno == errno.EINVAL and flags:
            raise
        directory = os.path.dirname(path)
        if os.path.isdir(directory):
            raise os_failure(exc, "create a file for", key, path) from exc
        error = os_failure(exc, "create the directory", key, directory)
        error.message += f" (the nearest parent that exists is {first_existing_parent(directory)})"
        raise error from exc


def _open_maybe_direct(path: str, key: str, direct: bool, sync: bool) -> tuple[int, str, bool]:
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    if flag:
        try:
            return *open_temp(path, key, flag, sync=sync), True
        except OSError as exc:
            if isinstance(exc, StorageError):
                raise
    return *open_temp(path, key, sync=sync), False


def _pwrite(fd: int, views: list[memoryview], offset: int) -> int:
    """Writes all views, one behind the other; leaves direct I/O where the filesystem refuses it."""
    done, left = 0, [view for view in views if len(view)]
    while left:
        try:
            count = os.pwritev(fd, left, offset + done)
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
        except OSError as exc:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if exc.errno != errno.EINVAL or not flags & getattr(os, "O_DIRECT", 0):
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return done
