"""What all pictures are made of: SVG and HTML elements, colours, text that fits, axes. Pure.

No scripts, fonts, images or style sheets: a picture is complete in itself, offline too. Text takes
the colour of the page (`currentColor`), and all other colours are of middle lightness, so that it
can be read on light pages and on dark ones. Every picture is well-formed XML.
"""

from __future__ import annotations

import colorsys
import math
import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH = 860
"""Of a picture, in pixels; it shrinks with its cell."""
CHARACTER = 6.3
"""Width of a character at 11 px, in pixels, on average."""
FAINT = 0.18
"""Opacity of lines that only guide the eye."""

RED, GREY = "#d1495b", "#8d949c"
_RANKS = (
    "#4c8fd6", "#e08a3c", "#4fa866", "#d4576b", "#9a6fd0",
    "#a9795a", "#d874b5", "#8a8f98", "#b5a835", "#3ba9b5",
)  # fmt: skip
_FONT = "font-family:system-ui,-apple-system,'Segoe UI',sans-serif"
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Picture:
    """A picture as HTML: shown by notebooks, also in what they export.

    Example:
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

    Example:
        >>> safe("<b>&" + chr(0)) == "&lt;b&gt;&amp;" + chr(0xFFFD)
        True
    """
    return escape(_NOT_XML.sub("\ufffd", str(value)))


def tag(name: str, content: str = "", **attributes: object) -> str:
    """Returns an element; `_` in the name of an attribute stands for `-`.

    Args:
        name: Of the element.
        content: Inside of it, escaped already.
        **attributes: Numbers are rounded; None leaves one out.

    Example:
        >>> tag("rect", x=1.23456, stroke_width=2, fill=None)
        '<rect x="1.23" stroke-width="2"/>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{told}>{content}</{name}>" if content else f"<{name}{told}/>"


def rect(
    x: float, y: float, width: float, height: float, fill: str, title: str = "", **more: object
) -> str:
    """Returns a rectangle that tells its title when the mouse is over it."""
    inner = tag("title", safe(title)) if title else ""
    return tag("rect", inner, x=x, y=y, width=width, height=height, fill=fill, **more)


def text(x: float, y: float, value: object, *, size: int = 11, **more: object) -> str:
    """Returns text in the colour of the page."""
    more.setdefault("fill", "currentColor")
    return tag("text", safe(value) or " ", x=x, y=y, font_size=size, **more)


def svg(width: float, height: float, *parts: str, label: str = "") -> str:
    """Returns a drawing that shrinks with the page.

    Args:
        width: In pixels, at most.
        height: At that width.
        *parts: Elements.
        label: What it shows, in a sentence, for those who don't see it.
    """
    style = f"max-width:{_value(width)}px;width:100%;height:auto;{_FONT}"
    return tag(
        "svg",
        (tag("title", safe(label)) if label else "") + "".join(parts),
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        role="img",
        style=style,
    )


def div(*parts: str, style: str = "") -> str:
    """Returns a block of HTML."""
    return f'<div style="{_FONT};font-size:13px;line-height:1.45;{style}">{"".join(parts)}</div>'


def clip(value: str, pixels: float, size: int = 11) -> str:
    """Returns text that fits, with its middle left out where it is too long: ends tell most.

    Args:
        value: Any text.
        pixels: Room for it.
        size: Of the font.

    Example:
        >>> clip("model.layers.17.attention.weight", 100)
        'model.l….weight'
    """
    most = max(3, int(pixels / (CHARACTER * size / 11)))
    if len(value) <= most:
        return value
    left = (most - 1) // 2
    return f"{value[:left]}…{value[len(value) - (most - 1 - left) :]}"


def rank_colour(rank: int) -> str:
    """Returns the colour of a rank: the same in all pictures, and unlike its neighbours'.

    Args:
        rank: From 0.

    Example:
        >>> rank_colour(0), rank_colour(11) != rank_colour(12)
        ('#4c8fd6', True)
    """
    if 0 <= rank < len(_RANKS):
        return _RANKS[rank]
    hue = rank * 0.618033988749895 % 1.0
    lightness = (0.5, 0.58, 0.54)[rank % 3]
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, 0.45)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def nice_ticks(most: float, about: int = 6) -> list[float]:
    """Returns round numbers from 0 to at most a value.

    Args:
        most: At least 0.
        about: How many are wanted.

    Example:
        >>> nice_ticks(0.93), nice_ticks(0)
        ([0.0, 0.2, 0.4, 0.6, 0.8], [0.0])
    """
    if not 0 < most < math.inf:
        return [0.0]
    raw = most / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * factor for factor in (1, 2, 5) if power * factor >= raw), power * 10)
    return [round(step * index, 12) for index in range(int(most / step + 1e-9) + 1)]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
    return safe(value)
