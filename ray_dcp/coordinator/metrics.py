"""Prometheus metrics `dcp_*` of saves and loads, and traces of saves.

The metrics, including those of staging memory, use `ray.util.metrics`. Ray exports them on each
node's metrics port, with the prefix `ray_` and, for counters, the suffix `_total`; the exporter is
part of `pip install "ray[default]"`. Only processes that are connected to Ray record metrics. No
error of events or metrics fails a save.

`Tracing` keeps the phases that ranks send, and the coordinator's tasks (`SaveRecord`). It writes
the trace of a save beside the checkpoint once its record exists, while `.metadata` is published and
replaced files are deleted. Durations are those of each rank's own clock. As ranks are compared on
the coordinator's clock, a rank has begun as early as its messages allow: one that says that it has
worked for 3 s, and arrives at 10 s, may be late, so the rank began at 7 s or before. What a stager
writes ends when its report arrives.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from ray_dcp.commit_protocol.commands import (
    Answer,
    BuildCommit,
    CreateRecord,
    MakePlan,
    Perform,
    PublishMetadata,
    ReadRecords,
    Result,
    Task,
    WriteTable,
)
from ray_dcp.commit_protocol.messages import (
    REUSED,
    OpKey,
    PartsHeld,
    PartsWritten,
    Phases,
    Refused,
    Request,
    SaveGo,
    SaveJoin,
    SaveReceipt,
    SaveStaged,
    Target,
)
from ray_dcp.core import bounds
from ray_dcp.core.processes import start_thread
from ray_dcp.errors import LimitError
from ray_dcp.events import Event
from ray_dcp.format.save_trace import (
    PHASES,
    RankTimes,
    SaveTrace,
    Span,
    encode_trace,
    make_trace,
    trace_key,
)
from ray_dcp.store.opening import open_storage
from ray_dcp.store.storage import Storage

logger = logging.getLogger(__name__)

SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0]
"""Bounds of the histograms: from the stall of a small warm save to a large load."""

METRICS = {
    "dcp_saves": ("Counter", "Saves that ended, by outcome; from rank 0", ("outcome", "mode")),
    "dcp_loads": ("Counter", "Loads that ended, by outcome; from rank 0", ("outcome",)),
    "dcp_staged_bytes": ("Counter", "Bytes that ranks copied so that training went on", ()),
    "dcp_written_bytes": ("Counter", "Bytes of committed part files", ()),
    "dcp_read_bytes": ("Counter", "Bytes that loads read, by where they came from", ("source",)),
    "dcp_save_stall_seconds": ("Histogram", "How long training waited for a save", ("mode",)),
    "dcp_save_durable_seconds": (
        "Histogram", "From the call to the commit of a save; from rank 0", ("mode",)
    ),
    "dcp_load_seconds": ("Histogram", "How long a load took; from rank 0", ()),
    "dcp_staging_used_bytes": ("Gauge", "Staging memory of a node that holds bytes", ()),
    "dcp_staging_limit_bytes": ("Gauge", "Staging memory that a node may use", ()),
}  # fmt: skip
"""Kind, description and tags of each metric, by name."""


def count(event: Event) -> None:
    """Counts the end of a save or load; does nothing without Ray, and never raises."""
    if not event.is_end or not _ray_is_up():
        return
    try:
        count_end(event, _metric)
    except Exception as error:  # noqa: BLE001 - no save fails because it could not be counted
        logger.debug("An event was not counted: %s", error)


def staging_memory(used_bytes: int, limit_bytes: int) -> None:
    """Sets the gauges of a node's staging memory; never raises.

    Args:
        used_bytes: Bytes that are staged.
        limit_bytes: Most bytes that may be staged.
    """
    try:
        _metric("dcp_staging_used_bytes").set(used_bytes)
        _metric("dcp_staging_limit_bytes").set(limit_bytes)
    except Exception as error:  # noqa: BLE001 - see `count`
        logger.debug("Staging memory was not counted: %s", error)


def count_end(event: Event, metric: Callable[[str], Any]) -> None:
    """Counts the end of a save or load; other operations have no metrics.

    Args:
        event: The last event of an operation.
        metric: Returns the metric of a name of `METRICS`, with the methods of Ray's metrics.
    """

    def add(name: str, value: int, tags: dict[str, str] | None = None) -> None:
        # Why: a counter of Ray's takes no zero.
        if value > 0:
            metric(name).inc(value, tags)

    first = event.rank == 0
    if event.name.startswith("load."):
        if first:
            metric("dcp_loads").inc(1, {"outcome": event.outcome})
            metric("dcp_load_seconds").observe(event.seconds)
        memory = event.memory_bytes
        add("dcp_read_bytes", event.num_bytes - memory, {"source": "storage"})
        add("dcp_read_bytes", memory, {"source": "memory"})
    if not event.name.startswith("save."):
        return
    mode = {"mode": event.mode}
    committed = event.outcome == "committed"
    if first:
        metric("dcp_saves").inc(1, {"outcome": event.outcome, **mode})
        if committed:
            metric("dcp_save_durable_seconds").observe(event.seconds, mode)
    if event.stall_s is not None:
        metric("dcp_save_stall_seconds").observe(event.stall_s, mode)
    add("dcp_staged_bytes", event.staged_bytes)
    add("dcp_written_bytes", event.num_bytes if committed else 0)


@cache
def _metric(name: str) -> Any:
    from ray.util import metrics

    kind, description, tag_keys = METRICS[name]
    if kind == "Histogram":
        return metrics.Histogram(name, description, boundaries=SECONDS, tag_keys=tag_keys)
    return getattr(metrics, kind)(name, description, tag_keys=tag_keys)


def _ray_is_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and not _inherited and bool(ray.is_initialized())


_inherited: list[bool] = []
"""Not empty in a child that was forked from a process with Ray, whose connection is not the
child's."""
os.register_at_fork(after_in_child=lambda: _inherited.extend([True] * _ray_is_up()))


