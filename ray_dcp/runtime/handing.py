"""Hands one rank's bytes to a stager, window by window, as fast as it has room for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ray_dcp.plan.values import RankPlan
from ray_dcp.runtime import ray_calls
from ray_dcp.runtime.reporting import Reporter
from ray_dcp.runtime.staging_link import Link, StagerGone
from ray_dcp.stage.layout import StagingLayout, lay_out_windows
from ray_dcp.stage.values import Grant, Slot, StageOrder, Unknown
from ray_dcp.transfer.threads import Stop

__all__ = ["Handed", "ask", "hand_in"]

TELL_S = 0.2
"""How often the stager is told what is full, in seconds. Told of each window it would begin to
write while the rank still copies, and both would wait for the same memory: a state that is copied
in less than this has its processors for itself."""

Fill = Callable[[StagingLayout, int, np.ndarray], None]
"""Puts the bytes of a window into uint8[used bytes of the window]."""


@dataclass
class Handed:
    """Where a stager has a rank's windows."""

    layout: StagingLayout
    slots: list[Slot] = field(default_factory=list)
    refs: dict[int, Any] = field(default_factory=dict)
    """References of those that went as objects; kept so that they outlive the stager."""


def hand_in(
    link: Link,
    order: StageOrder,
    plan: RankPlan,
    reporter: Reporter | None,
    fill: Fill,
    *,
    timeout_s: float,
    stop: Stop | None = None,
) -> Handed:
    """Returns when the stager holds every byte.

    Args:
        link: To the stager.
        order: What is handed over.
        plan: Of the order; sent along when the stager does not know it.
        reporter: Who gets the reports.
        fill: Gives the bytes; called in this thread, once a window.
        timeout_s: How long to wait each time that the stager has no room, in seconds.
        stop: Ends it early, with its error.

    Raises:
        StagerGone: It died; everything is to be handed to another one.
        CheckpointError: It refused or gave up, or `fill` failed.
    """
    grant = ask(link, "begin", order, plan, reporter, timeout_s=timeout_s)
    handed = Handed(lay_out_windows(plan, order.deferred_bytes, order.window_bytes))
    try:
        _hand_windows(link, order, plan, handed, grant, fill, timeout_s, stop)
        silence_s = order.options.heartbeat_timeout_s
        sealed = link.call(
            "seal", order.key, timeout_s=timeout_s, silence_s=silence_s, stop=stop
        )  # fmt: skip
        _known(link, sealed)
    except BaseException:
        # Why: until the rank says so, its memory is given to nobody else.
        link.post("cancel", order.key, True)
        raise
    return handed


def ask(
    link: Link, method: str, order: StageOrder, plan: RankPlan, *arguments: Any, timeout_s: float
) -> Any:
    """Returns the answer to an order, which is sent without its plan if that should be known."""
    known = order.plan_id in link.known_plans
    for given in (None, plan) if known else (plan,):
        sent = replace(order, plan=given)
        answer = link.call(
            method, link.stager, sent, *arguments,
            timeout_s=timeout_s, silence_s=order.options.heartbeat_timeout_s,
        )  # fmt: skip
        if answer != Unknown("plan"):
            break
    link.known_plans.add(order.plan_id)
    return _known(link, answer)


def _hand_windows(
    link: Link,
    order: StageOrder,
    plan: RankPlan,
    handed: Handed,
    grant: Grant,
    fill: Fill,
    timeout_s: float,
    stop: Stop | None,
) -> None:
    layout, slots = handed.layout, handed.slots
    wanted = set(range(len(plan.files)) if order.files is None else order.files)
    scratch = np.zeros(0, dtype=np.uint8)
    slots.extend(grant.slots)
    arena = link.arena if order.channel == "arena" else None
    told_s = time.monotonic()
    for window in range(layout.num_windows):
        while window >= len(slots):
            if arena is not None and window:
                # Nothing is written, and so no room made, before the stager knows of it.
                link.post("deliver", order.key, window - 1)
            more = link.call(
                "more", order.key, len(slots),
                timeout_s=timeout_s, silence_s=order.options.heartbeat_timeout_s, stop=stop,
            )  # fmt: skip
            grant = _known(link, more)
            slots.extend(grant.slots)
            for freed in grant.freed:
                handed.refs.pop(freed, None)
        used = int(layout.used_bytes[window]) if layout.files_of(window) & wanted else 0
        if arena is not None:
            fill(layout, window, arena.slot_array(slots[window].index)[:used])
            # The last one is told by `seal`.
            if window < layout.num_windows - 1 and time.monotonic() - told_s > TELL_S:
                link.post("deliver", order.key, window)
                told_s = time.monotonic()
            continue
        if len(scratch) < used:
            scratch = np.empty(order.window_bytes, dtype=np.uint8)
        if used:
            fill(layout, window, scratch[:used])
        handed.refs[window] = ray_calls.put(scratch[:used])
        link.post("deliver", order.key, window, [handed.refs[window]])


def _known(link: Link, answer: Any) -> Any:
    if isinstance(answer, Unknown):
        raise StagerGone(f"{link.stager} does not know the {answer.what}")
    return answer
