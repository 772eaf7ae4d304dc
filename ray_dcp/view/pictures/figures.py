"""The pictures as matplotlib figures, for papers and reports; needs `pip install "ray-dcp[viz]"`.

Same values, same colours. Each function returns a figure that belongs to no window: show it, or
`figure.savefig("save.pdf")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray_dcp.errors import InvalidRequestError
from ray_dcp.format.save_trace import SaveTrace
from ray_dcp.view.pictures.drawing import GREY, RED, rank_colour
from ray_dcp.view.pictures.layout import (
    MOST_BOXES,
    Boxes,
    Flat,
    Patch,
    check_one_tensor,
    flatten,
    patches,
    raster_patches,
)
from ray_dcp.view.pictures.lines import MOST_NAMED, Series, by_change
from ray_dcp.view.pictures.tables import CHANGES, Changed, Step
from ray_dcp.view.pictures.timeline import COLOURS, COORDINATOR
from ray_dcp.view.pictures.tree import Leaf, grown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_LABELS = 64
MOST_BARS = 30


def figure_timeline(trace: SaveTrace, title: str = "") -> Figure:
    """Returns the course of a save as a Gantt chart; late ranks have red names.

    Args:
        trace: Of the save.
        title: Above it.
    """
    found = trace.lanes()
    figure, axes = _figure(8, 1.2 + 0.22 * len(found))
    late = {straggler.rank for straggler in trace.stragglers}
    for y, (lane, spans) in enumerate(found.items()):
        for span in spans:
            colours = COORDINATOR if lane is None else COLOURS
            alpha = 0.25 if span.phase == "commit" and lane is not None else 1.0
            axes.barh(
                y,
                span.seconds,
                left=span.start_s,
                height=0.7,
                alpha=alpha,
                color=colours.get(span.phase, GREY),
                label=f"_{lane} {span.phase}",
            )
    axes.axvline(trace.committed_s, color=RED, ls="--", lw=1)
    if trace.mode == "async_save":
        axes.axvline(trace.stall_s, color=COLOURS["stage"], ls="--", lw=1)
    names = ["coordinator" if lane is None else f"rank {lane}" for lane in found]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    for label, lane in zip(axes.get_yticklabels(), found, strict=True):
        if lane in late:
            label.set_color(RED)
    axes.invert_yaxis()
    axes.set(xlabel="seconds", title=title or f"{trace.mode} of {trace.world_size} ranks")
    return figure


def figure_layout(boxes: Boxes, name: str = "") -> Figure:
    """Returns a tensor with its parts in the colours of the ranks that hold them.

    Args:
        boxes: The parts.
        name: FQN.
    """
    figure, axes = _figure(5, 3.5)
    _draw(axes, flatten(boxes), labels=True)
    axes.set(title=f"{name} {'×'.join(map(str, boxes.shape))}".strip())
    return figure


def figure_reshard(before: Boxes, after: Boxes, name: str = "") -> Figure:
    """Returns a tensor as stored, and as other ranks want it, in the colours of who stored it.

    Args:
        before: As stored.
        after: As wanted; of the same shape.
        name: FQN.

    Raises:
        InvalidRequestError: The shapes differ.
    """
    check_one_tensor(before, after)
    figure, (left, right) = _figure(9, 3.5, columns=2)
    old, new = flatten(before), flatten(after)
    _draw(left, old, labels=True)
    _draw(right, old, labels=False)
    if old.dims == new.dims:
        _outline(right, new)
    left.set(title=f"{name} stored by {before.num_ranks} ranks".strip())
    right.set(title=f"loaded by {after.num_ranks}")
    return figure


def figure_tree(leaves: Sequence[Leaf], title: str = "") -> Figure:
    """Returns the sizes of the largest branches of a checkpoint.

    Args:
        leaves: Its tensors and objects.
        title: Above it.
    """
    root = grown(leaves)
    branches = [
        (f"{child.name}.{below.name}", below.num_bytes)
        for child in root.children.values()
        for below in (child.children or {"": child}).values()
    ]
    largest = sorted(branches, key=lambda branch: -branch[1])[:MOST_BARS]
    return _bars([(name, size / 2**20, rank_colour(0)) for name, size in largest], "MiB", title)


def figure_steps(steps: Sequence[Step], title: str = "") -> Figure:
    """Returns the sizes of the steps of a run, with what each had anew in full colour.

    Args:
        steps: Oldest first.
        title: Above it.
    """
    figure, axes = _figure(8, 3)
    names = [str(step.name if step.step is None else step.step) for step in steps]
    whole = [step.num_bytes / 2**20 for step in steps]
    new = [(s.num_bytes if s.new_bytes is None else s.new_bytes) / 2**20 for s in steps]
    axes.bar(names, whole, color=rank_colour(0), alpha=0.35)
    axes.bar(names, new, color=rank_colour(0))
    axes.set(xlabel="step", ylabel="MiB", title=title)
    return figure


def figure_lines(series: Series, title: str = "", unit: str = "") -> Figure:
    """Returns numbers over steps; those that change most have names.

    Args:
        series: Name → `(step, value)`.
        title: Above it.
        unit: Of the values.
    """
    figure, axes = _figure(8, 3.5)
    order = by_change(series)
    for index, name in enumerate(order):
        named = index < MOST_NAMED
        steps, values = zip(*sorted(series[name]), strict=True)
        axes.plot(
            steps,
            values,
            color=rank_colour(index) if named else GREY,
            alpha=1 if named else 0.3,
            label=name if named else None,
            marker="." if named else None,
        )
    if order:
        axes.legend(fontsize=7)
    axes.set(xlabel="step", ylabel=unit, title=title)
    return figure


def figure_diff(changes: Sequence[Changed], title: str = "") -> Figure:
    """Returns what changed most between two checkpoints.

    Args:
        changes: Every tensor and object of either.
        title: Above it.
    """
    measured = any(one.relative is not None for one in changes)
    moved = [one for one in changes if one.change != "unchanged"]
    rows = [
        (
            one.name,
            (one.relative or 0.0) if measured else one.changed_bytes / 2**20,
            CHANGES.get(one.change, GREY),
        )
        for one in moved
    ]
    rows.sort(key=lambda row: -row[1])
    return _bars(rows[:MOST_BARS], "|new - old| / |old|" if measured else "MiB that differ", title)


# --- pieces -------------------------------------------------------------------------------------


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequestError(
            'figures need matplotlib: pip install "ray-dcp[viz]". The pictures of '
            "ray_dcp.view.pictures need nothing"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _bars(rows: Sequence[tuple[str, float, str]], unit: str, title: str) -> Figure:
    figure, axes = _figure(8, 1 + 0.22 * max(len(rows), 1))
    axes.barh([row[0] for row in rows], [row[1] for row in rows], color=[row[2] for row in rows])
    axes.tick_params(axis="y", labelsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)
    return figure


def _draw(axes: Axes, flat: Flat, *, labels: bool) -> None:
    rows, columns = flat.lengths
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    is_raster = len(flat.rank) > MOST_BOXES
    found = (raster_patches if is_raster else patches)(flat, columns, rows)
    edge = "none" if is_raster else "white"
    for one in found:
        colour = GREY if one.rank < 0 else rank_colour(one.rank)
        named = labels and one.rank >= 0 and len(found) <= MOST_LABELS
        _add(axes, one, "white" if named else None, facecolor=colour, edgecolor=edge)


def _outline(axes: Axes, flat: Flat) -> None:
    named = "black" if len(flat.rank) <= MOST_LABELS else None
    for one in patches(flat, flat.lengths[1], flat.lengths[0]):
        _add(axes, one, named, fill=False, edgecolor="black", linewidth=2)


def _add(axes: Axes, patch: Patch, named: str | None, **look: Any) -> None:
    """Draws a rectangle, with its rank in a colour if it is to be named."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((patch.left, patch.top), patch.width, patch.height, **look))
    if named is not None:
        x, y = patch.left + patch.width / 2, patch.top + patch.height / 2
        axes.text(x, y, str(patch.rank), color=named, ha="center", va="center", weight="bold")
