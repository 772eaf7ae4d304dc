"""Keys and errors that every storage shares: which keys are legal, what an errno means.

Opening a storage for a path or URL is in `opening`.
"""

from __future__ import annotations

import errno
import os

from ray_dcp.errors import InvalidRequestError, StorageError
from ray_dcp.store.storage import KeyExistsError, KeyMissingError

__all__ = ["TEMP_PREFIX", "as_bytes_view", "check_key", "check_range", "os_failure"]

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


def check_key(key: str, *, unpublished: bool = False) -> str:
    """Returns a key after checking that it stays below the root of a storage.

    Args:
        key: Relative, `/`-separated.
        unpublished: Accept names of unpublished temporary files (for removing them).

    Raises:
        InvalidRequestError: The key is empty or absolute, has an empty, `.` or `..` component, a
            backslash or a control character, or is reserved for unpublished files.

    Example:
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


def as_bytes_view(data: bytes | bytearray | memoryview) -> memoryview:
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
