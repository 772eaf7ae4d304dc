"""The course of a save as a Gantt chart: a lane for the coordinator and one for each rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.view.pictures.drawing import (
    FAINT,
    GREY,
    RED,
    WIDTH,
    Picture,
    div,
    nice_ticks,
    rect,
    safe,
    svg,
    tag,
    text,
)
from ray_dcp.view.wording import seconds_text, size_text

COLOURS = {
    "capture": "#d99a2b",
    "plan": "#b9a88a",
    "stage": "#9a6fd0",
    "write": "#4c8fd6",
    "commit": GREY,
}
"""Of the phases of a rank."""
COORDINATOR = {
    "look": GREY,
    "plan": "#b9a88a",
    "build": "#6fae8b",
    "table": "#3e8f6a",
    "record": RED,
}
_FADED = {"plan": 0.55, "commit": 0.2}
_MEANINGS = {
    "capture": "what is there?",
    "plan": "wait for all, plan",
    "stage": "copy, training waits",
    "write": "write durably",
    "commit": "wait for the commit",
}

_COORDINATOR_MEANINGS = {
    "look": "what stands there?",
    "plan": "plan",
    "build": "check what was written",
    "table": "chunk table",
    "record": "commit",
}

_LEFT, _RIGHT, _TOP = 92, 78, 34


def timeline(trace: SaveTrace, title: str = "") -> Picture:
    """Returns the course of a save: who did what when, with late ranks in red.

    Args:
        trace: Of the save: `ray_dcp.open(path).trace`.
        title: Above the picture.

    Returns:
        A picture of at most 65 lanes.
    """
    found = trace.lanes()
    end_s = max([trace.committed_s, *(span.stop_s for span in trace.spans), 1e-6])
    scale = (WIDTH - _LEFT - _RIGHT) / end_s
    height = 20 if len(found) <= 20 else 16
    bottom = _TOP + height * len(found) + 4
    parts = [_axis(end_s, scale, bottom), _marks(trace, scale, bottom)]
    for index, (lane, spans) in enumerate(found.items()):
        parts.append(_lane(trace, lane, spans, _TOP + index * height, height, scale))
    parts += [
        tag(
            "path",
            tag("title", safe(f"another stager took over from rank {rank}'s")),
            d=_triangle(_LEFT + at_s * scale, _TOP + [*found].index(rank) * height),
            fill=RED,
        )
        for rank, at_s in trace.takeovers
        if rank in found
    ]
    parts.append(_legends(trace, bottom + 28))
    drawing = svg(
        WIDTH, bottom + 56, *parts, label=f"Timeline of a save of {trace.world_size} ranks"
    )
    return Picture(div(_summary(trace, title), drawing, *_notes(trace)))


def _summary(trace: SaveTrace, title: str) -> str:
    name = f"<b>{safe(title)}</b> · " if title else ""
    ranks = f"{trace.world_size} rank{'s' * (trace.world_size != 1)}"
    return (
        f"<div>{name}{safe(trace.mode)} of {ranks} · {size_text(trace.num_bytes)} · training "
        f"waited <b>{seconds_text(trace.stall_s)}</b> · committed after "
        f"<b>{seconds_text(trace.committed_s)}</b></div>"
    )


def _axis(end_s: float, scale: float, bottom: float) -> str:
    parts = []
    for tick in nice_ticks(end_s):
        x = _LEFT + tick * scale
        parts.append(
            tag("line", x1=x, x2=x, y1=_TOP - 4, y2=bottom, stroke="currentColor", opacity=FAINT)
        )
        label = "0" if tick == 0 else seconds_text(tick)
        parts.append(text(x, _TOP - 8, label, size=10, text_anchor="middle", opacity=0.7))
    return "".join(parts)


def _marks(trace: SaveTrace, scale: float, bottom: float) -> str:
    """Returns the line from which training goes on, and that of the commit."""
    marks = [(trace.committed_s, "committed", RED, "end")]
    if trace.mode == "async_save":
        late = trace.stall_s > 0.6 * trace.committed_s
        marks.append((trace.stall_s, "training goes on", COLOURS["stage"], "end" if late else ""))
    parts = []
    for index, (at_s, name, colour, anchor) in enumerate(marks):
        x = _LEFT + at_s * scale
        parts.append(
            tag(
                "line",
                x1=x,
                x2=x,
                y1=_TOP - 4,
                y2=bottom,
                stroke=colour,
                stroke_width=1.5,
                stroke_dasharray="4 3",
            )
        )
        # Why two heights: the two may be at one place.
        parts.append(
            text(
                x - 3 if anchor else x + 3,
                bottom + 8 if index else 11,
                name,
                size=10,
                fill=colour,
                text_anchor=anchor or None,
            )
        )
    return "".join(parts)


def _lane(
    trace: SaveTrace, lane: int | None, spans: Sequence[Span], y: float, height: float, scale: float
) -> str:
    late = {s.phase: s for s in trace.stragglers if s.rank == lane} if lane is not None else {}
    name = "coordinator" if lane is None else f"rank {lane}"
    label = text(
        _LEFT - 8,
        y + height / 2 + 4,
        f"▲ {name}" if late else name,
        text_anchor="end",
        fill=RED if late else "currentColor",
        font_weight="bold" if late else None,
    )
    parts = [label]
    bar = height - 6
    # Why halves: a stager writes while its rank still copies.
    halves = lane is not None and any(span.phase == "stage" for span in spans)
    for span in spans:
        below = halves and span.phase in ("write", "commit")
        top = y + 3 + (bar / 2 if below else 0)
        colours = COORDINATOR if lane is None else COLOURS
        straggler = late.get(span.phase)
        told = f"{name}: {span.phase} {seconds_text(span.seconds)}"
        told += f", {size_text(span.num_bytes)}" if span.num_bytes else ""
        told += f", late: half of the ranks {seconds_text(straggler.median_s)}" if straggler else ""
        told += f" on {straggler.where}" if straggler and straggler.where else ""
        parts.append(
            rect(
                _LEFT + span.start_s * scale,
                top,
                max(span.seconds * scale, 1.0),
                bar / 2 if halves else bar,
                colours.get(span.phase, GREY),
                told,
                opacity=_FADED.get(span.phase),
                stroke=RED if straggler else None,
                stroke_width=1.5 if straggler else None,
            )
        )
    num_bytes = sum(span.num_bytes for span in spans if span.phase == "write")
    if num_bytes:
        parts.append(
            text(
                WIDTH - 4,
                y + height / 2 + 4,
                size_text(num_bytes),
                size=10,
                text_anchor="end",
                opacity=0.8,
            )
        )
    return tag("g", "".join(parts))


def _legends(trace: SaveTrace, y: float) -> str:
    """Returns what the colours mean: of the ranks, and below them of the coordinator."""
    own = {span.phase for span in trace.spans if span.rank is None}
    phases = {span.phase for span in trace.spans if span.rank is not None} | {"commit"}
    return _legend("ranks", COLOURS, _MEANINGS, phases, y) + _legend(
        "coordinator", COORDINATOR, _COORDINATOR_MEANINGS, own, y + 18
    )


def _legend(
    title: str, colours: Mapping[str, str], meanings: Mapping[str, str], phases: set[str], y: float
) -> str:
    parts = [text(_LEFT - 8, y + 1, title, size=10, text_anchor="end", opacity=0.8)]
    x = float(_LEFT)
    for phase, colour in colours.items():
        if phase not in phases:
            continue
        told = phase if meanings[phase] == phase else f"{phase}: {meanings[phase]}"
        parts.append(rect(x, y - 8, 10, 10, colour, opacity=_FADED.get(phase)))
        parts.append(text(x + 14, y + 1, told, size=10, opacity=0.8))
        x += 26 + len(told) * 5.4
    return tag("g", "".join(parts))


def _notes(trace: SaveTrace) -> list[str]:
    hidden = trace.world_size - len(trace.ranks)
    notes = []
    if hidden > 0:
        write = next((phase for phase in trace.phases if phase.phase == "write"), None)
        told = (
            f": all wrote within {seconds_text(write.max_s)}, half of them within "
            f"{seconds_text(write.median_s)}"
            if write
            else ""
        )
        notes.append(f"<div style='opacity:.75'>… and {hidden} more ranks{told}</div>")
    for straggler in trace.stragglers[:4]:
        where = f" ({safe(straggler.where)})" if straggler.where else ""
        notes.append(
            f"<div><span style='color:{RED}'>▲ rank {straggler.rank}</span>{where} was late with "
            f"<b>{safe(straggler.phase)}</b>: {seconds_text(straggler.seconds)}, half of the ranks "
            f"needed {seconds_text(straggler.median_s)}</div>"
        )
    return notes


def _triangle(x: float, y: float) -> str:
    return f"M{x:.1f} {y + 4:.1f}l5 -7h-10z"
