"""The course of a save as a Gantt chart: a lane for the coordinator and one for each rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_dcp.format.save_trace import SaveTrace, Span
from ray_dcp.view.pictures import drawing as draw
from ray_dcp.view.pictures.drawing import AMBER, GREY, RED, WIDTH, Picture
from ray_dcp.view.wording import count_text, seconds_text, size_text

RANK = {
    "capture": (AMBER, "what is there?"),
    "plan": ("#b9a88a", "wait for all, plan"),
    "stage": ("#9a6fd0", "copy, training waits"),
    "write": ("#4c8fd6", "write durably"),
    "commit": (GREY, "wait"),
}
"""Colour and meaning of the phases of a rank."""
COORDINATOR = {
    "look": (GREY, "read records"),
    "plan": ("#b9a88a", "who writes what"),
    "build": ("#6fae8b", "check the files"),
    "table": ("#3e8f6a", "chunk table"),
    "record": (RED, "commit"),
}
_FADED = {"plan": 0.55, "commit": 0.2}
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
    parts = []
    for tick in draw.ticks(0, end_s):
        x = _LEFT + tick * scale
        parts.append(draw.line(x, _TOP - 4, x, bottom))
        parts.append(draw.note(x, _TOP - 8, seconds_text(tick) if tick else "0", "middle"))
    parts += _marks(trace, scale, bottom)
    for index, (lane, spans) in enumerate(found.items()):
        parts += _lane(trace, lane, spans, _TOP + index * height, height, scale)
    shown = {span.phase for span in trace.spans if span.rank is not None} | {"commit"}
    own = {span.phase for span in trace.spans if span.rank is None}
    for y, who, looks, phases in (
        (20, "ranks", RANK, shown),
        (38, "coordinator", COORDINATOR, own),
    ):
        meant = [(c, f"{phase}: {told}") for phase, (c, told) in looks.items() if phase in phases]
        parts.append(draw.note(_LEFT - 8, bottom + y + 9, who, "end"))
        parts.append(draw.legend(_LEFT, bottom + y, meant))
    label = f"Timeline of a save of {count_text(trace.world_size, 'rank')}"
    told = (
        f"{draw.safe(trace.mode)} of {count_text(trace.world_size, 'rank')} · "
        f"{size_text(trace.num_bytes)} · training waited <b>{seconds_text(trace.stall_s)}</b> · "
        f"committed after <b>{seconds_text(trace.committed_s)}</b>"
    )
    drawn = draw.svg(WIDTH, bottom + 56, *parts, label=label)
    return draw.pictured(draw.heading(title, told), drawn, *_notes(trace))


def _marks(trace: SaveTrace, scale: float, bottom: float) -> list[str]:
    """Returns the line from which training goes on, and that of the commit."""
    parts = []
    marks = [(trace.committed_s, "committed", RED, True)]
    if trace.mode == "async_save":
        late = trace.stall_s > 0.6 * trace.committed_s
        marks.append((trace.stall_s, "training goes on", RANK["stage"][0], late))
    for at_s, told, colour, before in marks:
        x = _LEFT + at_s * scale
        dashed = {"stroke": colour, "stroke_width": 1.5, "stroke_dasharray": "4 3"}
        parts.append(draw.line(x, _TOP - 4, x, bottom, **dashed))
        # Why two heights: the two may be at one place.
        y = 11 if told == "committed" else bottom + 8
        look = {"fill": colour, "opacity": None}
        parts.append(
            draw.note(x - 3 if before else x + 3, y, told, "end" if before else None, **look)
        )
    return parts


def _lane(
    trace: SaveTrace, lane: int | None, spans: Sequence[Span], y: float, height: float, scale: float
) -> list[str]:
    late = {s.phase: s for s in trace.stragglers if s.rank == lane} if lane is not None else {}
    name = "coordinator" if lane is None else f"rank {lane}"
    red = {"fill": RED, "font_weight": "bold"} if late else {}
    parts = [draw.text(_LEFT - 8, y + height / 2 + 4, f"▲ {name}" if late else name, "end", **red)]
    looks = COORDINATOR if lane is None else RANK
    # Why halves: a stager writes while its rank still copies.
    halves = lane is not None and any(span.phase == "stage" for span in spans)
    bar = (height - 6) / (2 if halves else 1)
    for span in spans:
        top = y + 3 + (bar if halves and span.phase in ("write", "commit") else 0)
        straggler = late.get(span.phase)
        told = f"{name}: {span.phase} {seconds_text(span.seconds)}"
        told += f", {size_text(span.num_bytes)}" if span.num_bytes else ""
        told += f", late: half of the ranks {seconds_text(straggler.median_s)}" if straggler else ""
        told += f" on {straggler.where}" if straggler and straggler.where else ""
        edge: dict[str, Any] = {"stroke": RED, "stroke_width": 1.5} if straggler else {}
        edge["opacity"] = _FADED.get(span.phase)
        x, width = _LEFT + span.start_s * scale, max(span.seconds * scale, 1.0)
        colour = looks.get(span.phase, (GREY, ""))[0]
        parts.append(draw.rect(x, top, width, bar, colour, told, **edge))
    num_bytes = sum(span.num_bytes for span in spans if span.phase == "write")
    if num_bytes:
        parts.append(draw.note(WIDTH - 4, y + height / 2 + 4, size_text(num_bytes), "end"))
    return parts


def _notes(trace: SaveTrace) -> list[str]:
    notes = []
    hidden = trace.world_size - len(trace.ranks)
    if hidden > 0:
        notes.append(draw.aside(f"… and {hidden} more ranks"))
    for one in trace.stragglers[:4]:
        where = f" ({draw.safe(one.where)})" if one.where else ""
        notes.append(
            f"<div><span style='color:{RED}'>▲ rank {one.rank}</span>{where} was late with "
            f"<b>{draw.safe(one.phase)}</b>: {seconds_text(one.seconds)}, half of the ranks "
            f"needed {seconds_text(one.median_s)}</div>"
        )
    return notes
