"""Copies memory on several threads, which stay for the next copy.

*Why*: one thread gets half of what the memory of a small machine gives, and a tenth of a large
one's; and to start threads takes as long as to copy a window.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

__all__ = ["copy_all"]

_SLICE_BYTES = 4 << 20
"""Longer memory is cut for the threads."""
_MOST_THREADS = 4

Pair = tuple[np.ndarray, np.ndarray]

_helpers = ThreadPoolExecutor(_MOST_THREADS - 1, thread_name_prefix="ray_dcp copies")
"""Starts no thread before it is used."""


def copy_all(pairs: Iterable[Pair], num_threads: int | None = None) -> None:
    """Copies memory; returns when everything is in its place.

    The caller's thread takes part, and does all where no other gets a processor.

    Args:
        pairs: Where to and where from, each uint8[n] of one length.
        num_threads: That copy; by default as many as have a processor, up to four.

    Raises:
        ValueError: Two lengths differ; nothing, some or all of the others is copied.

    Example:
        >>> into = np.zeros(3, np.uint8)
        >>> copy_all([(into, np.arange(3, dtype=np.uint8))])
        >>> into
        array([0, 1, 2], dtype=uint8)
    """
    batch = _Batch(pairs)
    threads = min(num_threads or _processors(), _MOST_THREADS, len(batch))
    try:
        # Suppressed: the interpreter ends, and starts no threads any more.
        with suppress(RuntimeError):
            for _ in range(threads - 1):
                _helpers.submit(batch.work)
        batch.work()
    except BaseException:
        # Why: the caller was interrupted, and may use the memory for something else.
        batch.give_up()
        raise
    finally:
        batch.join()
    batch.check()


class _Batch:
    """Copies that any thread may take, one by one."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._left = deque(
            (target[low : low + _SLICE_BYTES], found[low : low + _SLICE_BYTES])
            for target, found in pairs
            for low in range(0, max(len(target), len(found)), _SLICE_BYTES)
        )
        self._changed = threading.Condition()
        self._working = 0
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._left)

    def work(self) -> None:
        """Copies until nothing is left."""
        with self._changed:
            self._working += 1
        try:
            while True:
                # Why numpy: unlike an assignment to a memoryview it lets other threads run.
                np.copyto(*self._left.popleft())
        except IndexError:
            pass
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
            self.give_up()
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def give_up(self) -> None:
        """Takes that nothing more is to be copied."""
        self._left.clear()

    def join(self) -> None:
        """Returns when nobody works any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)

    def check(self) -> None:
        """Raises what went wrong."""
        if self._error is not None:
            raise self._error


def _processors() -> int:
    asked = getattr(os, "sched_getaffinity", None)
    return len(asked(0)) if asked is not None else os.cpu_count() or 1
