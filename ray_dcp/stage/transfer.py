"""The rank's side of staging: hands a rank's bytes to a stager, window by window.

Pure of Ray: a `Link` carries the calls. Windows lie in memory that both sides have mapped, or go as
objects of a store. `StagedWindows` says where a stager has them; `StagedFiller` reads them again,
for another stager.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from ray_dcp.core.values import RankPlan
from ray_dcp.errors import CheckpointError, DeadlineError
from ray_dcp.io.threads import Stop, begin
from ray_dcp.stage.copying import (
    Filler,
    Pin,
    copying_threads,
    drain,
    fill_window,
    window_parts,
)
from ray_dcp.stage.memory import StagingMemory, WindowBytes, lost_memory
from ray_dcp.stage.values import Slot, StageKey, StageOrder, Unknown
from ray_dcp.stage.windows import StagingLayout, lay_out_windows

REPORT_S = 0.2
"""How often a rank reports full windows, in seconds. With a report of each window the stager would
begin to write while the rank still copies, and both would wait for the same memory: a state that is
copied in less than this has its processors for itself."""

FREED_S = 60.0
"""How long the answer to `freed` may take, in seconds; a stager answers within half of it."""


class StagerGone(Exception):
    """The stager of a link is dead; what it held may be handed to another one."""


class Link(Protocol):
    """The way to a stager. Calls may come from several threads."""

    stager: str
    """Its name, different for each process that ever was one."""
    arena: StagingMemory | None
    """Its memory, mapped here; None where that can't be."""
    channel: Literal["shared", "object_store"]
    """How windows get there."""
    window_bytes: int
    """Longest window that it takes."""
    known_plans: set[bytes]
    """`StageOrder.plan_id` of plans that it was sent."""

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float,
        silence_s: float | None = None,
        stop: Stop | None = None,
    ) -> Any:
        """Returns what the stager answers.

        Args:
            method: Of the stager.
            *arguments: Of the method.
            timeout_s: For the answer, in seconds.
            silence_s: How long it may take to answer whether it lives, in seconds; None for ever.
            stop: Ends the wait early, with its error.

        Raises:
            StagerGone: It is dead, or as good as dead: it does not answer.
            CheckpointError: What it raised, or it did not answer in time.
        """
        ...

    def post(self, method: str, *arguments: Any) -> None:
        """Sends a call whose answer nobody waits for."""
        ...

    def put(self, parts: list[np.ndarray]) -> Any:
        """Returns a reference to an object that has a copy of these runs of bytes."""
        ...

    def get(self, reference: Any) -> list[np.ndarray]:
        """Returns the runs of bytes of an object."""
        ...


@dataclass
class StagedWindows:
    """Where a stager has a rank's windows."""

    layout: StagingLayout
    arena: StagingMemory | None
    """Where `slots` are; None for windows that went as objects."""
    slots: list[Slot] = field(default_factory=list)
    refs: dict[int, Any] = field(default_factory=dict)
    """References of the objects. The rank keeps each as long as the bytes may have to be handed to
    another stager: they outlive this one."""
    num_reported: int = 0
    """Windows that were reported to the stager as full."""

    @property
    def reported(self) -> dict[int, Any] | None:
        """The objects of the windows that were reported; None for windows in shared memory.

        None for a window of which the stager needs nothing, or nothing any more.
        """
        if self.arena is not None:
            return None
        return {window: self.refs.get(window) for window in range(self.num_reported)}

    def drop(self) -> None:
        """Lets go of the memory: nobody will need the bytes again."""
        self.arena = None
        self.refs.clear()

    def drop_freed(self, link: Link, key: StageKey) -> None:
        """Drops each reference that the stager needs no more, until there is none left.

        *Why*: a window counts in the node's budget until its last reference is gone.
        """
        freed: Sequence[int] | None = ()
        # Suppressed: without the stager nobody counts them, and the next one may need them.
        with suppress(StagerGone, CheckpointError):
            while freed is not None:
                # Suppressed: a slow stager is asked again, else the windows count for ever.
                with suppress(DeadlineError):
                    freed = link.call("freed", key, tuple(freed), timeout_s=FREED_S)
                for window in freed or ():
                    self.refs.pop(window, None)


