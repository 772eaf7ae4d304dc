"""What commands print with: tables, JSON, questions, and bars on a terminal's standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ray_dcp.errors import InvalidRequestError

_MOST_DRAWN = 500

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
        self._rows.append([str(cell) for cell in cells])
        self._styles.append(styled)

    def print(self) -> None:
        """Prints the table."""
        if sys.stdout.isatty() and len(self._rows) <= _MOST_DRAWN:
            self._draw()
            return
        # Why not drawn: piped output has no width to fit into, a cut name is of no use to grep, and
        # of thousands of rows each takes a quarter of a millisecond to draw.
        widths = [max(map(len, column)) for column in zip(self._titles, *self._rows, strict=True)]
        lines = []
        for row in (self._titles, *self._rows):
            cells = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self._right, strict=True)
            ]
            lines.append("  ".join(cells).rstrip())
        click.echo("\n".join(lines))

    def _draw(self) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title, right in zip(self._titles, self._right, strict=True):
            table.add_column(title, justify="right" if right else "left", overflow="fold")
        for row, (at, style) in zip(self._rows, self._styles, strict=True):
            # Why Text: a name with [brackets] is no markup.
            table.add_row(*(Text(c, style if n == at else "") for n, c in enumerate(row)))
        Console(file=sys.stdout, highlight=False).print(table)


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
