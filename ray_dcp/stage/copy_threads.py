"""The threads that copy bytes in host memory.

*Why* several: one gets half of the memory bandwidth of a small machine, and a tenth of a large
one's. *Why* they stay for the next copy: to start them takes as long as to copy a window.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from ray_dcp.core.processes import wait_all

_SLICE_BYTES = 4 << 20
"""Longer memory is cut for the threads."""
_MOST_THREADS = 4

Pair = tuple[np.ndarray, np.ndarray]


def _new_helpers() -> ThreadPoolExecutor:
    """Returns a pool of copying threads; none is started before its first use."""
    return ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix="ray_dcp copies")


_helpers = _new_helpers()


def _begin_anew() -> None:
    """Makes a new pool in a forked child, which has none of the threads."""
    global _helpers
    _helpers = _new_helpers()


os.register_at_fork(after_in_child=_begin_anew)


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copies memory; returns when everything is in its place.

    The caller's thread takes part, and does all where no other gets a processor.

    Args:
        pairs: Target and source of each copy, both uint8[n] of one length.

    Raises:
        ValueError: Two lengths differ; nothing, some or all of the others is copied.

    Examples:
        >>> into = np.zeros(3, np.uint8)
        >>> copy_all([(into, np.arange(3, dtype=np.uint8))])
        >>> into
        array([0, 1, 2], dtype=uint8)
    """
    left = deque(
        (target[low : low + _SLICE_BYTES], found[low : low + _SLICE_BYTES])
        for target, found in pairs
        for low in range(0, max(len(target), len(found)), _SLICE_BYTES)
    )

    def work() -> None:
        try:
            while True:
                # Why numpy: unlike an assignment to a memoryview it lets other threads run.
                np.copyto(*left.popleft())
        except IndexError:
            return
        except BaseException:
            # Why: the caller may have been interrupted, and use the memory for something else.
            left.clear()
            raise

    helpers: list[Future[None]] = []
    # Suppressed: the interpreter ends, and starts no threads any more.
    with suppress(RuntimeError):
        for _ in range(min(copying_threads(), len(left)) - 1):
            helpers.append(_helpers.submit(work))
    try:
        work()
    finally:
        working = [one for one in helpers if not one.cancel()]
        wait_all(working)
    for one in working:
        one.result()


def copying_threads() -> int:
    """Returns the number of threads that copy at a time: one per processor, at most four."""
    asked = getattr(os, "sched_getaffinity", None)
    return min(_MOST_THREADS, len(asked(0)) if asked is not None else os.cpu_count() or 1)
