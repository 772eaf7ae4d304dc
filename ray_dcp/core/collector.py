"""Pauses Python's cyclic garbage collector while many small objects are made."""

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
    """Pauses the garbage collector for the time of the block.

    Why: a table of 20,000 tensors is a few hundred thousand objects, none of them garbage. The
    search for cycles among them, and among all objects of the training program, takes a third of a
    save or load. Use it for steps that compute, not for steps that wait.

    Blocks may be nested, and used by several threads at once: the last one to leave restores the
    state that the first one found.
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
    """Resets the module in a forked child, in which no thread has paused the collector."""
    global _depth
    if _depth and _was_enabled:
        gc.enable()
    _depth = 0


os.register_at_fork(after_in_child=_begin_anew)
