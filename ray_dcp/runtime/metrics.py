"""Prometheus metrics `dcp_*` of saves, loads and staging memory, through `ray.util.metrics`.

Ray exports them on each node's metrics port, with `ray_` before and, for counters, `_total` behind
their names; `pip install "ray[default]"` is what has the exporter. Only processes in which Ray is
up record anything, and nothing that goes wrong here reaches a save.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

from ray_dcp.events import Event

__all__ = ["METRICS", "count", "staging_memory"]

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
