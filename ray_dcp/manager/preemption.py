"""`Preemption`: the notice that this process is to end, as a signal gives it."""

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
"""SIGTERMs within this many seconds of the first one are the same notice. *Why*: a scheduler that
signals the whole job reaches a rank twice, directly and through `torchrun`, which forwards it."""


class Preemption:
    """The preemption notices of one manager: SIGTERM, or a call of the user.

    The first SIGTERM is recorded, and the process continues, so that it can save. A second one has
    the effect that it would have without a manager. So has the first one in a forked child, because
    `multiprocessing.Pool` ends its workers by SIGTERM.
    """

    def __init__(self) -> None:
        self._told = threading.Event()

    @property
    def is_told(self) -> bool:
        """Whether the process was notified."""
        return self._told.is_set()

    def tell(self) -> None:
        """Records that the machine will be taken away."""
        self._told.set()

    def listen(self) -> None:
        """Installs a SIGTERM handler; outside of the main thread, which can't, logs that."""
        if threading.current_thread() is not threading.main_thread():
            logger.info(
                "SIGTERM is not listened to, as the manager was not made in the main thread; "
                "call notice_preemption() when the machine is to be taken away"
            )
            return
        _listeners.add(self)
        _process[0] = os.getpid()
        if signal.getsignal(signal.SIGTERM) is not _take:
            _before[0] = signal.signal(signal.SIGTERM, _take)

    def stop(self) -> None:
        """Stops listening; the last listener restores the previous handler in the main thread."""
        _listeners.discard(self)
        if not _listeners:
            _first.clear()
        in_main = threading.current_thread() is threading.main_thread()
        if not _listeners and in_main and signal.getsignal(signal.SIGTERM) is _take:
            signal.signal(signal.SIGTERM, _or_default(_before[0]))


_listeners: weakref.WeakSet[Preemption] = weakref.WeakSet()
_before: list[Any] = [signal.SIG_DFL]
_process = [0]
"""Id of the process that listens. *Why*: a forked child inherits the listeners, but saves
nothing."""
_first: list[float] = []
"""Time of the notice; empty before it."""
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
    # Careful: checking only whether all are notified is not enough. They may be notified because of
    # another rank's notice, and the process would then be ended by its own first SIGTERM.
    if not _first or not all(one.is_told for one in _listeners):
        _first[:] = [now]
    return now - _first[0] < SAME_NOTICE_S


def _or_default(handler: Any) -> Any:
    # Why: None stands for a handler that was not set from Python, and can't be set again.
    return signal.SIG_DFL if handler is None else handler
