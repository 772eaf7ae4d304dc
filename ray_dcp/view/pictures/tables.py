"""Tables with bars: the steps of a run, and what changed between two checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ray_dcp.view.pictures.drawing import (
    GREY,
    RED,
    WIDTH,
    Picture,
    clip,
    div,
    rect,
    safe,
    svg,
    text,
)
from ray_dcp.view.wording import count_text, metric_names, seconds_text, size_text

MOST_STEPS = 100
MOST_CHANGED = 24
BAR = 120

_STATES = {
    "committed": "#4fa866", "stock": "#4c8fd6", "safetensors": "#4c8fd6", "damaged": RED,
    "aborted": "#a9795a", "in flight": "#d99a2b", "uncommitted": "#d99a2b", "deleted": GREY,
}  # fmt: skip
CHANGES = {
    "unchanged": GREY, "changed": "#e08a3c", "added": "#4fa866", "removed": RED,
    "reshaped": "#9a6fd0", "retyped": "#d874b5", "undecided": "#b5a835",
}  # fmt: skip
"""What may have become of a tensor, each with its colour."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One row of the table of a run. What is None is not known, and not shown."""

    name: str
    step: int | None = None
    state: str = "committed"
    age: str = ""
    """In words."""
    num_bytes: int = 0
    new_bytes: int | None = None
    """Bytes that the step before did not have."""
    num_ranks: int | None = None
    layout: str | None = None
    """How the tensors are cut, in words."""
    stall_s: float | None = None
    """How long training waited for the save."""
    durable_s: float | None = None
    """How long it took until the commit."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Changed:
    """What became of one tensor between two checkpoints."""

    name: str
    change: str
    """A key of `CHANGES`."""
    num_bytes: int
    changed_bytes: int = 0
    relative: float | None = None
    """Norm of the difference over the norm of the first; None if values were not read."""


def step_table(steps: Sequence[Step], title: str = "", *, best: str | None = None) -> Picture:
    """Returns the steps of a run as a table with bars for their sizes.

    Args:
        steps: Oldest first; of more than 100 the newest.
        title: Above the table.
        best: Name of a step to be marked with a star.
    """
    shown = steps[-MOST_STEPS:]
    top = max((step.num_bytes for step in shown), default=0)
    metrics = metric_names(((step.step, step.metrics) for step in shown), 6)
    columns = _columns(shown, metrics)
    head = "".join(
        f"<th style='{_CELL};text-align:{'left' if name in _LEFT else 'right'}'>"
        f"{safe(name.removeprefix(_METRIC))}</th>"
        for name in columns
    )
    rows = []
    for index, step in enumerate(shown):
        last = index == len(shown) - 1
        cells = _cells(step, metrics, top, step.name == best, last)
        rows.append(
            "<tr>"
            + "".join(
                f"<td style='{_CELL};text-align:{'left' if name in _LEFT else 'right'}'>"
                f"{cells[name]}</td>"
                for name in columns
            )
            + "</tr>"
        )
    hidden = len(steps) - len(shown)
    note = f"<div style='opacity:.75'>… and {hidden} earlier steps</div>" if hidden else ""
    name = (
        f"<div><b>{safe(title)}</b> · {count_text(len(steps), 'checkpoint')}</div>" if title else ""
    )
    if not steps:
        return Picture(div(name or "<div>no checkpoints</div>"))
    table = (
        "<table style='border-collapse:collapse;font-size:13px'>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    return Picture(div(name, note, table))


def diff_chart(changes: Sequence[Changed], title: str = "") -> Picture:
    """Returns what changed between two checkpoints: how much in all, and in which tensors most.

    Args:
        changes: Every tensor and object of either.
        title: Above the picture.
    """
    total = sum(change.num_bytes for change in changes)
    parts: list[str] = []
    x, scale = 0.0, WIDTH / total if total else 0.0
    for kind, colour in CHANGES.items():
        num_bytes = sum(one.num_bytes for one in changes if one.change == kind)
        if num_bytes:
            parts.append(
                rect(x, 0, num_bytes * scale, 16, colour, f"{kind}: {size_text(num_bytes)}")
            )
            x += num_bytes * scale
    y = 34.0
    parts.append(_kinds(changes, y))
    measured = any(one.relative is not None for one in changes)
    moved = sorted((one for one in changes if one.change != "unchanged"), key=_weight, reverse=True)
    y += 18
    if moved:
        told = "|new - old| / |old|" if measured else "bytes in blocks that differ"
        parts.append(text(300, y + 10, told, size=10, opacity=0.7))
        y += 16
    top = max((_length(one, measured) for one in moved), default=0.0) or 1.0
    for one in moved[:MOST_CHANGED]:
        parts.append(text(292, y + 11, clip(one.name, 280), text_anchor="end"))
        length = max(_length(one, measured) / top * (WIDTH - 430), 1.0)
        told = f"{one.name}: {one.change}, {size_text(one.changed_bytes)} of "
        told += size_text(one.num_bytes)
        parts.append(rect(300, y + 2, length, 11, CHANGES.get(one.change, GREY), told))
        parts.append(text(306 + length, y + 11, _words(one, measured), size=10, opacity=0.8))
        y += 16
    if len(moved) > MOST_CHANGED:
        parts.append(text(300, y + 11, f"… and {len(moved) - MOST_CHANGED} more", opacity=0.7))
        y += 16
    name = f"<div><b>{safe(title)}</b></div>" if title else ""
    drawing = svg(WIDTH, y + 6, *parts, label="What changed between two checkpoints")
    return Picture(div(name, drawing))


# --- pieces -------------------------------------------------------------------------------------

_UNKNOWN_NEW = "<span title='hashes can&#39;t tell: it is cut otherwise than before'>?</span>"
_CELL = "padding:2px 10px 2px 0;white-space:nowrap;background:none;border:none"
_METRIC = "metric "
_LEFT = ("step", "state", "layout", "size", "tags", "note")


def _columns(steps: Sequence[Step], metrics: Sequence[str]) -> list[str]:
    known = {
        "age": any(step.age for step in steps),
        "new": any(step.new_bytes is not None for step in steps),
        "ranks": any(step.num_ranks is not None for step in steps),
        "layout": any(step.layout for step in steps),
        "stall": any(step.stall_s is not None for step in steps),
        "durable": any(step.durable_s is not None for step in steps),
        "tags": any(step.tags for step in steps),
        "note": any(step.note for step in steps),
    }
    told = [f"{_METRIC}{name}" for name in metrics]
    order = ["step", "age", *told, "size", "new", "ranks", "layout", "stall", "durable", "state"]
    return [name for name in [*order, "tags", "note"] if known.get(name, True)]


def _cells(
    step: Step, metrics: Sequence[str], top: int, is_best: bool, is_last: bool
) -> dict[str, str]:
    star = f" <span style='color:{_STATES['in flight']}'>★</span>" if is_best else ""
    latest = " <span style='opacity:.65'>← latest</span>" if is_last else ""
    label = step.name if step.step is None else step.step
    cells = {
        "step": f"<b title='{safe(step.name)}'>{safe(clip(str(label), 260))}</b>{star}{latest}",
        "age": safe(step.age),
        "size": f"{_size_bar(step, top)}<span style='display:inline-block;width:74px;"
        f"text-align:right'>{size_text(step.num_bytes)}</span>",
        "new": _UNKNOWN_NEW if step.new_bytes is None else size_text(step.new_bytes),
        "ranks": "" if step.num_ranks is None else str(step.num_ranks),
        "layout": safe(step.layout or ""),
        "stall": "" if step.stall_s is None else seconds_text(step.stall_s),
        "durable": "" if step.durable_s is None else seconds_text(step.durable_s),
        "state": f"<span style='color:{_STATES.get(step.state, GREY)}'>● </span>{safe(step.state)}",
        "tags": " ".join(_badge(tag) for tag in step.tags[:8]),
        "note": safe(clip(step.note, 400)),
    }
    for name in metrics:
        value = step.metrics.get(name)
        cells[f"{_METRIC}{name}"] = "" if value is None else f"{value:.4g}"
    return cells


def _size_bar(step: Step, top: int) -> str:
    width = round(BAR * step.num_bytes / top) if top else 0
    known = step.new_bytes is not None
    new = min(round(BAR * min(step.new_bytes or 0, top) / top) if top else 0, width)
    told = f"{size_text(step.num_bytes)}"
    told += "" if step.new_bytes is None else f", {size_text(step.new_bytes)} new"
    return (
        f"<span title='{told}' style='display:inline-block;width:{BAR}px;vertical-align:middle'>"
        f"<span style='display:inline-block;height:10px;width:{new}px;background:#4c8fd6'></span>"
        f"<span style='display:inline-block;height:10px;width:{width - new}px;"
        f"background:#4c8fd6;opacity:{'.35' if known else '.65'}'></span></span>"
    )


def _badge(tag: str) -> str:
    return (
        "<span style='border:1px solid rgba(128,128,128,.6);border-radius:8px;padding:0 6px;"
        f"font-size:11px'>{safe(clip(tag, 160))}</span>"
    )


def _kinds(changes: Sequence[Changed], y: float) -> str:
    parts, x = [], 0.0
    for kind, colour in CHANGES.items():
        found = [one for one in changes if one.change == kind]
        if not found:
            continue
        told = f"{len(found)} {kind}, {size_text(sum(one.num_bytes for one in found))}"
        parts.append(rect(x, y - 10, 11, 11, colour))
        parts.append(text(x + 16, y, told))
        x += 40 + len(told) * 6.2
    return "".join(parts)


def _weight(one: Changed) -> tuple[float, int]:
    return (one.relative if one.relative is not None else 0.0, one.changed_bytes or one.num_bytes)


def _length(one: Changed, measured: bool) -> float:
    if measured:
        return one.relative or 0.0
    return float(one.changed_bytes or one.num_bytes)


def _words(one: Changed, measured: bool) -> str:
    if measured and one.relative is not None:
        return f"{one.relative:.3g}" if one.relative < 0.01 else f"{one.relative:.1%}"
    if one.change == "changed" and one.changed_bytes:
        return f"{size_text(one.changed_bytes)} of {size_text(one.num_bytes)}"
    return f"{one.change}, {size_text(one.num_bytes)}"
