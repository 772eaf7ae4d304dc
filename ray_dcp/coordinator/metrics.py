"""Prometheus metrics `dcp_*` of saves and loads, and traces of saves.

The metrics, including those of staging memory, use `ray.util.metrics`. Ray exports them on each
node's metrics port, with the prefix `ray_` and, for counters, the suffix `_total`; the exporter is
part of `pip install "ray[default]"`. Only processes that are connected to Ray record metrics. No
error of events or metrics fails a save.

`Tracing` records the messages and tasks of a coordinator's saves (`SaveRecorder`). It writes the
trace of a save beside the checkpoint once its record exists, while `.metadata` is published and
replaced files are deleted. All times are of the coordinator's clock: a phase ends when the message
that ends it arrives. The capture, and copies between messages, are durations that the rank reports.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
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


class SaveRecorder:
    """The times of one save, for its trace.

    Args:
        first: The first join; it must also be passed to `record_request`.
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
        self._by_stagers = first.staged
        self._in_background = first.options.staging == "background"
        self._unix_s = unix_s - now_s
        self._begun: dict[int, float] = {}
        self._joined: dict[int, float] = {}
        self._planned: dict[int, float] = {}
        self._staged_s: dict[int, float] = {}
        self._written: dict[int, float] = {}
        self._staged_bytes: dict[int, int] = {}
        self._bytes: dict[int, dict[int, int]] = {}
        self._reused_bytes: dict[str, dict[int, int]] = {how: {} for how in REUSED[1:]}
        self._where: dict[int, str] = {}
        self._tasks: list[tuple[str, float, float]] = []

    def record_request(self, request: Request, now_s: float, where: str = "") -> None:
        """Records a request.

        Args:
            request: A request of this save; if it arrives twice, only the first counts.
            now_s: Time of its arrival.
            where: Process and node of the rank.
        """
        rank = request.rank
        is_of_it = getattr(request, "attempt", self.attempt) == self.attempt
        match request:
            case SaveJoin():
                self._begun.setdefault(rank, now_s - request.capture_s)
                self._joined.setdefault(rank, now_s)
                if where:
                    self._where[rank] = where
            case _ if not is_of_it or getattr(request, "error", None) is not None:
                return
            case SaveReceipt():
                # Who copied and then wrote itself did so one after the other; a stager does both.
                staged_s, staged_bytes = request.staged
                self._by_stagers = self._by_stagers and not staged_s
                if staged_s and rank in self._planned:
                    self._staged_s.setdefault(rank, self._planned[rank] + staged_s)
                    self._staged_bytes[rank] = staged_bytes
                self._count_written(request, now_s)
            case PartsHeld():
                self._staged_s.setdefault(rank, now_s)
                self._staged_bytes[rank] = request.num_bytes
            case SaveStaged():
                self._staged_s.setdefault(rank, now_s)
            case PartsWritten():
                self._count_written(request, now_s)

    def record_answer(self, answer: Answer, now_s: float) -> None:
        """Records an answer with the assignments of ranks."""
        if isinstance(answer.reply, SaveGo):
            self.attempt = answer.reply.attempt
            for rank in answer.ranks:
                self._planned.setdefault(rank, now_s)

    def performed(self, task: Task, start_s: float, stop_s: float) -> None:
        """Records a task of the coordinator."""
        name = TASKS.get(type(task))
        if name is not None:
            self._tasks.append((name, start_s, stop_s))

    def trace(self, committed_s: float) -> SaveTrace | None:
        """Returns the trace of a save that was just committed; None if too little is known.

        Args:
            committed_s: Time of the commit, on the clock of the other times.
        """
        # Copies: a message that comes late may still be noted, in another thread.
        begun, joined, planned = dict(self._begun), dict(self._joined), dict(self._planned)
        held, written = dict(self._staged_s), dict(self._written)
        if not self.attempt or not begun:
            return None
        zero_s = min(begun.values())
        steps = {
            "capture": (begun, joined),
            "plan": (joined, planned),
            "stage": (planned, held),
            "write": ({**planned, **held} if not self._by_stagers else planned, written),
        }
        trace = make_trace(
            self.attempt,
            "async_save" if held else "save",
            self._world_size,
            self._unix_s + zero_s,
            committed_s - zero_s,
            [
                Span(name, None, round(start - zero_s, 5), round(stop - zero_s, 5))
                for name, start, stop in list(self._tasks)
            ],
            {phase: self._times(phase, *steps[phase], zero_s) for phase in PHASES},
            where=self._where,
        )
        linked, copied = (sum([*files.values()]) for files in self._reused_bytes.values())
        trace = replace(trace, linked_bytes=linked, copied_bytes=copied)
        return replace(trace, held_by="capture plan") if self._in_background else trace

    def _count_written(self, request: SaveReceipt | PartsWritten, now_s: float) -> None:
        files = self._bytes.setdefault(request.rank, {})
        before = len(files)
        for receipt in request.files:
            files.setdefault(receipt.file, 0 if receipt.reused else receipt.num_bytes)
            if receipt.reused:
                self._reused_bytes[receipt.reused][receipt.file] = receipt.num_bytes
        # Why: a file that two stagers wrote was durable with the first.
        if len(files) > before or request.rank not in self._written:
            self._written[request.rank] = now_s

    def _times(
        self, phase: str, starts: dict[int, float], stops: dict[int, float], zero_s: float
    ) -> RankTimes:
        ranks = sorted(starts.keys() & stops.keys())
        moved = {
            "stage": self._staged_bytes,
            "write": {rank: sum(files.values()) for rank, files in self._bytes.items()},
        }.get(phase, {})
        return RankTimes.of(
            ranks,
            [starts[rank] - zero_s for rank in ranks],
            [stops[rank] - zero_s for rank in ranks],
            [moved.get(rank, 0) for rank in ranks],
        )


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
        self._saves: dict[OpKey, SaveRecorder] = {}

    def record_request(self, request: Request, where: object = None) -> None:
        """Records a request.

        Args:
            request: Any request.
            where: Process and node of the rank; converted to a string.
        """
        is_join = isinstance(request, SaveJoin)
        if isinstance(request, SaveJoin) and request.key not in self._saves:
            self._saves[request.key] = SaveRecorder(request, time.time(), self._clock())
            if len(self._saves) > MOST_SAVES:
                del self._saves[next(iter(self._saves))]
        place = str(where) if where is not None and is_join else ""
        self._record(request.key, lambda save: save.record_request(request, self._clock(), place))

    def record_answer(self, answer: Answer) -> None:
        """Records an answer."""
        if isinstance(answer.reply, Refused):
            self._saves.pop(answer.key, None)
        self._record(answer.key, lambda save: save.record_answer(answer, self._clock()))

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
        self._record(command.key, lambda save: save.performed(command.task, start_s, stop_s))
        return result

    def _record(self, key: OpKey, record: Callable[[SaveRecorder], None]) -> None:
        """Records an event of a save; drops the record if that fails, which fails no save."""
        save = self._saves.get(key)
        try:
            if save is not None:
                record(save)
        except Exception:
            self._saves.pop(key, None)
            logger.debug("The record of save %d is dropped", key.seq, exc_info=True)

    def _start_writer(self, save: SaveRecorder, target: Target) -> threading.Thread:
        committed_s = self._clock()

        def run() -> None:
            try:
                self._write(save, target, committed_s)
            except Exception as error:  # noqa: BLE001 - no save fails because of its trace
                logger.debug("The trace of a save to %s was not written: %s", target.url, error)

        return start_thread(run, "trace")

    def _write(self, save: SaveRecorder, target: Target, committed_s: float) -> None:
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
