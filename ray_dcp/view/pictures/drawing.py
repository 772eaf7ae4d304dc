"""What all pictures are made of: SVG and HTML elements, colours, text that fits, bars. Pure.

No scripts, fonts, images or style sheets: a picture is complete in itself, offline too. Text takes
the colour of the page (`currentColor`), and all other colours are of middle lightness, so that it
can be read on light pages and on dark ones. Every picture is well-formed XML.
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
"""Of a picture, in pixels; it shrinks with its cell."""
CHARACTER = 6.3
"""Width of a character at 11 px, in pixels, on average."""
FAINT = 0.18
"""Opacity of lines that only guide the eye."""

RED, GREY, AMBER = "#d1495b", "#8d949c", "#d99a2b"
_RANKS = (
    "#4c8fd6", "#e08a3c", "#4fa866", "#d4576b", "#9a6fd0",
    "#a9795a", "#d874b5", "#8a8f98", "#b5a835", "#3ba9b5",
)  # fmt: skip
_FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Picture:
    """A picture as HTML: shown by notebooks, also in what they export.

    Examples:
        >>> Picture("<div>8 ranks</div>")
        <div>8 ranks</div>
    """

    html: str
    """One element, without script."""

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.html if len(self.html) < 200 else f"Picture of {len(self.html)} characters"

    def page(self, title: str = "") -> str:
        """Returns a whole HTML page.

        Args:
            title: Of the page.
        """
        return (
            "<!DOCTYPE html>\n<html><head><meta charset='utf-8'/>"
            "<meta name='color-scheme' content='light dark'/>"
            f"<title>{safe(title)}</title></head>"
            f"<body style='margin:2em;max-width:{WIDTH + 40}px'>{self.html}</body></html>\n"
        )

    def save(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Writes it as an HTML page.

        Args:
            path: Of the file.
            title: Of the page.

        Raises:
            OSError: It can't be written.
        """
        Path(path).write_text(self.page(title), encoding="utf-8")


def safe(value: object) -> str:
    """Returns text that is just text in HTML and XML, whatever it holds.

    Args:
        value: Any.

    Examples:
        >>> safe("<b>&" + chr(0)) == "&lt;b&gt;&amp;" + chr(0xFFFD)
        True
    """
    return escape(_NOT_XML.sub("\ufffd", str(value)))


def tag(name: str, content: str = "", **attributes: Any) -> str:
    """Returns an element; `_` in the name of an attribute becomes `-`.

    Args:
        name: Of the element.
        content: Inside of it, escaped already.
        **attributes: Numbers are rounded; None leaves one out.

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
    """Returns a rectangle that shows its title when the mouse is over it."""
    inner = tag("title", safe(title)) if title else ""
    return tag("rect", inner, x=x, y=y, width=width, height=height, fill=fill, **more)


def line(x1: float, y1: float, x2: float, y2: float, **more: Any) -> str:
    """Returns a line; a thin guide line by default."""
    more = more or {"stroke": "currentColor", "opacity": FAINT}
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, **more)


def text(x: float, y: float, value: object, anchor: str | None = None, **more: Any) -> str:
    """Returns text in the colour of the page, from `x` on; to it or around it by `anchor`."""
    look = {"fill": "currentColor", "font_size": 11, "text_anchor": anchor, **more}
    return tag("text", safe(value) or " ", x=x, y=y, **look)


def note(x: float, y: float, value: object, anchor: str | None = None, **more: Any) -> str:
    """Returns smaller text that explains."""
    return text(x, y, value, anchor, **{"font_size": 10, "opacity": 0.75, **more})


def svg(width: float, height: float, *parts: str, label: str) -> str:
    """Returns a drawing that shrinks with the page.

    Args:
        width: In pixels, at most.
        height: At that width.
        *parts: Elements.
        label: What it shows, in a sentence, for those who don't see it.
    """
    style = f"max-width:{_value(width)}px;width:100%;height:auto;{_FONT}"
    inner = tag("title", safe(label)) + "".join(parts)
    box = f"0 0 {_value(width)} {_value(height)}"
    return tag("svg", inner, viewBox=box, role="img", style=style)


def div(*parts: str) -> str:
    """Returns a block of HTML."""
    return f'<div style="{_FONT};font-size:13px;line-height:1.45">{"".join(parts)}</div>'


def pictured(*parts: str) -> Picture:
    """Returns a picture of parts, one below the other."""
    return Picture(div(*parts))


def heading(title: str, told: str = "") -> str:
    """Returns the line above a picture: its title, and text beside it, which is HTML."""
    return f"<div>{' · '.join(filter(None, (title and f'<b>{safe(title)}</b>', told)))}</div>"


def aside(told: str) -> str:
    """Returns a line below or above a picture that lists what is left out."""
    return f"<div style='opacity:.75'>{safe(told)}</div>" if told else ""


def legend(x: float, y: float, colours: Iterable[tuple[str, str]], **look: Any) -> str:
    """Returns what colours mean, side by side.

    Args:
        x: Where it begins.
        y: Of the top.
        colours: Each with its meaning.
        **look: Of the squares.
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
    """`(length, colour, title)`, beside each other."""
    told: str
    """Behind them."""


def bars(rows: Sequence[Bar], x: float, y: float, *, most: int) -> tuple[str, float]:
    """Returns rows of names and bars, the longest of which fills the width, and their lower end.

    Args:
        rows: From above.
        x: Where the bars begin; their names end there.
        y: Of the top.
        most: Rows that are drawn; of more only their number is shown.
    """
    shown = rows[:most]
    longest = max((sum(part[0] for part in row.parts) for row in shown), default=0.0)
    room = max((len(row.told) for row in shown), default=0) * 5.6 + 16
    scale, parts = (WIDTH - x - room) / (longest or 1.0), []
    for row in shown:
        parts.append(text(x - 8, y + 11, clip(row.label, x - 12), "end"))
        end = x
        for length, colour, title in row.parts:
            parts.append(rect(end, y + 2, max(length * scale, 1.0), 11, colour, title))
            end += length * scale
        parts.append(note(end + 6, y + 11, row.told))
        y += 16
    if len(rows) > most:
        parts.append(note(x, y + 11, f"… and {len(rows) - most} more"))
        y += 16
    return "".join(parts), y


def clip(value: str, pixels: float) -> str:
    """Returns text that fits, with its middle left out where it is too long: ends tell most.

    Args:
        value: Any text.
        pixels: Room for it.

    Examples:
        >>> clip("model.layers.17.attention.weight", 100)
        'model.l….weight'
    """
    return shortened(value, int(pixels / CHARACTER))


def shortened(value: str, most: int) -> str:
    """Returns text of at most so many characters, with its middle left out if it has more.

    Examples:
        >>> shortened("model.layers.17.attention.weight", 11)
        'model…eight'
    """
    most = max(3, most)
    left = (most - 1) // 2
    return value if len(value) <= most else f"{value[:left]}…{value[left + 1 - most :]}"


def rank_colour(rank: int) -> str:
    """Returns the colour of a rank: the same in all pictures, and unlike its neighbours'.

    Args:
        rank: From 0; -1 where nobody knows.

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
    """Returns round numbers from one value to another.

    Args:
        low: The first is at least this.
        high: The last is at most this.
        about: How many are wanted.

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
