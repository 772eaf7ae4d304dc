"""The steps of a run as a table; what changed, and what a load would read, as bars."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ray_dcp.errors import CheckpointError
from ray_dcp.view.pictures import drawing as draw
from ray_dcp.view.pictures.drawing import AMBER, GREY, RED, WIDTH, Bar, Picture
from ray_dcp.view.wording import age_text, count_text, number_text, seconds_text, size_text

if TYPE_CHECKING:
    from ray_dcp.view.difference import CheckpointDiff, TensorDiff
    from ray_dcp.view.resharding import ReshardPreview
    from ray_dcp.view.run_view import RunView, StepView

MOST_DETAILED = 50
"""Largest number of steps that are looked into by default, as that is quick."""
MOST_STEPS, MOST_CHANGED, MOST_RANKS, MOST_METRICS = 100, 24, 32, 6
BAR = 120

_STATES = {
    "committed": "#4fa866", "stock": "#4c8fd6", "safetensors": "#4c8fd6", "damaged": RED,
    "aborted": "#a9795a", "in flight": AMBER, "unreadable": RED, "deleted": GREY,
}  # fmt: skip
CHANGES = {
    "unchanged": GREY, "changed": "#e08a3c", "added": "#4fa866", "removed": RED,
    "reshaped": "#9a6fd0", "retyped": "#d874b5", "undecided": "#b5a835",
}  # fmt: skip
"""What may have become of a tensor, each with its colour."""
_CELL = "padding:2px 10px 2px 0;white-space:nowrap;background:none;border:none"
LEFT = ("name", "step", "state", "mark", "layout", "tags", "note")
"""Columns of a table of steps whose cells begin at the left."""


def step_cells(
    run: RunView, steps: Sequence[StepView], *, details: bool, now_s: float
) -> list[dict[str, str]]:
    """Returns the cells of each step in a table, as text by column; empty where not known.

    Args:
        run: Of the steps.
        steps: Which of them.
        details: Also new bytes, layout, stall and time to the commit, for which two small files
            of each step are read.
        now_s: The time, for ages.
    """
    metrics = _metric_names(run)
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


def _metric_names(run: RunView) -> list[str]:
    """Returns which metrics have a column of their own: one that repeats the step has none."""
    told = [(name, value, step.step) for step in run for name, value in step.metrics.items()]
    other = {name for name, value, step in told if name != "step" or value != step}
    return [name for name in dict.fromkeys(name for name, _, _ in told) if name in other][
        :MOST_METRICS
    ]


def picture_steps(run: RunView, *, details: bool | None = None) -> Picture:
    """Returns the steps of a run as a table with bars for their sizes.

    Args:
        run: As `ray_dcp.open` gives it; those that were deleted are only counted, and of more than
            100 others the newest are shown.
        details: Also new bytes, layout, stall and time to the commit, for which two small files of
            each step are read. None: of at most 50 steps, and not over a network.

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
    steps = run.present[-MOST_STEPS:]
    rows = step_cells(run, steps, details=details, now_s=time.time())
    head = draw.heading(run.url, run_text(run))
    if not rows:
        return draw.pictured(head)
    columns = [name for name in rows[0] if name != "name" and any(row[name] for row in rows)]
    top = max(step.num_bytes for step in steps) or 1
    lines = [_row("th", columns, {name: name for name in columns})]
    for step, row in zip(steps, rows, strict=True):
        cells = {name: draw.safe(draw.clip(told, 400)) for name, told in row.items()}
        label = draw.safe(draw.clip(row["step"] or step.name, 260))
        cells["step"] = f"<b title='{draw.safe(step.name)}'>{label}</b>"
        cells["mark"] = cells["mark"].replace("best", f"<span style='color:{AMBER}'>★</span>")
        cells["state"] = (
            f"<span style='color:{_STATES.get(step.state, GREY)}'>● </span>{step.state}"
        )
        new = step.new_bytes if details and step.is_readable else None
        cells["size"] = f"{_size_bar(step.num_bytes, new, top)} {cells['size']}"
        lines.append(_row("td", columns, cells))
    hidden = len(run.present) - len(rows)
    told = draw.aside(f"… and {hidden} earlier steps" if hidden else "")
    table = f"<table style='border-collapse:collapse;font-size:13px'>{''.join(lines)}</table>"
    return draw.pictured(head, told, table)


def run_text(run: RunView) -> str:
    """Returns how many checkpoints a run has, and how many were deleted."""
    num_gone = len(run) - len(run.present)
    told = count_text(len(run.present), "checkpoint")
    return f"{told}, {num_gone} deleted" if num_gone else told


def _row(cell: str, columns: Sequence[str], told: Mapping[str, str]) -> str:
    sides = {name: "left" if name in LEFT else "right" for name in columns}
    cells = (f"<{cell} style='{_CELL};text-align:{sides[n]}'>{told[n]}</{cell}>" for n in columns)
    return f"<tr>{''.join(cells)}</tr>"


