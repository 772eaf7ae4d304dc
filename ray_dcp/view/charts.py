"""Charts of plain data: lines over steps, the phases of a save, and trees of tensors. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ray_dcp.core.quantities import count_text, seconds_text, size_text
from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.view import drawing as draw
from ray_dcp.view.drawing import AMBER, GREY, RED, WIDTH, Picture
from ray_dcp.view.tensor_handle import TensorInfo
from ray_dcp.view.wording import course_text, late_text, stacked

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
    kept = {name: _thin_out(sorted(points)) for name, points in series.items() if points}
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

    # Why at the edge: the label of the last tick is centred at the end of the axis.
    parts = [draw.note(WIDTH - 2, _BOTTOM + 16, "step", "end")]
    parts += [draw.note(_LEFT + 4, _TOP - 2, "logarithmic")] if is_log else []
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


def _thin_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
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
        parts += _draw_lane(trace, lane, spans, _HEAD + index * height, height, scale)
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


def _draw_lane(
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
