"""Times the phases of saves and loads, as events and as Prometheus metrics `dcp_*`.

`Account` times one save or load on one rank, and emits its events. It looks at the requests that
the rank sends and at the replies that it gets, and so needs nothing of the code that it times.

The metrics, of staging memory too, go through `ray.util.metrics`. Ray exports them on each node's
metrics port, with the prefix `ray_` and, for counters, the suffix `_total`; the exporter comes with
`pip install "ray[default]"`. Only processes that are connected to Ray record anything. No error of
events or metrics reaches a save.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

from ray_dcp import events
from ray_dcp.events import Event, outcome_of
from ray_dcp.protocol.messages import (
    LoadDone,
    LoadOutcome,
    LoadProceed,
    LoadReady,
    Reply,
    Request,
    SaveAgain,
    SaveGo,
    SaveJoin,
    SaveOutcome,
    SaveReceipt,
)
from ray_dcp.runtime import metrics

logger = logging.getLogger(__name__)

SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0]
"""Bounds of the histograms: from a warm stall of a small state to a large load."""

METRICS = {
    "dcp_saves": ("Counter", "Saves that ended, by outcome; told by rank 0", ("outcome", "mode")),
    "dcp_loads": ("Counter", "Loads that ended, by outcome; told by rank 0", ("outcome",)),
    "dcp_staged_bytes": ("Counter", "Bytes that ranks copied so that training went on", ()),
    "dcp_written_bytes": ("Counter", "Bytes of committed part files", ()),
    "dcp_read_bytes": ("Counter", "Bytes that loads read, by where they came from", ("source",)),
    "dcp_takeovers": ("Counter", "Times that another stager took a rank's bytes over", ()),
    "dcp_save_stall_seconds": ("Histogram", "How long training waited for a save", ("mode",)),
    "dcp_save_durable_seconds": (
        "Histogram", "From the call to the commit of a save; told by rank 0", ("mode",)
    ),
    "dcp_load_seconds": ("Histogram", "How long a load took; told by rank 0", ()),
    "dcp_staging_used_bytes": ("Gauge", "Staging memory of a node that holds bytes", ()),
    "dcp_staging_limit_bytes": ("Gauge", "Staging memory that a node may use", ()),
}  # fmt: skip
"""Name -> kind, description, and the tags that tell its series apart."""


def count(event: Event) -> None:
    """Counts the end of a save or load; does nothing where Ray is not up, and never raises."""
    if not event.is_end or not _ray_is_up():
        return
    try:
        _count(event)
    except Exception as error:  # noqa: BLE001 - no save fails because it could not be counted
        logger.debug("An event was not counted: %s", error)


def staging_memory(used_bytes: int, limit_bytes: int) -> None:
    """Sets the gauges of a node's staging memory; never raises.

    Args:
        used_bytes: That hold staged bytes.
        limit_bytes: That may.
    """
    try:
        _metric("dcp_staging_used_bytes").set(used_bytes)
        _metric("dcp_staging_limit_bytes").set(limit_bytes)
    except Exception as error:  # noqa: BLE001 - see `count`
        logger.debug("Staging memory was not counted: %s", error)


def _count(event: Event) -> None:
    first = event.rank == 0
    if event.name.startswith("load."):
        if first:
            _metric("dcp_loads").inc(1, {"outcome": event.outcome})
            _metric("dcp_load_seconds").observe(event.seconds)
        memory = event.memory_bytes
        _add("dcp_read_bytes", event.num_bytes - memory, {"source": "storage"})
        _add("dcp_read_bytes", memory, {"source": "memory"})
        return
    mode = {"mode": event.mode}
    committed = event.outcome == "committed"
    if first:
        _metric("dcp_saves").inc(1, {"outcome": event.outcome, **mode})
        if committed:
            _metric("dcp_save_durable_seconds").observe(event.seconds, mode)
    if event.stall_s is not None:
        _metric("dcp_save_stall_seconds").observe(event.stall_s, mode)
    _add("dcp_staged_bytes", event.staged_bytes)
    _add("dcp_written_bytes", event.num_bytes if committed else 0)
    _add("dcp_takeovers", event.takeovers)


def _add(name: str, value: int, tags: dict[str, str] | None = None) -> None:
    # Why: a counter of Ray's takes no zero.
    if value > 0:
        _metric(name).inc(value, tags)


@cache
def _metric(name: str) -> Any:
    from ray.util import metrics

    kind, description, tag_keys = METRICS[name]
    if kind == "Histogram":
        return metrics.Histogram(name, description, boundaries=SECONDS, tag_keys=tag_keys)
    return getattr(metrics, kind)(name, description, tag_keys=tag_keys)


def _ray_is_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


STALL = ("capture", "plan", "stage")
"""Phases of an asynchronous save for which training waits, unless it stages in the background."""


class Account:
    """What one save or load takes on one rank. As a context manager it also tells the end.

    Args:
        mode: `"save"`, `"async_save"` or `"load"`.
        checkpoint_id: Path or URL, if it is known.
        rank: This rank.
        world_size: Number of ranks.
        path: Which way it goes; see `SaveReport.path`.
        clock: Seconds that never go back.

    Attributes:
        seconds: How long each phase took so far.
        bytes: Bytes that each phase moved, of those that move some.
        attempt: Of a save, once it is planned.
        plan: Of a save, once it is planned: see `SaveReport.plan`.
        waited_s: See `SaveReport.waited_s`.

    Example:
        >>> now = iter([0.0, 2.0, 5.0])
        >>> account = Account("async_save", "/run/step-1", clock=lambda: next(now))
        >>> account.done("stage", 100)
        >>> account.seconds, account.bytes
        ({'stage': 2.0}, {'stage': 100})
    """

    def __init__(
        self,
        mode: str,
        checkpoint_id: str | None,
        *,
        rank: int = 0,
        world_size: int = 1,
        path: str = "native",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}
        self.attempt: str | None = None
        self.plan: str | None = None
        self.takeovers = 0
        self.waited_s: float | None = None
        self._mode = mode
        self._kind = "load" if mode == "load" else "save"
        self._checkpoint_id = checkpoint_id
        self._rank, self._world_size, self._path = rank, world_size, path
        self._clock = clock
        self._began_s = self._last_s = clock()
        self._planned_bytes = self._memory_bytes = 0
        self._lock = threading.Lock()
        self._ended = False

    @property
    def stall_s(self) -> float:
        """How long training has waited for it so far, in seconds."""
        if self._mode != "async_save":
            return sum(self.seconds.values())
        if self.waited_s is not None:
            return sum(self.seconds.get(phase, 0.0) for phase in STALL[:2]) + self.waited_s
        return sum(self.seconds.get(phase, 0.0) for phase in STALL)

    @property
    def bytes_written(self) -> int:
        """Bytes of this rank's part files that are known to be durable."""
        return self.bytes.get("write", 0)

    def done(self, phase: str, num_bytes: int = 0) -> None:
        """Notes that a phase ended, which began when the one before did.

        Args:
            phase: See `Event`.
            num_bytes: That it moved.
        """
        with self._lock:
            now_s = self._clock()
            took_s, self._last_s = now_s - self._last_s, now_s
            self.seconds[phase] = self.seconds.get(phase, 0.0) + took_s
            if num_bytes:
                self.bytes[phase] = self.bytes.get(phase, 0) + num_bytes
        self._tell(phase, took_s, num_bytes)

    def planned(self, go: SaveGo) -> None:
        """Notes what this rank is to write: where stagers do, nobody tells it how much that was.

        Args:
            go: Its part of the plan.
        """
        self._planned_bytes = sum(file.num_bytes for file in go.plan.files)

    def watching(self, call: Callable[[Request], Reply]) -> Callable[[Request], Reply]:
        """Returns what calls the coordinator and notes the phases that end with it.

        Args:
            call: Returns the coordinator's reply.
        """

        def watched(request: Request) -> Reply:
            self._asks(request)
            reply = call(request)
            self._hears(reply)
            return reply

        return watched

    def end(self, error: BaseException | None = None) -> None:
        """Tells how it ended; once, whoever calls it again.

        Args:
            error: What it raised.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            took_s = self._clock() - self._began_s
        outcome = outcome_of(error, "loaded" if self._kind == "load" else "committed")
        self._tell(
            outcome,
            took_s,
            self.bytes.get("read", 0) if self._kind == "load" else self.bytes_written,
            error=None if error is None else f"{type(error).__name__}: {error}",
            stall_s=None if self._kind == "load" else self.stall_s,
            staged_bytes=self.bytes.get("stage", 0),
            takeovers=self.takeovers,
            memory_bytes=self._memory_bytes,
        )

    def __enter__(self) -> Account:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(error)

    def _asks(self, request: Request) -> None:
        match request:
            case SaveJoin() if "capture" not in self.seconds:
                self.done("capture")
            case SaveReceipt():
                self.done("write", sum(file.num_bytes for file in request.files))
            case LoadReady():
                self.done("plan")
            case LoadDone():
                self._memory_bytes += request.bytes_from_memory
                self.done("read", request.bytes_read)

    def _hears(self, reply: Reply) -> None:
        match reply:
            case SaveGo() | SaveAgain():
                self.attempt = reply.attempt
                self.plan = reply.origin
                self.done("plan")
            case SaveOutcome() if "write" in self.seconds:
                self.done("commit")
            case SaveOutcome():
                # A stager wrote: this rank can't tell its writing from the commit.
                self.done("write", self._planned_bytes)
            case LoadProceed():
                self.done("plan")
            case LoadOutcome():
                self.done("finish")

    def _tell(self, outcome: str, seconds: float, num_bytes: int, **more: object) -> None:
        try:
            event = Event(
                name=f"{self._kind}.{outcome}",
                checkpoint_id=self._checkpoint_id,
                rank=self._rank,
                world_size=self._world_size,
                mode=self._mode,
                path=self._path,
                attempt=self.attempt,
                plan=self.plan,
                seconds=seconds,
                num_bytes=num_bytes,
                **more,  # type: ignore[arg-type]
            )
            events.emit(event)
            metrics.count(event)
        except Exception as failed:  # noqa: BLE001 - a user's log handler must not fail a save
            logger.debug("An event was not told: %s", failed)
