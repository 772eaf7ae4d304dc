"""Elements of pictures: SVG and HTML tags, colours, bars, and text that fits. Pure.

A picture uses no scripts, fonts, images or style sheets, so that it needs no network. Text has the
colour of the page (`currentColor`), and all other colours have a medium lightness, so that pictures
can be read on light and on dark pages. Every picture is well-formed XML.
"""

from __future__ import annotations

import colorsys
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH = 860
"""Width of a picture, in pixels; narrower cells scale it down."""
CHARACTER = 6.3
"""Average width of a character of 11 px, in pixels."""
FAINT = 0.18
"""Opacity of guide lines."""

RED, GREY, AMBER = "#d1495b", "#8d949c", "#d99a2b"
_RANKS = (
    "#4c8fd6", "#e08a3c", "#4fa866", "#d4576b", "#9a6fd0",
    "#a9795a", "#d874b5", "#8a8f98", "#b5a835", "#3ba9b5",
)  # fmt: skip
_FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Picture:
    """A picture as HTML, which notebooks show and export.

    Examples:
        >>> Picture("<div>8 ranks</div>")
        <div>8 ranks</div>
    """

    html: str
    """One element, without scripts."""

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.html if len(self.html) < 200 else f"Picture of {len(self.html)} characters"

    def page(self, title: str = "") -> str:
        """Returns a whole HTML page.

        Args:
            title: Title of the page.
        """
        return (
            "<!DOCTYPE html>\n<html><head><meta charset='utf-8'/>"
            "<meta name='color-scheme' content='light dark'/>"
            f"<title>{safe(title)}</title></head>"
            f"<body style='margin:2em;max-width:{WIDTH + 40}px'>{self.html}</body></html>\n"
        )

    def save(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Writes the picture as an HTML page.

        Args:
            path: Path of the file.
            title: Title of the page.

        Raises:
            OSError: The file can't be written.
        """
        Path(path).write_text(self.page(title), encoding="utf-8")


def safe(value: object) -> str:
    """Returns the text of a value, escaped for HTML and XML.

    Args:
        value: Any value.

    Examples:
        >>> safe("<b>&" + chr(0)) == "&lt;b&gt;&amp;" + chr(0xFFFD)
        True
    """
    return escape(_NOT_XML.sub("\ufffd", str(value)))


def tag(name: str, content: str = "", **attributes: Any) -> str:
    """Returns an element; `_` in the name of an attribute becomes `-`.

    Args:
        name: Name of the element.
        content: Content of the element, already escaped.
        **attributes: Attributes. Numbers are rounded; attributes that are None are left out.

    Examples:
        >>> tag("rect", x=1.23456, stroke_width=2, fill=None)
        '<rect x="1.23" stroke-width="2"/>'
    """
    told = "".join(
        f' {key.replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{told}>{content}</{name}>" if content else f"<{name}{told}/>"


def rect(
    x: float, y: float, width: float, height: float, fill: str, title: str = "", **more: Any
) -> str:
    """Returns a rectangle that shows its title under the mouse pointer."""
    inner = tag("title", safe(title)) if title else ""
    return tag("rect", inner, x=x, y=y, width=width, height=height, fill=fill, **more)


def line(x1: float, y1: float, x2: float, y2: float, **more: Any) -> str:
    """Returns a line, by default a guide line."""
    more = more or {"stroke": "currentColor", "opacity": FAINT}
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, **more)


def text(x: float, y: float, value: object, anchor: str | None = None, **more: Any) -> str:
    """Returns text in the colour of the page. It starts at `x` unless `anchor` says otherwise."""
    look = {"fill": "currentColor", "font_size": 11, "text_anchor": anchor, **more}
    return tag("text", safe(value) or " ", x=x, y=y, **look)


def note(x: float, y: float, value: object, anchor: str | None = None, **more: Any) -> str:
    """Returns smaller, fainter text."""
    return text(x, y, value, anchor, **{"font_size": 10, "opacity": 0.75, **more})


def svg(width: float, height: float, *parts: str, label: str) -> str:
    """Returns a drawing that scales down with the page.

    Args:
        width: Maximum width, in pixels.
        height: Height at that width.
        *parts: Elements.
        label: Description of the picture, for screen readers.
    """
    style = f"max-width:{_value(width)}px;width:100%;height:auto;{_FONT}"
    inner = tag("title", safe(label)) + "".join(parts)
    box = f"0 0 {_value(width)} {_value(height)}"
    return tag("svg", inner, viewBox=box, role="img", style=style)


def div(*parts: str) -> str:
    """Returns a block of HTML."""
    return f'<div style="{_FONT};font-size:13px;line-height:1.45">{"".join(parts)}</div>'


def pictured(*parts: str) -> Picture:
    """Returns a picture of several parts, one below the other."""
    return Picture(div(*parts))


def heading(title: str, told: str = "") -> str:
    """Returns the line above a picture: the title, followed by a text that is HTML."""
    return f"<div>{' · '.join(filter(None, (title and f'<b>{safe(title)}</b>', told)))}</div>"


def aside(told: str) -> str:
    """Returns a faint line of text; "" for no text."""
    return f"<div style='opacity:.75'>{safe(told)}</div>" if told else ""


def legend(x: float, y: float, colours: Iterable[tuple[str, str]], **look: Any) -> str:
    """Returns a legend: colours with their meanings, side by side.

    Args:
        x: Left edge.
        y: Upper edge.
        colours: Pairs of colour and meaning.
        **look: Attributes of the squares.
    """
    parts = []
    for colour, told in colours:
        parts += [rect(x, y, 10, 10, colour, **look), note(x + 14, y + 9, told)]
        x += 28 + len(told) * 5.4
    return "".join(parts)


@dataclass(frozen=True)
class Bar:
    """One row of `bars`."""

    label: str
    parts: Sequence[tuple[float, str, str]]
    """`(length, colour, title)` of each part of the bar."""
    told: str
    """Text at the end of the bar."""


def bars(rows: Sequence[Bar], x: float, y: float, hidden: int = 0) -> tuple[str, float]:
    """Returns rows of labels and bars, and the lower edge of the last one.

    The longest bar fills the width.

    Args:
        rows: Rows, from top to bottom.
        x: Left edge of the bars, where the labels end.
        y: Upper edge of the first row.
        hidden: Number of further rows, which are only counted.
    """
    longest = max((sum(part[0] for part in row.parts) for row in rows), default=0.0)
    room = max((len(row.told) for row in rows), default=0) * 5.6 + 16
    scale, parts = (WIDTH - x - room) / (longest or 1.0), []
    for row in rows:
        parts.append(text(x - 8, y + 11, clip(row.label, x - 12), "end"))
        end = x
        for length, colour, title in row.parts:
            parts.append(rect(end, y + 2, max(length * scale, 1.0), 11, colour, title))
            end += length * scale
        parts.append(note(end + 6, y + 11, row.told))
        y += 16
    if hidden > 0:
        parts.append(note(x, y + 11, f"… and {hidden} more"))
        y += 16
    return "".join(parts), y


def clip(value: str, pixels: float) -> str:
    """Returns a text that fits, without its middle if it is too long.

    Args:
        value: Any text.
        pixels: Available width.

    Examples:
        >>> clip("model.layers.17.attention.weight", 100)
        'model.l….weight'
    """
    return shortened(value, int(pixels / CHARACTER))


def shortened(value: str, most: int) -> str:
    """Returns a text of at most `most` characters, without its middle if it is longer.

    Examples:
        >>> shortened("model.layers.17.attention.weight", 11)
        'model…eight'
    """
    most = max(3, most)
    left = (most - 1) // 2
    return value if len(value) <= most else f"{value[:left]}…{value[left + 1 - most :]}"


def rank_colour(rank: int) -> str:
    """Returns the colour of a rank: equal in all pictures, different from its neighbours'.

    Args:
        rank: The rank; -1 if unknown.

    Examples:
        >>> rank_colour(0), rank_colour(11) != rank_colour(12)
        ('#4c8fd6', True)
    """
    if rank < len(_RANKS):
        return GREY if rank < 0 else _RANKS[rank]
    hue = rank * 0.618033988749895 % 1.0
    rgb = colorsys.hls_to_rgb(hue, (0.5, 0.58, 0.54)[rank % 3], 0.45)
    return "#" + "".join(f"{round(part * 255):02x}" for part in rgb)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Returns round numbers in a range, for the ticks of an axis.

    Args:
        low: Lower bound.
        high: Upper bound.
        about: Approximate number of ticks.

    Examples:
        >>> ticks(0, 0.93), ticks(7.3, 12.9), ticks(0, 0)
        ([0.0, 0.2, 0.4, 0.6, 0.8], [8.0, 9.0, 10.0, 11.0, 12.0], [0.0])
    """
    if not 0 < high - low < math.inf:
        return [float(low)]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    every = next((power * factor for factor in (1, 2, 5) if power * factor >= raw), power * 10)
    first, last = math.ceil(low / every - 1e-9), math.floor(high / every + 1e-9)
    return [round(every * at, 12) for at in range(first, last + 1)]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
    return safe(value)
