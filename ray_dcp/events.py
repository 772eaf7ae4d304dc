"""What happens in saves and loads of this process, as frozen values for whoever listens.

Every `begun` has exactly one end: `done` or `failed`. Logs and metrics are listeners.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "emit", "subscribe"]

logger = logging.getLogger(__name__)

Listener = Callable[["Event"], None]

_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened on one rank."""

    operation: str
    """`save`, `async_save`, `load`, `load_newest`, or DCP's older forms."""
    phase: str
    """What of it: the operation's own name for the whole of it; `local_step`, `global_step`,
    `write_data`, `finish_checkpoint`, `read_metadata` and `read_data` as in DCP; `upload` for what
    an asynchronous save does after it returned."""
    what: Literal["begun", "done", "failed"]
    operation_id: str
    """Equal in all events of one call on one rank."""
    rank: int
    checkpoint_id: str | None = None
    """Path or URL; None when only a plug-in knows."""
    seconds: float | None = None
    """How long it took; None when it has just begun."""
    error: str | None = None
    """What went wrong, for `failed`."""


def subscribe(listener: Listener) -> Callable[[], None]:
    """Lets a function hear every event of this process.

    Args:
        listener: Called in the thread in which it happens, so it must be quick. What it raises is
            logged, and nothing else comes of it.

    Returns:
        A function that ends it.

    Example:
        >>> heard = []
        >>> unsubscribe = subscribe(heard.append)
        >>> emit(Event(operation="save", phase="save", what="begun", operation_id="1", rank=0))
        >>> unsubscribe()
        >>> heard[0].what
        'begun'
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)

    def unsubscribe() -> None:
        global _listeners
        with _lock:
            _listeners = tuple(each for each in _listeners if each is not listener)

    return unsubscribe


def emit(event: Event) -> None:
    """Tells all listeners.

    Args:
        event: What happened.
    """
    for listener in _listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener of events failed on %s", event)
