"""Shows the notebooks as a reader sees them: `python -m tests.notebook_shots DIR [NAME...]`.

By hand: executes each, writes it to DIR as HTML, takes a picture of that page in a real browser
(Debian's `chromium`), light and dark, and checks that no picture in it is blank. Look at the
pictures: that something is drawn does not make it readable.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from matplotlib import image
from nbconvert import HTMLExporter

from tests.notebooks import executed, paths

WIDTH, MOST_HEIGHT = 1000, 16_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LEAST_COLOURS = 4
"""A picture has a background, text, and two colours at least."""


def shots(directory: Path, names: Sequence[str]) -> list[str]:
    """Executes, renders and photographs notebooks; returns what is wrong.

    Args:
        directory: Where HTML and pictures go.
        names: Beginnings of names; all notebooks if empty.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wrong = []
    for path in paths(names):
        notebook = executed(path)
        nbformat.write(notebook, directory / path.name)
        print(f"{path.name}: executed", flush=True)
        for theme in ("light", "dark"):
            page = directory / f"{path.stem}-{theme}.html"
            page.write_text(HTMLExporter(theme=theme).from_notebook_node(notebook)[0])
            shot = photograph(page, page.with_suffix(".png"))
            wrong += [f"{shot.name}: {what}" for what in problems_of(shot)]
        wrong += [f"{path.name}: {what}" for what in blank_outputs(notebook, directory)]
    return wrong


def photograph(page: Path, shot: Path, width: int = WIDTH) -> Path:
    """Takes a picture of a page as a browser shows it, offline, cut off where the page ends."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("there is no browser: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND",
             f"--window-size={width},{MOST_HEIGHT}", "--virtual-time-budget=6000",
             f"--screenshot={shot}", page.absolute().as_uri()],
            check=True, timeout=600, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
    pixels = image.imread(shot)
    used = (abs(pixels - pixels[-1:, :1]).max(axis=2) > 0.02).any(axis=1).nonzero()[0]
    image.imsave(shot, pixels[: int(used[-1]) + 20 if len(used) else 20])
    return shot


def problems_of(shot: Path) -> list[str]:
    """Returns what is wrong with a picture, as far as a program can tell."""
    colours = colours_of(image.imread(shot))
    return [] if colours >= LEAST_COLOURS else [f"only {colours} colours: is it blank?"]


def blank_outputs(notebook: Any, directory: Path) -> Iterator[str]:
    """Photographs every picture in the outputs by itself; yields those that are blank."""
    with tempfile.TemporaryDirectory() as scratch:
        for number, (cell, html) in enumerate(_pictures(notebook)):
            page = Path(scratch) / "picture.html"
            page.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{html}</body>")
            shot = photograph(page, Path(scratch) / "picture.png")
            if colours_of(image.imread(shot)) < LEAST_COLOURS:
                kept = directory / f"blank-{number}.png"
                shutil.copy(shot, kept)
                yield f"picture {number} of cell {cell} is blank, see {kept}"


def colours_of(pixels: Any) -> int:
    """Returns how many colours an image has, those apart that anybody tells apart."""
    coarse = (pixels[..., :3] * 15).astype(int)
    return len({tuple(colour) for colour in coarse.reshape(-1, 3)[::7].tolist()})


def _pictures(notebook: Any) -> Iterator[tuple[int, str]]:
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                yield number, f"<img src='data:image/png;base64,{data['image/png']}'/>"
            elif "text/html" in data and re.search("<svg|<table|<details", data["text/html"]):
                yield number, data["text/html"]


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 1 if something is blank."""
    if not arguments:
        print("usage: python -m tests.notebook_shots DIR [NAME...]", file=sys.stderr)
        return 2
    wrong = shots(Path(arguments[0]), arguments[1:])
    for what in wrong:
        print(what)
    print(f"look at {arguments[0]}/*.png" if not wrong else f"{len(wrong)} are blank")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
