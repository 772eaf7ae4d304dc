"""Tries whether a filesystem gives a new name to exactly one of several who want it.

Tried once for each mounted filesystem of a process, with hidden files that are removed again.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress

from ray_dcp.store.durable import creates_once, first_existing_parent
from ray_dcp.store.mounts import may_create_twice, mount_kind
from ray_dcp.store.paths import TEMP_PREFIX

__all__ = ["creates_if_absent"]

_LOCK = threading.Lock()
_KNOWN: dict[int, bool] = {}
"""By device number."""


def creates_if_absent(directory: str) -> bool:
    """Returns whether a new name in a directory has exactly one winner, on all machines.

    Files are made, named and removed to find out: hidden ones, of a name that no storage lists.
    Of a directory that is not there yet, its nearest parent is tried, which lies on the same
    filesystem.

    Args:
        directory: Absolute path.

    Raises:
        OSError: It could not be tried: this process may not write there, the disk is full, or the
            server is gone. Not remembered.
    """
    directory = first_existing_parent(directory)
    device = os.stat(directory).st_dev
    with _LOCK:
        if device not in _KNOWN:
            _KNOWN[device] = _tried(directory)
        return _KNOWN[device]


def _tried(directory: str) -> bool:
    token = secrets.token_hex(6)
    first, second, name = (
        os.path.join(directory, f"{TEMP_PREFIX}{token}-probe-{role}")
        for role in ("first", "second", "name")
    )
    try:
        for path in (first, second):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return creates_once(first, second, name) and not may_create_twice(mount_kind(directory))
    finally:
        for path in (first, second, name):
            with suppress(OSError):
                os.unlink(path)