TASKS: dict[type, str] = {
    ReadRecords: "look",
    MakePlan: "plan",
    BuildCommit: "build",
    WriteTable: "table",
    CreateRecord: "record",
}


class SaveRecord:
    """What the trace of one save is made of: the phases that its ranks sent, and tasks.

    Args:
        first: The first join.
        unix_s: Time of its arrival, in seconds since 1970.
        now_s: The same time on the monotonic clock of all other times.

    Attributes:
        attempt: Id of the attempt, once there is one.

    Complexity:
        About a microsecond for each message.
    """

    def __init__(self, first: SaveJoin, unix_s: float, now_s: float) -> None:
        self.attempt = ""
        self._world_size = first.world_size
        self._in_background = first.options.staging == "background"
        self._unix_s = unix_s - now_s
        self._begun: dict[int, float] = {}
        self._phases: dict[int, Phases] = {}
        self._staged_bytes: dict[int, int] = {}
        self._by_stagers: dict[int, float] = {}
        self._bytes: dict[int, dict[int, int]] = {}
        self._reused_bytes: dict[str, dict[int, int]] = {how: {} for how in REUSED[1:]}
        self._where: dict[int, str] = {}
        self._tasks: list[tuple[str, float, float]] = []

    def add_request(self, request: Request, now_s: float, where: str = "") -> None:
        """Adds what a request says of its rank.

        Args:
            request: A request of this save; if it arrives twice, only the first counts.
            now_s: Time of its arrival.
            where: Process and node of the rank.
        """
        rank = request.rank
        if isinstance(request, SaveJoin):
            self._begin(rank, request.phases, now_s)
            if where:
                self._where[rank] = where
            return
        if getattr(request, "attempt", "") != self.attempt or getattr(request, "error", None):
            return
        match request:
            case SaveReceipt():
                self._staged_bytes[rank] = request.staged_bytes
                self._count_written(request)
            case PartsHeld():
                self._staged_bytes[rank] = request.num_bytes
            case PartsWritten() if self._count_written(request) or rank not in self._by_stagers:
                self._by_stagers[rank] = now_s
        if isinstance(request, SaveReceipt | PartsHeld | SaveStaged) and rank not in self._phases:
            self._phases[rank] = request.phases
            self._begin(rank, request.phases, now_s)

    def add_task(self, task: Task, start_s: float, stop_s: float) -> None:
        """Adds a task of the coordinator."""
        name = TASKS.get(type(task))
        if name is not None:
            self._tasks.append((name, start_s, stop_s))

    def trace(self, committed_s: float) -> SaveTrace | None:
        """Returns the trace of a save that was just committed; None if too little is known.

        Args:
            committed_s: Time of the commit, on the clock of the other times.
        """
        # Copies: a message that comes late may still be added, in another thread.
        sent, begun = dict(self._phases), dict(self._begun)
        if not self.attempt or not sent:
            return None
        spans = {rank: _spans(begun[rank], phases) for rank, phases in sent.items()}
        for rank, written_s in dict(self._by_stagers).items():
            if "stage" in (own := spans.get(rank, {})):
                # A stager writes what it has while its rank still hands over the rest.
                own["write"] = (own["stage"][0], written_s)
        zero_s = min(begun.values())
        trace = make_trace(
            self.attempt,
            "async_save" if any("stage" in own for own in spans.values()) else "save",
            self._world_size,
            self._unix_s + zero_s,
            committed_s - zero_s,
            [
                Span(name, None, round(start - zero_s, 5), round(stop - zero_s, 5))
                for name, start, stop in list(self._tasks)
            ],
            {phase: self._times(phase, spans, zero_s) for phase in PHASES},
            where=self._where,
        )
        linked, copied = (sum([*files.values()]) for files in self._reused_bytes.values())
        trace = replace(trace, linked_bytes=linked, copied_bytes=copied)
        return replace(trace, held_by="capture plan") if self._in_background else trace

    def _begin(self, rank: int, phases: Phases, now_s: float) -> None:
        began_s = now_s - sum(took_s for _, took_s in phases)
        self._begun[rank] = min(began_s, self._begun.get(rank, began_s))

    def _count_written(self, request: SaveReceipt | PartsWritten) -> bool:
        """Counts files that are durable; returns whether one is new.

        *Why*: a file that two stagers wrote was durable with the first.
        """
        files = self._bytes.setdefault(request.rank, {})
        before = len(files)
        for receipt in request.files:
            files.setdefault(receipt.file, 0 if receipt.reused else receipt.num_bytes)
            if receipt.reused:
                self._reused_bytes[receipt.reused][receipt.file] = receipt.num_bytes
        return len(files) > before

    def _times(
        self, phase: str, spans: Mapping[int, Mapping[str, tuple[float, float]]], zero_s: float
    ) -> RankTimes:
        own = {rank: spans[rank][phase] for rank in sorted(spans) if phase in spans[rank]}
        moved = {
            "stage": self._staged_bytes,
            "write": {rank: sum(files.values()) for rank, files in self._bytes.items()},
        }.get(phase, {})
        return RankTimes.of(
            list(own),
            [start - zero_s for start, _ in own.values()],
            [stop - zero_s for _, stop in own.values()],
            [moved.get(rank, 0) for rank in own],
        )


