"""Tables of steps and of differences, and trees of tensors."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ray_dcp.errors import CheckpointError
from ray_dcp.view import drawing as draw
from ray_dcp.view.drawing import AMBER, GREY, RED, WIDTH, Bar, Picture
from ray_dcp.view.tensor_handle import TensorInfo
from ray_dcp.view.wording import age_text, count_text, number_text, seconds_text, size_text

if TYPE_CHECKING:
    from ray_dcp.view.checkpoint_view import CheckpointView
    from ray_dcp.view.difference import CheckpointDiff, TensorDiff
    from ray_dcp.view.run_view import RunView, StepView

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
