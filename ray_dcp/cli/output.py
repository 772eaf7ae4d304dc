"""What commands print with: tables, JSON, questions, and bars on a terminal's standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ray_dcp.errors import InvalidRequestError

__all__ = [
    "add", "agree", "as_json", "console", "dry_run", "make_table", "number_text", "print_json",
    "progress", "yes",
]  # fmt: skip

_PLAIN_WIDTH = 10_000

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
dry_run = click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def console() -> Console:
    """Returns the console of the standard output."""
    # Why: piped output has no width to fit into, and a cut name is of no use to grep.
    found = Console(file=sys.stdout, highlight=False)
    return found if found.is_terminal else Console(
        file=sys.stdout, highlight=False, width=_PLAIN_WIDTH
    )  # fmt: skip


def make_table(*titles: str) -> Table:
    """Returns an empty table; a title that ends in `<` has right-aligned cells."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        justify = "right" if title.endswith("<") else "left"
        table.add_column(title.rstrip("<").upper(), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def add(table: Table, *cells: object) -> None:
    """Adds a row."""
    # Why Text: a name with [brackets] is no markup.
    table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))


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
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
               TransferSpeedColumn(), TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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
    if not sys.stdin.isatty():
        raise InvalidRequestError(f"{question}? Nobody is there to ask: say --yes, or --dry-run")
    click.confirm(f"{question}?", abort=True, err=True)
