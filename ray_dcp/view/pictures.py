"""Pictures of checkpoints and runs as SVG and HTML, for notebooks and web pages.

Pictures need no network, can be read on light and on dark pages, and stay small for any size of
checkpoint. Views, runs, tensors, differences, previews and traces show themselves as pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ray_dcp.core.dtypes import READABLE, as_numbers
from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.view import drawing as draw
from ray_dcp.view.drawing import AMBER, GREY, RED, WIDTH, Picture
from ray_dcp.view.resharding import picture_layout, picture_reshard
from ray_dcp.view.tables import picture_diff, picture_steps, tensor_tree
from ray_dcp.view.tensor_handle import TensorHandle, parts_of
from ray_dcp.view.wording import (
    count_text,
    course_text,
    late_text,
    seconds_text,
    size_text,
    stacked,
)

if TYPE_CHECKING:
    from ray_dcp.view.run_view import RunView

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
