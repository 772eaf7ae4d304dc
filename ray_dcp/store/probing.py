"""Tries whether a filesystem gives a new name to exactly one of several who want it.

Tried once for each mounted filesystem of a process, with hidden files that are removed again.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from contextlib import suppress

from ray_dcp.store.durable import first_existing_parent, publish
from ray_dcp.store.mounts import mount_kind
from ray_dcp.store.paths import TEMP_PREFIX

__all__ = ["creates_if_absent"]

# ENOENT is what /proc and the like answer; ENOTDIR, that a parent is a file.
_NOT_ALLOWED = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP}
)

_LOCK = threading.Lock()
_KNOWN: dict[int, bool] = {}
"""By device number."""


def creates_if_absent(directory: str) -> bool:
    """Returns whether a new name in a directory has exactly one winner, on all machines.

    Files are made, named and removed to find out: hidden ones, of a name that no storage lists.
    Of a directory that is not there yet, its nearest parent is tried, which lies on the same
    filesystem.

    *Why* FUSE needs hard links for a yes: without them, a bridge to an object store looks whether
    the name is free and then writes, and two machines may both find it so. One process can't see
    that, but no such bridge has hard links.

    Args:
        directory: Absolute path.

    Returns:
        False also where this process may write nothing (not remembered: that may change).

    Raises:
        OSError: It could not be tried: the disk is full, or the server is gone.
    """
    directory = first_existing_parent(directory)
    try:
        device = os.stat(directory).st_dev
        with _LOCK:
            if device not in _KNOWN:
                _KNOWN[device] = _tried(directory, device)
            return _KNOWN[device]
    except OSError as exc:
        if exc.errno in _NOT_ALLOWED:
            return False
        raise


def _tried(directory: str, device: int) -> bool:
    token = secrets.token_hex(6)
    first, second, name, link = (
        os.path.join(directory, f"{TEMP_PREFIX}{token}-probe-{role}")
        for role in ("first", "second", "name", "link")
    )
    try:
        for path in (first, second):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        publish(first, name, create=True, sync=False)
        try:
            publish(second, name, create=True, sync=False)
        except FileExistsError:
            return _has_links(name, link) or not _may_be_bridge(device)
        return False
    finally:
        for path in (first, second, name, link):
            with suppress(OSError):
                os.unlink(path)


def _has_links(path: str, link: str) -> bool:
    try:
        os.link(path, link)
    except OSError:
        return False
    return True


def _may_be_bridge(device: int) -> bool:
    """Tells whether a filesystem is, or may be, a FUSE one that is not on a local disk."""
    kind = mount_kind(device)
    return kind is None or kind == "fuse" or kind.startswith("fuse.")
