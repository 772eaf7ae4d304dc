"""Texts for tables, pictures and messages: lists of names, and the course of a save."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ray_dcp.core.quantities import count_text, seconds_text, size_text

if TYPE_CHECKING:
    from ray_dcp.format.save_trace import SaveTrace, Span, Straggler

_SHOWN = 8
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Returns a text without characters that control a terminal, as a name in a checkpoint may."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns a suggestion of similar names for the end of a message; "" if there are none.

    Args:
        name: Name that does not exist.
        known: Names that exist.

    Examples:
        >>> nearest("model.wieght", ["model.weight", "optimizer.step"])
        "; did you mean 'model.weight'?"
    """
    close = get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def few(names: Sequence[str]) -> str:
    """Returns names as a list; of many names, the first and last ones and their number."""
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, … {', '.join(names[-3:])} ({len(names)} in all)"


def course_text(trace: SaveTrace) -> tuple[str, str]:
    """Returns what was saved, and how long that took, as two lines of text."""
    ranks, size = count_text(trace.world_size, "rank"), size_text(trace.num_bytes)
    stall, durable = seconds_text(trace.stall_s), seconds_text(trace.committed_s)
    return f"{trace.mode}, {ranks}, {size}", f"committed after {durable}, training waited {stall}"


def late_text(one: Straggler) -> str:
    """Returns which phase a straggler ended late, as text."""
    where = f" ({one.where})" if one.where else ""
    return (
        f"rank {one.rank} ended {one.phase} after {seconds_text(one.seconds)}, half of the ranks "
        f"within {seconds_text(one.median_s)}{where}"
    )


def stacked(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans of a lane in the order to draw them, as later ones cover earlier ones.

    A node agent writes while its rank still copies, so other phases cover `write`, and all cover
    `commit`, which is mostly waiting.
    """
    order = {"commit": 0, "write": 1}
    return sorted(spans, key=lambda span: order.get(span.phase, 2))