def transfer(
    link: Link,
    order: StageOrder,
    plan: RankPlan,
    reporter: Any,
    filler: Filler,
    deferred: Callable[[int], bytes],
    *,
    refs: dict[int, Any] | None = None,
    timeout_s: float,
    stop: Stop | None = None,
) -> StagedWindows:
    """Returns when the stager holds every byte.

    Args:
        link: To the stager.
        order: What is handed over.
        plan: Of the order; sent along when the stager does not know it.
        reporter: Who gets the reports.
        filler: Copies the fixed items; called in this thread. It is waited for as seldom as
            windows are reported, so that a device always has something to copy.
        deferred: Gives a deferred item's bytes.
        refs: Objects of windows that are staged already, by window.
        timeout_s: How long to wait each time that the stager has no room, in seconds.
        stop: Ends it early, with its error.

    Raises:
        StagerGone: It died; everything is to be handed to another one.
        CheckpointError: It refused or gave up, or `filler` or `deferred` failed.
    """
    silence_s = order.options.heartbeat_timeout_s

    def call(method: str, *arguments: Any) -> Any:
        answer = link.call(method, *arguments, timeout_s=timeout_s, silence_s=silence_s, stop=stop)
        if isinstance(answer, Unknown):
            raise StagerGone(f"{link.stager} does not know the {answer.what}")
        return answer

    arena = link.arena if order.channel == "shared" else None
    layout = lay_out_windows(plan, order.deferred_bytes, order.window_bytes)
    windows = StagedWindows(layout, arena, refs=dict(refs or {}))
    try:
        for given in (None, plan) if order.plan_id in link.known_plans else (plan,):
            sent = (link.stager, replace(order, plan=given), reporter)
            grant = link.call("begin", *sent, timeout_s=timeout_s, silence_s=silence_s)
            if grant != Unknown("plan"):
                break
        if isinstance(grant, Unknown):
            raise StagerGone(f"{link.stager} does not know the {grant.what}")
        link.known_plans.add(order.plan_id)
        windows.slots.extend(grant.slots)
        if arena is None:
            threading.Thread(
                target=windows.drop_freed, args=(link, order.key), name="freed windows", daemon=True
            ).start()
        _fill_windows(link, order, plan, windows, filler, deferred, call)
        # Why with all: a message that reported some of them may have been lost.
        call("seal", order.key, windows.reported)
    except BaseException:
        drain(filler)
        # Why: until the rank says so, its memory is given to nobody else.
        link.post("cancel", order.key, True)
        windows.drop()
        raise
    return windows


def _fill_windows(
    link: Link,
    order: StageOrder,
    plan: RankPlan,
    windows: StagedWindows,
    filler: Filler,
    deferred: Callable[[int], bytes],
    call: Callable[..., Any],
) -> None:
    layout, slots, arena = windows.layout, windows.slots, windows.arena
    wanted = set(range(len(plan.files)) if order.files is None else order.files)
    reported_s = time.monotonic()

    def report(deliver: Callable[..., Any], window: int) -> None:
        filler.finish()
        objects.finish()
        windows.num_reported = window
        if window:
            deliver("deliver", order.key, window - 1, windows.reported)

    with _WindowObjects(link, order.window_bytes, windows.refs) as objects:
        for window in range(layout.num_windows):
            while window >= len(slots):
                # Nothing is written, and so no room made, before the stager knows of it.
                report(call, window)
                slots.extend(call("more", order.key, len(slots)).slots)
            used_bytes = int(layout.used_bytes[window])
            if not layout.files_of(window) & wanted:
                windows.refs.pop(window, None)
            elif arena is not None:
                into = arena.slot_array(slots[window].index)[:used_bytes]
                fill_window(layout, window, into, filler, deferred, wait=False)
            elif window not in windows.refs:
                scratch = objects.scratch()
                parts = window_parts(layout, window, scratch[:used_bytes], filler, deferred)
                objects.put(window, parts, scratch)
            if time.monotonic() - reported_s > REPORT_S and window < layout.num_windows - 1:
                report(link.post, window + 1)
                reported_s = time.monotonic()
        filler.finish()
        objects.finish()
        windows.num_reported = layout.num_windows
        # `seal` reports the last ones.


