"""Whether this process was notified that its machine is preempted: by SIGTERM, or by the caller.

The first SIGTERM is recorded, and the process goes on, so that it can save. A second one does what
it would have done without a manager; so does the first in a process that was forked from this one,
as `multiprocessing.Pool` ends its workers by it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

SAME_NOTICE_S = 5.0
"""SIGTERMs within so many seconds of the first are one notice. A scheduler that signals the whole
job reaches a rank twice: itself, and through `torchrun`, which passes its own on."""


class Preemption:
    """What one manager knows of it."""

    def __init__(self) -> None:
        self._told = threading.Event()

    @property
    def is_told(self) -> bool:
        """Whether the process was notified."""
        return self._told.is_set()

    def tell(self) -> None:
        """Notes that the machine will be taken away."""
        self._told.set()

    def listen(self) -> bool:
        """Begins to take SIGTERM; returns whether that is possible: only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                "SIGTERM is not listened to, as the manager was not made in the main thread; "
                "call notice_preemption() when the machine is to be taken away"
            )
            return False
        _listeners.add(self)
        _process[0] = os.getpid()
        if signal.getsignal(signal.SIGTERM) is not _take:
            _before[0] = signal.signal(signal.SIGTERM, _take)
        return True

    def stop(self) -> None:
        """Ends it; the last listener gives SIGTERM back, if it is in the main thread."""
        _listeners.discard(self)
        if not _listeners:
            _first.clear()
        in_main = threading.current_thread() is threading.main_thread()
        if not _listeners and in_main and signal.getsignal(signal.SIGTERM) is _take:
            signal.signal(signal.SIGTERM, _or_default(_before[0]))


_listeners: weakref.WeakSet[Preemption] = weakref.WeakSet()
_before: list[Any] = [signal.SIG_DFL]
_process = [0]
"""That listens: a fork has the listeners too, but nobody who would save for them."""
_first: list[float] = []
"""When the notice came, if it did."""
_clock = time.monotonic


def _take(number: int, frame: FrameType | None) -> None:
    if _listeners and _process[0] == os.getpid() and _is_first(_clock()):
        for one in _listeners:
            one.tell()
        return
    before = _or_default(_before[0])
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _is_first(now: float) -> bool:
    # Careful: that all are notified is not enough. Another rank's notice counts too, and then this
    # process would end by its own, in the middle of the save.
    if not _first or not all(one.is_told for one in _listeners):
        _first[:] = [now]
    return now - _first[0] < SAME_NOTICE_S


def _or_default(handler: Any) -> Any:
    # Why: None means a handler that was not set from Python, which can't be set again.
    return signal.SIG_DFL if handler is None else handler