def _size_bar(num_bytes: int, new_bytes: int | None, top: int) -> str:
    """Returns a bar, what the step before does not have in full colour."""
    width = round(BAR * num_bytes / top)
    new = width if new_bytes is None else min(round(BAR * new_bytes / top), width)
    colour = f"display:inline-block;height:10px;background:{draw.rank_colour(0)}"
    return (
        f"<span style='display:inline-block;width:{BAR}px;text-align:left'><span style='{colour};"
        f"width:{new}px'></span><span style='{colour};opacity:.35;width:{width - new}px'></span>"
        f"</span>"
    )


def picture_diff(diff: CheckpointDiff, *, values: bool = False) -> Picture:
    """Returns what changed between two checkpoints.

    Args:
        diff: As `CheckpointView.diff` gives it.
        values: Read what changed and show by how much.

    Raises:
        DamagedCheckpointError: What is read does not match its checksums.
    """
    names = ("/".join(view.url.rstrip("/").split("/")[-2:]) for view in (diff.first, diff.second))
    relative = {one.name: one.relative for one in diff.values()} if values else {}
    return diff_chart(diff.tensors, " → ".join(names), relative)


def diff_chart(
    tensors: Sequence[TensorDiff], title: str = "", relative: Mapping[str, float] | None = None
) -> Picture:
    """Returns what changed between two checkpoints: how much in all, and in which tensors most.

    Args:
        tensors: Every tensor and object of either.
        title: Above the picture.
        relative: Norm of the difference over the norm of the first, by name, where values were
            read.
    """
    scale = WIDTH / (sum(one.num_bytes for one in tensors) or 1)
    parts: list[str] = []
    meant, x = [], 0.0
    for kind, colour in CHANGES.items():
        found = [one.num_bytes for one in tensors if one.change == kind]
        if sum(found):
            told = f"{kind}: {size_text(sum(found))}"
            parts.append(draw.rect(x, 0, sum(found) * scale, 16, colour, told))
            x += sum(found) * scale
        if found:
            meant.append((colour, f"{len(found)} {kind}, {size_text(sum(found))}"))
    parts.append(draw.legend(0, 24, meant))
    known = relative or {}
    moved = [one for one in tensors if one.change != "unchanged"]
    moved.sort(key=lambda one: (-known.get(one.name, 0.0), -_bytes(one)))
    rows = []
    for one in moved:
        length = known.get(one.name, 0.0) if known else float(_bytes(one))
        title_ = f"{one.name}: {one.change}, {size_text(_bytes(one))} of {size_text(one.num_bytes)}"
        rows.append(Bar(one.name, [(length, CHANGES[one.change], title_)], _told(one, known)))
    if rows:
        told = "|new - old| / |old|" if known else "bytes in blocks that differ"
        parts.append(draw.note(300, 54, told))
    drawn, y = draw.bars(rows, 300, 58, most=MOST_CHANGED)
    label = "What changed between two checkpoints"
    return Picture(
        draw.div(draw.heading(title), draw.svg(WIDTH, y + 6, *parts, drawn, label=label))
    )


def preview_chart(preview: ReshardPreview) -> Picture:
    """Returns what each rank of a load would need and read, as bars.

    Args:
        preview: As `CheckpointView.reshard` gives it.
    """
    rows = []
    for one in preview.ranks:
        needed, more = one.bytes_needed, max(one.bytes_read - one.bytes_needed, 0)
        title = f"needs {size_text(needed)}, reads {size_text(one.bytes_read)}"
        parts = [(needed, draw.rank_colour(0), title), (more, AMBER, title)]
        told = f"{size_text(one.bytes_read)} in {count_text(one.num_ranges, 'range')} of "
        told += (
            f"{count_text(one.num_files, 'file')}, at most {size_text(one.peak_bytes)} of memory"
        )
        rows.append(Bar(f"rank {one.rank}", parts, told))
    drawn, bottom = draw.bars(rows, 72, 0, most=MOST_RANKS)
    meant = (
        (draw.rank_colour(0), "needed"),
        (AMBER, "read beyond that, in fewer and whole ranges"),
    )
    told = (
        f"{count_text(len(preview.ranks), 'rank')} need {size_text(preview.bytes_needed)} and read "
        f"{size_text(preview.bytes_read)} (<b>{preview.amplification:.3f}</b> times), none more "
        f"than {size_text(preview.peak_bytes)} of memory"
    )
    holes = count_text(len(preview.uncovered), "tensor")
    lacking = draw.aside(
        f"parts of {holes} are missing: a load would fail" if preview.uncovered else ""
    )
    drawing = draw.svg(
        WIDTH, bottom + 22, drawn, draw.legend(72, bottom + 6, meant), label="Reads of a load"
    )
    return draw.pictured(draw.heading(str(preview.layout), told), lacking, drawing)


def _bytes(one: TensorDiff) -> int:
    return one.changed_bytes or one.num_bytes


def _told(one: TensorDiff, relative: Mapping[str, float]) -> str:
    if one.name in relative:
        share = relative[one.name]
        return f"{share:.3g}" if share < 0.01 else f"{share:.1%}"
    if one.change == "changed":
        return f"{size_text(_bytes(one))} of {size_text(one.num_bytes)}"
    return f"{one.change}, {size_text(one.num_bytes)}"
