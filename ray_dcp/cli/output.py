"""What commands print with: tables, JSON, questions, and bars on a terminal's standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ray_dcp.errors import InvalidRequestError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
dry_run = click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


class Rows:
    """A table that is printed at the end: in colours on a terminal, plain elsewhere.

    Args:
        *titles: One that ends in `<` has right-aligned cells.
    """

    def __init__(self, *titles: str) -> None:
        self._titles = [title.rstrip("<").upper() for title in titles]
        self._right = [title.endswith("<") for title in titles]
        self._rows: list[list[str]] = []
        self._styles: list[tuple[int, str]] = []

    def add(self, *cells: object, styled: tuple[int, str] = (0, "")) -> None:
        """Adds a row.

        Args:
            *cells: One for each title.
            styled: Which cell has a style on a terminal, and which.
        """
        row = [str(cell) for cell in cells]
        if sys.stdout.isatty():
            # Why: a name in a checkpoint must not move the cursor of who looks at it.
            row = [_CONTROL.sub("\N{REPLACEMENT CHARACTER}", cell) for cell in row]
        self._rows.append(row)
        self._styles.append(styled)

    def print(self) -> None:
        """Prints the table."""
        widths = [max(map(len, column)) for column in zip(self._titles, *self._rows, strict=True)]
        lines = [click.style(self._line(self._titles, widths), bold=True)]
        for row, (at, style) in zip(self._rows, self._styles, strict=True):
            lines.append(self._line(row, widths, at, style))
        click.echo("\n".join(lines))

    def _line(self, row: list[str], widths: list[int], styled_at: int = 0, style: str = "") -> str:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, self._right, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        start = sum(widths[:styled_at]) + 2 * styled_at
        stop = start + widths[styled_at]
        return line[:start] + styled(line[start:stop], style) + line[stop:]


def styled(text: str, style: str) -> str:
    """Returns text with a style on a terminal: a colour, `dim` or `bold`; plain where that is "".

    Where the output is no terminal click takes the style away.
    """
    if style in ("dim", "bold"):
        return click.style(text, **{style: True})
    return click.style(text, fg=style) if style else text


def number_text(value: float) -> str:
    """Returns a number in at most four digits, plain where it can be.

    Example:
        >>> number_text(2.31), number_text(0.000123456), number_text(1234567.0)
        ('2.31', '0.0001235', '1.235e+06')
    """
    return f"{value:.4g}"


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Draws a bar on a terminal's standard error, for long work; draws nothing elsewhere.

    Args:
        what: Is done, in words.

    Yields:
        What to tell bytes done and in all, from any thread; None where nothing is drawn.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _is_asked() -> bool:
    return sys.stdin.isatty()


def agree(question: str, *, yes: bool) -> None:
    """Asks whether to destroy something; returns only if the answer is yes.

    Args:
        question: Without its question mark.
        yes: Was said beforehand.

    Raises:
        InvalidRequestError: Nobody can be asked.
        click.Abort: The answer is no.
    """
    if yes:
        return
    if not _is_asked():
        raise InvalidRequestError(f"{question}? Nobody is there to ask: say --yes, or --dry-run")
    click.confirm(f"{question}?", abort=True, err=True)