class _WindowObjects:
    """Puts windows into the object store, as many at a time as threads copy.

    Nothing is under way any more when the context ends.

    Args:
        link: Puts them.
        window_bytes: Length of the longest.
        refs: Takes the references, by window.
    """

    def __init__(self, link: Link, window_bytes: int, refs: dict[int, Any]) -> None:
        self._link = link
        self._window_bytes = window_bytes
        self._refs = refs
        self._free: list[np.ndarray] = []
        self._begun: deque[tuple[int, Future[Any], np.ndarray]] = deque()

    def scratch(self) -> np.ndarray:
        """Returns memory for the next window (uint8[window_bytes]); waits until one may begin."""
        if len(self._begun) >= copying_threads():
            self._finish_first()
        # Its pages take memory only where bytes are copied to.
        return self._free.pop() if self._free else np.empty(self._window_bytes, np.uint8)

    def put(self, window: int, parts: list[np.ndarray], scratch: np.ndarray) -> None:
        """Begins to put a window.

        Args:
            window: Its number.
            parts: Its bytes.
            scratch: Where some of them are; free for the next window when they are copied.
        """
        self._begun.append((window, begin(partial(self._link.put, parts), "put window"), scratch))

    def finish(self) -> None:
        """Returns when the references of all that was begun are there."""
        while self._begun:
            self._finish_first()

    def _finish_first(self) -> None:
        window, future, scratch = self._begun[0]
        self._refs[window] = future.result()
        self._begun.popleft()
        self._free.append(scratch)

    def __enter__(self) -> _WindowObjects:
        return self

    def __exit__(self, *_: object) -> None:
        wait([future for _, future, _ in self._begun])


class StagedFiller:
    """Implements `Filler` on windows that are staged; `deferred` gives the deferred items.

    Args:
        windows: Where they are.
        rank: Whose, for errors.
        files: Positions in `RankPlan.files` of those whose bytes are needed; others are left out.
        get: Returns the runs of bytes of an object.
    """

    pin: Pin | None = None

    def __init__(
        self,
        windows: StagedWindows,
        rank: int,
        files: Collection[int],
        get: Callable[[Any], list[np.ndarray]],
    ) -> None:
        self._windows = windows
        self._rank = rank
        self._get = get
        self._used: set[int] = set()
        self._object = (-1, WindowBytes(()))
        layout = windows.layout
        self._segments: dict[int, list[int]] = {}
        self._deferred_bytes: dict[int, int] = {}
        columns = zip(
            layout.row.tolist(),
            layout.file.tolist(),
            layout.is_deferred.tolist(),
            (layout.source_start + layout.num_bytes).tolist(),
            strict=True,
        )
        for segment, (row, file, is_deferred, end) in enumerate(columns):
            if file in files:
                self._segments.setdefault(row, []).append(segment)
            if is_deferred:
                self._deferred_bytes[row] = max(end, self._deferred_bytes.get(row, 0))

    def fill(self, row: int, start: int, target: np.ndarray) -> None:
        """See `Filler.fill`."""
        layout = self._windows.layout
        for segment in self._segments.get(row, ()):
            first, length = int(layout.source_start[segment]), int(layout.num_bytes[segment])
            low, high = max(start, first), min(start + len(target), first + length)
            if low < high:
                offset = int(layout.offset[segment]) + low - first
                into = target[low - start : high - start]
                self._bytes_of(int(layout.window[segment])).read_into(offset, into.data)

    def fill_many(
        self, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int], target: np.ndarray
    ) -> None:
        """See `Filler.fill_many`."""
        done = 0
        for row, start, length in zip(rows, starts, lengths, strict=True):
            self.fill(row, start, target[done : done + length])
            done += length

    def deferred(self, row: int) -> bytes:
        """Returns a deferred item's bytes."""
        found = np.zeros(self._deferred_bytes.get(row, 0), dtype=np.uint8)
        self.fill(row, 0, found)
        return found.tobytes()

    def finish(self) -> None:
        """See `Filler.finish`.

        Raises:
            ParticipantError: The memory was used for something else meanwhile.
        """
        arena, slots = self._windows.arena, self._windows.slots
        if arena is not None and not all(arena.holds(slots[window]) for window in self._used):
            raise lost_memory(self._rank)

    def _bytes_of(self, window: int) -> WindowBytes:
        windows = self._windows
        if windows.arena is not None:
            self._used.add(window)
            return WindowBytes([windows.arena.slot(windows.slots[window].index)])
        if self._object[0] != window:
            ref = windows.refs.get(window)
            if ref is None:
                raise lost_memory(self._rank)
            self._object = (window, WindowBytes(self._get(ref)))
        return self._object[1]
