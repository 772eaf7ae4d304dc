"""Keeps Python's cyclic garbage collector out of the way while many small objects are made."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ray_dcp.core.processes import ProcessLock

_lock = ProcessLock()
_depth = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps the collector from walking a million new objects that are all in use.

    Why: a table of 20,000 tensors is a few hundred thousand objects, none of them garbage, and
    looking for cycles among them, and among all of the training program's own, took a third of a
    save and a load. For steps that compute, not for those that wait.

    May be nested, and used by several threads at once: the last one to leave restores what the
    first one found.
    """
    global _depth, _was_enabled
    with _lock:
        _depth += 1
        if _depth == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            _depth = max(_depth - 1, 0)
            if _depth == 0 and _was_enabled:
                gc.enable()


def _begin_anew() -> None:
    """Begins anew in a child that was forked: whoever had paused the collector is not here."""
    global _depth
    if _depth and _was_enabled:
        gc.enable()
    _depth = 0


os.register_at_fork(after_in_child=_begin_anew)
