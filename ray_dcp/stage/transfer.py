"""The rank's side of staging: hands a rank's bytes to a stager, window by window.

Pure of Ray: a `Link` carries the calls. Windows go as objects of a store. What is not in host
memory, or small, is copied to private memory first, from which the objects are made behind it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ray_dcp.core.values import RankPlan
from ray_dcp.io.threads import Stop, begin
from ray_dcp.stage.orders import SHARE_OF_STORE, Grant, StageOrder, Unknown
from ray_dcp.stage.staged_memory import PIECE_BYTES, Lease, PrivateMemory
from ray_dcp.stage.window_filling import (
    Filler,
    Pin,
    copying_threads,
    drain,
    window_parts,
)
from ray_dcp.stage.windows import StagingLayout, lay_out_windows

REPORT_S = 0.2
"""How often a rank reports full windows, in seconds. With a report of each window the stager would
begin to write while the rank still copies, and both would wait for the same memory: a state that is
copied in less than this has its processors for itself."""


logger = logging.getLogger(__name__)

_scratch = PrivateMemory()
"""Reused from save to save, as pages that are touched and registered with a device."""
os.register_at_fork(after_in_child=_scratch.begin_anew)


class StagerGone(Exception):
    """The stager of a link is dead; a rank that has its state still stages it at another one."""


class Link(Protocol):
    """The way to a stager. Calls may come from several threads."""

    stager: str
    """Its name, different for each process that ever was one."""
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
        _fill_windows(link, order, layout, grant, filler, deferred, call)
    except BaseException:
        drain(filler)
        # Why: until the rank says so, the room of its windows is given to nobody else.
        link.post("cancel", order.key, True)
        raise
    return layout.total_bytes


def _fill_windows(
    link: Link,
    order: StageOrder,
    layout: StagingLayout,
    grant: Grant,
    filler: Filler,
    deferred: Callable[[int], bytes],
    call: Callable[..., Any],
) -> None:
    last, reported, reported_s = layout.num_windows - 1, -1, time.monotonic()

    with _WindowObjects(link, order.window_bytes, filler.pin) as objects:

        def report(method: str, window: int) -> None:
            """Reports that all windows up to this one are full.

            *Why* each report waits for its answer: one that was lost would hold up what writes.
            """
            nonlocal reported, reported_s
            call(method, order.key, objects.take(range(reported + 1, window + 1)))
            reported, reported_s = window, time.monotonic()

        for window in range(layout.num_windows):
            while window >= grant.num_windows:
                # Nothing is written, and so no room made, before the stager knows of it.
                if reported < window - 1:
                    report("deliver", window - 1)
                grant = call("more", order.key, grant.num_windows)
                if grant.missing_bytes:
                    _warn_of_full_store(grant.missing_bytes, order)
            scratch = objects.scratch()
            into = np.frombuffer(scratch.view, np.uint8)[: int(layout.used_bytes[window])]
            objects.put(window, window_parts(layout, window, into, filler, deferred), scratch)
            if time.monotonic() - reported_s > REPORT_S and window < last:
                report("deliver", window)
        report("seal", last)


def _warn_of_full_store(missing_bytes: int, order: StageOrder) -> None:
    logger.warning(
        "What the ranks of this node save to %s is %.3g GB larger than what staged bytes may take "
        "of its object store: windows follow each other, and training waits for the storage. "
        "Start Ray with an --object-store-memory that is %.3g GB larger, on a /dev/shm that has as "
        "much, and raise StagerOptions(limit_bytes=...) where that is set",
        order.target.url,
        missing_bytes / 1e9,
        missing_bytes / SHARE_OF_STORE / 1e9,
    )


class _WindowObjects:
    """Puts windows into the object store, as many at a time as threads copy.

    Nothing is under way any more when the context ends.

    Args:
        link: Puts them.
        window_bytes: Length of the longest.
        pin: Of the device that some of their bytes come from.
    """

    def __init__(self, link: Link, window_bytes: int, pin: Pin | None) -> None:
        self._link = link
        self._window_bytes = window_bytes
        self._pin = pin
        self._refs: dict[int, Any] = {}
        self._free: list[Lease] = []
        self._begun: deque[tuple[int, Future[Any], Lease]] = deque()

    def scratch(self) -> Lease:
        """Returns memory for the next window; waits until one may begin."""
        if len(self._begun) >= copying_threads():
            self._finish_first()
        if self._free:
            return self._free.pop()
        # Its pages take memory only where bytes are copied to.
        lease = _scratch.lease(self._window_bytes)
        for piece in range(-(-self._window_bytes // PIECE_BYTES)):
            lease.pin(self._pin, piece)
        return lease

    def put(self, window: int, parts: list[np.ndarray], scratch: Lease) -> None:
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
        for lease in (*self._free, *(lease for *_, lease in self._begun)):
            lease.release()
