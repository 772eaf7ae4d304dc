"""Closes the managers that are open when the process ends: their saves end first."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

from ray_dcp.errors import CheckpointError

__all__ = ["close_at_exit", "forget"]

logger = logging.getLogger(__name__)


class _Closable(Protocol):
    def close(self) -> None:
        """Waits for what is under way."""
        ...


def close_at_exit(manager: _Closable) -> None:
    """Has a manager closed at the end of the process, unless that was done before.

    Args:
        manager: That has saves under way.
    """
    _open.add(manager)
    # Why with each save: handlers run in reverse order, and Ray's own, which ends the connection,
    # comes with the first `import ray`.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget(manager: _Closable) -> None:
    """Takes back `close_at_exit`."""
    _open.discard(manager)


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()
# Why: a forked child has none of the threads that end their saves.
os.register_at_fork(after_in_child=_open.clear)


def _close_all() -> None:
    for manager in list(_open):
        try:
            manager.close()
        except CheckpointError as error:
            logger.error("At the end of the process, of %r: %s", manager, error)
