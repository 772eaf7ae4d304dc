"""From runs, differences and previews to pictures. What reads tensors says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from ray_dcp.core.dtypes import READABLE, as_numbers
from ray_dcp.errors import CheckpointError, InvalidRequestError
from ray_dcp.view.pictures.drawing import WIDTH, Picture, div, rank_colour, rect, safe, svg, text
from ray_dcp.view.pictures.lines import line_chart
from ray_dcp.view.pictures.tables import Changed, Step, diff_chart, step_table
from ray_dcp.view.tensor_handle import parts_of
from ray_dcp.view.wording import age_text, count_text, size_text

if TYPE_CHECKING:
    from ray_dcp.view.difference import CheckpointDiff
    from ray_dcp.view.resharding import ReshardPreview
    from ray_dcp.view.run_view import RunView, StepView
    from ray_dcp.view.tensor_handle import TensorHandle


MOST_DETAILED = 50
"""Steps of which a notebook looks at more than the listing, where that is quick."""
MOST_RANKS = 32


def picture_steps(
    run: RunView, *, details: bool | None = None, now_s: Callable[[], float] = time.time
) -> Picture:
    """Returns the steps of a run as a table.

    Args:
        run: As `ray_dcp.open` gives it.
        details: Also tell new bytes, layout, stall and time to the commit, for which two small
            files of each step are read. None: of at most 50 steps, and not over a network.
        now_s: The time, for ages.

    Example:
        >>> import ray_dcp, torch
        >>> for step in (1, 2):
        ...     _ = ray_dcp.save({"w": torch.ones(2)}, checkpoint_id=f"memory://doc-pic/step-{step}")
        >>> picture_steps(ray_dcp.open("memory://doc-pic")).html.count("<tr>")
        3
    """
    if details is None:
        is_near = "://" not in run.url or run.url.startswith("memory://")
        details = is_near and len(run) <= MOST_DETAILED
    steps = steps_of(run, details=details, now_s=now_s)
    best = None
    with suppress(CheckpointError):
        best = run.best().name
    return step_table(steps, run.url, best=best)


def steps_of(
    run: RunView, *, details: bool = False, now_s: Callable[[], float] = time.time
) -> list[Step]:
    """Returns what the table of a run shows; see `picture_steps`."""
    return [_step(step, details, now_s()) for step in run]


def picture_diff(diff: CheckpointDiff, *, values: bool = False) -> Picture:
    """Returns what changed between two checkpoints.

    Args:
        diff: As `CheckpointView.diff` gives it.
        values: Read what changed and tell by how much.

    Raises:
        DamagedCheckpointError: What is read does not match its checksums.
    """
    names = [_short(view.url) for view in (diff.first, diff.second)]
    return diff_chart(changes_of(diff, values=values), " → ".join(names))


def changes_of(diff: CheckpointDiff, *, values: bool = False) -> list[Changed]:
    """Returns what the chart of a difference shows; see `picture_diff`."""
    relative = {one.name: one.relative for one in diff.values()} if values else {}
    return [
        Changed(one.name, one.change, one.num_bytes, one.changed_bytes, relative.get(one.name))
        for one in diff.tensors
    ]


def picture_preview(preview: ReshardPreview) -> Picture:
    """Returns what each rank of a load would need and read, as bars.

    Args:
        preview: As `CheckpointView.reshard` gives it.
    """
    shown = preview.ranks[:MOST_RANKS]
    top = max([1, *(max(one.bytes_read, one.bytes_needed) for one in shown)])
    parts, scale, y = [], (WIDTH - 420) / top, 4.0
    for one in shown:
        name = f"rank {one.rank}"
        told = f"{name}: needs {size_text(one.bytes_needed)}, reads {size_text(one.bytes_read)}"
        parts.append(text(64, y + 11, name, text_anchor="end"))
        parts.append(rect(72, y, max(one.bytes_read * scale, 1.0), 13, "#d99a2b", told))
        parts.append(rect(72, y + 3, max(one.bytes_needed * scale, 1.0), 7, rank_colour(0), told))
        facts = f"{size_text(one.bytes_read)} in {count_text(one.num_ranges, 'range')} of "
        facts += count_text(one.num_files, "file")
        facts += f", at most {size_text(one.peak_bytes)} of memory"
        parts.append(
            text(
                80 + max(one.bytes_read, one.bytes_needed) * scale,
                y + 11,
                facts,
                size=10,
                opacity=0.8,
            )
        )
        y += 18
    if len(preview.ranks) > MOST_RANKS:
        parts.append(text(72, y + 11, f"… and {len(preview.ranks) - MOST_RANKS} more", opacity=0.7))
        y += 16
    head = (
        f"<div><b>{safe(preview.layout)}</b>: {len(preview.ranks)} ranks need "
        f"{size_text(preview.bytes_needed)} and read {size_text(preview.bytes_read)} "
        f"(<b>{preview.amplification:.3f}</b> times), none more than "
        f"{size_text(preview.peak_bytes)} of memory</div>"
    )
    holes = (
        f"<div style='color:#d1495b'>{len(preview.uncovered)} tensors lack a part: a load would "
        f"fail</div>"
        if preview.uncovered
        else ""
    )
    y += 6
    for x, colour, told in (
        (72, rank_colour(0), "needed"),
        (146, "#d99a2b", "read beyond that, to reach it in fewer and whole ranges"),
    ):
        parts.append(rect(x, y, 10, 10, colour))
        parts.append(text(x + 14, y + 9, told, size=10, opacity=0.8))
    return Picture(div(head, holes, svg(WIDTH, y + 16, *parts, label="Reads of a load")))


def picture_norms(run: RunView, include: str = "*") -> Picture:
    """Returns the norms of tensors over the steps of a run.

    Of steps that were saved with `SaveOptions(stats=True)` they are known; of others the tensors
    are read.

    Args:
        run: As `ray_dcp.open` gives it.
        include: Shell pattern of FQNs.

    Raises:
        InvalidRequestError: Nothing matches.
        DamagedCheckpointError: What is read does not match its checksums.
    """
    title = f"norms of {include} over the steps of {_short(run.url)}"
    return line_chart(norms_of(run, include), title)


def norms_of(run: RunView, include: str = "*") -> dict[str, list[tuple[float, float]]]:
    """Returns the norm of each tensor at each step; see `picture_norms`.

    Returns:
        FQN → `(step, norm)`. Steps that can't be read are left out.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for step in run:
        if step.step is None or not step.is_readable:
            continue
        stats = step.view.stats
        for name, info in step.view.tensors.items():
            if not fnmatchcase(name, include) or info.dtype not in READABLE or not info.num_bytes:
                continue
            norm = stats[name].norm if name in stats else _norm(step.view[name])
            found.setdefault(name, []).append((float(step.step), norm))
    if not found:
        raise InvalidRequestError(
            f"expected tensors with numbers whose names match {include!r} in the steps of "
            f"{run.url}, found none",
            key="include",
        )
    return found


def _short(url: str) -> str:
    """Returns the end of a path: what tells the steps of a run, and two runs, apart."""
    return "/".join(url.rstrip("/").split("/")[-2:])


def _step(step: StepView, details: bool, now_s: float) -> Step:
    looks_in = details and step.is_readable
    return Step(
        name=step.name,
        step=step.step,
        state=step.state,
        age="" if step.created_s is None else age_text(now_s - step.created_s),
        num_bytes=step.num_bytes,
        new_bytes=step.new_bytes if looks_in else None,
        num_ranks=step.num_ranks,
        layout=step.layout if looks_in else None,
        stall_s=step.stall_s if looks_in else None,
        durable_s=step.durable_s if looks_in else None,
        metrics=step.metrics,
        tags=step.tags,
        note=step.note,
    )


def _norm(handle: TensorHandle) -> float:
    total = 0.0
    for part in parts_of(handle.shape):
        values = np.abs(as_numbers(handle.raw(part), handle.dtype).reshape(-1))
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.dot(values, values))
    return sqrt(total) if total >= 0 else total
