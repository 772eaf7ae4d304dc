"""Numbers over the steps of a training, as lines: norms of weights, losses, sizes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ray_dcp.view.pictures.drawing import (
    FAINT,
    GREY,
    WIDTH,
    Picture,
    clip,
    div,
    nice_ticks,
    rank_colour,
    safe,
    svg,
    tag,
    text,
)

MOST_NAMED, MOST_LINES = 8, 60
MOST_POINTS = 400
LOG_RATIO = 50.0
"""Values that lie further apart are drawn on a logarithmic scale."""

_LEFT, _RIGHT, _TOP, _HEIGHT = 58, 210, 12, 230

Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(series: Series, title: str = "", *, unit: str = "") -> Picture:
    """Returns numbers over steps: the ones that change most by name, the others faint behind them.

    Args:
        series: Name → `(step, value)`; values that are not finite are marked at the bottom.
        title: Above the picture.
        unit: Of the values.
    """
    kept = {name: _thinned(sorted(points)) for name, points in series.items() if points}
    order = by_change(kept)
    named, faint = order[:MOST_NAMED], order[MOST_NAMED:MOST_LINES]
    values = [v for name in order for _, v in kept[name] if math.isfinite(v)]
    steps = [s for name in order for s, _ in kept[name]]
    head = f"<div><b>{safe(title)}</b></div>" if title else ""
    if not values:
        return Picture(div(head, "<div style='opacity:.75'>no values</div>"))
    scale = _Scale(steps, values)
    parts = [scale.axes(unit)]
    parts += [_line(kept[name], scale, name, GREY, 1.0, 0.35) for name in faint]
    parts += [
        _line(kept[name], scale, name, rank_colour(index), 1.8, 1.0)
        for index, name in enumerate(named)
    ]
    parts.append(_names(named, kept, scale))
    hidden = len(order) - len(named)
    note = ""
    if hidden:
        told = f"{hidden} that change less" + (
            "" if len(faint) == hidden else f", {len(faint)} drawn"
        )
        note = f"<div style='opacity:.7'>in grey: {told}</div>"
    label = f"{len(order)} lines over {len(set(steps))} steps"
    return Picture(div(head, svg(WIDTH, _TOP + _HEIGHT + 26, *parts, label=label), note))


def by_change(series: Series) -> list[str]:
    """Returns the names of all lines that have points, those that change most first."""
    return sorted((name for name in series if series[name]), key=lambda n: -_change(series[n]))


class _Scale:
    """Where a step and a value are on paper."""

    def __init__(self, steps: Sequence[float], values: Sequence[float]) -> None:
        self.first, self.last = min(steps), max(steps)
        low, high = min(values), max(values)
        self.is_log = low > 0 and high / low > LOG_RATIO
        if self.is_log:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            # Why from 0 where it is near: a small change of a large number is small.
            self.low = 0.0 if 0 <= low < 0.5 * high else low
            self.high = high
        if self.high - self.low <= abs(self.high) * 1e-9:
            pad = abs(self.high) * 0.1 or 1.0
            self.low, self.high = self.low - pad, self.high + pad

    def x(self, step: float) -> float:
        span = self.last - self.first
        return _LEFT + ((step - self.first) / span if span else 0.5) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        if not math.isfinite(value) or (self.is_log and value <= 0):
            return _TOP + _HEIGHT
        at = math.log10(value) if self.is_log else value
        return _TOP + (1 - (at - self.low) / (self.high - self.low)) * _HEIGHT

    def axes(self, unit: str) -> str:
        parts = []
        if self.is_log:
            ticks = [10.0**p for p in range(math.ceil(self.low), math.floor(self.high) + 1)]
        else:
            ticks = _multiples(self.low, self.high, 5)
        for tick in ticks:
            y = self.y(tick)
            parts.append(
                tag(
                    "line",
                    x1=_LEFT,
                    x2=WIDTH - _RIGHT,
                    y1=y,
                    y2=y,
                    stroke="currentColor",
                    opacity=FAINT,
                )
            )
            told = f"{tick:.4g} {unit}".strip()
            parts.append(text(_LEFT - 6, y + 4, told, size=10, text_anchor="end", opacity=0.75))
        for step in _multiples(self.first, self.last, 6) or [self.first]:
            parts.append(
                text(
                    self.x(step),
                    _TOP + _HEIGHT + 16,
                    f"{step:.10g}",
                    size=10,
                    text_anchor="middle",
                    opacity=0.75,
                )
            )
        parts.append(text(WIDTH - _RIGHT + 24, _TOP + _HEIGHT + 16, "step", size=10, opacity=0.6))
        return "".join(parts)


def _multiples(low: float, high: float, about: int) -> list[float]:
    """Returns round numbers from one to another, whatever the first of them is."""
    ticks = nice_ticks(high - low, about)
    every = ticks[1] if len(ticks) > 1 else 1.0
    first, last = math.ceil(low / every - 1e-9), math.floor(high / every + 1e-9)
    return [round(every * at, 12) for at in range(first, last + 1)]


def _line(
    points: Sequence[tuple[float, float]],
    scale: _Scale,
    name: str,
    colour: str,
    width: float,
    opacity: float,
) -> str:
    finite = [(s, v) for s, v in points if math.isfinite(v) and not (scale.is_log and v <= 0)]
    path = " ".join(f"{scale.x(s):.1f},{scale.y(v):.1f}" for s, v in finite)
    told = tag("title", safe(name))
    parts = (
        [
            tag(
                "polyline",
                told,
                points=path,
                fill="none",
                stroke=colour,
                stroke_width=width,
                opacity=opacity,
                stroke_linejoin="round",
            )
        ]
        if finite
        else []
    )
    if opacity == 1.0 and len(finite) <= 40:
        parts += [
            tag(
                "circle",
                tag("title", safe(f"{name} at {s:.10g}: {v:.6g}")),
                cx=scale.x(s),
                cy=scale.y(v),
                r=2.4,
                fill=colour,
            )
            for s, v in finite
        ]
    parts += [
        text(scale.x(s), _TOP + _HEIGHT - 2, "✕", fill=colour, text_anchor="middle")
        for s, v in points
        if not math.isfinite(v)
    ][:20]
    return "".join(parts)


def _names(
    named: Sequence[str], series: Mapping[str, Sequence[tuple[float, float]]], scale: _Scale
) -> str:
    """Returns a label at the end of each line, moved apart where they would overlap."""
    ends = sorted((scale.y(series[name][-1][1]), index, name) for index, name in enumerate(named))
    parts: list[str] = []
    free = -math.inf
    room = _TOP + _HEIGHT - 13 * (len(ends) - 1)
    for place, (y, index, name) in enumerate(ends):
        at = max(min(y, room + 13 * place), free)
        free = at + 13
        x = scale.x(series[name][-1][0])
        colour = rank_colour(index)
        parts.append(
            tag(
                "path",
                d=f"M{x + 3:.1f} {y:.1f}L{WIDTH - _RIGHT + 10} {at:.1f}",
                stroke=colour,
                opacity=0.5,
                fill="none",
            )
        )
        told = clip(name, _RIGHT - 18)
        parts.append(text(WIDTH - _RIGHT + 13, at + 4, told, fill=colour))
    return "".join(parts)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most `MOST_POINTS` of the points, with the first and the last."""
    if len(points) <= MOST_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(index * last / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def _change(points: Sequence[tuple[float, float]]) -> float:
    """Returns how much a line changes, for its size; what is not finite comes first."""
    values = [value for _, value in points]
    if not all(math.isfinite(value) for value in values):
        return math.inf
    size = max(abs(value) for value in values)
    return (max(values) - min(values)) / size if size else 0.0