def _spans(began_s: float, phases: Phases) -> dict[str, tuple[float, float]]:
    """Returns when each phase of a rank began and ended.

    Args:
        began_s: When the first one began.
        phases: What the rank sent.

    Examples:
        >>> _spans(3.0, (("capture", 1.0), ("plan", 2.0), ("write", 4.0)))
        {'capture': (3.0, 4.0), 'plan': (4.0, 6.0), 'write': (6.0, 10.0)}
    """
    spans = {}
    for phase, took_s in phases:
        spans[phase] = (began_s, began_s + took_s)
        began_s += took_s
    return spans


Performer = Callable[[Task], Result]
"""Performs a task."""

MOST_SAVES = 64
"""Most saves that are recorded at a time: the end of older ones was never reported."""


class Tracing:
    """The traces of one coordinator's saves.

    Args:
        opener: Opens the storage to which traces are written.
    """

    def __init__(
        self,
        opener: Callable[[Target], Storage] = open_storage,
    ) -> None:
        self._clock = time.monotonic
        self._opener = opener
        self._saves: dict[OpKey, SaveRecord] = {}

    def record_request(self, request: Request, where: object = None) -> None:
        """Records a request.

        Args:
            request: Any request.
            where: Process and node of the rank; converted to a string.
        """
        is_join = isinstance(request, SaveJoin)
        if isinstance(request, SaveJoin) and request.key not in self._saves:
            self._saves[request.key] = SaveRecord(request, time.time(), self._clock())
            if len(self._saves) > MOST_SAVES:
                del self._saves[next(iter(self._saves))]
        place = str(where) if where is not None and is_join else ""
        self._record(request.key, lambda save: save.add_request(request, self._clock(), place))

    def record_answer(self, answer: Answer) -> None:
        """Records the attempt of a save, or that it has failed."""
        if isinstance(answer.reply, Refused):
            self._saves.pop(answer.key, None)
        save = self._saves.get(answer.key)
        if save is not None and isinstance(answer.reply, SaveGo):
            save.attempt = answer.reply.attempt

    def perform(self, command: Perform, performer: Performer) -> Result:
        """Performs a task and records its duration; writes the trace beside the last one.

        Args:
            command: The command with the task.
            performer: Performs the task.
        """
        save = self._saves.get(command.key)
        if save is None:
            return performer(command.task)
        if isinstance(command.task, PublishMetadata):
            self._saves.pop(command.key, None)
            writing = None
            # Suppressed: there are no more threads, and no save fails because of its trace.
            with suppress(LimitError):
                writing = self._start_writer(save, command.task.target)
            result = performer(command.task)
            if writing is not None:
                writing.join(bounds.TRACE_S)
            return result
        start_s = self._clock()
        result = performer(command.task)
        stop_s = self._clock()
        self._record(command.key, lambda save: save.add_task(command.task, start_s, stop_s))
        return result

    def _record(self, key: OpKey, record: Callable[[SaveRecord], None]) -> None:
        """Records an event of a save; drops the record if that fails, which fails no save."""
        save = self._saves.get(key)
        try:
            if save is not None:
                record(save)
        except Exception:
            self._saves.pop(key, None)
            logger.debug("The record of save %d is dropped", key.seq, exc_info=True)

    def _start_writer(self, save: SaveRecord, target: Target) -> threading.Thread:
        committed_s = self._clock()

        def run() -> None:
            try:
                self._write(save, target, committed_s)
            except Exception as error:  # noqa: BLE001 - no save fails because of its trace
                logger.debug("The trace of a save to %s was not written: %s", target.url, error)

        return start_thread(run, "trace")

    def _write(self, save: SaveRecord, target: Target, committed_s: float) -> None:
        trace = save.trace(committed_s)
        if trace is None:
            return
        # Why not durable: a crash may take it, and an fsync would cost more than all else.
        writer = self._opener(target).open_writer(trace_key(trace.attempt), sync=False)
        try:
            writer.write(encode_trace(trace))
            writer.commit()
        except BaseException:
            writer.abort()
            raise
