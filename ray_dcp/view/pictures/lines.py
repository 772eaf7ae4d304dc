"""Numbers over the steps of a training, as lines: norms of weights, losses, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from ray_dcp.core.dtypes import READABLE, as_numbers
from ray_dcp.errors import InvalidRequestError
from ray_dcp.view.pictures import drawing as draw
from ray_dcp.view.pictures.drawing import GREY, WIDTH, Picture
from ray_dcp.view.tensor_handle import TensorHandle, parts_of

if TYPE_CHECKING:
    from ray_dcp.view.run_view import RunView

MOST_NAMED, MOST_LINES, MOST_POINTS = 8, 60, 400
LOG_RATIO = 50.0
"""Values that lie further apart are drawn on a logarithmic scale."""

_LEFT, _TOP, _BOTTOM, _END = 58, 12, 242, WIDTH - 210

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(series: Series, title: str = "") -> Picture:
    """Returns numbers over steps: the ones that change most by name, the others faint behind them.

    Args:
        series: Name → `(step, value)`; values that are not finite are marked at the bottom.
        title: Above the picture.
    """
    kept = {name: _thinned(sorted(points)) for name, points in series.items() if points}
    order = sorted(kept, key=lambda name: -_change(kept[name]))
    values = [v for points in kept.values() for _, v in points if math.isfinite(v)]
    if not values:
        return draw.pictured(draw.heading(title), draw.aside("no values"))
    scale = _Scale([s for points in kept.values() for s, _ in points], values)
    faint = order[MOST_NAMED:MOST_LINES]
    parts = [
        scale.axes(),
        *(_line(kept[name], scale, name, GREY, faint=True) for name in faint),
    ]
    ends = []
    for index, name in enumerate(order[:MOST_NAMED]):
        parts.append(_line(kept[name], scale, name, draw.rank_colour(index), faint=False))
        ends.append((scale.y(kept[name][-1][1]), scale.x(kept[name][-1][0]), index, name))
    hidden = len(order) - len(ends)
    drawn = "" if len(faint) == hidden else f", {len(faint)} drawn"
    told = draw.aside(f"in grey: {hidden} that change less{drawn}" if hidden else "")
    label = f"{len(order)} lines over steps"
    drawing = draw.svg(WIDTH, _BOTTOM + 26, *parts, *_names(ends), label=label)
    return draw.pictured(draw.heading(title), drawing, told)


def picture_norms(run: RunView, include: str = "*") -> Picture:
    """Returns the norms of tensors over the steps of a run.

    The tensors are read.

    Args:
        run: As `ray_dcp.open` gives it.
        include: Shell pattern of FQNs.

    Raises:
        InvalidRequestError: Nothing matches.
        DamagedCheckpointError: What is read does not match its checksums.
    """
    return line_chart(norms_of(run, include), f"norms of {include} over the steps of {run.url}")


def norms_of(run: RunView, include: str = "*") -> dict[str, list[tuple[float, float]]]:
    """Returns the norm of each tensor at each step; see `picture_norms`.

    Returns:
        FQN → `(step, norm)`. Steps that can't be read are left out.
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
    return found


class _Scale:
    """Where a step and a value are on paper."""

    def __init__(self, steps: Sequence[float], values: Sequence[float]) -> None:
        self.first, self.last = min(steps), max(steps)
        low, high = min(values), max(values)
        self.is_log = low > 0 and high / low > LOG_RATIO
        if self.is_log:
            low, high = math.log10(low), math.log10(high)
        elif 0 <= low < 0.5 * high:
            low = 0.0  # a small change of a large number is small
        if high - low <= abs(high) * 1e-9:
            pad = abs(high) * 0.1 or 1.0
            low, high = low - pad, high + pad
        self.low, self.high = low, high

    def x(self, step: float) -> float:
        span = self.last - self.first
        return _LEFT + ((step - self.first) / span if span else 0.5) * (_END - _LEFT)

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and not (self.is_log and value <= 0)

    def y(self, value: float) -> float:
        if not self.shows(value):
            return _BOTTOM
        at = math.log10(value) if self.is_log else value
        return _TOP + (1 - (at - self.low) / (self.high - self.low)) * (_BOTTOM - _TOP)

    def axes(self) -> str:
        parts = [draw.note(_END + 24, _BOTTOM + 16, "step")]
        powers = range(math.ceil(self.low), math.floor(self.high) + 1) if self.is_log else ()
        for tick in (
            [10.0**p for p in powers] if self.is_log else draw.ticks(self.low, self.high, 5)
        ):
            y = self.y(tick)
            parts += [
                draw.line(_LEFT, y, _END, y),
                draw.note(_LEFT - 6, y + 4, f"{tick:.4g}", "end"),
            ]
        for step in draw.ticks(self.first, self.last):
            parts.append(draw.note(self.x(step), _BOTTOM + 16, f"{step:.10g}", "middle"))
        return "".join(parts)


def _line(
    points: Sequence[tuple[float, float]], scale: _Scale, name: str, colour: str, *, faint: bool
) -> str:
    shown = [(scale.x(s), scale.y(v), s, v) for s, v in points if scale.shows(v)]
    look = {"stroke": colour, "stroke_width": 1.0 if faint else 1.8, "fill": "none"}
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in shown)
    title = draw.tag("title", draw.safe(name))
    parts = [draw.tag("polyline", title, points=path, opacity=0.35 if faint else 1, **look)]
    if not faint and len(shown) <= 40:
        for x, y, step, value in shown:
            told = draw.tag("title", draw.safe(f"{name} at {step:.10g}: {value:.6g}"))
            parts.append(draw.tag("circle", told, cx=x, cy=y, r=2.4, fill=colour))
    wrong = [step for step, value in points if not math.isfinite(value)]
    parts += [draw.text(scale.x(s), _BOTTOM - 2, "✕", "middle", fill=colour) for s in wrong[:20]]
    return "".join(parts)


def _names(ends: list[tuple[float, float, int, str]]) -> list[str]:
    """Returns a label at the end of each line, moved apart where they would overlap."""
    parts: list[str] = []
    free = -math.inf
    for left, (y, x, index, name) in zip(range(len(ends))[::-1], sorted(ends), strict=True):
        at = max(min(y, _BOTTOM - 13.0 * left), free)
        free = at + 13
        colour = draw.rank_colour(index)
        parts.append(draw.line(x + 3, y, _END + 10, at, stroke=colour, opacity=0.5))
        parts.append(draw.text(_END + 13, at + 4, draw.clip(name, 190), fill=colour))
    return parts


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most `MOST_POINTS` of the points, with the first and the last."""
    chosen = np.linspace(0, len(points) - 1, min(len(points), MOST_POINTS)).round().astype(int)
    return [points[index] for index in chosen.tolist()]


def _change(points: Sequence[tuple[float, float]]) -> float:
    """Returns how much a line changes, for its size; what is not finite comes first."""
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
