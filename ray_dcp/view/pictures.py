"""Pictures of checkpoints and runs as SVG and HTML, for notebooks and web pages.

Pictures need no network, can be read on light and on dark pages, and stay small for any size of
checkpoint. Views, runs, tensors, differences, previews and traces show themselves as pictures.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import READABLE, as_numbers
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.view import drawing as draw
from ray_dcp.view.drawing import AMBER, GREY, RED, WIDTH, Bar, Picture
from ray_dcp.view.resharding import picture_layout, picture_reshard
from ray_dcp.view.tensor_handle import TensorHandle, TensorInfo, parts_of
from ray_dcp.view.wording import (
    age_text,
    count_text,
    course_text,
    late_text,
    number_text,
    seconds_text,
    size_text,
    stacked,
)

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView
    from ray_dcp.view.difference import CheckpointDiff, TensorDiff
    from ray_dcp.view.run_view import RunView, StepView

__all__ = [
    "Picture",
    "line_chart",
    "picture_diff",
    "picture_histogram",
    "picture_layout",
    "picture_norms",
    "picture_reshard",
    "picture_steps",
    "tensor_tree",
    "timeline",
]

MOST_NAMED, MOST_LINES, MOST_POINTS = 8, 60, 400
LOG_RATIO = 50.0
"""Ratio of the largest to the smallest value from which the scale is logarithmic."""

_LEFT, _TOP, _BOTTOM, _END = 58, 12, 242, WIDTH - 60

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(series: Series, title: str = "") -> Picture:
    """Returns values over steps as lines: those that change most have names and colours.

    Args:
        series: Name → `(step, value)`. Values that are not finite are marked at the bottom.
        title: Title of the picture.
    """
    kept = {name: _thinned(sorted(points)) for name, points in series.items() if points}
    order = sorted(kept, key=lambda name: -_change(kept[name]))
    values = [v for points in kept.values() for _, v in points if math.isfinite(v)]
    if not values:
        return draw.pictured(draw.heading(title), draw.aside("no values"))
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > LOG_RATIO
    if is_log:
        low, high = math.log10(low), math.log10(high)
    elif 0 <= low < 0.5 * high:
        low = 0.0  # a small change of a large number is small
    if high - low <= abs(high) * 1e-9:
        pad = abs(high) * 0.1 or 1.0
        low, high = low - pad, high + pad
    steps = [step for points in kept.values() for step, _ in points]
    first, last = min(steps), max(steps)

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_END - _LEFT)

    def y(value: float) -> float:
        at = math.log10(value) if is_log else value
        return _TOP + (1 - (at - low) / (high - low)) * (_BOTTOM - _TOP)

    parts = [draw.note(_END + 8, _BOTTOM + 16, "step")]
    powers = range(math.ceil(low), math.floor(high) + 1) if is_log else ()
    for tick in [10.0**power for power in powers] or draw.ticks(low, high, 5):
        parts.append(draw.line(_LEFT, y(tick), _END, y(tick)))
        parts.append(draw.note(_LEFT - 6, y(tick) + 4, f"{tick:.4g}", "end"))
    for step in draw.ticks(first, last):
        parts.append(draw.note(x(step), _BOTTOM + 16, f"{step:.10g}", "middle"))
    bottom = _BOTTOM + 26
    for index, name in enumerate(order[:MOST_LINES]):
        shown = [(step, value) for step, value in kept[name] if math.isfinite(value)]
        is_named = index < MOST_NAMED
        colour = draw.rank_colour(index) if is_named else GREY
        look = {"stroke": colour, "fill": "none", "opacity": 1 if is_named else 0.35}
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in shown)
        label = draw.tag("title", draw.safe(name))
        parts.append(draw.tag("polyline", label, points=path, stroke_width=1.6, **look))
        for step, value in shown if is_named and len(shown) <= 40 else ():
            told = draw.tag("title", draw.safe(f"{name} at {step:.10g}: {value:.6g}"))
            parts.append(draw.tag("circle", told, cx=x(step), cy=y(value), r=2.4, fill=colour))
        wrong = [step for step, value in kept[name] if not math.isfinite(value)][:20]
        parts += [draw.text(x(at), _BOTTOM - 2, "✕", "middle", fill=colour) for at in wrong]
        if is_named:
            parts.append(draw.legend(_LEFT, bottom, [(colour, draw.clip(name, 600))]))
            bottom += 16
    hidden, drawn = len(order) - MOST_NAMED, min(len(order), MOST_LINES) - MOST_NAMED
    more = "" if drawn >= hidden else f", {drawn} drawn"
    told = draw.aside(f"in grey: {hidden} that change less{more}" if hidden > 0 else "")
    drawing = draw.svg(WIDTH, bottom, *parts, label=f"{len(order)} lines over steps")
    return draw.pictured(draw.heading(title), drawing, told)


def picture_norms(run: RunView, include: str = "*") -> Picture:
    """Returns the norms of tensors over the steps of a run as lines. The tensors are read.

    Args:
        run: Result of `ray_dcp.open`.
        include: Shell pattern of FQNs.

    Raises:
        InvalidRequestError: No tensor matches.
        DamagedCheckpointError: Bytes that were read do not match their checksums.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for step in run:
        if step.step is None or not step.is_readable:
            continue
        for name, info in step.view.tensors.items():
            if fnmatchcase(name, include) and info.dtype in READABLE and info.num_bytes:
                norm = _norm(step.view[name])
                found.setdefault(name, []).append((float(step.step), norm))
    if not found:
        raise InvalidRequestError(
            f"expected tensors with numbers whose names match {include!r} in the steps of "
            f"{run.url}, found none",
            key="include",
        )
    return line_chart(found, f"norms of {include} over the steps of {run.url}")


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most `MOST_POINTS` points, including the first and the last."""
    chosen = np.linspace(0, len(points) - 1, min(len(points), MOST_POINTS)).round().astype(int)
    return [points[index] for index in chosen.tolist()]


def _change(points: Sequence[tuple[float, float]]) -> float:
    """Returns the change of a line relative to its values; infinite for values not finite."""
    values = [value for _, value in points]
    if not all(math.isfinite(value) for value in values):
        return math.inf
    size = max(abs(value) for value in values)
    return (max(values) - min(values)) / size if size else 0.0


def _norm(handle: TensorHandle) -> float:
    total = 0.0
    for part in parts_of(handle.shape):
        values = np.abs(as_numbers(handle.raw(part), handle.dtype).reshape(-1))
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.dot(values, values))
    return math.sqrt(total) if total >= 0 else total


MOST_TENSORS = 6
_LARGEST = 1e300
"""Larger values count as infinite, as the range of all values must be finite."""

_REAL = READABLE - {"complex32", "complex64", "complex128"}
_FLOOR = 192
"""Bottom of a histogram, in pixels."""


def picture_histogram(*tensors: TensorHandle, bins: int = 80) -> Picture:
    """Returns the distribution of the values of tensors: of layers, or of one tensor over steps.

    All tensors have the same bins, from the smallest value to the largest. Values that are not
    finite are counted below the picture. Every tensor is read twice, in parts.

    Args:
        *tensors: Up to six tensors of any shapes, as `ray_dcp.open(...)["name"]` returns them.
        bins: Number of bins, 2 to 400.

    Raises:
        InvalidRequestError: A tensor has no real numbers, or there are too many or too few.
        DamagedCheckpointError: Bytes that were read do not match their checksums.

    Examples:
        >>> import ray_dcp, torch
        >>> saved = ray_dcp.save({"w": torch.randn(64, 64)}, checkpoint_id="memory://histogram")
        >>> picture_histogram(ray_dcp.open("memory://histogram")["w"])
        Picture of 3... characters
    """
    if not 1 <= len(tensors) <= MOST_TENSORS or bins not in range(2, 401):
        raise InvalidRequestError(
            f"expected 1 to {MOST_TENSORS} tensors and 2 to 400 bins, found {len(tensors)} and "
            f"{bins!r}"
        )
    for one in tensors:
        if not isinstance(one, TensorHandle) or one.dtype not in _REAL:
            found = repr(one) if isinstance(one, TensorHandle) else type(one).__qualname__
            raise InvalidRequestError(
                f"expected tensors of real numbers, as ray_dcp.open(...)['name'] returns them, "
                f"found {found}"
            )
    bounds = [(v.min(), v.max()) for one in tensors for v in _finite(one) if len(v)]
    if not bounds:
        return draw.pictured(draw.aside("no finite values"))
    low, high = float(min(b[0] for b in bounds)), float(max(b[1] for b in bounds))
    edges = np.histogram_bin_edges([], bins, (low, high))
    none = np.zeros(bins, dtype=np.int64)
    counts = [sum((np.histogram(v, edges)[0] for v in _finite(one)), none) for one in tensors]
    shares = [found / max(found.sum(), 1) for found in counts]
    top = max(float(share.max()) for share in shares)

    def x(value: float) -> float:
        return float(_LEFT + (value - edges[0]) / (edges[-1] - edges[0]) * (WIDTH - _LEFT - 20))

    def y(share: float) -> float:
        return _FLOOR - share / top * (_FLOOR - _TOP)

    parts = [draw.note(_LEFT - 6, _TOP - 2, "share", "end")]
    for tick in draw.ticks(0, top, 4)[1:]:
        parts.append(draw.line(_LEFT, y(tick), WIDTH - 20, y(tick)))
        parts.append(draw.note(_LEFT - 6, y(tick) + 4, f"{tick * 100:.4g} %", "end"))
    for tick in draw.ticks(float(edges[0]), float(edges[-1])):
        parts.append(draw.note(x(tick), _FLOOR + 16, f"{tick:.6g}", "middle"))
    parts.append(draw.line(_LEFT, _FLOOR, WIDTH - 20, _FLOOR))
    for index, share in enumerate(shares):
        corners = zip(np.repeat(edges, 2)[1:-1].tolist(), np.repeat(share, 2).tolist(), strict=True)
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in corners)
        path = f"{x(low):.1f},{_FLOOR} {points} {x(high):.1f},{_FLOOR}"
        colour = draw.rank_colour(index)
        look: dict[str, Any] = {"stroke": colour, "stroke_width": 1.4, "fill_opacity": 0.15}
        parts.append(draw.tag("polygon", points=path, fill=colour, **look))
    for index, (one, count) in enumerate(zip(tensors, counts, strict=True)):
        meant = (draw.rank_colour(index), _caption(one, int(count.sum())))
        parts.append(draw.legend(_LEFT, _FLOOR + 26 + 16 * index, [meant]))
    label = f"values of {len(tensors)} tensors in {bins} bins"
    return draw.pictured(draw.svg(WIDTH, _FLOOR + 32 + 16 * len(tensors), *parts, label=label))


def _finite(tensor: TensorHandle) -> Iterator[npt.NDArray[np.floating]]:
    for part in parts_of(tensor.shape):
        values = as_numbers(tensor.raw(part), tensor.dtype).reshape(-1)
        yield values[np.abs(values) < _LARGEST]


def _caption(tensor: TensorHandle, finite: int) -> str:
    total = int(np.prod(tensor.shape, dtype=np.int64))
    caption = f"{draw.clip(tensor.name, 400)}: {total:,} values"
    return caption if finite == total else f"{caption}, {total - finite:,} not finite"


RANK = {
    "capture": (AMBER, "list the items"),
    "plan": ("#b9a88a", "wait for all ranks, plan"),
    "stage": ("#9a6fd0", "copy, training waits"),
    "write": ("#4c8fd6", "write durably"),
    "commit": (GREY, "wait"),
}
"""Colour and meaning of the phases of a rank."""
COORDINATOR = {
    "look": (GREY, "read records"),
    "plan": ("#b9a88a", "assign the bytes"),
    "build": ("#6fae8b", "check the files"),
    "table": ("#3e8f6a", "chunk table"),
    "record": (RED, "commit"),
}
"""Colour and meaning of the phases of the coordinator."""
_LANES, _RIGHT, _HEAD = 92, 78, 34
"""Room for the names of lanes, for sizes, and above the first lane, in pixels."""


def timeline(trace: SaveTrace, title: str = "") -> Picture:
    """Returns the phases of a save on each rank as bars; stragglers are red.

    Args:
        trace: Trace of a save: `ray_dcp.open(path).trace`.
        title: Title of the picture.

    Returns:
        A picture of at most 65 lanes.
    """
    found = trace.lanes()
    end_s = max([trace.committed_s, *(span.stop_s for span in trace.spans), 1e-6])
    scale = (WIDTH - _LANES - _RIGHT) / end_s
    height = 20 if len(found) <= 20 else 16
    bottom = _HEAD + height * len(found) + 4
    parts = []
    for tick in draw.ticks(0, end_s):
        x = _LANES + tick * scale
        parts.append(draw.line(x, _HEAD - 4, x, bottom))
        parts.append(draw.note(x, _HEAD - 8, seconds_text(tick) if tick else "0", "middle"))
    # Why two heights: both lines may be at the same place.
    marks = [(trace.committed_s, "committed", RED, 11)]
    if trace.mode == "async_save":
        marks.append((trace.stall_s, "training goes on", RANK["stage"][0], bottom + 8))
    for at_s, told, colour, y in marks:
        x, before = _LANES + at_s * scale, at_s > 0.6 * end_s
        look = {"stroke": colour, "stroke_width": 1.5, "stroke_dasharray": "4 3"}
        parts.append(draw.line(x, _HEAD - 4, x, bottom, **look))
        anchor, x = ("end", x - 3) if before else ("start", x + 3)
        parts.append(draw.note(x, y, told, anchor, fill=colour, opacity=None))
    for index, (lane, spans) in enumerate(found.items()):
        parts += _lane(trace, lane, spans, _HEAD + index * height, height, scale)
    shown = {(span.rank is None, span.phase) for span in trace.spans} | {(False, "commit")}
    for y, who, looks in ((20, "ranks", RANK), (38, "coordinator", COORDINATOR)):
        is_own = who == "coordinator"
        meant = [(c, f"{n}: {told}") for n, (c, told) in looks.items() if (is_own, n) in shown]
        parts.append(draw.note(_LANES - 8, bottom + y + 9, who, "end"))
        parts.append(draw.legend(_LANES, bottom + y, meant))
    label = f"Timeline of a save of {count_text(trace.world_size, 'rank')}"
    hidden = trace.world_size - len(trace.ranks)
    notes = [f"… and {hidden} more ranks"] if hidden > 0 else []
    notes += [f"▲ {late_text(one)}" for one in trace.stragglers[:4]]
    heading = draw.heading(title, draw.safe(", ".join(course_text(trace))))
    drawn = draw.svg(WIDTH, bottom + 56, *parts, label=label)
    return draw.pictured(heading, drawn, *map(draw.aside, notes))


def _lane(
    trace: SaveTrace, lane: int | None, spans: Sequence[Span], y: float, height: float, scale: float
) -> list[str]:
    late = {s.phase: s for s in trace.stragglers if s.rank == lane}
    name = "coordinator" if lane is None else f"rank {lane}"
    red = {"fill": RED, "font_weight": "bold"} if late else {}
    middle = y + height / 2 + 4
    parts = [draw.text(_LANES - 8, middle, f"▲ {name}" if late else name, "end", **red)]
    looks = COORDINATOR if lane is None else RANK
    for span in stacked(spans):
        straggler = late.get(span.phase)
        told = f"{name}: {span.phase} {seconds_text(span.seconds)}"
        told += f", {size_text(span.num_bytes)}" if span.num_bytes else ""
        told += f", late: median {seconds_text(straggler.median_s)}" if straggler else ""
        edge: dict[str, Any] = {"stroke": RED, "stroke_width": 1.5} if straggler else {}
        edge["opacity"] = 0.2 if span.phase == "commit" else None
        x, width = _LANES + span.start_s * scale, max(span.seconds * scale, 1.0)
        colour = looks.get(span.phase, (GREY, ""))[0]
        parts.append(draw.rect(x, y + 3, width, height - 6, colour, told, **edge))
    num_bytes = sum(span.num_bytes for span in spans if span.phase == "write")
    if num_bytes:
        parts.append(draw.note(WIDTH - 4, middle, size_text(num_bytes), "end"))
    return parts


# --- tables of steps and of differences, and trees of tensors -------------------------------------

MOST_DETAILED = 50
"""Maximum number of steps whose details are read by default, which is fast."""
MOST_STEPS, MOST_CHANGED, MOST_METRICS = 100, 24, 6
_STEP_BAR = 120
"""Width of the longest bar in a table of steps, in pixels."""

_STATES = {
    "committed": "#4fa866", "stock": "#4c8fd6", "safetensors": "#4c8fd6", "damaged": RED,
    "aborted": "#a9795a", "in flight": AMBER, "unreadable": RED, "deleted": GREY,
}  # fmt: skip
CHANGES = {
    "unchanged": GREY, "changed": "#e08a3c", "added": "#4fa866", "removed": RED,
    "reshaped": "#9a6fd0", "retyped": "#d874b5", "undecided": "#b5a835",
}  # fmt: skip
"""Colour of each kind of change."""
_CELL = "padding:2px 10px 2px 0;white-space:nowrap;background:none;border:none"
LEFT = ("name", "step", "state", "mark", "layout", "tags", "note")
"""Left-aligned columns of a table of steps."""


def step_cells(
    run: RunView, steps: Sequence[StepView], *, details: bool, now_s: float
) -> list[dict[str, str]]:
    """Returns the cells of each step in a table, as text by column; "" if unknown.

    Args:
        run: Run of the steps.
        steps: Steps to show.
        details: Include new bytes, layout, stall and time to the commit, which takes two small
            reads per step.
        now_s: Current time, for ages.
    """
    metrics = metric_names(run)
    marks: dict[str, list[str]] = {}
    for key in ("latest", "best"):
        with suppress(CheckpointError):
            marks.setdefault(run.step(key).name, []).append(key)
    return [
        {
            "name": step.name,
            "step": "" if step.step is None else str(step.step),
            "state": step.state,
            "mark": " ".join(marks.get(step.name, ())),
            "age": "" if step.created_s is None else age_text(now_s - step.created_s),
            **{n: number_text(step.metrics[n]) if n in step.metrics else "" for n in metrics},
            "size": size_text(step.num_bytes),
            "ranks": "" if step.num_ranks is None else str(step.num_ranks),
            **(_details(step) if details else {}),
            "tags": " ".join(step.tags),
            "note": step.note,
        }
        for step in steps
    ]


def _details(step: StepView) -> dict[str, str]:
    new = step.new_bytes if step.is_readable else None
    return {
        "new": "" if new is None else size_text(new),
        "reused": size_text(reused) if (reused := sum(step.reused_bytes.values())) else "",
        "layout": (step.layout if step.is_readable else None) or "",
        "stall": "" if step.stall_s is None else seconds_text(step.stall_s),
        "durable": "" if step.durable_s is None else seconds_text(step.durable_s),
    }


def metric_names(run: RunView) -> list[str]:
    """Returns the metrics that get a column: all but one that repeats the number of the step."""
    told = [(name, value, step.step) for step in run for name, value in step.metrics.items()]
    other = {name for name, value, step in told if name != "step" or value != step}
    names = dict.fromkeys(name for name, _, _ in told)
    return [name for name in names if name in other][:MOST_METRICS]


def picture_steps(run: RunView, *, details: bool | None = None) -> Picture:
    """Returns the steps of a run as a table with bars for their sizes; of several runs, one each.

    Deleted steps are only counted. Of more than 100 other steps of a run, the newest are shown.

    Args:
        run: Result of `ray_dcp.open`.
        details: Include new bytes, layout, stall and time to the commit, which takes two small
            reads per step. By default, only for up to 50 steps on a local disk.

    Examples:
        >>> import ray_dcp, torch
        >>> for step in (1, 2):
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"memory://doc-pic/step-{step}")
        >>> picture_steps(ray_dcp.open("memory://doc-pic")).html.count("<tr>")
        3
    """
    if details is None:
        is_near = "://" not in run.url or run.url.startswith("memory://")
        details = is_near and len(run.present) <= MOST_DETAILED
    tables = []
    for part in run.runs:
        if part is not run:
            tables.append(draw.heading(folder_of(part, run), run_text(part)))
        tables += _steps_table(part, details=details)
    return draw.pictured(draw.heading(run.url, run_text(run)), *tables)


def folder_of(part: RunView, run: RunView) -> str:
    """Returns the folder of one of `run.runs`, relative to the run; `.` for the run itself."""
    return part.url[len(run.url.rstrip("/")) + 1 :] or "."


def _steps_table(run: RunView, *, details: bool) -> list[str]:
    """Returns the newest steps of a single run as a table; the number of others before it."""
    steps = run.present[-MOST_STEPS:]
    rows = step_cells(run, steps, details=details, now_s=time.time())
    if not rows:
        return []
    columns = [name for name in rows[0] if name != "name" and any(row[name] for row in rows)]
    top = max(step.num_bytes for step in steps) or 1
    lines = [_row("th", columns, {name: name for name in columns})]
    for step, row in zip(steps, rows, strict=True):
        cells = {name: draw.safe(draw.clip(told, 400)) for name, told in row.items()}
        label = draw.safe(draw.clip(row["step"] or step.name, 260))
        cells["step"] = f"<b title='{draw.safe(step.name)}'>{label}</b>"
        cells["mark"] = cells["mark"].replace("best", f"<span style='color:{AMBER}'>★</span>")
        dot = f"<span style='color:{_STATES.get(step.state, GREY)}'>● </span>"
        cells["state"] = f"{dot}{step.state}"
        new = step.new_bytes if details and step.is_readable else None
        cells["size"] = f"{_size_bar(step.num_bytes, new, top)} {cells['size']}"
        lines.append(_row("td", columns, cells))
    hidden = len(run.present) - len(rows)
    told = draw.aside(f"… and {hidden} earlier steps" if hidden else "")
    table = f"<table style='border-collapse:collapse;font-size:13px'>{''.join(lines)}</table>"
    return [told, table]


def run_text(run: RunView) -> str:
    """Returns the number of checkpoints of a run, and of those that were deleted, as text."""
    num_gone = len(run) - len(run.present)
    told = count_text(len(run.present), "checkpoint")
    return f"{told}, {num_gone} deleted" if num_gone else told


def _row(cell: str, columns: Sequence[str], told: Mapping[str, str]) -> str:
    sides = {name: "left" if name in LEFT else "right" for name in columns}
    cells = (f"<{cell} style='{_CELL};text-align:{sides[n]}'>{told[n]}</{cell}>" for n in columns)
    return f"<tr>{''.join(cells)}</tr>"


def _size_bar(num_bytes: int, new_bytes: int | None, top: int) -> str:
    """Returns a bar whose new bytes have full colour; the step before has the other bytes, too."""
    width = round(_STEP_BAR * num_bytes / top)
    new = width if new_bytes is None else min(round(_STEP_BAR * new_bytes / top), width)
    colour = f"display:inline-block;height:10px;background:{draw.rank_colour(0)}"
    return (
        f"<span style='display:inline-block;width:{_STEP_BAR}px;text-align:left'>"
        f"<span style='{colour};width:{new}px'></span>"
        f"<span style='{colour};opacity:.35;width:{width - new}px'></span></span>"
    )


def picture_diff(diff: CheckpointDiff, *, values: bool = False) -> Picture:
    """Returns a picture of the differences of two checkpoints.

    Args:
        diff: Result of `CheckpointView.diff`.
        values: Read the tensors that changed, and show by how much.

    Raises:
        DamagedCheckpointError: Bytes that were read do not match their checksums.
    """
    names = ("/".join(view.url.rstrip("/").split("/")[-2:]) for view in (diff.first, diff.second))
    known = {one.name: one.relative for one in diff.values()} if values else {}
    scale = WIDTH / (sum(one.num_bytes for one in diff.tensors) or 1)
    parts: list[str] = []
    meant, x = [], 0.0
    for kind, colour in CHANGES.items():
        found = [one.num_bytes for one in diff.tensors if one.change == kind]
        if found:
            told = f"{kind}: {size_text(sum(found))}"
            parts.append(draw.rect(x, 0, sum(found) * scale, 16, colour, told))
            x += sum(found) * scale
            meant.append((colour, f"{len(found)} {kind}, {size_text(sum(found))}"))
    parts.append(draw.legend(0, 24, meant))
    moved = [one for one in diff.tensors if one.change != "unchanged"]
    moved.sort(key=lambda one: (-known.get(one.name, 0.0), -_bytes(one)))
    rows = []
    for one in moved[:MOST_CHANGED]:
        length = known.get(one.name, 0.0) if known else float(_bytes(one))
        told = f"{one.name}: {one.change}, {size_text(_bytes(one))} of {size_text(one.num_bytes)}"
        rows.append(Bar(one.name, [(length, CHANGES[one.change], told)], _told(one, known)))
    if rows:
        told = "|new - old| / |old|" if known else "bytes in blocks that differ"
        parts.append(draw.note(300, 54, told))
    drawn, y = draw.bars(rows, 300, 58, len(moved) - len(rows))
    drawing = draw.svg(WIDTH, y + 6, *parts, drawn, label="Differences of two checkpoints")
    return draw.pictured(draw.heading(" → ".join(names)), drawing)


def _bytes(one: TensorDiff) -> int:
    return one.changed_bytes or one.num_bytes


def _told(one: TensorDiff, relative: Mapping[str, float]) -> str:
    if one.name in relative:
        share = relative[one.name]
        return f"{share:.3g}" if share < 0.01 else f"{share:.1%}"
    if one.change == "changed":
        return f"{size_text(_bytes(one))} of {size_text(one.num_bytes)}"
    return f"{one.change}, {size_text(one.num_bytes)}"


MOST_NODES = 500
"""Maximum number of lines of a tree, whatever the checkpoint contains."""
MOST_CHILDREN = 40
_TREE_BAR = 130
"""Width of the bar of all bytes, in pixels."""


class Leaf(NamedTuple):
    """One tensor or object."""

    name: str
    """FQN."""
    info: TensorInfo | None
    """None for an object, whose size is unknown."""
    path: tuple[str | int, ...] | None = None
    """Path in the nested state dict; if unknown, the name is split at dots."""
    value: str = ""
    """Value of an object as text, if known."""


@dataclass
class Node:
    """All tensors and objects below one name."""

    name: str
    num_bytes: int = 0
    num_tensors: int = 0
    num_objects: int = 0
    children: dict[str, Node] = field(default_factory=dict)
    leaf: Leaf | None = None

    @property
    def told(self) -> str:
        """Shape and dtype of a tensor, or the numbers of tensors and objects below the name."""
        if self.leaf is None or self.children:
            counts = ((self.num_tensors, "tensor"), (self.num_objects, "object"))
            return " and ".join(count_text(n, noun) for n, noun in counts if n)
        info = self.leaf.info
        if info is None:
            return self.leaf.value or "object"
        parts = f" in {info.num_chunks} parts" if info.num_chunks > 1 else ""
        return f"{shape_text(info.shape)} {info.dtype}{parts}"


def shape_text(shape: tuple[int, ...]) -> str:
    """Returns a shape as text.

    Examples:
        >>> shape_text((64, 8)), shape_text(())
        ('64x8', 'scalar')
    """
    return "x".join(map(str, shape)) or "scalar"


def leaves_of(view: CheckpointView, names: Iterable[str] | None = None) -> list[Leaf]:
    """Returns tensors and objects of a checkpoint.

    Args:
        view: The checkpoint.
        names: FQNs to include; all by default.
    """
    paths = dict(zip(view.names, view.checkpoint.table.paths, strict=True))
    chosen = view.names if names is None else names
    return [Leaf(n, view.tensors.get(n), paths[n], view.small_values.get(n, "")) for n in chosen]


def grown(leaves: Iterable[Leaf], *, merged: bool = True) -> Node:
    """Returns the root of the tree of some tensors and objects.

    Args:
        leaves: Tensors and objects, in any order.
        merged: Merge names that have one child each into one node.

    Complexity:
        O(leaves x depth).

    Examples:
        >>> info = TensorInfo((2,), "float32", 8, 1, None)
        >>> root = grown([Leaf("a.b.w", info), Leaf("a.b.v", None)])
        >>> root.num_bytes, list(root.children), list(root.children["a.b"].children)
        (8, ['a.b'], ['w', 'v'])
    """
    root = Node("")
    for leaf in leaves:
        node = root
        # Why dots as well: most paths are a single mapping whose names have dots.
        parts = [part for key in leaf.path or (leaf.name,) for part in str(key).split(".")]
        for part in (None, *parts):
            if part is not None:
                node = node.children.setdefault(part, Node(part))
            node.num_bytes += 0 if leaf.info is None else leaf.info.num_bytes
            node.num_objects += leaf.info is None
            node.num_tensors += leaf.info is not None
        node.leaf = leaf
    if merged:
        children = [_merged(child) for child in root.children.values()]
        root.children = {child.name: child for child in children}
    return root


def tensor_tree(leaves: Iterable[Leaf], title: str = "") -> Picture:
    """Returns a tree of names that opens and closes; of many names, only the largest.

    Args:
        leaves: All tensors and objects of a checkpoint.
        title: Title of the picture.
    """
    root = grown(leaves)
    lines = _children(root, root.num_bytes, 0, [MOST_NODES])
    told = f"{root.told or 'nothing'}, {size_text(root.num_bytes)}"
    return draw.pictured(draw.heading(title, told), *lines)


def _children(node: Node, total: int, level: int, budget: list[int]) -> list[str]:
    most = min(MOST_CHILDREN, max(budget[0], 1))
    shown = sorted(node.children.values(), key=lambda child: -child.num_bytes)[:most]
    shown.sort(key=lambda child: _natural(child.name))
    budget[0] -= len(shown)
    lines = [_line(child, total, level, budget) for child in shown]
    hidden = len(node.children) - len(shown)
    rest = size_text(node.num_bytes - sum(child.num_bytes for child in shown))
    return [*lines, draw.aside(f"… and {hidden} more, {rest}" if hidden else "")]


def _line(node: Node, total: int, level: int, budget: list[int]) -> str:
    width = max(round(_TREE_BAR * node.num_bytes / total), 1) if total and node.num_bytes else 0
    look = f"height:9px;border-radius:2px;background:{draw.rank_colour(0)};width:{width}px"
    # Why not 0 B: the size of an object is unknown until it is read.
    length = size_text(node.num_bytes) if node.num_bytes or node.num_tensors else ""
    room, weight = ("calc(100% - 1.3em)", 600) if node.children else ("100%", 400)
    row = (
        f"<span style='display:inline-flex;gap:10px;align-items:center;width:{room};"
        f"vertical-align:middle'><code style='flex:1;min-width:6em;overflow-wrap:anywhere;"
        f"font-weight:{weight};background:none'>{draw.safe(node.name)}</code>"
        f"<span style='flex:none;opacity:.75;text-align:right'>{draw.safe(node.told)}</span>"
        f"<span style='flex:none;width:76px;text-align:right'>{length}</span>"
        f"<span style='flex:none;display:inline-block;width:{_TREE_BAR}px'>"
        f"<span style='display:block;{look}'></span></span></span>"
    )
    if not node.children or budget[0] <= 0:
        return f"<div style='padding-left:1.3em'>{row}</div>"
    inner = "".join(_children(node, total, level + 1, budget))
    opened = "" if level else " open=''"
    return (
        f"<details{opened}><summary style='cursor:pointer'>{row}</summary>"
        f"<div style='margin-left:1.1em;border-left:1px solid rgba(128,128,128,.35);"
        f"padding-left:.2em'>{inner}</div></details>"
    )


def _merged(node: Node) -> Node:
    """Returns a node after merging nodes that have a single child and no leaf."""
    while len(node.children) == 1 and node.leaf is None:
        (only,) = node.children.values()
        node = replace(only, name=f"{node.name}.{only.name}")
    children = [_merged(child) for child in node.children.values()]
    node.children = {child.name: child for child in children}
    return node


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key that orders layer 9 before layer 10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdecimal() and len(p) < 18 else (1, 0, p) for p in parts if p]
