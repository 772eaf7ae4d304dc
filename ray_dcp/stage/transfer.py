"""The rank's side of staging: hands a rank's bytes to a stager, window by window.

Pure of Ray: a `Link` carries the calls. Windows lie in memory that both sides have mapped, or go as
objects of a store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from ray_dcp.core.values import RankPlan
from ray_dcp.io.threads import Stop, begin
from ray_dcp.stage.copying import (
    Filler,
    copying_threads,
    drain,
    fill_window,
    window_parts,
)
from ray_dcp.stage.memory import StagingMemory
from ray_dcp.stage.values import Slot, StageOrder, Unknown
from ray_dcp.stage.windows import StagingLayout, lay_out_windows

REPORT_S = 0.2
"""How often a rank reports full windows, in seconds. With a report of each window the stager would
begin to write while the rank still copies, and both would wait for the same memory: a state that is
copied in less than this has its processors for itself."""


class StagerGone(Exception):
    """The stager of a link is dead; a rank that has its state still stages it at another one."""


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


def transfer(
    link: Link,
    order: StageOrder,
    plan: RankPlan,
    reporter: Any,
    filler: Filler,
    deferred: Callable[[int], bytes],
    *,
    timeout_s: float,
    stop: Stop | None = None,
) -> int:
    """Returns how many bytes the stager holds, when it holds them all.

    Args:
        link: To the stager.
        order: What is handed over.
        plan: Of the order; sent along when the stager does not know it.
        reporter: Who gets the reports.
        filler: Copies the fixed items; called in this thread. It is waited for as seldom as
            windows are reported, so that a device always has something to copy.
        deferred: Gives a deferred item's bytes.
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

    layout = lay_out_windows(plan, order.deferred_bytes, order.window_bytes)
    try:
        for given in (None, plan) if order.plan_id in link.known_plans else (plan,):
            sent = (link.stager, replace(order, plan=given), reporter)
            grant = link.call("begin", *sent, timeout_s=timeout_s, silence_s=silence_s)
            if grant != Unknown("plan"):
                break
        if isinstance(grant, Unknown):
            raise StagerGone(f"{link.stager} does not know the {grant.what}")
        link.known_plans.add(order.plan_id)
        _fill_windows(link, order, layout, list(grant.slots), filler, deferred, call)
    except BaseException:
        drain(filler)
        # Why: until the rank says so, its memory is given to nobody else.
        link.post("cancel", order.key, True)
        raise
    return layout.total_bytes


def _fill_windows(
    link: Link,
    order: StageOrder,
    layout: StagingLayout,
    slots: list[Slot],
    filler: Filler,
    deferred: Callable[[int], bytes],
    call: Callable[..., Any],
) -> None:
    arena = link.arena if order.channel == "shared" else None
    last, reported, reported_s = layout.num_windows - 1, -1, time.monotonic()

    with _WindowObjects(link, order.window_bytes) as objects:

        def report(method: str, window: int) -> None:
            """Reports that all windows up to this one are full.

            *Why* each report waits for its answer: one that was lost would hold up what writes.
            """
            nonlocal reported, reported_s
            filler.finish()
            refs = None if arena is not None else objects.take(range(reported + 1, window + 1))
            call(method, order.key, window, refs)
            reported, reported_s = window, time.monotonic()

        for window in range(layout.num_windows):
            while window >= len(slots):
                # Nothing is written, and so no room made, before the stager knows of it.
                if reported < window - 1:
                    report("deliver", window - 1)
                slots.extend(call("more", order.key, len(slots)).slots)
            used_bytes = int(layout.used_bytes[window])
            if arena is not None:
                into = arena.slot_array(slots[window].index)[:used_bytes]
                fill_window(layout, window, into, filler, deferred, wait=False)
            else:
                scratch = objects.scratch()
                parts = window_parts(layout, window, scratch[:used_bytes], filler, deferred)
                objects.put(window, parts, scratch)
            if time.monotonic() - reported_s > REPORT_S and window < last:
                report("deliver", window)
        report("seal", last)


class _WindowObjects:
    """Puts windows into the object store, as many at a time as threads copy.

    Nothing is under way any more when the context ends.

    Args:
        link: Puts them.
        window_bytes: Length of the longest.
    """

    def __init__(self, link: Link, window_bytes: int) -> None:
        self._link = link
        self._window_bytes = window_bytes
        self._refs: dict[int, Any] = {}
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

    def take(self, windows: Sequence[int]) -> dict[int, Any]:
        """Returns the references of windows, once they are there; nobody else keeps any.

        *Why*: a window counts in the node's budget until its last reference is gone.
        """
        while self._begun:
            self._finish_first()
        return {window: self._refs.pop(window) for window in windows}

    def _finish_first(self) -> None:
        window, future, scratch = self._begun[0]
        self._refs[window] = future.result()
        self._begun.popleft()
        self._free.append(scratch)

    def __enter__(self) -> _WindowObjects:
        return self

    def __exit__(self, *_: object) -> None:
        wait([future for _, future, _ in self._begun])
