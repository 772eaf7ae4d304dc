"""Events of a save or load on each rank, as frozen values, with their log.

To receive events, call `subscribe`, or add a handler to the logger `ray_dcp.events` and read
`record.event`, a JSON-serializable dict. The end of a save or load on rank 0 is logged at INFO (one
line for each save and load of a job), all other events at DEBUG. `coordinator.metrics` derives
metrics from the same events.

After a commit, and after a load has filled the last byte, only reports remain: events, warnings,
which may be errors (`python -W error`), logs, whose handlers may raise, and calls of user objects.
None of them may turn a committed save, or a load, into a failure: `contained` and `warn` see to
that.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ray_dcp.core.processes import ProcessLock
from ray_dcp.core.quantities import seconds_text, size_text
from ray_dcp.errors import CommitUnknownError, SaveCancelledError, SaveSkippedError

__all__ = ["LOGGER_NAME", "Event", "emit", "outcome_of", "subscribe"]

LOGGER_NAME = "ray_dcp.events"

Listener = Callable[["Event"], None]

_logger = logging.getLogger(LOGGER_NAME)
_reports = logging.getLogger("ray_dcp.reports")
_lock = ProcessLock()
_listeners: tuple[Listener, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Event:
    """The end of a phase, of a save or of a load, on one rank.

    A save emits `save.capture`, `save.plan`, `save.stage`, `save.write` and `save.commit`, each
    when that phase ends or fails, and then exactly one end event: `save.committed`, `save.failed`,
    `save.cancelled`, `save.skipped` or `save.unknown`. A load emits `load.plan`, `load.read` and
    `load.finish`, and then `load.loaded` or `load.failed`. The seconds of the phases add up to
    those of the end event. An export in the background of a run emits `export.exported` or
    `export.failed` alone.

    Examples:
        >>> event = Event(name="save.stage", checkpoint_id="/run/step-1", seconds=0.5, num_bytes=8)
        >>> event.as_dict()["num_bytes"], event.is_end
        (8, False)
        >>> print(event)
        save.stage /run/step-1 on rank 0: 500 ms, 8 B
    """

    name: str
    checkpoint_id: str | None = None
    """Path or URL; None when only a third-party plug-in knows it."""
    rank: int = 0
    world_size: int = 1
    mode: str = ""
    """The function that was called: `"save"`, `"async_save"` or `"load"`."""
    path: str = ""
    """`"native"`, `"planner hooks"` or `"foreign storage"`."""
    attempt: str | None = None
    """Id of the attempt of a save, once it is planned."""
    plan: str | None = None
    """Origin of the plan of a save, once it is planned; see `SaveReport.plan`."""
    seconds: float = 0.0
    """Duration of the phase; at an end, of the whole save or load."""
    stall_s: float | None = None
    """At the end of a save: how long training waited, in seconds."""
    num_bytes: int = 0
    """Bytes that this rank staged, wrote or read in this phase; at an end, wrote or read in all."""
    staged_bytes: int = 0
    """At the end of a save: bytes that were copied for it."""
    memory_bytes: int = 0
    """At the end of a load: the part of `num_bytes` that came from the memory of the nodes."""
    error: str | None = None
    """At an end by failure: type and message of the error."""

    @property
    def outcome(self) -> str:
        """The part of `name` after the dot: the phase, or how the save or load ended."""
        return self.name.partition(".")[2]

    @property
    def is_end(self) -> bool:
        """Whether this is the last event of its save, load or export."""
        return self.outcome in _ENDS

    def as_dict(self) -> dict[str, object]:
        """Returns the fields that are not None, as a JSON-serializable dict."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __str__(self) -> str:
        took = seconds_text(self.seconds)
        text = f"{self.name} {self.checkpoint_id} on rank {self.rank}: {took}"
        text += f", {size_text(self.num_bytes)}" if self.num_bytes else ""
        return text + (f", {self.error}" if self.error else "")


_ENDS = ("committed", "failed", "cancelled", "skipped", "unknown", "loaded", "exported")


def outcome_of(error: BaseException | None, good: str) -> str:
    """Returns the word with which event names describe how a save or load ended.

    Args:
        error: The exception that it raised, or None.
        good: The word for success.

    Examples:
        >>> outcome_of(SaveSkippedError("enough"), "committed")
        'skipped'
    """
    match error:
        case None:
            return good
        case SaveSkippedError():
            return "skipped"
        case SaveCancelledError():
            return "cancelled"
        case CommitUnknownError():
            return "unknown"
    return "failed"


def subscribe(listener: Listener) -> Callable[[], None]:
    """Registers a function that is called with every event of this process.

    Args:
        listener: The function. It runs in the thread that emits the event, so it must be quick.
            Exceptions that it raises are logged and otherwise ignored.

    Returns:
        A function that ends the subscription.

    Examples:
        >>> heard = []
        >>> unsubscribe = subscribe(heard.append)
        >>> emit(Event(name="save.committed", checkpoint_id="/run/step-1"))
        >>> unsubscribe()
        >>> heard[0].outcome
        'committed'
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
    """Logs an event, with the event itself as `record.event`, and passes it to all listeners.

    Args:
        event: The event.
    """
    level = logging.INFO if event.is_end and event.rank == 0 else logging.DEBUG
    with contained(f"The log of {event.name}"):
        if _logger.isEnabledFor(level):
            _logger.log(level, "%s", event, extra={"event": event.as_dict()})
    for listener in _listeners:
        try:
            listener(event)
        except Exception:
            with contained("The log of a listener"):
                _logger.exception("A listener of events failed on %s", event)


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Logs an exception raised in the block, and continues.

    Args:
        what: What reports, for the log.

    Examples:
        >>> _reports.disabled = True
        >>> with contained("a listener"):
        ...     raise ValueError("no")
        >>> _reports.disabled = False
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, what it reports stands
        # Suppressed: the exception may come from a log handler.
        with suppress(Exception):
            _reports.warning("%s failed: %s: %s", what, type(error).__name__, error)


def warn(message: str, *, stacklevel: int) -> None:
    """Warns the user; if warnings are errors, logs the message instead.

    Args:
        message: The warning.
        stacklevel: Argument of `warnings.warn`, counted from the caller.
    """
    with contained("A warning"):
        try:
            warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
        except UserWarning:
            _reports.warning("%s", message)
