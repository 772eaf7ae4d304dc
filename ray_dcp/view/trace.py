"""Reads the trace that a save wrote beside its checkpoint, and converts it to Chrome's format.

Needs neither torch nor Ray. `ray_dcp.format.save_trace` defines the content of a trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ray_dcp.errors import DamagedCheckpointError
from ray_dcp.format.save_trace import MAX_TRACE_BYTES, SaveTrace, decode_trace, trace_key
from ray_dcp.store.storage import Storage, read_if_there


@dataclass(frozen=True, kw_only=True)
class Trace(SaveTrace):
    """The trace of a save. Notebooks show it as a timeline."""

    def _repr_html_(self) -> str:
        from ray_dcp.view.pictures import timeline

        return timeline(self).html


def read_trace(storage: Storage, attempt: str | None) -> Trace | None:
    """Returns the trace of an attempt; None if there is none.

    Args:
        storage: Storage of the checkpoint.
        attempt: Id of the committed attempt; None for a checkpoint of another program.

    Raises:
        DamagedCheckpointError: The trace is damaged. The checkpoint does not need it.
        StorageError: The trace can't be read.
    """
    if attempt is None:
        return None
    key = trace_key(attempt)
    data = read_if_there(storage, key, MAX_TRACE_BYTES + 1)
    if data is None:
        return None
    found = decode_trace(data, key=key)
    if found.attempt != attempt:
        raise DamagedCheckpointError(
            f"expected the trace of attempt {attempt}, found that of {found.attempt}", key=key
        )
    return Trace(**vars(found))


def chrome_trace(trace: SaveTrace) -> str:
    """Returns a trace as JSON for `chrome://tracing` and https://ui.perfetto.dev.

    Each rank is a process, after the coordinator. Times are microseconds since 1970.

    Args:
        trace: Trace of a save.

    Examples:
        >>> import json
        >>> from ray_dcp.format.save_trace import Span
        >>> trace = SaveTrace(
        ...     attempt="0123456789abcdef", mode="save", world_size=1, began_s=1.0,
        ...     committed_s=0.5, spans=(Span("write", 0, 0.1, 0.5, 8),),
        ... )
        >>> events = json.loads(chrome_trace(trace))["traceEvents"]
        >>> [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
        [('write', 1100000.0, 400000.0), ('commit', 1500000.0, 0.0)]
    """
    late = {(straggler.rank, straggler.phase): straggler for straggler in trace.stragglers}
    events: list[dict[str, Any]] = []
    for lane, spans in trace.lanes().items():
        pid = 0 if lane is None else lane + 1
        name = "coordinator" if lane is None else f"rank {lane}"
        meta = {"ph": "M", "pid": pid, "tid": 0}
        events.append({**meta, "name": "process_name", "args": {"name": name}})
        events.append({**meta, "name": "process_sort_index", "args": {"sort_index": pid}})
        for span in spans:
            told: dict[str, Any] = {"bytes": span.num_bytes} if span.num_bytes else {}
            straggler = late.get((lane, span.phase)) if lane is not None else None
            if straggler is not None:
                told |= {"straggler": True, "median_s": straggler.median_s}
                told |= {"where": straggler.where} if straggler.where else {}
            times = {"ts": _micros(trace.began_s + span.start_s), "dur": _micros(span.seconds)}
            kind = {"name": span.phase, "cat": "commit" if lane is None else "rank", "ph": "X"}
            events.append({**kind, "pid": pid, "tid": 0, **times, "args": told})
    whole = ("attempt", "mode", "world_size", "num_bytes")
    other = {name.removeprefix("num_"): getattr(trace, name) for name in whole}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
