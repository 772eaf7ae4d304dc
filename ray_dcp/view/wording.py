"""Texts for tables, pictures and messages: sizes, ages, counts, and lists of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_dcp.format.save_trace import SaveTrace, Span, Straggler

_SHOWN = 8
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def size_text(num_bytes: int) -> str:
    """Returns a number of bytes in the largest binary unit of which there is at least one.

    Examples:
        >>> size_text(0), size_text(1536), size_text(21 << 30)
        ('0 B', '1.5 KiB', '21.0 GiB')
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def age_text(age_s: float) -> str:
    """Returns an age in seconds in its largest whole unit; `0s` for a time in the future.

    Examples:
        >>> age_text(59), age_text(3700), age_text(200_000)
        ('59s', '1h', '2d')
    """
    for unit, seconds in (("d", 86_400), ("h", 3600), ("m", 60)):
        if age_s >= seconds:
            return f"{int(age_s // seconds)}{unit}"
    return f"{max(0, int(age_s))}s"


def count_text(count: int, noun: str) -> str:
    """Returns a number with its noun, whose plural ends with an s.

    Examples:
        >>> count_text(1, "file"), count_text(1200, "file")
        ('1 file', '1200 files')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def number_text(value: float) -> str:
    """Returns a number in about four digits, without an exponent if possible.

    Examples:
        >>> number_text(2.31), number_text(0.000123456), number_text(12345.6)
        ('2.31', '0.0001235', '12346')
        >>> number_text(1229000.0), number_text(-3.2e9), number_text(7e21)
        ('1.229 M', '-3.2 G', '7e+21')
    """
    # Why from 999,999.5 on: below, it is rounded to six digits.
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if unit - 0.5 <= abs(value) < 1e15:
            return f"{value / unit:.4g} {name}"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def seconds_text(seconds: float) -> str:
    """Returns a duration in about three digits, in milliseconds, seconds or minutes.

    Examples:
        >>> seconds_text(0.00042), seconds_text(0.0312), seconds_text(2.5), seconds_text(754)
        ('0.42 ms', '31.2 ms', '2.50 s', '12.6 min')
    """
    if seconds < 1:
        digits = 2 if seconds < 0.01 else 1 if seconds < 0.1 else 0
        return f"{seconds * 1e3:.{digits}f} ms"
    if seconds < 120:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    return f"{seconds / 60:.1f} min"


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
